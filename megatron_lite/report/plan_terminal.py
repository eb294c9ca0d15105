"""A plan as lines for a terminal: the verdict first, then what it is made of, at last what was assumed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from megatron_lite.config.plan import Plan
from megatron_lite.formats.hardware import PROCESSORS, Processor
from megatron_lite.formats.run_record import LedgerRow, MemoryPrediction, Moment, TimePrediction, TimeRow
from megatron_lite.pipeline_schedule import TimedAction, measure_bubble
from megatron_lite.planner.inference import InferencePrediction
from megatron_lite.planner.plan_results import (
    Exact,
    Generating,
    Outlook,
    PlanReport,
    StageOutlook,
    Subject,
    Training,
)
from megatron_lite.planner.step_time import Duration
from megatron_lite.planner.what_if import Fit
from megatron_lite.report import palette
from megatron_lite.report.plan_search import build_search_sections, judge_search
from megatron_lite.report.section import Block, Lines, Section, Table, build_share_table, limit_rows, section_lines
from megatron_lite.report.text import Style, flops, heading, milliseconds, percent, share, wrapped
from megatron_lite.units import GIB, count, duration, short_count, size


def plan_lines(report: PlanReport, style: Style, why: bool = False) -> list[str]:
    """Write a plan as lines for a terminal.

    Args:
        report: what is predicted.
        style: how the terminal may be written to.
        why: show the formula behind each line.
    """
    subject = report.subject
    lines = [heading(subject.title, subject.facts, style), ""]
    for verdict in judge_plan(report):
        lines += map(style.warm, wrapped(verdict, hanging="    "))
    for note in subject.notes:
        lines += map(style.dim, wrapped(note, hanging="    "))
    for section in build_plan_sections(report, why):
        lines.append("")
        lines += section_lines(section, style)
    return lines


# --- the first lines: does training fit, or generating; how fast can it be, how long does it take

ASK_FOR_GPU = "--gpu NAME shows whether it fits and how fast it can be"


def judge_plan(report: PlanReport) -> list[str]:
    """Judge a plan in a sentence for each GPU that was named; without any write the peak, and how to learn more."""
    margin = report.subject.margin
    if report.search:
        return judge_search(report.search)
    if report.generating:
        return _judge_all_generating(report.generating, report.subject.plan.precision, margin)
    training = report.training
    assert training is not None  # one of the three was asked
    where = _describe_peak_moment(training)
    if training.outlooks:
        return [_judge_training(outlook, training.exact, margin, where) for outlook in training.outlooks]
    peak_bytes = _choose_peak_bytes(training.memory, training.exact)
    held = f"{size(peak_bytes)} of tensors on each GPU"
    return [f"peak {held}, {where}; {ASK_FOR_GPU}"]


def _choose_peak_bytes(memory: MemoryPrediction, exact: Exact | None) -> int:
    """Take the peak of the walk where there was one, else the formula's."""
    return exact.allocated_peak_bytes if exact else memory.peak.num_bytes


def _describe_peak_moment(training: Training) -> str:
    """Describe when memory peaks, 'at the last layer (backward), estimated'; without the last word after a walk."""
    peak = training.memory.peak
    exact = training.exact
    if exact is None:
        return f"at {peak.where} ({peak.phase}), estimated"
    if exact.phase != peak.phase:
        # the formula's place is not the walk's
        return f"in {exact.phase}"
    return f"at {peak.where} ({peak.phase})"


def _judge_training(outlook: Outlook, exact: Exact | None, margin: float, where: str) -> str:
    """Judge whether training fits into a GPU, and how fast it can be.

    Args:
        outlook: what is predicted of the GPU.
        exact: the walk, whose peak counts if there is one.
        margin: the share of the GPU's memory that is to stay free.
        where: the moment of the peak, in words.
    """
    room_bytes = outlook.room_bytes
    budget_bytes = room_bytes * (1 - margin)
    name = outlook.processor.name
    peak_bytes = _choose_peak_bytes(outlook.memory, exact)
    peak = f"peak {_compare_with_room(peak_bytes, room_bytes)}, {where}"
    remedy = ""
    if outlook.fit:
        remedy = f"; {describe_fit(outlook.fit)}"
    if peak_bytes > room_bytes:
        return f"does not fit in one {name}: {peak}{remedy}"
    speed = _describe_speed(outlook)
    if peak_bytes > budget_bytes:
        left = f"less than {percent(margin)} is left for CUDA, NCCL and allocator overhead"
        return f"may fit in one {name}: {peak}; {left}{remedy}; {speed}"
    return f"fits in one {name}: {peak}; {speed}"


