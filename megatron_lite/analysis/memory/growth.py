"""Memory that stays after each step."""

import numpy as np

from megatron_lite.analysis.memory.figures import Growth, StepMemory
from megatron_lite.analysis.memory.phases import StepSpan

FEWEST_STEPS = 3
LEAST_BYTES = 4096  # per step; counters and log values come and go
MOSTLY = 0.75  # of the steps must end higher than the one before


def growth_of(steps: tuple[StepSpan, ...], allocated: np.ndarray, sites_between) -> Growth | None:
    """allocated: int64 [n + 1], bytes before the first event and after each. sites_between(first, last): what is held after
    event `last` more than after event `first`. None where memory does not grow or too few steps are seen."""
    ends = np.array([step.last for step in steps], np.int64)
    if len(ends) < FEWEST_STEPS:
        return None
    change = np.diff(allocated[ends + 1])
    slope = float(np.median(change))
    if slope < LEAST_BYTES or np.mean(change > 0) < MOSTLY:
        return None
    times = len(change)
    sites = sites_between(int(ends[0]), int(ends[-1]), times)
    return Growth(bytes_per_step=slope, steps=len(ends), sites=sites)


def step_memory(steps: tuple[StepSpan, ...], allocated: np.ndarray, time_us: np.ndarray) -> tuple[StepMemory, ...]:
    return tuple(
        StepMemory(
            step.name,
            int(time_us[step.first]),
            int(time_us[step.last]),
            int(allocated[step.last + 1]),
            int(allocated[step.first : step.last + 2].max()),
        )
        for step in steps
    )
