"""A plan as lines for a terminal: the verdict first, then what it is made of, at last what was assumed."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_lite.analysis.run.pipeline_times import measure_bubble
from megatron_lite.config.plan import Plan
from megatron_lite.formats.hardware import PROCESSORS, Processor
from megatron_lite.formats.run_record import MemoryPrediction
from megatron_lite.planner.inference import InferencePrediction
from megatron_lite.planner.plan_results import (
    Exact,
    Generating,
    Outlook,
    PlanReport,
    StageOutlook,
    Subject,
    Training,
    count_room,
    simulate_stages,
)
from megatron_lite.planner.step_time import Duration
from megatron_lite.planner.what_if import Fit
from megatron_lite.report import palette
from megatron_lite.report.plan_search import build_search_sections, judge_search
from megatron_lite.report.section import (
    Block,
    Lines,
    Section,
    Table,
    build_share_table,
    limit_rows,
    section_lines,
)
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
    for paint, texts in ((style.warm, verdicts(report)), (style.dim, subject.notes)):
        for text in texts:
            lines += map(paint, wrapped(text, hanging="    "))
    for section in build_plan_sections(report, why):
        lines += ["", *section_lines(section, style)]
    return lines


# --- the first lines: does training fit, or generating; how fast can it be, how long does it take


def verdicts(report: PlanReport) -> list[str]:
    """A sentence for each GPU that was named; without any the peak, and how to learn more."""
    margin = report.subject.margin
    if report.search:
        return judge_search(report.search)
    if report.generating:
        return _judge_all_generating(report.generating, report.subject.plan.precision, margin)
    training = report.training
    assert training is not None  # one of the three was asked
    exact = training.exact
    peak = training.memory.peak
    where = f"at {peak.where} ({peak.phase}){'' if exact else ', estimated'}"
    where = f"in {exact.phase}" if exact and exact.phase != peak.phase else where
    if training.outlooks:
        return [_judge_training(outlook, exact, margin, where) for outlook in training.outlooks]
    held = f"{size(exact.allocated_peak_bytes if exact else peak.num_bytes)} of tensors on each GPU"
    return [f"peak {held}, {where}; --gpu NAME shows whether it fits and how fast it can be"]


def _judge_training(outlook: Outlook, exact: Exact | None, margin: float, where: str) -> str:
    """The exact peak if it was asked for, else that on the outlook's GPU, against its room."""
    room, name = outlook.room_bytes, outlook.processor.name
    peak = exact.allocated_peak_bytes if exact else outlook.memory.peak.num_bytes
    of_room = f"peak {peak / GIB:.1f} of {room / GIB:.1f} GiB ({percent(peak / room)}), {where}"
    remedy = f"; {describe_fit(outlook.fit)}" if outlook.fit else ""
    if peak > room:
        return f"does not fit in one {name}: {of_room}{remedy}"
    speed = "how fast it can be is not known: the table has no peak of this GPU in this precision"
    if outlook.time.peak_tflops and outlook.duration is not None:
        step, lasts = milliseconds(outlook.time.step_ms), _describe_span(outlook.duration)
        tokens = f"{count(outlook.time.tokens_per_s)} tokens/s"
        speed = f"at best {step} ms per step, {tokens}, {lasts} for {short_count(outlook.duration.tokens)} tokens"
    if peak > room * (1 - margin):
        left = f"less than {percent(margin)} is left for CUDA, NCCL and allocator overhead"
        return f"may fit in one {name}: {of_room}; {left}{remedy}; {speed}"
    return f"fits in one {name}: {of_room}; {speed}"


