"""What the run's own record and snapshots say about the questions of the audit that no finding answers."""

import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np

from megatron_lite.analysis.audit.answers import (
    LONGER_RUN,
    RUN_FOLDER,
    SECOND_RUN,
    SHAPES,
    SNAPSHOT,
    Case,
    Point,
    fail_by_findings,
    failed,
    not_seen,
)
from megatron_lite.analysis.compare.compare_results import Change, Pair
from megatron_lite.analysis.compare.settings import exact, objections, paired_samples
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.memory_growth import MIN_STEPS as MIN_SNAPSHOT_STEPS
from megatron_lite.analysis.findings.run_settings import argument, compiles, part, peak, whole
from megatron_lite.analysis.findings.step_measurements import (
    counted,
    in_ms,
    micro_batches_seen,
    rows_named,
    steady_steps,
    where,
)
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.read import MIN_STEPS as MIN_STEPS_WITHOUT_GROWTH
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.units import MIB, count, size

IS_UPDATE, OPTIMIZER_STEP = re.compile(r"Optimizer\.step#").match, "optimizer step"
MIN_TRACED_STEPS = 2
MIN_SETTLED_STEPS = 20  # after the first good one, of which one skipped is 5%
MAX_CATEGORIES, MAX_ITERATIONS = 4, 6  # shown
SIXTEEN_BITS = ("fp16", "bf16")
MATRIX = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)
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
    "seed",
    "mock_data",
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "split",
    "dataloader_type",
    "external_dataloader",
    "data_sharding",
)


def examine_sixteen_bits(case: Case) -> Point | list[Evidence]:
    """Less time and memory than the same work in fp32 takes; one run shows only that 16 bits are used."""
    facts, one = case.facts, case.facts.critical
    used = _products_ms(one)
    text = "products per step: " + ", ".join(f"{in_ms(ms)} in {name}" for name, ms in used.most_common())
    seen = [Evidence(text, where(one))] if used.total() > 0 else []
    if (
        seen
        and facts.plan.get("precision") in SIXTEEN_BITS
        and 2 * sum(map(used.get, SIXTEEN_BITS, (0, 0))) < used.total()
    ):
        return failed("see which operators autocast or the model leaves in fp32", *seen, code="fp32-products")
    seen += _list_uncast(one) if one is not None else []
    if case.other is None:
        wanted = "in fp32" if _precision(facts) in SIXTEEN_BITS else "in bf16 or fp16"
        return not_seen(f"{SECOND_RUN}, the same work {wanted}", *seen)
    here, there = _precision(facts), _precision(case.other)
    if None in (here, there) or (here in SIXTEEN_BITS) == (there in SIXTEEN_BITS):
        text = f"this run is in {here or 'an unknown format'}, the other in {there or 'an unknown format'}"
        record = "--against a run of the same work, one of the two in fp32 and one in 16 bits"
        return not_seen(record, Evidence(text), *seen)
    if other_work := objections(facts, case.other):
        return not_seen("--against a run of the same work", *map(Evidence, other_work), *seen)
    full, half = (case.other, facts) if here in SIXTEEN_BITS else (facts, case.other)
    return _compare_precisions(full, half, here if here in SIXTEEN_BITS else there, seen)


def _list_uncast(one: RankFacts) -> list[Evidence]:
    """Formats of what mixed precision should leave alone; [] without shapes."""
    told = []
    for what, (operator, argument_index) in UNCAST.items():
        rows = rows_named(one, operator.__eq__, Kind.OP)
        shapes = [one.trace.shapes[index] for index in np.unique(one.trace.events.shapes[rows]) if index >= 0]
        formats = {shape.dtypes[argument_index] for shape in shapes if len(shape.dtypes) > argument_index} - {""}
        # On GPUs the operator may read 16 bits and compute in fp32 by itself.
        if formats and (what != "the loss" or formats == {"float"}):
            told.append(f"{what} in {' and '.join(sorted(formats))}")
    return [Evidence(f"left alone: {', '.join(told)}", where(one))] if told else []


