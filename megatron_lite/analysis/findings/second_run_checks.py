"""Checks that need a second run: whether 16-bit formats pay, and whether the losses still agree."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    """Tell whether 16 bits take less time and memory than the same work in fp32.

    A single run shows only that they are used.
    """
    facts = case.facts
    other = case.other
    one = facts.critical
    used = _measure_formats(one)
    seen = _describe_formats(one, used) if one is not None else []
    if _is_left_in_fp32(facts, used):
        return saw_wrong("see which operators autocast or the model leaves in fp32", *seen, code="fp32-products")
    here = _get_precision(facts)
    if other is None:
        wanted = "fp32" if here in SIXTEEN_BITS else "bf16 or fp16"
        return could_not_look(*seen, record=f"{Recording.SECOND_RUN}, the same work in {wanted}")
    there = _get_precision(other)
    is_pair = (here in SIXTEEN_BITS) != (there in SIXTEEN_BITS)
    if here is None or there is None or not is_pair:
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
    products = [(row.role, row.dtype, row.ms) for row in one.kernels.roofline]
    if one.time.on_gpu:
        products = [(row.role, row.precision, row.ms) for row in one.kernels.rows]
    times_ms: dict[str, float] = {}
    for role, name, ms in products:
        if role in MATRIX_ROLES and name:
            times_ms[name] = times_ms.get(name, 0.0) + ms
    return dict(sorted(times_ms.items(), key=lambda pair: -pair[1]))


def _describe_formats(one: RankFacts, used: Mapping[str, float]) -> list[Evidence]:
    """Describe a trace's formats of products, and of what mixed precision leaves alone. used: ms by format."""
    seen = []
    if sum(used.values()) > 0:
        times = [f"{in_ms(ms)} in {name}" for name, ms in used.items()]
        seen.append(Evidence(f"products per step: {', '.join(times)}", one.where()))
    uncast = _list_uncast(one)
    if uncast:
        seen.append(Evidence(f"left alone: {', '.join(uncast)}", one.where()))
    return seen


def _is_left_in_fp32(facts: Facts, used: Mapping[str, float]) -> bool:
    """Whether most of the products' time is not in 16 bits, although the plan asks for them."""
    if facts.plan.precision not in SIXTEEN_BITS:
        return False
    in_16_bits_ms = sum(used.get(name, 0.0) for name in SIXTEEN_BITS)
    total_ms = sum(used.values())
    return total_ms > 0 and 2 * in_16_bits_ms < total_ms


def _get_precision(facts: Facts) -> str | None:
    """The plan's format; without a plan the one that most of the products' time is in; None where nothing tells it."""
    return facts.plan.precision or next(iter(_measure_formats(facts.critical)), None)


def _list_uncast(one: RankFacts) -> list[str]:
    """List the formats of what mixed precision should leave alone; [] without shapes."""
    told = []
    for what, (operator, place) in UNCAST.items():
        formats = _find_argument_formats(one, operator, place)
        # On GPUs the operator may read 16 bits and compute in fp32 by itself.
        is_known = formats == {"float"} if what == "the loss" else bool(formats)
        if is_known:
            told.append(f"{what} in {' and '.join(sorted(formats))}")
    return told


def _find_argument_formats(one: RankFacts, operator: str, place: int) -> set[str]:
    """Find the number formats that an operator's argument has in the steady steps; empty without shapes.

    Args:
        one: The rank.
        operator: Name of the operator.
        place: The argument's place, from 0.
    """
    rows = one.rows_named(operator.__eq__, Kind.OP)
    indices = np.unique(one.trace.events.shapes[rows])
    shapes = [one.trace.shapes[index] for index in indices if index >= 0]
    formats = {shape.dtypes[place] for shape in shapes if len(shape.dtypes) > place}
    return formats - {""}


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

    samples = _choose_samples(full, half)
    peaks = _choose_peaks(full, half)
    pairs: list[tuple[str, str, Pair | None]] = [
        ("step", "ms", paired_samples(*samples) if samples else None),
        ("peak memory", "MiB", exact(*peaks) if peaks else None),
    ]
    told = []
    changes: list[Change | None] = []
    for what, unit, pair in pairs:
        ratio = pair.ratio if pair is not None else None
        if pair is None or ratio is None or not math.isfinite(ratio):
            told.append(Evidence(f"{what}: not known of both"))
            changes.append(None)
            continue
        in_full = f"{pair.a:,.1f} {unit} in fp32"
        in_half = f"{pair.b:,.1f} {unit} in {name}"
        told.append(Evidence(f"{what}: {in_full}, {in_half} ({ratio - 1:+.0%})"))
        changes.append(pair.change)
    if Change.MORE in changes or Change.SAME in changes:
        remedy = "see what the report names as the most costly causes in both runs; megatron-lite compare A B"
        return saw_wrong(remedy, *told, *seen)
    if None in changes:
        return could_not_look(*told, *seen, record="longer runs, both with --record-memory-history")
    return saw(*told, *seen)


def _choose_samples(full: Facts, half: Facts) -> tuple[Numbers | list[float], Numbers | list[float]] | None:
    """Choose two runs' times of steps, in ms: typical steps, else traced ones; None where neither is known of both."""
    recorded = (_list_recorded_ms(full), _list_recorded_ms(half))
    if all(map(len, recorded)):
        return recorded
    traced = (_list_traced_ms(full), _list_traced_ms(half))
    return traced if all(map(len, traced)) else None