def _compare_with_room(num_bytes: int, room_bytes: int) -> str:
    """Write how much of a GPU's memory is taken: '60.1 of 79.1 GiB (76%)'."""
    part = percent(num_bytes / room_bytes)
    return f"{num_bytes / GIB:.1f} of {room_bytes / GIB:.1f} GiB ({part})"


def _describe_speed(outlook: Outlook) -> str:
    """Describe how fast a GPU can train at best, and how long the whole training then takes."""
    time = outlook.time
    if not time.peak_tflops or outlook.duration is None:
        return "how fast it can be is not known: the table has no peak of this GPU in this precision"
    step = f"{milliseconds(time.step_ms)} ms per step"
    rate = f"{count(time.tokens_per_s)} tokens/s"
    span = _describe_span(outlook.duration)
    tokens = short_count(outlook.duration.tokens)
    return f"at best {step}, {rate}, {span} for {tokens} tokens"


def describe_fit(fit: Fit) -> str:
    """Describe the flags that fit, 'it fits with --micro-batch-size 2 (10.84 GiB)', else the smallest change that
    makes it fit."""
    if fit.found:
        words = fit.found.words or "no change at all, by formula"
        needed = size(fit.found.peak_bytes)
        return f"it fits with {words} ({needed})"
    assert fit.least is not None  # where nothing was found
    needed_bytes = fit.least.peak_bytes
    excess = size(needed_bytes - fit.budget_bytes)
    too_much = f"{excess} more than there is with {percent(fit.margin)} left free"
    least = f"no micro-batch and no recomputation makes it fit: at least {size(needed_bytes)}, {too_much}"
    remedy = fit.remedy
    if remedy is not None:
        needed = size(remedy.peak_bytes)
        return f"{least}; smallest change that fits: {remedy.words} ({needed})"
    gib = needed_bytes / (1 - fit.margin) / GIB
    return f"{least}; nor does a shorter sequence: it needs a smaller model{_name_larger_gpu(gib)}"


def _name_larger_gpu(gib: float) -> str:
    """Name the smallest GPU of the table with so much memory, as the end of a sentence."""
    large = {}
    for one in PROCESSORS:
        if one.memory_gib and one.memory_gib >= gib:
            large[one.name] = one.memory_gib
    if not large:
        return ", no GPU of the table is large enough"
    name = min(large, key=lambda name: large[name])
    return f" or a GPU of {gib:.1f} GiB, such as {name} ({large[name]:g} GiB)"


def _judge_all_generating(generating: Generating, precision: str, margin: float) -> list[str]:
    """Judge whether generating fits, in a sentence for each GPU; without any write what it takes.

    Args:
        generating: what is predicted.
        precision: the training's, in which the weights are.
        margin: the share of a GPU's memory that is to stay free.
    """
    found = generating.prediction
    format_number = 0 if precision == "fp32" else 1  # of WEIGHT_BITS
    weights = found.weights[format_number]
    held = f"with {weights.name} and a cache for {count(found.batch)} x {count(found.tokens)} tokens"
    if not generating.on_gpus:
        needed = size(found.num_bytes(weights))
        return [f"generating takes {needed} of tensors {held}; {ASK_FOR_GPU}"]
    texts = []
    for processor, on_gpu in generating.on_gpus:
        text = _judge_generating(processor, on_gpu, format_number, held, margin)
        texts.append(text)
    return texts


