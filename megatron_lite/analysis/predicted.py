"""What a run's record predicted, held against all that was measured of the run."""

from megatron_lite.analysis.findings.run_settings import part
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts, Predicted
from megatron_lite.estimate.memory_categories import CATEGORIES
from megatron_lite.estimate.prediction import LedgerRow, MemoryPrediction, Moment, TimePrediction, TimeRow
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.units import size

# --- the predicted peak of tensors beside the measured one


def compared_memory(facts: Facts, predicted: MemoryPrediction) -> tuple[ComparedMemory | None, list[str]]:
    """(the comparison, why there is none or what it lacks). A snapshot tells most; the allocator's counter knows the peak."""
    snapshot, peak = facts.highest_snapshot, predicted.peak
    if snapshot is not None and snapshot.oom is not None:
        return None, [
            f"memory ran out before its peak, which was predicted as {size(peak.num_bytes)} at {where(peak)}."
        ]
    if snapshot is not None:
        return _with_snapshot(snapshot, peak)
    return _with_counter(facts, peak)


def where(moment: Moment) -> str:
    """'cross entropy (forward)'."""
    return f"{moment.where} ({moment.phase})"


def _with_snapshot(snapshot: Snapshot, peak: Moment) -> tuple[ComparedMemory, list[str]]:
    measured = {held.category: held.requested_bytes for held in snapshot.held}
    whole = sum(measured.values())
    notes = (
        []
        if snapshot.complete
        else [
            f"{snapshot.source} began late, and does not know the categories of all that it holds: only the peaks are compared."
        ]
    )
    return ComparedMemory(
        peak=Compared("peak of tensors", peak.num_bytes, whole),
        categories=_categories(peak, measured) if snapshot.complete else (),
        source=snapshot.source,
        rank=snapshot.rank,
        predicted_at=where(peak),
        measured_in=snapshot.peak_phase,
    ), notes


def _categories(peak: Moment, measured: dict[str, int]) -> tuple[Compared, ...]:
    expected = {
        category: sum(row.num_bytes for row in peak.rows if row.category == category) for category in CATEGORIES
    }
    return tuple(
        Compared(category, expected[category], measured.get(category, 0))
        for category in CATEGORIES
        if expected[category] or measured.get(category)
    )


def _with_counter(facts: Facts, peak: Moment) -> tuple[ComparedMemory | None, list[str]]:
    run = facts.run
    if facts.plan.get("device") != "cuda":
        return None, [
            "predicted memory is that of tensors, which a run on CPUs measures with --record-memory-history only."
        ]
    most = run.peak_memory_bytes.max(initial=0.0, where=run.peak_memory_bytes > 0)  # NaN is not
    if not most:
        return None, [f"{STEPS_FILE} holds no peak of GPU memory: nothing to hold the prediction against."]
    rank = part(facts, "world", "rank")
    return ComparedMemory(
        peak=Compared("peak of tensors", peak.num_bytes, float(most)),
        categories=(),
        source=STEPS_FILE,
        rank=rank if isinstance(rank, int) else None,
        predicted_at=where(peak),
        measured_in="",
    ), []


# --- what a run's record says was predicted of it


def predicted_memory(record: dict) -> MemoryPrediction | None:
    """From run.json without its plan; None where it has none, or none that can be read."""
    try:
        moments = record["prediction"]["memory"]["moments"]
        read = tuple(_moment(moment) for moment in moments)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return MemoryPrediction(read) if read else None


def predicted_time(record: dict) -> TimePrediction | None:
    """Likewise; None too where no row bounds the step."""
    try:
        given = record["prediction"]["time"]
        rows = tuple(
            TimeRow(str(row["name"]), float(row["ms"]), str(row["bound"]), str(row["formula"])) for row in given["rows"]
        )
        read = TimePrediction(
            gpu=str(given["gpu"]),
            rows=rows,
            tokens=int(given["tokens"]),
            flops_causal=int(given["flops_causal"]),
            flops_full=int(given["flops_full"]),
            peak_tflops=float(given["peak_tflops"]),
            notes=tuple(map(str, given["notes"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return read if 0 < read.step_ms < float("inf") else None


def _moment(given: dict) -> Moment:
    rows = (
        LedgerRow(str(row["category"]), str(row["name"]), int(row["num_bytes"]), str(row["formula"]))
        for row in given["rows"]
    )
    return Moment(str(given["phase"]), str(given["where"]), tuple(rows))


# --- the shortest step that the hardware allows beside the real one

PRODUCTS = (Role.GEMM, Role.ATTENTION)
BOUNDS = ("compute", "memory", "link")


def compared_time(facts: Facts, predicted: TimePrediction) -> tuple[ComparedTime | None, list[str]]:
    """(the comparison, why there is none)."""
    run = facts.run
    if run.steady_step_ms is None:
        return None, ["no ordinary step was timed: nothing to hold the predicted step against."]
    tokens = run.tokens_per_second
    return ComparedTime(
        gpu=predicted.gpu,
        step=Compared("step", predicted.step_ms, run.steady_step_ms),
        tokens=Compared("tokens per second", predicted.tokens_per_s, tokens) if tokens else None,
        parts=_parts(facts, predicted),
        not_predicted=predicted.notes,
    ), []


def _parts(facts: Facts, predicted: TimePrediction) -> tuple[Compared, ...]:
    """A step of the trace by what bounds its parts; what neither computes nor sends is lost altogether."""
    one = facts.critical
    if one is None or not one.time.on_gpu or not one.time.step_ms:
        return ()
    least = {bound: sum(row.ms for row in predicted.rows if row.bound == bound) for bound in BOUNDS}
    computing, sending = (one.time.rows.get(row, 0.0) for row in ("compute", "exposed_communication"))
    products = min(computing, sum(one.kernels.roles.get(role, 0.0) for role in PRODUCTS))
    return (
        Compared("matrix products, attention", least["compute"], products),
        Compared("all other computing", least["memory"], computing - products),
        Compared("communication that nothing hides", least["link"], sending),
        Compared("not computing", 0.0, one.time.step_ms - computing - sending),
    )


# --- what a run's record predicted, held against all that was measured of the run


def compare_prediction(facts: Facts) -> Predicted | None:
    """None for a run that predicted nothing, as those of older versions and other trainers."""
    record = facts.run.record if facts.run else {}
    memory, time = predicted_memory(record), predicted_time(record)
    if memory is None and time is None:
        return None
    of_memory, notes = compared_memory(facts, memory) if memory else (None, [])
    of_time, more = compared_time(facts, time) if time else (None, [])
    return Predicted(memory=of_memory, time=of_time, notes=(*notes, *more))
