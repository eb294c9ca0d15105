"""Points about 16-bit formats: whether they pay, and whether gradients survive them."""

import math
from collections import Counter

import numpy as np

from megatron_lite.analysis.audit.audit_results import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import LONGER_RUN, RUN_FOLDER, SECOND_RUN
from megatron_lite.analysis.compare.compare_results import Change, Pair
from megatron_lite.analysis.compare.noise import exact, paired_samples
from megatron_lite.analysis.compare.settings import objections
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.seen.headroom import peak
from megatron_lite.analysis.findings.seen.steady import in_ms, rows_named, where
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.units import MIB

# --- times and memory of two runs beside each other, with the noise of their steps


def step_times(a: Facts, b: Facts) -> Pair | None:
    """ms of ordinary steps, else of the traces' steady ones; None where the two have not the same."""
    for samples in (_ordinary_ms, _traced_ms):
        found = samples(a), samples(b)
        if all(found):
            return paired_samples(*found)
    return None


def peaks(a: Facts, b: Facts) -> Pair | None:
    """MiB of tensors at the peak, by the allocator or by snapshots; None where the two have not the same."""
    measured = peak(a), peak(b)
    if all(measured):
        return exact(*(one.num_bytes / MIB for one in measured))
    recorded = a.highest_snapshot, b.highest_snapshot
    return exact(*(one.peak_bytes / MIB for one in recorded)) if all(recorded) else None


def _ordinary_ms(facts: Facts) -> list[float]:
    run = facts.run
    return [ms for ms, plain in zip(run.training_ms, run.ordinary) if plain] if run else []


def _traced_ms(facts: Facts) -> list[float]:
    one = facts.critical
    return [step.ms for step in one.time.steps if step.steady] if one is not None else []


# --- points about 16-bit formats: whether they pay, and whether gradients survive them

SIXTEEN_BITS = ("fp16", "bf16")
MATRIX = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)
MIN_SETTLED = 20  # steps after the first good one, of which one skipped is 5%
MOST = 0.5  # of the products' time whose format is known
# what must not be cast, and which argument of an operator tells: ids and labels are whole numbers, the loss wants fp32
UNCAST = {
    "token ids": ("aten::embedding", 1),
    "labels": ("aten::nll_loss_forward", 1),
    "the loss": ("aten::_log_softmax", 0),
}


def sixteen_bits_pay(case: Case) -> Outcome:
    """Less time and memory than the same work in fp32 takes; one run shows only that 16 bits are used."""
    facts = case.facts
    if found := case.found("fp32-products"):
        return blamed(found)
    used = _used(facts.critical)
    planned = facts.plan.get("precision")
    if used and planned in SIXTEEN_BITS and not used[1]:
        return failed("see which operators autocast or the model leaves in fp32", used[0], code="fp32-products")
    seen = ((used[0],) if used else ()) + _uncast(facts.critical)
    if case.other is None:
        return not_seen(
            f"{SECOND_RUN}, the same work {'in fp32' if precision_of(facts) in SIXTEEN_BITS else 'in bf16 or fp16'}",
            *seen,
        )
    return _against(facts, case.other, seen)


def few_overflows(case: Case) -> Outcome:
    """Skipped steps and the loss scale."""
    run = case.facts.run
    if found := case.found("overflow-storm", "scale-collapse"):
        return blamed(found)
    scales = [scale for scale in run.loss_scale if scale > 0] if run else []
    if run is None or not run.steps or not scales:
        return not_seen(RUN_FOLDER)
    text = f"{sum(run.skipped)} of {run.steps} steps skipped, the loss scale is {scales[-1]:,.6g} at the end"
    settled = run.steps - (run.skipped.index(False) if False in run.skipped else run.steps)
    if any(run.skipped) and settled < MIN_SETTLED:
        return not_seen(
            f"{LONGER_RUN}; --initial-loss-scale 65536 saves the skipped steps at the beginning",
            Evidence(f"{text}; {settled} steps since the first good one", "steps.jsonl"),
        )
    planned = case.facts.plan.get("precision")
    if planned and planned != "fp16":
        text += f": {planned} has the range of fp32 and needs none"
    return passed(Evidence(text, "steps.jsonl"))