def _products_ms(one: RankFacts | None) -> Counter:
    """Time of products and attention by number format, as far as names or shapes tell it."""
    times = Counter()
    for row in () if one is None else one.kernels.rows if one.time.on_gpu else one.kernels.roofline:
        name = row.precision if one.time.on_gpu else row.dtype
        if row.role in MATRIX and name:
            times[name] += row.ms
    return times


def _precision(facts: Facts) -> str | None:
    """The plan's; without one what most of the products' time is in."""
    return facts.plan.get("precision") or next((name for name, _ in _products_ms(facts.critical).most_common(1)), None)


def _compare_precisions(full: Facts, half: Facts, name: str, seen: list[Evidence]) -> Point | list[Evidence]:
    told, changes = [], []
    for what, pair, unit in (("step", step_times(full, half), "ms"), ("peak memory", peaks(full, half), "MiB")):
        known = pair is not None and pair.ratio is not None and math.isfinite(pair.ratio)
        text = (
            f"{pair.a:,.1f} {unit} in fp32, {pair.b:,.1f} {unit} in {name} ({pair.ratio - 1:+.0%})"
            if known
            else "not known of both"
        )
        told.append(Evidence(f"{what}: {text}"))
        changes.append(pair.change if known else None)
    if Change.MORE in changes or Change.SAME in changes:
        remedy = "see what the report names as the most costly causes in both runs; megatron-lite compare A B"
        return failed(remedy, *told, *seen)
    if set(changes) == {Change.LESS}:
        return [*told, *seen]
    return not_seen("longer runs, both with --record-memory-history", *told, *seen)


def step_times(a: Facts, b: Facts) -> Pair | None:
    """Milliseconds of ordinary steps, else of the traces' steady ones; None where the two have not the same."""
    ordinary = [
        [ms for ms, plain in zip(one.run.training_ms, one.run.ordinary) if plain] if one.run else [] for one in (a, b)
    ]
    traced = [[step.ms for step in one.critical.time.steps if step.steady] if one.critical else [] for one in (a, b)]
    return next((paired_samples(*samples) for samples in (ordinary, traced) if all(samples)), None)


def peaks(a: Facts, b: Facts) -> Pair | None:
    """MiB of tensors at the peak, by the allocator or by snapshots; None where the two have not the same."""
    measured = peak(a), peak(b)
    if all(measured):
        return exact(*(one.num_bytes / MIB for one in measured))
    recorded = a.highest_snapshot, b.highest_snapshot
    return exact(*(one.peak_bytes / MIB for one in recorded)) if all(recorded) else None


# --- what the run's own record says


def examine_overflows(case: Case) -> Point | list[Evidence]:
    """Skipped steps and the loss scale."""
    run, precision = case.facts.run, case.facts.plan.get("precision")
    scales = [scale for scale in run.loss_scale if scale > 0] if run else []
    if not scales or not run.steps:
        return []
    text = f"{sum(run.skipped)} of {run.steps} steps skipped, the loss scale is {scales[-1]:,.6g} at the end"
    settled = run.steps - (run.skipped.index(False) if False in run.skipped else run.steps)
    if any(run.skipped) and settled < MIN_SETTLED_STEPS:
        remedy = f"{LONGER_RUN}; --initial-loss-scale 65536 saves the skipped steps at the beginning"
        return not_seen(remedy, Evidence(f"{text}; {settled} steps since the first good one", STEPS_FILE))
    why = f": {precision} has the range of fp32 and needs none" if precision not in (None, "", "fp16") else ""
    return [Evidence(text + why, STEPS_FILE)]


