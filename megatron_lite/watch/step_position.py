"""The place in the training loop where a process is, as another thread of it sees it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_STEPS_OF_USUAL = 3
FIRST_ORDINARY_STEP = 2  # the first compiles, and fills caches


@dataclass(frozen=True)
class StepPosition:
    """Step, phase, and since when. Moments are of time.perf_counter(); 0.0 before the first step."""

    step: int = 0
    phase: str | None = None
    step_since: float = 0.0
    phase_since: float = 0.0
    # when a phase or a step began last
    moved_at: float = 0.0
    # median duration of the last steps in seconds; None before there are some
    usual_step_s: float | None = None


def compute_usual_s(durations_s: Sequence[float]) -> float | None:
    """Compute the usual duration of a step: the median; None before there are some. durations_s: in seconds."""
    return statistics.median(durations_s) if len(durations_s) >= MIN_STEPS_OF_USUAL else None