def precision_of(facts: Facts) -> str | None:
    """The plan's; without one what most of the products' time is in."""
    if facts.plan.get("precision"):
        return str(facts.plan["precision"])
    times = _products_ms(facts.critical) if facts.critical is not None else Counter()
    return times.most_common(1)[0][0] if times else None


def _products_ms(one: RankFacts) -> Counter:
    """Time of products and attention by format, as far as names or shapes tell it."""
    on_gpu, times = one.time.on_gpu, Counter()
    for row in one.kernels.rows if on_gpu else one.kernels.roofline:
        name = row.precision if on_gpu else row.dtype
        if row.role in MATRIX and name:
            times[name] += row.ms
    return times


def _used(one: RankFacts | None) -> tuple[Evidence, bool] | None:
    """(what products are computed in, whether most of it is 16 bits)."""
    times = _products_ms(one) if one is not None else Counter()
    total = sum(times.values())
    if not total > 0:
        return None
    told = ", ".join(f"{in_ms(ms)} in {name}" for name, ms in times.most_common())
    half = sum(times[name] for name in SIXTEEN_BITS)
    return Evidence(f"products per step: {told}", where(one)), half >= MOST * total


def _uncast(one: RankFacts | None) -> tuple[Evidence, ...]:
    """Formats of what mixed precision should leave alone; () without shapes."""
    found = {what: _formats(one, *place) for what, place in UNCAST.items()} if one is not None else {}
    if found.get("the loss") != {"float"}:  # on GPUs the operator may read 16 bits and compute in fp32 by itself
        found.pop("the loss", None)
    told = [f"{what} in {' and '.join(sorted(formats))}" for what, formats in found.items() if formats]
    return (Evidence(f"left alone: {', '.join(told)}", where(one)),) if told else ()


def _formats(one: RankFacts, operator: str, argument: int) -> set[str]:
    rows = rows_named(one, lambda name: name == operator, Kind.OP)
    shapes = [one.trace.shapes[index] for index in np.unique(one.trace.events.shapes[rows]) if index >= 0]
    return {shape.dtypes[argument] for shape in shapes if len(shape.dtypes) > argument and shape.dtypes[argument]}


def _against(facts: Facts, other: Facts, seen: tuple[Evidence, ...]) -> Outcome:
    formats = [precision_of(one) for one in (facts, other)]
    here, there = (name in SIXTEEN_BITS for name in formats)
    if None in formats or here == there:
        told = Evidence(
            f"this run is in {formats[0] or 'an unknown format'}, the other in {formats[1] or 'an unknown format'}"
        )
        return not_seen("--against a run of the same work, one of the two in fp32 and one in 16 bits", told, *seen)
    if other_work := objections(facts, other):
        return not_seen("--against a run of the same work", *map(Evidence, other_work), *seen)
    full, half = (other, facts) if here else (facts, other)
    return _saving(full, half, max(formats, key=SIXTEEN_BITS.__contains__), seen)


def _saving(full: Facts, half: Facts, name: str, seen: tuple[Evidence, ...]) -> Outcome:
    """`name`: of the 16-bit format."""
    told, answers = [], []
    for what, pair, unit in (("step", step_times(full, half), "ms"), ("peak memory", peaks(full, half), "MiB")):
        known = pair is not None and pair.ratio is not None and math.isfinite(pair.ratio)
        text = (
            f"{what}: {pair.a:,.1f} {unit} in fp32, {pair.b:,.1f} {unit} in {name} ({pair.ratio - 1:+.0%})"
            if known
            else f"{what}: not known of both"
        )
        told.append(Evidence(text))
        answers.append(pair.change if known else None)
    if any(answer in (Change.MORE, Change.SAME) for answer in answers):
        return failed(
            "see what the report names as the most costly causes in both runs; megatron-lite compare A B", *told, *seen
        )
    if all(answer is Change.LESS for answer in answers):
        return passed(*told, *seen)
    return not_seen("longer runs, both with --record-memory-history", *told, *seen)