def examine_peak(case: Case) -> Point | list[Evidence]:
    """What holds the peak (a snapshot says it), and that nothing stays from step to step."""
    most, run = case.facts.highest_snapshot, case.facts.run
    held = []
    if most is not None and most.complete and most.peak_bytes > 0:
        parts = ", ".join(f"{part.category} {size(part.num_bytes)}" for part in most.held[:MAX_CATEGORIES])
        kind = "simulated peak" if most.simulated else "peak"
        held = [
            Evidence(
                f"{kind} of {size(most.peak_bytes)} in {most.peak_phase or 'an unknown phase'}: {parts}", most.source
            )
        ]
    steady = [
        Evidence(f"no growth over {len(one.steps)} steps", one.source)
        for one in case.facts.snapshots
        if len(one.steps) >= MIN_SNAPSHOT_STEPS and one.growth is None
    ]
    for what, values in (("GPU", run.peak_memory_bytes), ("process", run.host_memory_bytes)) if run else ():
        number = sum(plain and not math.isnan(value) for plain, value in zip(run.ordinary, values))
        if number >= MIN_STEPS_WITHOUT_GROWTH:
            steady.append(Evidence(f"memory of the {what} does not grow over {number} ordinary steps", STEPS_FILE))
    return [*held, *steady] if held and steady else not_seen(SNAPSHOT, *held, *steady)


def examine_batches(case: Case) -> Point | list[Evidence]:
    """Global batch = micro-batch x ranks x micro-batches; samples and learning rate follow updates."""
    run, one = case.facts.run, case.facts.critical
    if run and (why := measure_learning(run).nothing):
        code = next((one.code for one in case.found("overflow-storm", "no-learning")), "")
        return failed(
            "see why no step improves the weights", Evidence(f"no update at all: {why}", STEPS_FILE), code=code
        )
    traced = micro_batches_seen(one) if one is not None else 0.0
    updates = len(rows_named(one, IS_UPDATE, Kind.ANNOTATION)) / steady_steps(one) if one is not None else 0.0
    told = f"per step {counted(traced, 'backward range')}{f', {counted(updates, OPTIMIZER_STEP)}' if updates else ''}"
    seen = [Evidence(f"{told} in the trace", where(one))] if traced else []
    micro_batch, world = whole(argument(case.facts, "micro_batch_size")), run.world_size if run else None
    sizes = [one for one in run.batch_sizes if one > 0] if run else []
    if not micro_batch or not world or not sizes:
        return not_seen(RUN_FOLDER, *seen)
    wrong = [*_check_batch_sizes(run, sizes, micro_batch * world, traced), *_check_schedule(run)]
    final = whole(part(case.facts, "batch", "final"))
    if final and not part(case.facts, "batch", "start") and set(sizes) != {final}:  # nothing ramps up
        wrong.append(f"the plan has {final} samples per step, the steps have {min(sizes):g} to {max(sizes):g}")
    if updates > 1:
        wrong.append(f"{updates:.3g} {OPTIMIZER_STEP}s per iteration in the trace")
    if wrong:
        remedy = "micro-batch size x ranks x micro-batches must give --global-batch-size, with one update for all of it"
        return failed(remedy, *(Evidence(text, STEPS_FILE) for text in wrong), *seen)
    text = (
        f"{sizes[-1]:,.0f} samples per step = micro-batches of {micro_batch} x {counted(world, 'rank')} x "
        f"{sizes[-1] / (micro_batch * world):,.0f} of them, in {len(sizes)} steps"
    )
    rates = [rate for rate in run.next_lrs if not math.isnan(rate)]
    schedule = f"the learning rate is set once per step, {rates[0]:.3g} to {rates[-1]:.3g}" if rates else ""
    held = ", and held in skipped ones" if any(run.skipped) else ""
    return [Evidence(text, STEPS_FILE), *([Evidence(schedule + held, STEPS_FILE)] if rates else []), *seen]


def _check_batch_sizes(run: Run, sizes: list[float], samples: int, traced: float) -> list[str]:
    """What is wrong with them. `samples`: of one micro-batch of every rank; `traced`: micro-batches, 0 for unknown."""
    wrong = [
        f"iteration {at} has {number:g} samples, no multiple of {samples} (micro-batch x ranks)"
        for at, number in zip(run.iterations, run.batch_sizes)
        if number > 0 and number % samples
    ][:1]
    if traced and len(set(sizes)) == 1 and traced != sizes[0] / samples:
        planned = f"{sizes[0] / samples:g} micro-batches by the plan"
        wrong.append(f"{traced:.3g} backward passes per step in the trace, {planned}")
    return wrong


