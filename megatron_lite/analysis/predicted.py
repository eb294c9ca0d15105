"""What a run's record predicted, held against all that was measured of the run."""

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts, Predicted
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import MemoryPrediction, Moment, Prediction, TimePrediction
from megatron_lite.units import size

PRODUCTS = (Role.GEMM, Role.ATTENTION)
BOUNDS = ("compute", "memory", "link")


def compare_prediction(facts: Facts) -> Predicted | None:
    """None for a run that predicted nothing, as those of other trainers."""
    prediction = facts.run.record.prediction if facts.run else None
    memory, time = find_predicted_memory(prediction), find_predicted_time(prediction)
    if memory is None and time is None:
        return None
    of_memory, notes = compare_memory(facts, memory.peak) if memory else (None, [])
    of_time = compare_time(facts, time) if time else None
    if time and of_time is None:
        notes.append("no typical step was timed, so the predicted step cannot be compared.")
    return Predicted(memory=of_memory, time=of_time, notes=tuple(notes))


def compare_memory(facts: Facts, peak: Moment) -> tuple[ComparedMemory | None, list[str]]:
    """(the comparison, why there is none or what it lacks).

    A snapshot tells most; the allocator's counter knows the peak.
    """
    snapshot, run, at = facts.highest_snapshot, facts.run, f"{peak.where} ({peak.phase})"  # cross entropy (forward)
    if snapshot is not None and snapshot.oom is not None:
        return None, [f"memory ran out before its peak, which was predicted as {size(peak.num_bytes)} at {at}."]
    if snapshot is not None:
        measured = {held.category: held.requested_bytes for held in snapshot.held}
        expected = dict.fromkeys(CATEGORIES if snapshot.complete else (), 0)
        for row in peak.rows:
            if row.category in expected:
                expected[row.category] += row.num_bytes
        pairs = [(name, num_bytes, measured.get(name, 0)) for name, num_bytes in expected.items()]
        categories = tuple(Compared(*pair) for pair in pairs if any(pair[1:]))
        late = f"{snapshot.source} began late, so some categories are unknown: only the peaks are compared."
        of_peak = Compared("peak of tensors", peak.num_bytes, sum(measured.values()))
        found = ComparedMemory(of_peak, categories, snapshot.source, snapshot.rank, at, snapshot.peak_phase)
        return found, [] if snapshot.complete else [late]
    if facts.plan.device != "cuda":
        why = "predicted memory is that of tensors, which a run on CPUs measures only with --record-memory-history."
        return None, [why]
    most = run.peak_memory_bytes.max(initial=0.0, where=run.peak_memory_bytes > 0) if run else 0.0  # NaN is not
    if not most:
        return None, [f"{STEPS_FILE} holds no peak of GPU memory, so the prediction cannot be compared."]
    rank, of_peak = facts.plan.world.rank, Compared("peak of tensors", peak.num_bytes, float(most))
    return ComparedMemory(of_peak, (), STEPS_FILE, rank, at, ""), []


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
            Compared("communication not overlapped with compute", least["link"], sending),
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


def find_predicted_memory(prediction: Prediction | None) -> MemoryPrediction | None:
    """None where no moment is known."""
    found = prediction.memory if prediction is not None else None
    return found if found is not None and found.moments else None


def find_predicted_time(prediction: Prediction | None) -> TimePrediction | None:
    """None, too, where no row bounds the step."""
    found = prediction.time if prediction is not None else None
    return found if found is not None and 0 < found.step_ms < float("inf") else None
