"""What a run's record predicted, held against all that was measured of the run."""

from typing import Any

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts, Predicted
from megatron_lite.estimate.prediction import CATEGORIES, LedgerRow, MemoryPrediction, Moment, TimePrediction, TimeRow
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.units import size

PRODUCTS = (Role.GEMM, Role.ATTENTION)
BOUNDS = ("compute", "memory", "link")
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def compare_prediction(facts: Facts) -> Predicted | None:
    """None for a run that predicted nothing, as those of other trainers."""
    record = facts.run.record if facts.run else {}
    memory, time = predicted_memory(record), predicted_time(record)
    if memory is None and time is None:
        return None
    of_memory, notes = compare_memory(facts, memory.peak) if memory else (None, [])
    of_time = compare_time(facts, time) if time else None
    if time and of_time is None:
        notes.append("no ordinary step was timed: nothing to hold the predicted step against.")
    return Predicted(memory=of_memory, time=of_time, notes=tuple(notes))


def compare_memory(facts: Facts, peak: Moment) -> tuple[ComparedMemory | None, list[str]]:
    """(the comparison, why there is none or what it lacks). A snapshot tells most; the allocator's counter knows the peak."""
    snapshot, run, at = facts.highest_snapshot, facts.run, f"{peak.where} ({peak.phase})"  # cross entropy (forward)
    if snapshot is not None and snapshot.oom is not None:
        return None, [f"memory ran out before its peak, which was predicted as {size(peak.num_bytes)} at {at}."]
    if snapshot is not None:
        measured = {held.category: held.requested_bytes for held in snapshot.held}
        expected = {
            name: sum(row.num_bytes for row in peak.rows if row.category == name)
            for name in CATEGORIES
            if snapshot.complete
        }
        late = f"{snapshot.source} began late, and does not know the categories of all that it holds: only the peaks are compared."
        return ComparedMemory(
            peak=Compared("peak of tensors", peak.num_bytes, sum(measured.values())),
            categories=tuple(
                Compared(name, num_bytes, measured.get(name, 0))
                for name, num_bytes in expected.items()
                if num_bytes or measured.get(name)
            ),
            source=snapshot.source,
            rank=snapshot.rank,
            predicted_at=at,
            measured_in=snapshot.peak_phase,
        ), [] if snapshot.complete else [late]
    if facts.plan.get("device") != "cuda":
        return None, [
            "predicted memory is that of tensors, which a run on CPUs measures with --record-memory-history only."
        ]
    most = run.peak_memory_bytes.max(initial=0.0, where=run.peak_memory_bytes > 0) if run else 0.0  # NaN is not
    if not most:
        return None, [f"{STEPS_FILE} holds no peak of GPU memory: nothing to hold the prediction against."]
    rank = facts.part("world", "rank")
    return ComparedMemory(
        peak=Compared("peak of tensors", peak.num_bytes, float(most)),
        categories=(),
        source=STEPS_FILE,
        rank=rank if isinstance(rank, int) else None,
        predicted_at=at,
        measured_in="",
    ), []


def compare_time(facts: Facts, predicted: TimePrediction) -> ComparedTime | None:
    """The shortest step that the hardware allows beside the real one; None where none was timed.

    A step of the trace by what bounds its parts; what neither computes nor sends is lost altogether.
    """
    run, one = facts.run, facts.critical
    parts: tuple[Compared, ...] = ()
    if run is None or run.steady_step_ms is None:
        return None
    if one is not None and one.time.on_gpu and one.time.step_ms:
        least = {bound: sum(row.ms for row in predicted.rows if row.bound == bound) for bound in BOUNDS}
        computing, sending = (one.time.rows.get(row, 0.0) for row in ("compute", "exposed_communication"))
        products = min(computing, sum(one.kernels.roles.get(role, 0.0) for role in PRODUCTS))
        parts = (
            Compared("matrix products, attention", least["compute"], products),
            Compared("all other computing", least["memory"], computing - products),
            Compared("communication that nothing hides", least["link"], sending),
            Compared("not computing", 0.0, one.time.step_ms - computing - sending),
        )
    tokens = run.tokens_per_second
    return ComparedTime(
        gpu=predicted.gpu,
        step=Compared("step", predicted.step_ms, run.steady_step_ms),
        tokens=Compared("tokens per second", predicted.tokens_per_s, tokens) if tokens else None,
        parts=parts,
        not_predicted=predicted.notes,
    )


# --- what a run's record says was predicted of it


def predicted_memory(record: dict[str, Any]) -> MemoryPrediction | None:
    """From run.json without its plan; None where it has none, or none that can be read."""
    moments = []
    try:
        for given in record["prediction"]["memory"]["moments"]:
            rows = [
                LedgerRow(str(row["category"]), str(row["name"]), int(row["num_bytes"]), str(row["formula"]))
                for row in given["rows"]
            ]
            moments.append(Moment(str(given["phase"]), str(given["where"]), tuple(rows)))
    except UNREADABLE:
        return None
    return MemoryPrediction(tuple(moments)) if moments else None


def predicted_time(record: dict[str, Any]) -> TimePrediction | None:
    """Likewise; None too where no row bounds the step."""
    try:
        given = record["prediction"]["time"]
        read = TimePrediction(
            gpu=str(given["gpu"]),
            rows=tuple(
                TimeRow(str(row["name"]), float(row["ms"]), str(row["bound"]), str(row["formula"]))
                for row in given["rows"]
            ),
            tokens=int(given["tokens"]),
            flops_causal=int(given["flops_causal"]),
            flops_full=int(given["flops_full"]),
            peak_tflops=float(given["peak_tflops"]),
            notes=tuple(map(str, given["notes"])),
        )
    except UNREADABLE:
        return None
    return read if 0 < read.step_ms < float("inf") else None