def _check_schedule(run: Run) -> list[str]:
    """The first iteration that counts other samples than it has, and the first skipped one that moves the schedule."""
    counts = (
        f"iteration {at} has {number:g} samples and counts {after - before:g}"
        for at, (before, after), number in zip(run.iterations[1:], pairwise(run.consumed_samples), run.batch_sizes[1:])
        if after - before != number and not math.isnan(after - before + number)
    )
    rates = (
        f"the learning rate goes on from {before:.6g} to {after:.6g} in iteration {at}, which was skipped"
        for at, (before, after), skipped in zip(run.iterations[1:], pairwise(run.next_lrs), run.skipped[1:])
        if skipped and before != after and not math.isnan(after - before)
    )
    return [text for texts in (counts, rates) if (text := next(texts, ""))]


def examine_compilation(case: Case) -> Point | list[Evidence]:
    """The first step's compiling apart from steady steps, and none later."""
    run, one, compiled = case.facts.run, case.facts.critical, compiles(case.facts)
    if compiled and (found := case.found("first-step")):
        return fail_by_findings(found)
    regions = one.kernels.compiled_regions if one is not None else 0.0
    if compiled is False and not regions:
        text = "nothing is compiled (--torch-compile none)"
        return not_seen("a run with --torch-compile", Evidence(text, "run.json"))
    seen = [Evidence(f"{regions:,.3g} compiled regions per step", where(one))] if regions else []
    if not run or not (compiled or regions) or not run.first_step_ms or not run.steady_step_ms:
        return not_seen(RUN_FOLDER if run is None else "all steps of the run: start it with an empty --run-dir", *seen)
    compiling = f" ({in_ms(run.compile_ms[0])} of it compiling)" if run.compile_ms and run.compile_ms[0] > 0 else ""
    late = [at for at, compiled_late in zip(run.iterations[1:], run.compiling[1:]) if compiled_late]
    listed = f" (iterations {', '.join(map(str, late[:MAX_ITERATIONS]))})" if late else ""
    text = (
        f"first step {in_ms(run.first_step_ms)}{compiling}, ordinary ones {in_ms(run.steady_step_ms)}; "
        f"{len(late)} later steps compiled something{listed} and are left out"
    )
    return [Evidence(text, STEPS_FILE), *seen]


def examine_shapes(case: Case) -> Point | list[Evidence]:
    """The same shapes in every step (nothing to compile anew), and no position without a token."""
    facts, run, one = case.facts, case.facts.run, case.facts.critical
    shapes, seen = _shapes_by_step(one), []
    if shapes:
        number, same = len(frozenset().union(*shapes)), "the same" if len(set(shapes)) == 1 else "not the same"
        seen.append(Evidence(f"{number} shapes of products, {same} in each of {len(shapes)} steady steps", where(one)))
    if len(set(shapes)) > 1:
        return not_seen(f"how much of it is padding and what it compiles: {RUN_FOLDER}", *seen)
    length = whole(part(facts, "shape", "seq_length"))
    if length and run.steps:
        late = sum(compiled and not evaluated for compiled, evaluated in zip(run.compiling[1:], run.evaluating[1:]))
        text = f"every sequence has {length:,} positions; {late} of {run.steps} steps compiled after the first"
        seen.append(Evidence(text, "run.json"))
    if not seen:
        longer = "a window with two steady steps or more: --profile-step-end"
        return not_seen(longer if one is not None and one.trace.with_shapes else SHAPES)
    if not _is_packed(facts):
        return not_seen(f"how many positions are padding: {RUN_FOLDER}, with its own data set", *seen)
    return [*seen, PACKED]


PACKED = Evidence(
    "every position holds a token: the data set cuts a stream of tokens, without padding (--dataloader-type)",
    "run.json",
)


def _is_packed(facts: Facts) -> bool:
    """Whether the data sets are this trainer's own, which cut one stream of tokens. Other loaders are not known."""
    return argument(facts, "dataloader_type") in ("single", "cyclic")