def _judge_generating(
    processor: Processor,
    found: InferencePrediction,
    format_number: int,
    held: str,
    margin: float,
) -> str:
    """Judge whether generating fits into a GPU, and how fast it can be.

    Args:
        processor: the GPU.
        found: what is predicted for it.
        format_number: the weights' number format, among those of the prediction.
        held: what takes the memory, in words.
        margin: the share of the GPU's memory that is to stay free.
    """
    name = processor.name
    room_bytes = processor.memory_bytes
    budget_bytes = room_bytes * (1 - margin)
    weights = found.weights[format_number]
    needed_bytes = found.num_bytes(weights)
    needed = f"{_compare_with_room(needed_bytes, room_bytes)} {held}"
    speed = ""
    if found.token_rows:
        row = found.token_rows[format_number]
        tokens_per_s = found.tokens_per_s(row)
        speed = f"; at best {count(tokens_per_s)} tokens/s"
    if needed_bytes <= budget_bytes:
        return f"generating fits in one {name}: {needed}{speed}"
    remedy = _describe_fitting(found, format_number, budget_bytes)
    if needed_bytes <= room_bytes:
        left = f"less than {percent(margin)} is left"
        return f"generating may fit in one {name}: {needed}; {left}{remedy}{speed}"
    return f"generating does not fit in one {name}: {needed}{remedy}"


