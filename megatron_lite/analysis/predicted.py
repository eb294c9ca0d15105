"""Predictions of a run's record, held against all that was measured of the run."""

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts, Predicted
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import MemoryPrediction, Moment, Prediction, TimePrediction
from megatron_lite.units import size

PRODUCTS = (Role.GEMM, Role.ATTENTION)
BOUNDS = ("compute", "memory", "link")
PEAK = "peak of tensors"


def compare_prediction(facts: Facts) -> Predicted | None:
    """Compare what a run predicted with what was measured.

    None for a run that predicted nothing, as those of other trainers.
    """
    prediction = facts.run.record.prediction if facts.run else None
    memory = find_predicted_memory(prediction)
    time = find_predicted_time(prediction)
    if memory is None and time is None:
        return None
    notes: list[str] = []
    of_memory = None
    if memory is not None:
        of_memory, notes = compare_memory(facts, memory.peak)
    of_time = None
    if time is not None:
        of_time = compare_time(facts, time)
        if of_time is None:
            notes.append("no typical step was timed, so the predicted step cannot be compared.")
    return Predicted(memory=of_memory, time=of_time, notes=tuple(notes))


def compare_memory(facts: Facts, peak: Moment) -> tuple[ComparedMemory | None, list[str]]:
    """Compare the predicted peak with the measured one: a snapshot tells most, the allocator's counter the peak only.

    Args:
        facts: the run.
        peak: the moment at which memory was predicted to peak.

    Returns:
        The comparison, and sentences on why there is none or what it lacks.
    """
    at = f"{peak.where} ({peak.phase})"
    snapshot = facts.highest_snapshot
    if snapshot is not None and snapshot.oom is not None:
        return None, [f"memory ran out before its peak, which was predicted as {size(peak.num_bytes)} at {at}."]
    if snapshot is not None:
        found = _compare_snapshot(snapshot, peak, at)
        if snapshot.complete:
            return found, []
        return found, [f"{snapshot.source} began late, so some categories are unknown: only the peaks are compared."]
    if facts.plan.device != "cuda":
        why = "predicted memory is that of tensors, which a run on CPUs measures only with --record-memory-history."
        return None, [why]
    most_bytes = facts.run.counted_peak_bytes if facts.run else 0.0
    if not most_bytes:
        return None, [f"{STEPS_FILE} holds no peak of GPU memory, so the prediction cannot be compared."]
    found = ComparedMemory(
        peak=Compared(PEAK, peak.num_bytes, most_bytes),
        categories=(),
        source=STEPS_FILE,
        rank=facts.plan.world.rank,
        predicted_at=at,
        measured_in="",
    )
    return found, []


def _compare_snapshot(snapshot: Snapshot, peak: Moment, at: str) -> ComparedMemory:
    """Compare a snapshot with the predicted peak; categories only where the snapshot saw every allocation.

    Args:
        snapshot: the one with the highest peak.
        peak: the moment at which memory was predicted to peak.
        at: that moment in words: "cross entropy (forward)".
    """
    measured = {held.category: held.requested_bytes for held in snapshot.held}
    expected = dict.fromkeys(CATEGORIES, 0)
    for row in peak.rows:
        if row.category in expected:
            expected[row.category] += row.num_bytes
    categories = []
    if snapshot.complete:
        for name, num_bytes in expected.items():
            measured_bytes = measured.get(name, 0)
            if num_bytes or measured_bytes:
                categories.append(Compared(name, num_bytes, measured_bytes))
    return ComparedMemory(
        peak=Compared(PEAK, peak.num_bytes, sum(measured.values())),
        categories=tuple(categories),
        source=snapshot.source,
        rank=snapshot.rank,
        predicted_at=at,
        measured_in=snapshot.peak_phase,
    )


def compare_time(facts: Facts, predicted: TimePrediction) -> ComparedTime | None:
    """Compare a step with the shortest that the hardware allows.

    A step of the trace is divided by what bounds its parts; what neither computes nor sends is lost altogether.

    Args:
        facts: the run.
        predicted: the prediction of a step.

    Returns:
        The comparison; None where no step was timed.
    """
    run = facts.run
    if run is None or run.steady_step_ms is None:
        return None
    rank = facts.critical
    parts: tuple[Compared, ...] = ()
    if rank is not None and rank.time.on_gpu and rank.time.step_ms:
        parts = _compare_parts(rank, predicted)
    tokens = None
    if run.tokens_per_second:
        tokens = Compared("tokens per second", predicted.tokens_per_s, run.tokens_per_second)
    return ComparedTime(
        gpu=predicted.gpu,
        step=Compared("step", predicted.step_ms, run.steady_step_ms),
        tokens=tokens,
        parts=parts,
        not_predicted=predicted.notes,
    )


def _compare_parts(rank: RankFacts, predicted: TimePrediction) -> tuple[Compared, ...]:
    """Compare the parts of a traced step, ms, with the least time of each."""
    least_ms = {}
    for bound in BOUNDS:
        least_ms[bound] = sum(row.ms for row in predicted.rows if row.bound == bound)
    time = rank.time
    computing_ms = time.rows.get("compute", 0.0)
    sending_ms = time.rows.get("exposed_communication", 0.0)
    of_products_ms = sum(rank.kernels.roles.get(role, 0.0) for role in PRODUCTS)
    products_ms = min(computing_ms, of_products_ms)
    return (
        Compared("matrix products, attention", least_ms["compute"], products_ms),
        Compared("all other computing", least_ms["memory"], computing_ms - products_ms),
        Compared("communication not overlapped with compute", least_ms["link"], sending_ms),
        Compared("not computing", 0.0, time.step_ms - computing_ms - sending_ms),
    )


# --- what a run's record says was predicted of it


def find_predicted_memory(prediction: Prediction | None) -> MemoryPrediction | None:
    """Find what was predicted of memory; None where no moment is known."""
    found = prediction.memory if prediction is not None else None
    return found if found is not None and found.moments else None


def find_predicted_time(prediction: Prediction | None) -> TimePrediction | None:
    """Find what was predicted of a step's time; None, too, where no row bounds the step."""
    found = prediction.time if prediction is not None else None
    return found if found is not None and 0 < found.step_ms < float("inf") else None