def _shapes_by_step(one: RankFacts | None) -> list[frozenset[int]]:
    """Shapes of products in each steady step; [] for fewer than two steps."""
    if one is None or not one.trace.with_shapes:
        return []
    events, steps = one.trace.events, one.placing.step
    rows = rows_named(one, PRODUCTS.__contains__, Kind.OP)
    rows = rows[events.shapes[rows] >= 0]
    shapes = [frozenset(events.shapes[rows[steps[rows] == step]].tolist()) for step in np.unique(steps[rows])]
    return shapes if len(shapes) >= MIN_TRACED_STEPS else []


def examine_tokens(case: Case) -> Point | list[Evidence]:
    """Tokens per second, counting only positions that train."""
    run = case.facts.run
    if run is None or run.tokens_per_second is None:
        return []
    if any(run.not_finite) and (found := case.found("no-learning")):
        return fail_by_findings(found)
    seen = Evidence(
        f"{count(run.tokens_per_second)} tokens/s over {sum(run.ordinary)} ordinary steps, all ranks; "
        f"{sum(run.skipped)} of {run.steps} steps skipped",
        STEPS_FILE,
    )
    if argument(case.facts, "eod_mask_loss"):
        return not_seen("how many positions have a loss is not recorded: without --eod-mask-loss all have one", seen)
    if not _is_packed(case.facts):
        return not_seen("how many positions are padding is not recorded: a .bin/.idx data set has none", seen)
    return [seen, PACKED]


# --- results: does the loss still go where the baseline's goes?


def examine_losses(case: Case) -> Point | list[Evidence]:
    """Iteration by iteration against the other run, with the same seed and data."""
    if case.other is None:
        return []
    run, base = case.facts.run, case.other.run
    if run is None or base is None:
        return not_seen("a run folder for each of the two: traces hold no losses")
    if differences := _differences_of_data(case.facts, case.other):
        return not_seen("--against a run with the same seed, data, model and batch", *map(Evidence, differences))
    against = f"{STEPS_FILE}, against {base.folder}"
    if any(run.not_finite) and not any(base.not_finite):
        seen = Evidence(f"{measure_learning(run).losses}; the baseline's are all finite", against)
        remedy = "undo changes one by one until the losses are finite; megatron-lite compare A B"
        return failed(remedy, seen, code="no-learning")
    mine, theirs = (
        {at: loss for at, loss in zip(one.iterations, one.losses) if not math.isnan(loss)} for one in (run, base)
    )
    apart = {at: abs(mine[at] - theirs[at]) / max(abs(theirs[at]), 1e-12) for at in sorted(mine.keys() & theirs.keys())}
    if not apart:
        text = f"{len(mine)} iterations with a loss here, {len(theirs)} there, none in common"
        return not_seen("two runs that share iterations", Evidence(text))
    at, last = max(apart, key=apart.get), max(apart)
    text = (
        f"the losses of {len(apart)} common iterations differ by at most {apart[at]:.2%} "
        f"(iteration {at}: {mine[at]:.6g} here, {theirs[at]:.6g} there); "
        f"the last, iteration {last}, by {apart[last]:.2%}; {MAX_LOSS_DIFFERENCE:.0%} is taken for rounding"
    )
    seen = Evidence(text, against)
    if apart[at] <= MAX_LOSS_DIFFERENCE:
        return [seen]
    if found := case.found("overflow-storm", "scale-collapse"):
        return failed(found[0].advice, seen, *found[0].evidence, code=found[0].code)
    return failed(
        "undo changes one by one until the losses agree; megatron-lite compare A B lists the flags that differ", seen
    )


def _differences_of_data(a: Facts, b: Facts) -> list[str]:
    """Why the losses of two runs need not agree."""
    ours, theirs = a.run.args, b.run.args
    told = [
        f"--{name.replace('_', '-')} {ours[name]} here, {theirs[name]} there"
        for name in DATA_FLAGS
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
    unknown = [] if ours and theirs else ["the flags of one of the two are unknown: no plan in run.json"]
    return [*told, *unknown, *objections(a, b)]
