"""What the run's own record and snapshots say about the questions of the audit that no finding answers.

An examiner returns evidence, which is a pass; a Point; or nothing, where the files hold too little.
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from megatron_lite.analysis.audit.answers import Case, Point, Record, fail_by_findings, failed, not_seen
from megatron_lite.analysis.compare.compare_results import Change, Pair
from megatron_lite.analysis.compare.settings import exact, objections, paired_samples
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.memory_rules import MIN_SNAPSHOT_STEPS
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.read import MIN_STEPS as MIN_STEPS_WITHOUT_GROWTH
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, whole
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.units import MIB, count, counted, significant, size

IS_UPDATE, OPTIMIZER_STEP = re.compile(r"Optimizer\.step#").match, "optimizer step"
MIN_TRACED_STEPS = 2
MIN_SETTLED_STEPS = 20  # after the first good one, of which one skipped is 5%
MAX_CATEGORIES, MAX_ITERATIONS = 4, 6  # shown
SIXTEEN_BITS = ("fp16", "bf16")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
# What must not be cast, and which argument of an operator tells: ids and labels are whole numbers, the loss wants fp32.
UNCAST = {
    "token ids": ("aten::embedding", 1),
    "labels": ("aten::nll_loss_forward", 1),
    "the loss": ("aten::_log_softmax", 0),
}
# Largest difference over 60 iterations of small models, measured on a CPU: the same command again 0, fp32 against bf16
# 0.03% to 2.0%, another seed 3.3%, twice the learning rate 21%.
MAX_LOSS_DIFFERENCE = 0.03
# What decides which samples a run sees.
DATA_FLAGS = (
    "seed mock_data data_path train_data_path data_args_path per_split_data_args_path split dataloader_type "
    "external_dataloader data_sharding"
)
PACKED = Evidence(
    "every position holds a token: the data set cuts a stream of tokens, without padding (--dataloader-type)",
    "run.json",
)


def examine_sixteen_bits(case: Case) -> Point | list[Evidence]:
    """Less time and memory than the same work in fp32 takes; one run shows only that 16 bits are used."""
    facts, other, one = case.facts, case.other, case.facts.critical
    used, seen = _measure_formats(one), []
    if one is not None and (total := sum(used.values())) > 0:
        text = "products per step: " + ", ".join(f"{in_ms(ms)} in {name}" for name, ms in used.items())
        seen.append(Evidence(text, one.where()))
        in_16_bits = sum(used.get(name, 0.0) for name in SIXTEEN_BITS)
        if facts.plan.precision in SIXTEEN_BITS and 2 * in_16_bits < total:
            return failed("see which operators autocast or the model leaves in fp32", *seen, code="fp32-products")
    if one is not None and (uncast := _list_uncast(one)):
        seen.append(Evidence(f"left alone: {', '.join(uncast)}", one.where()))
    here, there = (_get_precision(run) if run else None for run in (facts, other))
    if other is None:
        wanted = "fp32" if here in SIXTEEN_BITS else "bf16 or fp16"
        return not_seen(*seen, record=f"{Record.SECOND_RUN}, the same work in {wanted}")
    if None in (here, there) or (here in SIXTEEN_BITS) == (there in SIXTEEN_BITS):
        text = f"this run is in {here or 'an unknown format'}, the other in {there or 'an unknown format'}"
        record = "--against a run of the same work, one of the two in fp32 and one in 16 bits"
        return not_seen(Evidence(text), *seen, record=record)
    if other_work := objections(facts, other):
        return not_seen(*map(Evidence, other_work), *seen, record="--against a run of the same work")
    full, half, name = (other, facts, here) if here in SIXTEEN_BITS else (facts, other, there)
    told, changes = [], []
    for what, unit, pair in _pair_measurements(full, half):
        text, change = "not known of both", None
        if pair is not None and pair.ratio is not None and math.isfinite(pair.ratio):
            text = f"{pair.a:,.1f} {unit} in fp32, {pair.b:,.1f} {unit} in {name} ({pair.ratio - 1:+.0%})"
            change = pair.change
        told.append(Evidence(f"{what}: {text}"))
        changes.append(change)
    if Change.MORE in changes or Change.SAME in changes:
        remedy = "see what the report names as the most costly causes in both runs; megatron-lite compare A B"
        return failed(remedy, *told, *seen)
    if None in changes:
        return not_seen(*told, *seen, record="longer runs, both with --record-memory-history")
    return [*told, *seen]


def _measure_formats(one: RankFacts | None) -> dict[str, float]:
    """Time of products and attention by number format, as far as names or shapes tell it, most first."""
    if one is None:
        return {}
    of_kernels = ((row.role, row.precision, row.ms) for row in one.kernels.rows)
    of_shapes = ((row.role, row.dtype, row.ms) for row in one.kernels.roofline)
    times: dict[str, float] = {}
    for role, name, ms in of_kernels if one.time.on_gpu else of_shapes:
        if role in MATRIX_ROLES and name:
            times[name] = times.get(name, 0.0) + ms
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def _get_precision(facts: Facts) -> str | None:
    """The plan's; without one what most of the products' time is in."""
    return facts.plan.precision or next(iter(_measure_formats(facts.critical)), None)


def _list_uncast(one: RankFacts) -> list[str]:
    """Formats of what mixed precision should leave alone; [] without shapes."""
    told = []
    for what, (operator, place) in UNCAST.items():
        rows = one.rows_named(operator.__eq__, Kind.OP)
        shapes = [one.trace.shapes[index] for index in np.unique(one.trace.events.shapes[rows]) if index >= 0]
        formats = {shape.dtypes[place] for shape in shapes if len(shape.dtypes) > place} - {""}
        # On GPUs the operator may read 16 bits and compute in fp32 by itself.
        if formats and (what != "the loss" or formats == {"float"}):
            told.append(f"{what} in {' and '.join(sorted(formats))}")
    return told


def _pair_measurements(*runs: Facts) -> Iterator[tuple[str, str, Pair | None]]:
    """(what, unit, the two runs' values), None for these where no kind of measurement is known of both."""
    ordinary: list[Numbers | list[float]] = [one.run.training_ms[one.run.ordinary] if one.run else [] for one in runs]
    traced: list[Numbers | list[float]] = [
        [step.ms for step in one.critical.time.steady_steps] if one.critical else [] for one in runs
    ]
    samples = next((kind for kind in (ordinary, traced) if all(map(len, kind))), None)
    yield "step", "ms", paired_samples(*samples) if samples else None
    allocator = [one.peak.num_bytes if one.peak else 0 for one in runs]
    snapshots = [most.peak_bytes if (most := one.highest_snapshot) else 0 for one in runs]
    peaks = next((kind for kind in (allocator, snapshots) if all(kind)), None)
    yield "peak memory", "MiB", exact(*(num_bytes / MIB for num_bytes in peaks)) if peaks else None


def examine_overflows(case: Case, run: Run) -> Point | list[Evidence]:
    """Skipped steps and the loss scale."""
    precision, scales = case.facts.plan.precision, run.loss_scale[run.loss_scale > 0]
    if not len(scales):
        return []
    text = f"{run.skipped.sum():,} of {run.steps:,} steps skipped"
    text += f", the loss scale is {significant(scales[-1], 6)} at the end"
    settled = 0 if run.skipped.all() else run.steps - int(run.skipped.argmin())
    if run.skipped.any() and settled < MIN_SETTLED_STEPS:
        remedy = f"{Record.LONGER_RUN}; --initial-loss-scale 65536 avoids the skipped steps at the beginning"
        return not_seen(
            Evidence(f"{text}; {counted(settled, 'step')} since the first good one", STEPS_FILE), record=remedy
        )
    why = f": {precision} has the range of fp32 and needs none" if precision not in (None, "", "fp16") else ""
    return [Evidence(text + why, STEPS_FILE)]


def examine_peak(case: Case) -> Point | list[Evidence]:
    """What holds the peak (a snapshot says it), and that nothing stays from step to step."""
    most, run, held = case.facts.highest_snapshot, case.facts.run, []
    if most is not None and most.complete and most.peak_bytes > 0:
        parts = ", ".join(f"{part.category} {size(part.num_bytes)}" for part in most.held[:MAX_CATEGORIES])
        text = f"peak of {size(most.peak_bytes)} in {most.peak_phase or 'an unknown phase'}: {parts}"
        held.append(Evidence(f"simulated {text}" if most.simulated else text, most.source))
    kept = [one for one in case.facts.snapshots if len(one.steps) >= MIN_SNAPSHOT_STEPS and one.growth is None]
    steady = [Evidence(f"no growth over {counted(len(one.steps), 'step')}", one.source) for one in kept]
    memory = {"GPU": run.peak_memory_bytes[run.ordinary], "process": run.host_memory_bytes[run.ordinary]} if run else {}
    for what, values in memory.items():
        number = (~np.isnan(values)).sum()
        if number >= MIN_STEPS_WITHOUT_GROWTH:
            steady.append(Evidence(f"memory of the {what} does not grow over {number} typical steps", STEPS_FILE))
    return [*held, *steady] if held and steady else not_seen(*held, *steady)


def examine_batches(case: Case) -> Point | list[Evidence]:
    """Global batch = micro-batch x ranks x micro-batches; samples and learning rate follow updates."""
    facts, run, one, traced, updates = case.facts, case.facts.run, case.facts.critical, 0.0, 0.0
    seen: list[Evidence] = []
    if run and (why := measure_learning(run).nothing):
        code = next((one.code for one in case.found("overflow-storm", "no-learning")), "")
        none = Evidence(f"no update at all: {why}", STEPS_FILE)
        return failed("see why no step improves the weights", none, code=code)
    if one is not None:
        traced = one.per_step(one.backward_ranges())
        updates = one.per_step(one.rows_named(IS_UPDATE, Kind.ANNOTATION))
        told = f"{counted(traced, 'backward range')}{f', {counted(updates, OPTIMIZER_STEP)}' if updates else ''}"
        seen = [Evidence(f"per step {told} in the trace", one.where())] if traced else []
    micro_batch, world = whole(facts.argument("micro_batch_size")), run.world_size if run else None
    sizes = run.batch_sizes[run.batch_sizes > 0] if run else np.empty(0)
    if run is None or not micro_batch or not world or not len(sizes):
        return not_seen(*seen)
    wrong = _check_batches(run, sizes, micro_batch * world, traced)
    batch = facts.plan.batch
    if batch.final and not batch.start and (sizes != batch.final).any():  # nothing ramps up
        wrong.append(
            f"the plan has {batch.final} samples per step, the steps have {sizes.min():,.0f} to {sizes.max():,.0f}"
        )
    if updates > 1:
        wrong.append(f"{significant(updates)} {OPTIMIZER_STEP}s per iteration in the trace")
    if wrong:
        remedy = "micro-batch size x ranks x micro-batches must give --global-batch-size, with one update for all of it"
        return failed(remedy, *(Evidence(text, STEPS_FILE) for text in wrong), *seen)
    parts = f"{micro_batch} x {counted(world, 'rank')} x {sizes[-1] / (micro_batch * world):,.0f} of them"
    lines = [f"{counted(sizes[-1], 'sample')} per step = micro-batches of {parts}, in {counted(len(sizes), 'step')}"]
    rates = run.next_lrs[~np.isnan(run.next_lrs)]
    if len(rates):
        held = ", and unchanged in skipped ones" if run.skipped.any() else ""
        lines.append(
            f"the learning rate is set once per step, {significant(rates[0])} to {significant(rates[-1])}{held}"
        )
    return [*(Evidence(text, STEPS_FILE) for text in lines), *seen]


def _check_batches(run: Run, sizes: Numbers, samples: int, traced: float) -> list[str]:
    """What is wrong with sizes, counts of samples and schedule, the first iteration of each kind.

    Args: samples: of one micro-batch of every rank; traced: micro-batches per step, 0 for unknown.
    """
    numbers, counted_samples, rates = run.batch_sizes, np.diff(run.consumed_samples), np.diff(run.next_lrs)
    odd = (numbers > 0) & (numbers % samples > 0)
    # a step's own entry is the one after the difference's; nothing unknown is wrong
    miscounted = ~np.isnan(counted_samples + numbers[1:]) & (counted_samples != numbers[1:])
    went_on = run.skipped[1:] & ~np.isnan(rates) & (rates != 0)
    wrong = []
    for at in np.flatnonzero(odd)[:1]:
        of = f"no multiple of {samples} (micro-batch x ranks)"
        wrong.append(f"iteration {run.iterations[at]} has {numbers[at]:,.0f} samples, {of}")
    planned = sizes[0] / samples
    if traced and (sizes == sizes[0]).all() and traced != planned:
        passes = f"{counted(traced, 'backward pass')} per step in the trace"
        wrong.append(f"{passes}, {planned:g} micro-batches planned")
    for at in np.flatnonzero(miscounted)[:1]:
        told = f"{numbers[at + 1]:,.0f} samples and counts {counted_samples[at]:,.0f}"
        wrong.append(f"iteration {run.iterations[at + 1]} has {told}")
    for at in np.flatnonzero(went_on)[:1]:
        before, after = (significant(rate, 6) for rate in run.next_lrs[at : at + 2])
        told = f"from {before} to {after} in iteration {run.iterations[at + 1]:,}"
        wrong.append(f"the learning rate goes on {told}, which was skipped")
    return wrong


def examine_compilation(case: Case) -> Point | list[Evidence]:
    """The first step's compiling apart from steady steps, and none later."""
    run, one, compiled = case.facts.run, case.facts.critical, case.facts.compiles
    if compiled and (found := case.found("first-step")):
        return fail_by_findings(found)
    regions = one.kernels.compiled_regions if one is not None else 0.0
    if compiled is False and not regions:
        text = "nothing is compiled (--torch-compile none)"
        return not_seen(Evidence(text, "run.json"), record="a run with --torch-compile")
    seen = [Evidence(f"{counted(regions, 'compiled region')} per step", one.where())] if one and regions else []
    if not run or not (compiled or regions) or not run.first_step_ms or not run.steady_step_ms:
        return not_seen(*seen, record="all steps of the run: start it with an empty --run-dir" if run else "")
    compiling = f" ({in_ms(run.compile_ms[0])} of it compiling)" if run.compile_ms[0] > 0 else ""
    late = run.iterations[1:][run.compiling[1:]]
    listed = f" (iterations {', '.join(map(str, late[:MAX_ITERATIONS]))})" if len(late) else ""
    text = (
        f"first step {in_ms(run.first_step_ms)}{compiling}, typical ones {in_ms(run.steady_step_ms)}; "
        f"left out, since they compiled something: {counted(len(late), 'later step')}{listed}"
    )
    return [Evidence(text, STEPS_FILE), *seen]


def examine_shapes(case: Case) -> Point | list[Evidence]:
    """The same shapes in every step (nothing to compile anew), and no position without a token."""
    facts, run, one = case.facts, case.facts.run, case.facts.critical
    shapes, seen = [], []  # of products in each steady step, and what they say
    if one is not None and one.trace.with_shapes:
        events, steps = one.trace.events, one.placing.step
        rows = one.rows_named(PRODUCTS.__contains__, Kind.OP)
        rows = rows[events.shapes[rows] >= 0]
        shapes = [frozenset(events.shapes[rows[steps[rows] == step]].tolist()) for step in np.unique(steps[rows])]
    if one is not None and len(shapes) >= MIN_TRACED_STEPS:
        number, same = len(frozenset().union(*shapes)), "the same" if len(set(shapes)) == 1 else "not the same"
        seen.append(
            Evidence(
                f"{counted(number, 'shape')} of products, {same} in each of {counted(len(shapes), 'steady step')}",
                one.where(),
            )
        )
        if same == "not the same":
            return not_seen(*seen, record=f"how much of it is padding and what it compiles: {Record.RUN_FOLDER}")
    length = facts.shape.seq_length
    if length and run and run.steps:
        late = (run.compiling & ~run.evaluating)[1:].sum()
        text = f"every sequence has {length:,} positions; {late} of {run.steps:,} steps compiled after the first"
        seen.append(Evidence(text, "run.json"))
    if not seen:
        longer = "a window with two steady steps or more: --profile-step-end"
        return not_seen(record=longer if one is not None and one.trace.with_shapes else "")
    if not _is_packed(facts):
        return not_seen(*seen, record=f"how many positions are padding: {Record.RUN_FOLDER}, with its own data set")
    return [*seen, PACKED]


def _is_packed(facts: Facts) -> bool:
    """Whether the data sets are this trainer's own, which cut one stream of tokens. Other loaders are not known."""
    return facts.argument("dataloader_type") in ("single", "cyclic")


def examine_tokens(case: Case, run: Run) -> Point | list[Evidence]:
    """Tokens per second, counting only positions that train."""
    if run.tokens_per_second is None:
        return []
    if run.not_finite.any() and (found := case.found("no-learning")):
        return fail_by_findings(found)
    speed = (
        f"{count(run.tokens_per_second)} tokens/s over {counted(int(run.ordinary.sum()), 'typical step')}, all ranks"
    )
    seen = Evidence(f"{speed}; {run.skipped.sum():,} of {run.steps:,} steps skipped", STEPS_FILE)
    if case.facts.argument("eod_mask_loss"):
        record = "how many positions have a loss is not recorded: without --eod-mask-loss all have one"
        return not_seen(seen, record=record)
    if not _is_packed(case.facts):
        return not_seen(seen, record="how many positions are padding is not recorded: a .bin/.idx data set has none")
    return [seen, PACKED]


def examine_losses(case: Case) -> Point | list[Evidence]:
    """Iteration by iteration against the other run, with the same seed and data."""
    if case.other is None:
        return []
    run, base = case.facts.run, case.other.run
    if run is None or base is None:
        return not_seen(record="a run folder for each of the two: traces hold no losses")
    ours, theirs = run.args, base.args
    differences = [
        f"--{name.replace('_', '-')} {ours[name]} here, {theirs[name]} there"
        for name in DATA_FLAGS.split()
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
    differences += [] if ours and theirs else ["the flags of one of the two are unknown: no plan in run.json"]
    if differences := [*differences, *objections(case.facts, case.other)]:
        record = "--against a run with the same seed, data, model and batch"
        return not_seen(*map(Evidence, differences), record=record)
    against = f"{STEPS_FILE}, against {base.folder}"
    undo = "undo changes one by one until the losses"
    if run.not_finite.any() and not base.not_finite.any():
        seen = Evidence(f"{measure_learning(run).losses}; the baseline's are all finite", against)
        return failed(f"{undo} are finite; megatron-lite compare A B", seen, code="no-learning")
    mine, others = (dict(zip(of.iterations.tolist(), of.losses.tolist())) for of in (run, base))
    mine, others = ({at: loss for at, loss in of.items() if not math.isnan(loss)} for of in (mine, others))
    apart = {at: abs(mine[at] - others[at]) / max(abs(others[at]), 1e-12) for at in sorted(mine.keys() & others.keys())}
    if not apart:
        text = f"{counted(len(mine), 'iteration')} with a loss here, {len(others)} there, none in common"
        return not_seen(Evidence(text), record="two runs that share iterations")
    at, last = max(apart, key=lambda iteration: apart[iteration]), max(apart)
    text = (
        f"the losses of {counted(len(apart), 'common iteration')} differ by at most {apart[at]:.2%} "
        f"(iteration {at}: {significant(mine[at], 6)} here, {significant(others[at], 6)} there); "
        f"the last, iteration {last}, by {apart[last]:.2%}; {MAX_LOSS_DIFFERENCE:.0%} is taken for rounding"
    )
    seen = Evidence(text, against)
    if apart[at] <= MAX_LOSS_DIFFERENCE:
        return [seen]
    if found := case.found("overflow-storm", "scale-collapse"):
        return failed(found[0].advice, seen, *found[0].evidence, code=found[0].code)
    return failed(f"{undo} agree; megatron-lite compare A B lists the flags that differ", seen)