def _describe_fitting(found: InferencePrediction, format_number: int, budget_bytes: float) -> str:
    """Describe the largest batch that fits with these weights, else the widest weights that fit with this batch.

    Args:
        found: what is predicted for the GPU.
        format_number: the weights' number format, among those of the prediction.
        budget_bytes: the memory that may be used.

    Returns:
        The end of a sentence; '' where nothing fits.
    """
    weights_bytes = found.weights[format_number].num_bytes
    bytes_of_one = found.cache.num_bytes // found.batch
    batch = int((budget_bytes - weights_bytes) // bytes_of_one)
    if batch >= 1:
        needed_bytes = weights_bytes + batch * bytes_of_one
        return f"; it fits with --batch {batch} ({size(needed_bytes)})"
    for narrower in found.weights:
        needed_bytes = found.num_bytes(narrower)
        if needed_bytes <= budget_bytes:
            return f"; it fits with {narrower.name} ({size(needed_bytes)})"
    return ""


def _describe_span(found: Duration) -> str:
    """Write how long a training takes: in days from two of them on, else in hours, minutes and seconds."""
    if found.days >= 2:
        return f"{found.days:,.1f} days"
    return duration(found.seconds)


# --- sections of a plan: parameters, work, memory, time, what if, fit, inference, environment

ALL_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EQUAL = 0.0005  # of a figure: formula and walk are called equal
SMALL = 0.005  # of the peak: rows of less stand together
MAX_STAGES = 12  # rows
MAX_COLLECTIVES = 12  # rows
MAX_SIMULATED = 8192  # micro-batches times chunks times stages
STATES = "state"
ACTIVATIONS = "activations"
LOSS = "logits"
OTHER = "other"
KINDS = (STATES, ACTIVATIONS, LOSS)
# state takes the color of the parameters, which it is made of
KIND_COLORS = {
    STATES: palette.HELD["parameters"],
    ACTIVATIONS: palette.HELD["activations"],
    LOSS: palette.HELD["logits and loss"],
    OTHER: palette.HELD["other"],
}
OF_STATE = ("parameters", "gathered parameters", "gradients", "master weights", "moments")
KIND_OF = {name: STATES for name in OF_STATE}
KIND_OF |= {"activations": ACTIVATIONS, "logits and loss": LOSS}


def build_plan_sections(report: PlanReport, why: bool) -> Iterator[Section]:
    """Build the sections of a plan, of training or of inference, in the order of a reader's questions. `why`: with
    the formula of every line."""
    subject = report.subject
    training = report.training
    if report.search:
        yield from build_search_sections(report.search, subject.everything)
        return
    if report.generating:
        yield build_inference_section(report.generating, why)
    elif training:
        yield from _build_training_sections(subject, training, why)
        yield _build_work_section(subject)
    yield _build_parameters_section(subject)
    if training and training.variants and not report.generating:
        yield _build_what_if_section(training, subject.margin)
    if training and training.fit:
        yield _build_fit_section(training.fit)
    if subject.hints is not None:
        hints = list(subject.hints) or ["no flag or variable costs speed or memory"]
        yield Section("environment", "Environment", "", [Lines(hints)])


def _build_training_sections(subject: Subject, training: Training, why: bool) -> Iterator[Section]:
    """Build the sections of memory, by formula, stage and walk, and of time."""
    yield from _build_memory_sections(training.memory, why)
    if training.stages:
        yield build_stages_section(training.stages, subject.everything)
        yield from _build_schedule_section(subject.plan, training, subject.everything)
    if training.exact:
        yield build_exact_section(training.memory, training.exact)
        if training.exact.collectives:
            yield _build_collectives_section(training.exact, subject.everything)
    if training.outlooks:
        yield build_time_section(training.outlooks, why)


def _build_work_section(subject: Subject) -> Section:
    """Build the table of a step's FLOPs by either convention."""
    plan = subject.plan
    tokens = plan.batch.final * plan.shape.seq_length
    flops_by_convention = {
        "half of attention counted (Megatron-LM)": subject.count_flops(causal=True),
        "all of attention counted (nanoGPT, PaLM)": subject.count_flops(causal=False),
    }
    rows = []
    for name, per_token in flops_by_convention.items():
        of_step = flops(per_token * tokens)
        rows.append((name, of_step, f"{flops(per_token)} per token"))
    table = Table(rows, "lrr")
    return Section("work", "Work of a step", f"{count(tokens)} tokens, all GPUs", [table])


def _build_parameters_section(subject: Subject) -> Section:
    """Build the table of the parameters of each part that the model has."""
    parts = {name: number for name, number in subject.parts.items() if number}
    whole = sum(parts.values())
    table = build_share_table(list(parts.items()), whole, count)
    subtitle = f"{count(whole)} ({short_count(whole)})"
    return Section("parameters", "Parameters", subtitle, [table])


def _build_memory_sections(memory: MemoryPrediction, why: bool) -> Iterator[Section]:
    """Build the ledger of what tensors hold at the peak, and the moments at which the peak can be."""
    yield _build_peak_section(memory.peak, why)
    rows = []
    shares = []
    for moment in memory.moments:
        num_bytes = moment.num_bytes
        rows.append((moment.phase, moment.where, size(num_bytes)))
        shares.append(share(num_bytes, memory.peak.num_bytes))
    table = Table(rows, "llr", shares=shares)
    yield Section("moments", "Memory through a step", "estimate for one GPU", [table])


def _build_peak_section(peak: Moment, why: bool) -> Section:
    """Build the ledger of what tensors hold at the peak. `why`: with every row, and its formula."""
    shown = list(peak.rows)
    if not why:
        least_bytes = SMALL * peak.num_bytes
        shown = [row for row in shown if row.num_bytes >= least_bytes]
    blocks: list[Block] = [_build_ledger(peak, shown)]
    if why:
        blocks.append(Lines(_write_formulas(shown), quiet=True))
    subtitle = f"estimate for one GPU, {peak.where} ({peak.phase})"
    return Section("memory", "Memory at the peak", subtitle, blocks)


def _write_formulas(rows: Iterable[LedgerRow | TimeRow]) -> list[str]:
    """Write the formula behind each row that has one."""
    return [f"{row.name} = {row.formula}" for row in rows if row.formula]


def _build_ledger(peak: Moment, shown: Sequence[LedgerRow]) -> Table:
    """Build the table of what holds the peak, whose rows add up to it; those that are not shown share one."""
    parts = []
    colors = []
    rest_bytes = peak.num_bytes
    for row in shown:
        parts.append((row.name, row.num_bytes))
        colors.append(palette.HELD.get(row.category, palette.GREY))
        rest_bytes -= row.num_bytes
    table = build_share_table(parts, peak.num_bytes, size, colors)
    rows = [*table.rows]
    shares = [*table.shares]
    if rest_bytes:
        part = percent(share(rest_bytes, peak.num_bytes))
        rows.append(("smaller ones", size(rest_bytes), part))
        shares.append(None)
    rows.append(("peak", size(peak.num_bytes), ""))
    shares.append(None)
    return Table(rows, "lrr", shares=shares, colors=colors)


def build_stages_section(unsorted: Sequence[StageOutlook], everything: bool) -> Section:
    """Build the table of what one rank of each stage holds at its peak, and say why the heaviest is the heaviest."""
    stages = sorted(unsorted, key=lambda one: -one.memory.peak.num_bytes)
    shown, hidden = limit_rows(stages, MAX_STAGES, everything)
    rows = [_list_stage_cells(one) for one in shown]
    head = ["stage", "layers", "peak", "exact", *KINDS, "in flight", "work at best"]
    align = "rl" + "r" * (len(head) - 2)
    table = Table(rows, align, head, hidden=hidden)
    why = _say_why_heaviest(stages)
    meaning = "state: weights, moments, gradients; in flight: micro-batches whose activations are kept for backward"
    lines = Lines([why, meaning], quiet=True)
    subtitle = "estimate for one GPU of each, at its peak"
    return Section("stages", "Memory by stage", subtitle, [table, lines])


def _list_stage_cells(one: StageOutlook) -> list[str]:
    """Write a stage: its number and layers, its peak by formula and by the walk, what holds it, and its work."""
    stage = one.plan.stage
    layers = stage.describe_layers("-")
    exact = size(one.exact.allocated_peak_bytes) if one.exact else ""
    bytes_by_kind = sum_kinds(one.memory)
    held = []
    for kind in KINDS:
        num_bytes = bytes_by_kind[kind]
        held.append(size(num_bytes) if num_bytes else "")
    return [
        f"{stage.number + 1}",
        layers,
        size(one.memory.peak.num_bytes),
        exact,
        *held,
        count(_count_in_flight(one)),
        _write_best_step(one.time),
    ]


def _write_best_step(time: TimePrediction | None) -> str:
    """Write the least time of a step, '12.3 ms'; '' where it is not known."""
    if time is None or not time.peak_tflops:
        return ""
    return f"{milliseconds(time.step_ms)} ms"


def _count_in_flight(one: StageOutlook) -> int:
    """Count the micro-batches whose activations a stage keeps for backward when it holds most."""
    micro_batches = one.plan.micro_batches(one.plan.train_samples)
    in_flight, _ = one.plan.stage.count_held(micro_batches)
    return in_flight


def _build_schedule_section(plan: Plan, training: Training, everything: bool) -> Iterator[Section]:
    """Build the table of how long each stage waits at best, in the order in which the stages really compute, and by
    formula. Yields nothing where the stages' times are not known."""
    micro_batches = plan.final_micro_batches
    chunks = len(plan.stage.chunks)
    num_stages = len(training.stages)
    simulated = min(micro_batches, MAX_SIMULATED // num_stages // chunks)
    actions = training.simulate_stages(simulated)
    if not actions:
        return
    table = _build_waits(actions, num_stages, everything)
    actions_of_chunk = 3 if plan.stage.splits_backward else 1
    bubble = measure_bubble(num_stages, micro_batches, chunks * actions_of_chunk)
    formula = f"{percent(bubble)} by formula, for equal stages and {count(micro_batches)} micro-batches"
    note = Lines([f"bubble: {formula}"], quiet=True)
    subtitle = f"{count(simulated)} micro-batches at best, all stages as they compute"
    yield Section("schedule", "Schedule", subtitle, [table, note])


def _build_waits(actions: Sequence[TimedAction], num_stages: int, everything: bool) -> Table:
    """Build the table of how long each stage computes and waits in a schedule.

    Args:
        actions: the schedule.
        num_stages: how many stages it has.
        everything: show all stages.
    """
    end_ms = max(action.end_ms for action in actions)
    busy_ms_by_stage = [0.0] * num_stages
    for action in actions:
        busy_ms_by_stage[action.stage] += action.end_ms - action.start_ms
    rows = []
    shares = []
    for number, busy_ms in enumerate(busy_ms_by_stage, 1):
        wait_ms = end_ms - busy_ms
        waiting = share(wait_ms, end_ms)
        shares.append(waiting)
        busy = f"{milliseconds(busy_ms)} ms"
        wait = f"{milliseconds(wait_ms)} ms"
        rows.append([str(number), busy, wait, percent(waiting)])
    shown, hidden = limit_rows(rows, MAX_STAGES, everything)
    head = ["stage", "computes", "waits", "share"]
    return Table(shown, "rrrr", head, shares=shares[: len(shown)], hidden=hidden)


def sum_kinds(memory: MemoryPrediction) -> Counter[str]:
    """Sum the bytes at the peak by kind: of weights and what belongs to them, of activations, of the loss."""
    found = Counter[str]()
    for row in memory.peak.rows:
        found[KIND_OF.get(row.category, OTHER)] += row.num_bytes
    return found


def _say_why_heaviest(stages: list[StageOutlook]) -> str:
    """Describe what the stage that holds most has more than the stage that holds least."""
    most = stages[0]
    least = stages[-1]
    more = sum_kinds(most.memory)
    more.subtract(sum_kinds(least.memory))
    reasons = []
    for kind, num_bytes in more.most_common():
        if num_bytes < SMALL * most.memory.peak.num_bytes:
            continue
        why = ""
        if kind == ACTIVATIONS:
            why = _compare_in_flight(most, least)
        elif kind == STATES:
            why = _name_ends(most, least)
        reasons.append(f"{size(num_bytes)} more {kind}{why}")
    if not reasons:
        return "all stages hold about as much"
    numbers = f"stage {most.plan.stage.number + 1} holds more than stage {least.plan.stage.number + 1}"
    return f"{numbers}: {', '.join(reasons)}"


def _compare_in_flight(most: StageOutlook, least: StageOutlook) -> str:
    """Describe how many more micro-batches the one stage keeps than the other; '' where they keep as many."""
    of_most = _count_in_flight(most)
    of_least = _count_in_flight(least)
    if of_most == of_least:
        return ""
    return f" ({of_most} micro-batches in flight, not {of_least})"


def _name_ends(most: StageOutlook, least: StageOutlook) -> str:
    """Name the matrices and the number of layers that the one stage has and the other has not."""
    stage = most.plan.stage
    other = least.plan.stage
    words = []
    if stage.is_first and not other.is_first:
        words.append("the embedding")
    if stage.is_last and not other.is_last:
        words.append("the output layer")
    further = len(stage.layers) - len(other.layers)
    if further > 0:
        plural = "s" if further > 1 else ""
        words.append(f"{further} more layer{plural}")
    return f" ({' and '.join(words)})" if words else ""


def _build_collectives_section(found: Exact, everything: bool) -> Section:
    """Build the table of what the rank exchanged in the walked step, most bytes first."""
    calls = sorted(found.collectives, key=lambda call: -call[2] * call[3])
    shown, hidden = limit_rows(calls, MAX_COLLECTIVES, everything)
    rows = []
    for group, kind, each_bytes, times in shown:
        together = size(each_bytes * times)
        rows.append((group, kind, count(times), size(each_bytes), together))
    head = ["ranks", "", "times", "bytes each", "together"]
    table = Table(rows, "llrrr", head, hidden=hidden)
    meaning = "what an all-gather gives, what a reduce-scatter takes; of the micro-batches that were walked"
    note = Lines([f"whole tensors: {meaning}"], quiet=True)
    return Section("collectives", "Exchanged in a step", "by the rank that holds most", [table, note])


def build_exact_section(memory: MemoryPrediction, found: Exact) -> Section:
    """Build the table of what the walk held, category by category, beside the formula."""
    rows = _compare_categories(memory.peak, found.categories)
    rows.append(_list_exact_cells("peak", found.allocated_peak_bytes, memory.peak.num_bytes))
    table = Table(rows, "lrrr", ["", "exact", "estimate", "difference"])
    where = f"peak in {found.where}"
    expandable = f"with expandable segments {size(found.expandable_reserved_bytes)}"
    reserved = f"reserved by the caching allocator: {size(found.reserved_peak_bytes)}; {expandable}"
    lines = Lines([where, reserved, *found.notes])
    subtitle = f"the real model and step, without data, in {found.seconds:.1f} s"
    return Section("exact", "Exact", subtitle, [table, lines])


def _compare_categories(peak: Moment, exact_bytes_by_category: Mapping[str, int]) -> list[tuple[str, str, str, str]]:
    """List the cells of each category that the walk or the formula has at the peak."""
    formula_bytes = Counter[str]()
    for row in peak.rows:
        formula_bytes[row.category] += row.num_bytes
    rows = []
    for name in {**exact_bytes_by_category, **formula_bytes}:
        exact_bytes = exact_bytes_by_category.get(name, 0)
        rows.append(_list_exact_cells(name, exact_bytes, formula_bytes[name]))
    return rows


def _list_exact_cells(name: str, exact_bytes: int, formula_bytes: int) -> tuple[str, str, str, str]:
    """Write a category: its bytes in the walk and by formula, and by how much the formula is off."""
    difference = "not there" if formula_bytes else ""
    if exact_bytes:
        share_off = formula_bytes / exact_bytes - 1
        difference = f"{share_off:+.1%}" if abs(share_off) >= EQUAL else "0"
    return name, size(exact_bytes), size(formula_bytes), difference


def build_time_section(outlooks: Sequence[Outlook], why: bool) -> Section:
    """Build the table of a step's parts at best: with limits and bars for one GPU, a column for each of several."""
    if len(outlooks) == 1:
        table = _build_time_of_one(outlooks[0])
        subtitle = f"{outlooks[0].processor.name}, a lower bound"
    else:
        table = _build_times_of_several(outlooks)
        subtitle = "lower bounds"
    blocks: list[Block] = [table]
    formulas = []
    lines = ["real steps take longer: kernels miss the peak, and launches and the host take time"]
    for outlook in outlooks:
        formulas += _write_formulas(outlook.time.rows)
        lines += outlook.time.notes
    if why:
        blocks.append(Lines(formulas, quiet=True))
    # several GPUs have notes in common
    blocks.append(Lines(list(dict.fromkeys(lines)), quiet=True))
    return Section("time", "Time of a step at best", subtitle, blocks)


def _build_time_of_one(outlook: Outlook) -> Table:
    """Build the table of a step's parts with the limit that each meets, and bars."""
    step_ms = outlook.time.step_ms
    rows = []
    shares = []
    for row in outlook.time.rows:
        rows.append([row.name, f"{milliseconds(row.ms, step_ms)} ms", row.bound])
        shares.append(share(row.ms, step_ms))
    for name, text in zip(_name_sums([outlook]), _sum_up(outlook)):
        rows.append([name, text, ""])
    return Table(rows, "lrl", shares=shares)


def _build_times_of_several(outlooks: Sequence[Outlook]) -> Table:
    """Build the table of a step's parts with a column for each GPU."""
    columns = [_write_parts(outlook.time) for outlook in outlooks]
    names = dict.fromkeys(chain.from_iterable(columns))
    rows = []
    for name in names:
        cells = [column.get(name, "not known") for column in columns]
        rows.append([name, *cells])
    sums = map(_sum_up, outlooks)
    for name, *texts in zip(_name_sums(outlooks), *sums):
        rows.append([name, *texts])
    head = ["", *(outlook.processor.name for outlook in outlooks)]
    return Table(rows, "l" + "r" * len(outlooks), head)


def _write_parts(time: TimePrediction) -> dict[str, str]:
    """Write the least time of each part of a step, '12.3 ms', by the name of the part."""
    texts: dict[str, str] = {}
    for row in time.rows:
        texts.setdefault(row.name, f"{milliseconds(row.ms, time.step_ms)} ms")
    return texts


def _name_sums(outlooks: Sequence[Outlook]) -> list[str]:
    """Name what _sum_up writes, in its order."""
    training = "whole training"
    for outlook in outlooks:
        if outlook.duration:
            # the training is the same whatever the GPU
            training = f"{short_count(outlook.duration.tokens)} tokens"
    return ["step", "tokens/s", "of peak at best", training, "GPU hours"]


def _sum_up(outlook: Outlook) -> list[str]:
    """Write a step's time, tokens/s, the share of the peak, the whole training's time and GPU hours."""
    time = outlook.time
    texts = ["not known", "", ""]
    if time.peak_tflops:
        step_s = time.step_ms / 1000
        peak_flops_per_s = time.peak_tflops * 1e12
        # with half of attention counted, Megatron-LM's convention
        of_peak = time.flops_causal / step_s / peak_flops_per_s
        texts = [_write_best_step(time), count(time.tokens_per_s), percent(of_peak)]
    training = outlook.duration
    if training is None:
        return [*texts, "", ""]
    return [*texts, _describe_span(training), f"{training.gpu_hours:,.1f}"]


def _build_what_if_section(training: Training, margin: float) -> Section:
    """Build a row per change: its peak, and on the first GPU whether it fits and how fast it can be."""
    now_bytes = training.memory.peak.num_bytes
    outlook = training.outlooks[0] if training.outlooks else None
    rows = []
    for variant in training.variants:
        # the line below the table has the flags in full
        words = variant.words.replace(ALL_LAYERS, "--recompute-granularity full (all layers)")
        change_gib = (variant.peak_bytes - now_bytes) / GIB
        row = [words, size(variant.peak_bytes), f"{change_gib:+.2f} GiB"]
        if outlook:
            budget_bytes = outlook.room_bytes * (1 - margin)
            row.append("yes" if variant.peak_bytes <= budget_bytes else "no")
            row.append(_write_best_step(variant.time) or "not known")
        rows.append(row)
    head = ["", "peak", "against now"]
    subtitle = "one change each"
    align = "lrr"
    if outlook:
        head += ["fits", "at best"]
        subtitle = outlook.processor.name
        align += "lr"
    table = Table(rows, align, head)
    lines = Lines([f"all layers: {ALL_LAYERS}"], quiet=True)
    return Section("what_if", "What if", subtitle, [table, lines])


def _build_fit_section(fit: Fit) -> Section:
    """Write flags to paste with which a training fits into a GPU, or what is in the way."""
    lines = []
    if fit.fits:
        peak_bytes = fit.given.peak_bytes
        spare = size(fit.budget_bytes - peak_bytes)
        lines.append(f"fits as it is: {size(peak_bytes)}, {spare} to spare")
    found = fit.found
    if found is None:
        lines.append(describe_fit(fit))
        flags = "--tensor-model-parallel-size or --pipeline-model-parallel-size"
        lines.append(f"more GPUs help only if they split the model too: {flags} 2 or more")
    elif found.words:
        what = "fastest that fits" if fit.fits else "fits with"
        lines.append(f"{what}: {found.words}")
        best = _write_best_step(found.time)
        speed = f", at best {best} per step" if best else ""
        lines.append(f"peak {size(found.peak_bytes)}{speed}")
    processor = fit.processor
    room = f"{processor.memory_gib:g} GiB"
    budget = f"{size(fit.budget_bytes)} of {room}, {percent(fit.margin)} left free"
    return Section("fit", f"Fit into one {processor.name}", budget, [Lines(lines)])


def build_inference_section(generating: Generating, why: bool) -> Section:
    """Build the table of weights by number format, the cache, and both, with tokens/s for each GPU.

    Args:
        generating: what is predicted.
        why: show the formula behind each line.
    """
    found = generating.prediction
    formats = [row.name.removeprefix("weights in ") for row in found.weights]
    timed = [(processor, one) for processor, one in generating.on_gpus if one.token_rows]
    blocks: list[Block] = [_build_weights(formats, found)]
    if timed:
        blocks.append(_build_rates(formats, timed))
    lines = [f"KV cache: {size(found.cache.num_bytes)} = {found.cache.formula}"]
    if why:
        lines += _write_formulas(found.weights)
        for _, on_gpu in timed:
            lines += _write_formulas(on_gpu.token_rows)
    blocks.append(Lines(lines))
    subtitle = f"batch {found.batch}, {count(found.tokens)} tokens each; tensors only"
    return Section("inference", "Inference", subtitle, blocks)


def _build_weights(formats: Sequence[str], found: InferencePrediction) -> Table:
    """Build the table of what weights take: a row per number format."""
    rows = []
    for name, weights, batch in zip(formats, found.weights, found.batches_beyond_weights):
        with_cache = size(found.num_bytes(weights))
        rows.append([name, size(weights.num_bytes), with_cache, count(batch)])
    head = ["", "weights", "with cache", "cache is larger from batch"]
    return Table(rows, "lrrr", head)


def _build_rates(formats: Sequence[str], timed: Sequence[tuple[Processor, InferencePrediction]]) -> Table:
    """Build the table of tokens/s at best: a row per number format, a column per GPU."""
    head = ["tokens/s at best"]
    columns = [formats]
    for processor, found in timed:
        head.append(processor.name)
        columns.append(_list_rates(processor, found))
    rows = list(zip(*columns))
    return Table(rows, "l" + "r" * len(timed), head)


def _list_rates(processor: Processor, found: InferencePrediction) -> list[str]:
    """Write the tokens/s of each number format that fits into a GPU."""
    texts = []
    for row, weights in zip(found.token_rows, found.weights):
        if found.num_bytes(weights) > processor.memory_bytes:
            texts.append("does not fit")
            continue
        tokens_per_s = found.tokens_per_s(row)
        texts.append(count(tokens_per_s))
    return texts