def _list_recorded_ms(facts: Facts) -> Numbers:
    """List the times of typical steps by the run's own record, ms."""
    run = facts.run
    return run.training_ms[run.ordinary] if run else np.empty(0)


def _list_traced_ms(facts: Facts) -> list[float]:
    """List the times of a trace's steady steps, ms."""
    one = facts.critical
    return [step.ms for step in one.time.steady_steps] if one else []


def _choose_peaks(full: Facts, half: Facts) -> tuple[float, float] | None:
    """Choose two runs' peaks in MiB: of real memory, else of snapshots; None where neither is known of both."""
    runs = (full, half)
    peaks = [one.peak.num_bytes if one.peak else 0 for one in runs]
    if not all(peaks):
        snapshots = [one.highest_snapshot for one in runs]
        peaks = [most.peak_bytes if most else 0 for most in snapshots]
    if not all(peaks):
        return None
    return peaks[0] / MIB, peaks[1] / MIB


# --- losses


def look_at_losses(case: CheckCase) -> Observation:
    """Compare the losses with the other run's, iteration by iteration, with the same seed and data."""
    if case.other is None:
        return could_not_look()
    run = case.facts.run
    base = case.other.run
    if run is None or base is None:
        return could_not_look(record="a run folder for each of the two: traces hold no losses")
    differences = _list_differences(case.facts, case.other)
    if differences:
        record = "--against a run with the same seed, data, model and batch"
        return could_not_look(*map(Evidence, differences), record=record)
    against = f"{STEPS_FILE}, against {base.folder}"
    if run.not_finite.any() and not base.not_finite.any():
        seen = Evidence(f"{measure_learning(run).losses}; the baseline's are all finite", against)
        return saw_wrong(f"{UNDO} are finite; megatron-lite compare A B", seen, code="no-learning")
    losses = LossPair(_get_losses(run), _get_losses(base))
    if not losses.common:
        mine = counted(len(losses.mine), "iteration")
        numbers = f"{mine} with a loss here, {len(losses.others)} there"
        return could_not_look(Evidence(f"{numbers}, none in common"), record="two runs that share iterations")
    seen = Evidence(_describe_losses(losses), against)
    if losses.measure_difference(losses.find_worst()) <= MAX_LOSS_DIFFERENCE:
        return saw(seen)
    overflows = case.find("overflow-storm", "scale-collapse")
    if overflows:
        most = overflows[0]
        return saw_wrong(most.advice, seen, *most.evidence, code=most.code)
    return saw_wrong(f"{UNDO} agree; megatron-lite compare A B lists the flags that differ", seen)


@dataclass(frozen=True)
class LossPair:
    """Losses of two runs, by iteration."""

    mine: Mapping[int, float]  # of the run that is checked
    others: Mapping[int, float]

    @property
    def common(self) -> list[int]:
        """The iterations that have a loss in both, in order."""
        return sorted(self.mine.keys() & self.others.keys())

    def measure_difference(self, iteration: int) -> float:
        """Measure how far the losses of an iteration are apart, relative to the other run's."""
        other = self.others[iteration]
        return abs(self.mine[iteration] - other) / max(abs(other), MIN_LOSS)

    def find_worst(self) -> int:
        """Find the iteration whose losses are farthest apart."""
        return max(self.common, key=self.measure_difference)


UNDO = "undo changes one by one until the losses"


def _list_differences(facts: Facts, other: Facts) -> list[str]:
    """List why two runs need not have the same losses: other data, another model, another batch."""
    from megatron_lite.analysis.compare.settings import objections  # here: a report of one run does not compare

    here = facts.run.args if facts.run else {}
    there = other.run.args if other.run else {}
    differences = []
    for name in DATA_FLAGS.split():
        is_known = name in here and name in there
        if is_known and here[name] != there[name]:
            flag = f"--{name.replace('_', '-')}"
            differences.append(f"{flag} {here[name]} here, {there[name]} there")
    if not here or not there:
        differences.append("the flags of one of the two are unknown: no plan in run.json")
    return [*differences, *objections(facts, other)]


def _get_losses(run: Run) -> dict[int, float]:
    """Get each iteration's loss, of those that have one."""
    pairs = zip(run.iterations.tolist(), run.losses.tolist())
    return {iteration: loss for iteration, loss in pairs if not math.isnan(loss)}


def _describe_losses(losses: LossPair) -> str:
    """Describe how far the losses of two runs are apart, at most and in the last iteration."""
    worst = losses.find_worst()
    last = losses.common[-1]
    mine = significant(losses.mine[worst], 6)
    others = significant(losses.others[worst], 6)
    values = f"{mine} here, {others} there"
    at_worst = f"{losses.measure_difference(worst):.2%} (iteration {worst}: {values})"
    at_last = f"the last, iteration {last}, by {losses.measure_difference(last):.2%}"
    number = counted(len(losses.common), "common iteration")
    limit = f"{MAX_LOSS_DIFFERENCE:.0%} is taken for rounding"
    return f"the losses of {number} differ by at most {at_worst}; {at_last}; {limit}"
