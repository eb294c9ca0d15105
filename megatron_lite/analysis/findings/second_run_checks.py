"""Checks that need a second run: whether 16-bit formats pay, and whether the losses still agree."""

import math
from collections.abc import Mapping

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Observation, Recording, could_not_look, saw, saw_wrong
from megatron_lite.analysis.findings.check_case import CheckCase
from megatron_lite.analysis.findings.product_rules import SIXTEEN_BITS
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.units import MIB, counted, significant

# What must not be cast, and which argument of an operator tells: ids and labels are whole numbers, the loss wants fp32.
UNCAST = {
    "token ids": ("aten::embedding", 1),
    "labels": ("aten::nll_loss_forward", 1),
    "the loss": ("aten::_log_softmax", 0),
}
# Largest difference over 60 iterations of small models, measured on a CPU: the same command again 0, fp32 against bf16
# 0.03% to 2.0%, another seed 3.3%, twice the learning rate 21%.
MAX_LOSS_DIFFERENCE = 0.03
MIN_LOSS = 1e-12  # what a loss is divided by at least
# What decides which samples a run sees.
DATA_FLAGS = (
    "seed mock_data data_path train_data_path data_args_path per_split_data_args_path split dataloader_type "
    "external_dataloader data_sharding"
)


# --- 16-bit formats


def look_at_sixteen_bits(case: CheckCase) -> Observation:
    """Tell whether 16 bits take less time and memory than the same work in fp32;
    one run shows only that they are used."""
    facts, other, one = case.facts, case.other, case.facts.critical
    used = _measure_formats(one)
    seen = _describe_formats(one, used) if one is not None else []
    if _is_left_in_fp32(facts, used):
        return saw_wrong("see which operators autocast or the model leaves in fp32", *seen, code="fp32-products")
    here = _get_precision(facts)
    if other is None:
        wanted = "fp32" if here in SIXTEEN_BITS else "bf16 or fp16"
        return could_not_look(*seen, record=f"{Recording.SECOND_RUN}, the same work in {wanted}")
    there = _get_precision(other)
    if here is None or there is None or (here in SIXTEEN_BITS) == (there in SIXTEEN_BITS):
        text = f"this run is in {here or 'an unknown format'}, the other in {there or 'an unknown format'}"
        record = "--against a run of the same work, one of the two in fp32 and one in 16 bits"
        return could_not_look(Evidence(text), *seen, record=record)
    from megatron_lite.analysis.compare.settings import objections  # here: a report of one run does not compare

    other_work = objections(facts, other)
    if other_work:
        return could_not_look(*map(Evidence, other_work), *seen, record="--against a run of the same work")
    if here in SIXTEEN_BITS:
        return _compare_formats(full=other, half=facts, name=here, seen=seen)
    return _compare_formats(full=facts, half=other, name=there, seen=seen)


def _measure_formats(one: RankFacts | None) -> dict[str, float]:
    """Measure ms of products and attention by number format, as far as names or shapes tell it, most first."""
    if one is None:
        return {}
    of_kernels = ((row.role, row.precision, row.ms) for row in one.kernels.rows)
    of_shapes = ((row.role, row.dtype, row.ms) for row in one.kernels.roofline)
    times: dict[str, float] = {}
    for role, name, ms in of_kernels if one.time.on_gpu else of_shapes:
        if role in MATRIX_ROLES and name:
            times[name] = times.get(name, 0.0) + ms
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def _describe_formats(one: RankFacts, used: Mapping[str, float]) -> list[Evidence]:
    """Describe a trace's formats of products, and of what mixed precision leaves alone.

    used: ms by format.
    """
    seen = []
    if sum(used.values()) > 0:
        text = ", ".join(f"{in_ms(ms)} in {name}" for name, ms in used.items())
        seen.append(Evidence(f"products per step: {text}", one.where()))
    uncast = _list_uncast(one)
    if uncast:
        seen.append(Evidence(f"left alone: {', '.join(uncast)}", one.where()))
    return seen


