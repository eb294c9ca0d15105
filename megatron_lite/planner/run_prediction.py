"""Predicts a run's memory and speed before its first step, for the console and for run.json."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.plan import Plan
from megatron_lite.formats.hardware import Processor, match_processor
from megatron_lite.formats.run_record import CategoryPrediction, MemoryPrediction, Moment, Prediction, TimePrediction
from megatron_lite.planner.categories import predict_categories
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.step_time import predict_time
from megatron_lite.planner.what_if import MARGIN, find_heaviest_stage, fit
from megatron_lite.units import GIB, count, size

NAMED = 4  # categories of the peak, in the console's line
MAX_UNNAMED_SHARE = 0.02  # of the peak: not named there
NO_REMEDY = "training may run out of memory"
# for CPUs and GPUs that no table has: only the memory, which is measured, decides what fits
ANY = Processor("any", "", None, None, None, None, None, None, None, None, "none")


@dataclass(frozen=True)
class Forecast:
    """A run's predicted memory and time.

    They are None without a training, for a model given by --model, after a failure, and on an unknown processor.
    """

    memory: MemoryPrediction | None
    time: TimePrediction | None
    room_bytes: int | None  # of one GPU, or of this machine
    sharing: int  # ranks that share this room
    failures: tuple[str, ...] = ()
    remedy: str = ""  # flags with which it would fit, if it does not fit as it is
    categories: CategoryPrediction | None = None

    def excess_bytes(self, margin: float) -> float:
        """Bytes that tensors take beyond the room less `margin`, a share of it; 0 if nothing is known."""
        if self.memory is None or self.room_bytes is None:
            return 0
        return max(0, self.sharing * self.memory.peak.num_bytes - (1 - margin) * self.room_bytes)


def forecast(plan: Plan, device_name: str | None, room_bytes: int | None) -> Forecast:
    """Predict a run. Never raises: failures are part of the result.

    Args:
        plan: Of any of its ranks.
        device_name: The GPU's, as torch names it; None on CPUs.
        room_bytes: Memory of one GPU, or of this machine; None if unknown.
    """
    sharing = 1 if plan.device == "cuda" else plan.world.local_size
    if plan.args.training.skip_train or plan.args.model.model is not None:
        return Forecast(None, None, room_bytes, sharing)
    processor = match_processor(device_name)
    failures: list[str] = []

    def attempt(what: str, predict: Callable[..., Any], *given: object) -> Any:
        try:
            return predict(*given)
        except Exception as error:  # noqa: BLE001  a mistake in a formula must not cost anybody a training
            failures.append(f"{what}: {type(error).__name__}: {error}; please report it")
            return None

    heaviest = plan
    if plan.layout.pipeline > 1:
        heaviest = attempt("memory", find_heaviest_stage, plan, processor)
    memory = attempt("memory", predict_memory, heaviest, processor) if heaviest else None
    time = attempt("time", predict_time, plan, processor) if processor else None
    # those of further tokens are known at the peak only
    categories = None if plan.shape.mtp_num_layers else attempt("categories of memory", predict_categories, plan)
    seen = Forecast(memory, time, room_bytes, sharing, categories=categories)
    remedy = ""
    if seen.excess_bytes(MARGIN):
        # what fits into the room that there is: '--micro-batch-size 2 would need 12.30 GiB'
        room = dataclasses.replace(processor or ANY, memory_gib=(room_bytes or 0) / sharing / GIB)
        fitting = attempt("remedy", fit, plan, room)
        found = fitting and (fitting.found or fitting.remedy)
        remedy = f"{found.words} would need {size(found.peak_bytes)}" if found else ""
    return dataclasses.replace(seen, remedy=remedy, failures=tuple(failures))


def describe_forecast(seen: Forecast) -> Iterator[str]:
    """Lines for the console: memory and speed, what could not be predicted, and whether memory may run out."""
    if seen.memory is not None:
        yield _describe_peak(seen, seen.memory.peak)
    if seen.time is not None and seen.time.rows:
        step = f"{_write_ms(seen.time.step_ms)} ms per step"
        yield f"  predicted: at best {step}, {count(seen.time.tokens_per_s)} tokens/s"
    yield from (f"  no prediction of the {failure}" for failure in seen.failures)
    if seen.excess_bytes(MARGIN):
        leaves = f"leaves less than {MARGIN:.0%} of the memory for libraries and allocator overhead"
        if seen.excess_bytes(0):
            leaves = f"is {size(seen.excess_bytes(0))} more than there is"
        yield f"  note: the predicted peak {leaves}; {seen.remedy or NO_REMEDY}."


def _describe_peak(seen: Forecast, peak: Moment) -> str:
    """Two lines for the console: how much memory tensors take at most, and which ones most of it."""
    held = collections.Counter[str]()
    for row in peak.rows:
        held[row.category] += row.num_bytes
    largest = []
    for name, taken in held.most_common(NAMED):
        if taken >= MAX_UNNAMED_SHARE * peak.num_bytes:
            largest.append(f"{name} {size(taken)}")
    each = f"{seen.sharing} x " if seen.sharing > 1 else ""
    room = f" of {size(seen.room_bytes)}" if seen.room_bytes else ""
    amount = f"{each}{size(peak.num_bytes)}{room}"
    moment = f"{peak.where} ({peak.phase})"
    return f"  predicted: tensors peak at about {amount}, at {moment}:\n    {', '.join(largest)}"


def _write_ms(ms: float) -> str:
    """Milliseconds with three digits at least: '1.23', '12.3', '1,234'."""
    decimals = 2
    if ms >= 100:
        decimals = 0
    elif ms >= 10:
        decimals = 1
    return f"{ms:,.{decimals}f}"


def record_forecast(seen: Forecast) -> Prediction:
    """The prediction as run.json holds it."""
    return Prediction(
        peak_bytes=seen.memory.peak.num_bytes if seen.memory else None,
        room_bytes=seen.room_bytes,
        memory=seen.memory,
        time=seen.time,
        categories=seen.categories,
        failures=seen.failures,
    )


@dataclass(frozen=True)
class PredictedRun:
    """Lines and records by which a run describes itself before its first step."""

    lines: Sequence[str]  # for the console
    record: Prediction  # for run.json


def predict_run(plan: Plan, device_name: str | None, room_bytes: int | None) -> PredictedRun:
    """Predict a run, for the console and for run.json.

    Args:
        plan: Of any of its ranks.
        device_name: The GPU's, as torch names it; None on CPUs.
        room_bytes: Memory of one GPU, or of this machine; None if unknown.
    """
    seen = forecast(plan, device_name, room_bytes)
    return PredictedRun(tuple(describe_forecast(seen)), record_forecast(seen))