def describe_fit(fit: Fit) -> str:
    """Describe the flags that fit, 'it fits with --micro-batch-size 2 (10.84 GiB)', else the smallest change that
    makes it fit."""
    if fit.found:
        words = fit.found.words or "no change at all, by formula"
        return f"it fits with {words} ({size(fit.found.peak_bytes)})"
    assert fit.least is not None  # where nothing was found
    needed = fit.least.peak_bytes
    too_much = f"{size(needed - fit.budget_bytes)} more than there is with {percent(fit.margin)} left free"
    least = f"no micro-batch and no recomputation makes it fit: at least {size(needed)}, {too_much}"
    if fit.way_out is not None:
        return f"{least}; smallest change that fits: {fit.way_out.words} ({size(fit.way_out.peak_bytes)})"
    gib = needed / (1 - fit.margin) / GIB
    large = [(one.memory_gib, one.name) for one in PROCESSORS if (one.memory_gib or 0.0) >= gib]
    other = ", no GPU of the table is large enough"
    if large:
        memory, name = min(large, key=lambda one: one[0] or 0.0)
        other = f" or a GPU of {gib:.1f} GiB, such as {name} ({memory:g} GiB)"
    return f"{least}; nor does a shorter sequence: it needs a smaller model{other}"


def _judge_all_generating(generating: Generating, precision: str, margin: float) -> list[str]:
    """A sentence for each GPU, else what generating takes."""
    found = generating.prediction
    at = 0 if precision == "fp32" else 1  # WEIGHT_BITS: weights of the training's precision
    weights = found.weights[at]
    held = f"with {weights.name} and a cache for {count(found.batch)} x {count(found.tokens)} tokens"
    if generating.on_gpus:
        return [_judge_generating(processor, one, at, held, margin) for processor, one in generating.on_gpus]
    takes = f"generating takes {size(found.num_bytes(weights))} of tensors {held}"
    return [f"{takes}; --gpu NAME shows whether it fits and how fast it can be"]