def _is_left_in_fp32(facts: Facts, used: Mapping[str, float]) -> bool:
    """Whether most of the products' time is not in 16 bits, although the plan asks for them."""
    in_16_bits = sum(used.get(name, 0.0) for name in SIXTEEN_BITS)
    total = sum(used.values())
    return total > 0 and facts.plan.precision in SIXTEEN_BITS and 2 * in_16_bits < total


def _get_precision(facts: Facts) -> str | None:
    """The plan's format; without a plan the one that most of the products' time is in; None where nothing tells it."""
    return facts.plan.precision or next(iter(_measure_formats(facts.critical)), None)


def _list_uncast(one: RankFacts) -> list[str]:
    """List the formats of what mixed precision should leave alone; [] without shapes."""
    told = []
    for what, (operator, place) in UNCAST.items():
        rows = one.rows_named(operator.__eq__, Kind.OP)
        shapes = [one.trace.shapes[index] for index in np.unique(one.trace.events.shapes[rows]) if index >= 0]
        formats = {shape.dtypes[place] for shape in shapes if len(shape.dtypes) > place} - {""}
        # On GPUs the operator may read 16 bits and compute in fp32 by itself.
        if formats and (what != "the loss" or formats == {"float"}):
            told.append(f"{what} in {' and '.join(sorted(formats))}")
    return told


def _compare_formats(full: Facts, half: Facts, name: str, seen: list[Evidence]) -> Observation:
    """Compare a step's time and the peak of two runs of the same work.

    Args:
        full: the run in fp32.
        half: the run in 16 bits.
        name: its format.
        seen: what the trace of the run that is checked says of formats.
    """
    from megatron_lite.analysis.compare.compare_results import Change, Pair
    from megatron_lite.analysis.compare.settings import exact, paired_samples

    pairs: list[tuple[str, str, Pair | None]] = []
    samples = _choose_samples(full, half)
    pairs.append(("step", "ms", paired_samples(*samples) if samples else None))
    peaks = _choose_peaks(full, half)
    pairs.append(("peak memory", "MiB", exact(*peaks) if peaks else None))
    told = []
    changes: list[Change | None] = []
    for what, unit, pair in pairs:
        ratio = pair.ratio if pair is not None else None
        if pair is None or ratio is None or not math.isfinite(ratio):
            told.append(Evidence(f"{what}: not known of both"))
            changes.append(None)
            continue
        values = f"{pair.a:,.1f} {unit} in fp32, {pair.b:,.1f} {unit} in {name}"
        told.append(Evidence(f"{what}: {values} ({ratio - 1:+.0%})"))
        changes.append(pair.change)
    if Change.MORE in changes or Change.SAME in changes:
        remedy = "see what the report names as the most costly causes in both runs; megatron-lite compare A B"
        return saw_wrong(remedy, *told, *seen)
    if None in changes:
        return could_not_look(*told, *seen, record="longer runs, both with --record-memory-history")
    return saw(*told, *seen)


def _choose_samples(full: Facts, half: Facts) -> tuple[Numbers | list[float], Numbers | list[float]] | None:
    """Choose two runs' times of steps, in ms: typical steps, else traced ones; None where neither is known of both."""
    runs = (full, half)
    ordinary = [one.run.training_ms[one.run.ordinary] if one.run else np.empty(0) for one in runs]
    if all(map(len, ordinary)):
        return ordinary[0], ordinary[1]
    traced = [[step.ms for step in one.critical.time.steady_steps] if one.critical else [] for one in runs]
    return (traced[0], traced[1]) if all(map(len, traced)) else None