def _judge_generating(processor: Processor, found: InferencePrediction, at: int, held: str, margin: float) -> str:
    room = count_room(processor)
    name = processor.name
    weights, budget = found.weights[at], room * (1 - margin)
    needed = found.num_bytes(weights)
    of_room = f"{needed / GIB:.1f} of {room / GIB:.1f} GiB ({percent(needed / room)}) {held}"
    best = f"; at best {count(found.tokens_per_s(found.token_rows[at]))} tokens/s" if found.token_rows else ""
    if needed <= budget:
        return f"generating fits in one {name}: {of_room}{best}"
    # the largest batch with these weights, else the widest weights with this batch
    one_bytes = found.cache.num_bytes // found.batch
    batch = int((budget - weights.num_bytes) // one_bytes)
    fitting = next((row for row in found.weights if found.num_bytes(row) <= budget), None)
    other = ""
    if batch >= 1:
        other = f"; it fits with --batch {batch} ({size(weights.num_bytes + batch * one_bytes)})"
    elif fitting:
        other = f"; it fits with {fitting.name} ({size(found.num_bytes(fitting))})"
    if needed <= room:
        return f"generating may fit in one {name}: {of_room}; less than {percent(margin)} is left{other}{best}"
    return f"generating does not fit in one {name}: {of_room}{other}"


def _describe_span(found: Duration) -> str:
    """Days above two of them, else hours, minutes, seconds."""
    return f"{found.days:,.1f} days" if found.days >= 2 else duration(found.seconds)


# --- sections of a plan: parameters, work, memory, time, what if, fit, inference, environment

ALL_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EQUAL = 0.0005  # of a figure: formula and walk are called equal
SMALL = 0.005  # of the peak: rows of less stand together
MAX_STAGES, MAX_COLLECTIVES = 12, 12  # rows
MAX_SIMULATED = 8192  # micro-batches times chunks times stages
STATES, ACTIVATIONS, LOSS, OTHER = "state", "activations", "logits", "other"
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
    subject, training = report.subject, report.training
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
        none = ["no flag or variable costs speed or memory"]
        yield Section("environment", "Environment", "", [Lines(list(subject.hints) or none)])


def _build_training_sections(subject: Subject, training: Training, why: bool) -> Iterator[Section]:
    """Memory, by stage and by the walk, and time."""
    yield from _build_memory_sections(training.memory, why)
    if training.stages:
        yield build_stages_section(training.stages, subject.everything)
        yield from _build_schedule_section(subject.plan, training.stages, subject.everything)
    if training.exact:
        yield build_exact_section(training.memory, training.exact)
        if training.exact.collectives:
            yield _build_collectives_section(training.exact, subject.everything)
    if training.outlooks:
        yield build_time_section(training.outlooks, why)


def _build_work_section(subject: Subject) -> Section:
    """FLOPs of a step by either convention."""
    tokens = subject.plan.batch.final * subject.plan.shape.seq_length
    conventions = {
        "half of attention counted (Megatron-LM)": subject.count_flops(causal=True),
        "all of attention counted (nanoGPT, PaLM)": subject.count_flops(causal=False),
    }
    rows = [(name, flops(each * tokens), f"{flops(each)} per token") for name, each in conventions.items()]
    return Section("work", "Work of a step", f"{count(tokens)} tokens, all GPUs", [Table(rows, "lrr")])


def _build_parameters_section(subject: Subject) -> Section:
    """Parameters of each part that the model has."""
    parts = [(name, number) for name, number in subject.parts.items() if number]
    whole = sum(number for _, number in parts)
    table = build_share_table(parts, whole, count)
    return Section("parameters", "Parameters", f"{count(whole)} ({short_count(whole)})", [table])


def _build_memory_sections(memory: MemoryPrediction, why: bool) -> Iterator[Section]:
    """Build the ledger of what tensors hold at the peak, whose rows add up to it; then the moments at which the peak
    can be."""
    peak = memory.peak
    shown = [row for row in peak.rows if why or row.num_bytes >= SMALL * peak.num_bytes]
    rest = peak.num_bytes - sum(row.num_bytes for row in shown)
    colors = [palette.HELD.get(row.category, palette.GREY) for row in shown]
    table = build_share_table([(row.name, row.num_bytes) for row in shown], peak.num_bytes, size, colors)
    more = [("smaller ones", size(rest), percent(share(rest, peak.num_bytes)))] if rest else []
    more.append(("peak", size(peak.num_bytes), ""))
    shares = [*table.shares, *(None for _ in more)]
    blocks: list[Block] = [Table([*table.rows, *more], "lrr", shares=shares, colors=colors)]
    if why:
        blocks.append(Lines([f"{row.name} = {row.formula}" for row in shown if row.formula], quiet=True))
    yield Section("memory", "Memory at the peak", f"estimate for one GPU, {peak.where} ({peak.phase})", blocks)
    moments = memory.moments
    rows = [(moment.phase, moment.where, size(moment.num_bytes)) for moment in moments]
    shares = [share(moment.num_bytes, peak.num_bytes) for moment in moments]
    yield Section("moments", "Memory through a step", "estimate for one GPU", [Table(rows, "llr", shares=shares)])


def build_stages_section(unsorted: Sequence[StageOutlook], everything: bool) -> Section:
    """Build the table of what one rank of each stage holds at its peak, and say why the heaviest is the heaviest."""
    stages = sorted(unsorted, key=lambda one: -one.memory.peak.num_bytes)
    shown, hidden = limit_rows(stages, MAX_STAGES, everything)
    rows = []
    for one in shown:
        stage, kinds = one.plan.stage, sum_kinds(one.memory)
        layers = ", ".join(f"{chunk.start + 1}-{chunk.stop}" for chunk in stage.chunks)
        waiting, _ = stage.count_held(one.plan.micro_batches(one.plan.train_samples))
        exact = size(one.exact.allocated_peak_bytes) if one.exact else ""
        own = f"{milliseconds(one.time.step_ms)} ms" if one.time and one.time.peak_tflops else ""
        held = [size(kinds[kind]) if kinds[kind] else "" for kind in KINDS]
        rows.append([f"{stage.number + 1}", layers, size(one.memory.peak.num_bytes), exact, *held, count(waiting), own])
    head = ["stage", "layers", "peak", "exact", *KINDS, "in flight", "work at best"]
    table = Table(rows, "rl" + "r" * (len(head) - 2), head, hidden=hidden)
    meaning = "state: weights, moments, gradients; in flight: micro-batches whose activations are kept for backward"
    lines = [_say_why_heaviest(stages), meaning]
    blocks: list[Block] = [table, Lines(lines, quiet=True)]
    return Section("stages", "Memory by stage", "estimate for one GPU of each, at its peak", blocks)


def _build_schedule_section(plan: Plan, stages: Sequence[StageOutlook], everything: bool) -> Iterator[Section]:
    """How long each stage waits at best: by formula, and in the order in which the stages really compute."""
    micro_batches = plan.batch.final // plan.samples_per_pass
    simulated = min(micro_batches, MAX_SIMULATED // len(stages) // len(plan.stage.chunks))
    turns = simulate_stages(stages, simulated)
    if not turns:
        return
    end_ms, rows, shares = max(one.end_ms for one in turns), [], []
    for number in range(len(stages)):
        busy_ms = sum(one.end_ms - one.start_ms for one in turns if one.stage == number)
        times = [f"{milliseconds(ms)} ms" for ms in (busy_ms, end_ms - busy_ms)]
        shares.append(share(end_ms - busy_ms, end_ms))
        rows.append([str(number + 1), *times, percent(shares[-1])])
    shown, hidden = limit_rows(rows, MAX_STAGES, everything)
    table = Table(shown, "rrrr", ["stage", "computes", "waits", "share"], shares=shares[: len(shown)], hidden=hidden)
    parts = len(plan.stage.chunks) * (3 if plan.stage.splits_backward else 1)
    bubble = measure_bubble(len(stages), micro_batches, parts)
    formula = f"{percent(bubble)} by formula, for equal stages and {count(micro_batches)} micro-batches"
    of = f"{count(simulated)} micro-batches at best, all stages as they compute"
    yield Section("schedule", "Schedule", of, [table, Lines([f"bubble: {formula}"], quiet=True)])


def sum_kinds(memory: MemoryPrediction) -> Counter[str]:
    """Bytes at the peak: of weights and what belongs to them, of activations, of the loss."""
    found = Counter[str]()
    for row in memory.peak.rows:
        found[KIND_OF.get(row.category, OTHER)] += row.num_bytes
    return found


def _say_why_heaviest(stages: list[StageOutlook]) -> str:
    """Describe what the stage that holds most has more than the stage that holds least."""
    most, least = stages[0], stages[-1]
    more = sum_kinds(most.memory)
    more.subtract(sum_kinds(least.memory))
    reasons = []
    for kind, num_bytes in more.most_common():
        if num_bytes < SMALL * most.memory.peak.num_bytes:
            continue
        why = ""
        if kind == ACTIVATIONS:
            held = [
                one.plan.stage.count_held(one.plan.micro_batches(one.plan.train_samples))[0] for one in (most, least)
            ]
            why = f" ({held[0]} micro-batches in flight, not {held[1]})" if held[0] != held[1] else ""
        elif kind == STATES:
            why = _name_ends(most, least)
        reasons.append(f"{size(num_bytes)} more {kind}{why}")
    numbers = f"stage {most.plan.stage.number + 1} holds more than stage {least.plan.stage.number + 1}"
    return f"{numbers}: {', '.join(reasons)}" if reasons else "all stages hold about as much"


def _name_ends(most: StageOutlook, least: StageOutlook) -> str:
    """Name the matrices and the number of layers that the one stage has and the other has not."""
    one, other = most.plan.stage, least.plan.stage
    words = []
    if one.is_first and not other.is_first:
        words.append("the embedding")
    if one.is_last and not other.is_last:
        words.append("the output layer")
    further = len(one.layers) - len(other.layers)
    if further > 0:
        words.append(f"{further} more layer{'s' if further > 1 else ''}")
    return f" ({' and '.join(words)})" if words else ""


def _build_collectives_section(found: Exact, everything: bool) -> Section:
    """Build the table of what the rank exchanged in the walked step, most bytes first."""
    calls = sorted(found.collectives, key=lambda call: -call[2] * call[3])
    shown, hidden = limit_rows(calls, MAX_COLLECTIVES, everything)
    rows = [(group, kind, count(times), size(each), size(each * times)) for group, kind, each, times in shown]
    table = Table(rows, "llrrr", ["ranks", "", "times", "bytes each", "together"], hidden=hidden)
    note = "whole tensors: what an all-gather gives, what a reduce-scatter takes; of the micro-batches that were walked"
    blocks: list[Block] = [table, Lines([note], quiet=True)]
    return Section("collectives", "Exchanged in a step", "by the rank that holds most", blocks)


def build_exact_section(memory: MemoryPrediction, found: Exact) -> Section:
    """Category by category beside the formula."""
    by_formula = Counter[str]()
    for row in memory.peak.rows:
        by_formula[row.category] += row.num_bytes
    pairs = [
        (name, found.categories.get(name, 0), by_formula.get(name, 0)) for name in {**found.categories, **by_formula}
    ]
    pairs.append(("peak", found.allocated_peak_bytes, memory.peak.num_bytes))
    rows = []
    for name, real, formula in pairs:
        difference = "not there" if formula else ""
        if real:
            share_off = formula / real - 1
            difference = f"{share_off:+.1%}" if abs(share_off) >= EQUAL else "0"
        rows.append((name, size(real), size(formula), difference))
    expandable = f"with expandable segments {size(found.expandable_reserved_bytes)}"
    reserved = f"reserved by the caching allocator: {size(found.reserved_peak_bytes)}; {expandable}"
    table = Table(rows, "lrrr", ["", "exact", "estimate", "difference"])
    lines = Lines([f"peak in {found.where}", reserved, *found.notes])
    return Section("exact", "Exact", f"the real model and step, without data, in {found.seconds:.1f} s", [table, lines])


def build_time_section(outlooks: Sequence[Outlook], why: bool) -> Section:
    """The parts of a step at best: with limits and bars for one GPU, a column for each of several."""
    if len(outlooks) == 1:
        table, of = _build_time_of_one(outlooks[0]), f"{outlooks[0].processor.name}, a lower bound"
    else:
        table, of = _build_times_of_several(outlooks), "lower bounds"
    blocks: list[Block] = [table]
    if why:
        formulas = [f"{row.name} = {row.formula}" for outlook in outlooks for row in outlook.time.rows]
        blocks.append(Lines(formulas, quiet=True))
    notes = dict.fromkeys(note for outlook in outlooks for note in outlook.time.notes)
    caveat = "real steps take longer: kernels miss the peak, and launches and the host take time"
    blocks.append(Lines([caveat, *notes], quiet=True))
    return Section("time", "Time of a step at best", of, blocks)


def _build_time_of_one(outlook: Outlook) -> Table:
    """Parts with the limit that each meets, and bars."""
    time = outlook.time
    rows = [[row.name, f"{milliseconds(row.ms, time.step_ms)} ms", row.bound] for row in time.rows]
    rows += [[name, text, ""] for name, text in zip(_name_sums([outlook]), _sum_up(outlook))]
    return Table(rows, "lrl", shares=[share(row.ms, time.step_ms) for row in time.rows])


def _build_times_of_several(outlooks: Sequence[Outlook]) -> Table:
    """A column for each GPU."""
    rows = []
    for name in dict.fromkeys(row.name for outlook in outlooks for row in outlook.time.rows):
        cells = []
        for outlook in outlooks:
            found = next((row for row in outlook.time.rows if row.name == name), None)
            cells.append(f"{milliseconds(found.ms, outlook.time.step_ms)} ms" if found else "not known")
        rows.append([name, *cells])
    rows += [list(row) for row in zip(_name_sums(outlooks), *map(_sum_up, outlooks))]
    head = ["", *(outlook.processor.name for outlook in outlooks)]
    return Table(rows, "l" + "r" * len(outlooks), head)


def _name_sums(outlooks: Sequence[Outlook]) -> list[str]:
    """The names of what _sum_up gives."""
    lengths = [outlook.duration.tokens for outlook in outlooks if outlook.duration]
    length = f"{short_count(lengths[0])} tokens" if lengths else "whole training"
    return ["step", "tokens/s", "of peak at best", length, "GPU hours"]


def _sum_up(outlook: Outlook) -> list[str]:
    """A step's time, tokens/s, the share of the peak, the whole training's time and GPU hours."""
    time, lasts = outlook.time, outlook.duration
    texts = ["not known", "", ""]
    if time.peak_tflops:
        # with half of attention counted, Megatron-LM's convention
        of_peak = time.flops_causal / (time.step_ms / 1000) / (time.peak_tflops * 1e12)
        texts = [f"{milliseconds(time.step_ms)} ms", count(time.tokens_per_s), percent(of_peak)]
    if lasts is None:
        return [*texts, "", ""]
    return [*texts, _describe_span(lasts), f"{lasts.gpu_hours:,.1f}"]


def _build_what_if_section(training: Training, margin: float) -> Section:
    """Build a row per change: its peak, and on the first GPU whether it fits and how fast it can be."""
    now = training.memory.peak.num_bytes
    outlook = training.outlooks[0] if training.outlooks else None
    rows = []
    for one in training.variants:
        # the line below the table has the flags in full
        words = one.words.replace(ALL_LAYERS, "--recompute-granularity full (all layers)")
        row = [words, size(one.peak_bytes), f"{(one.peak_bytes - now) / GIB:+.2f} GiB"]
        if outlook:
            row.append("yes" if one.peak_bytes <= outlook.room_bytes * (1 - margin) else "no")
            row.append(f"{milliseconds(one.time.step_ms)} ms" if one.time and one.time.peak_tflops else "not known")
        rows.append(row)
    head = ["", "peak", "against now", *(["fits", "at best"] if outlook else [])]
    of = outlook.processor.name if outlook else "one change each"
    table = Table(rows, "lrr" + ("lr" if outlook else ""), head)
    return Section("what_if", "What if", of, [table, Lines([f"all layers: {ALL_LAYERS}"], quiet=True)])


def _build_fit_section(found: Fit) -> Section:
    """Flags to paste, or what is in the way."""
    lines = []
    if found.fits:
        spare = found.budget_bytes - found.given.peak_bytes
        lines.append(f"fits as it is: {size(found.given.peak_bytes)}, {size(spare)} to spare")
    if found.found and found.found.words:
        one = found.found
        best = ""
        if one.time and one.time.peak_tflops:
            best = f", at best {milliseconds(one.time.step_ms)} ms per step"
        lines.append(f"{'fastest that fits' if found.fits else 'fits with'}: {one.words}")
        lines.append(f"peak {size(one.peak_bytes)}{best}")
    if found.found is None:
        lines += [
            describe_fit(found),
            "more GPUs help only if they split the model too: --tensor-model-parallel-size or --pipeline-model-parallel-size 2 or more",
        ]
    budget = f"{size(found.budget_bytes)} of {found.processor.memory_gib:g} GiB, {percent(found.margin)} left free"
    return Section("fit", f"Fit into one {found.processor.name}", budget, [Lines(lines)])


def build_inference_section(generating: Generating, why: bool) -> Section:
    """Build the table of weights by number format, the cache, and both, with tokens/s for each GPU.

    Args:
        report: what is predicted.
        found: the part of it that is of inference.
        why: show the formula behind each line.
    """
    found = generating.prediction
    timed = [(processor, one) for processor, one in generating.on_gpus if one.token_rows]
    formats = [row.name.removeprefix("weights in ") for row in found.weights]
    rows = [
        [name, size(row.num_bytes), size(found.num_bytes(row)), count(batch)]
        for name, row, batch in zip(formats, found.weights, found.batches_beyond_weights)
    ]
    blocks: list[Block] = [Table(rows, "lrrr", ["", "weights", "with cache", "cache is larger from batch"])]
    if timed:
        columns = [_list_rates(processor, one) for processor, one in timed]
        head = ["tokens/s at best", *(processor.name for processor, _ in timed)]
        blocks.append(Table(list(zip(formats, *columns)), "l" + "r" * len(timed), head))
    lines = [f"KV cache: {size(found.cache.num_bytes)} = {found.cache.formula}"]
    if why:
        lines += [f"{row.name} = {row.formula}" for row in found.weights]
        lines += [f"{row.name} = {row.formula}" for _, one in timed for row in one.token_rows]
    of = f"batch {found.batch}, {count(found.tokens)} tokens each; tensors only"
    return Section("inference", "Inference", of, [*blocks, Lines(lines)])


def _list_rates(processor: Processor, found: InferencePrediction) -> list[str]:
    """Tokens/s of each number format that fits."""
    texts = []
    for row, weights in zip(found.token_rows, found.weights):
        fits = found.num_bytes(weights) <= count_room(processor)
        texts.append(count(found.tokens_per_s(row)) if fits else "does not fit")
    return texts