def _choose_peaks(full: Facts, half: Facts) -> tuple[float, float] | None:
    """Choose two runs' peaks in MiB: of real memory, else of snapshots; None where neither is known of both."""
    runs = (full, half)
    peaks = [one.peak.num_bytes if one.peak else 0 for one in runs]
    if not all(peaks):
        snapshots = [one.highest_snapshot for one in runs]
        peaks = [most.peak_bytes if most else 0 for most in snapshots]
    return (peaks[0] / MIB, peaks[1] / MIB) if all(peaks) else None


# --- losses


def look_at_losses(case: CheckCase) -> Observation:
    """Compare the losses with the other run's, iteration by iteration, with the same seed and data."""
    if case.other is None:
        return could_not_look()
    run, base = case.facts.run, case.other.run
    if run is None or base is None:
        return could_not_look(record="a run folder for each of the two: traces hold no losses")
    differences = _list_differences(case.facts, case.other)
    if differences:
        record = "--against a run with the same seed, data, model and batch"
        return could_not_look(*map(Evidence, differences), record=record)
    against = f"{STEPS_FILE}, against {base.folder}"
    if run.not_finite.any() and not base.not_finite.any():
        seen = Evidence(f"{measure_learning(run).losses}; the baseline's are all finite", against)
        remedy = f"{UNDO} are finite; megatron-lite compare A B"
        return saw_wrong(remedy, seen, code="no-learning")
    mine = _get_losses(run)
    others = _get_losses(base)
    common = sorted(mine.keys() & others.keys())
    if not common:
        text = f"{counted(len(mine), 'iteration')} with a loss here, {len(others)} there, none in common"
        return could_not_look(Evidence(text), record="two runs that share iterations")
    apart = {at: abs(mine[at] - others[at]) / max(abs(others[at]), MIN_LOSS) for at in common}
    worst = max(apart, key=lambda iteration: apart[iteration])
    seen = Evidence(_describe_losses(mine, others, apart, worst), against)
    if apart[worst] <= MAX_LOSS_DIFFERENCE:
        return saw(seen)
    overflows = case.find("overflow-storm", "scale-collapse")
    if overflows:
        return saw_wrong(overflows[0].advice, seen, *overflows[0].evidence, code=overflows[0].code)
    return saw_wrong(f"{UNDO} agree; megatron-lite compare A B lists the flags that differ", seen)


UNDO = "undo changes one by one until the losses"


def _list_differences(facts: Facts, other: Facts) -> list[str]:
    """List why two runs need not have the same losses: other data, another model, another batch."""
    from megatron_lite.analysis.compare.settings import objections  # here: a report of one run does not compare

    ours = facts.run.args if facts.run else {}
    theirs = other.run.args if other.run else {}
    differences = []
    for name in DATA_FLAGS.split():
        if name in ours and name in theirs and ours[name] != theirs[name]:
            differences.append(f"--{name.replace('_', '-')} {ours[name]} here, {theirs[name]} there")
    if not ours or not theirs:
        differences.append("the flags of one of the two are unknown: no plan in run.json")
    return [*differences, *objections(facts, other)]


def _get_losses(run: Run) -> dict[int, float]:
    """Each iteration's loss, for those that have one."""
    pairs = zip(run.iterations.tolist(), run.losses.tolist())
    return {iteration: loss for iteration, loss in pairs if not math.isnan(loss)}


def _describe_losses(
    mine: Mapping[int, float], others: Mapping[int, float], apart: Mapping[int, float], worst: int
) -> str:
    """Describe how far the losses of two runs are apart.

    Args:
        mine: each iteration's loss of the run that is checked.
        others: each iteration's loss of the other run.
        apart: their relative difference in each common iteration.
        worst: the iteration in which it is largest.
    """
    last = max(apart)
    values = f"{significant(mine[worst], 6)} here, {significant(others[worst], 6)} there"
    return (
        f"the losses of {counted(len(apart), 'common iteration')} differ by at most {apart[worst]:.2%} "
        f"(iteration {worst}: {values}); the last, iteration {last}, by {apart[last]:.2%}; "
        f"{MAX_LOSS_DIFFERENCE:.0%} is taken for rounding"
    )
