"""The steps that count."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, union
from megatron_lite.analysis.time.time_results import Step

FEWEST = 2


@dataclass(frozen=True)
class SteadySteps:
    """The steady ones among `steps`; at least one is."""

    steps: tuple[Step, ...]

    @cached_property
    def flags(self) -> np.ndarray:
        """bool [k + 1] per step; the last one, which index -1 (no step) finds, is False."""
        return np.array([step.steady for step in self.steps] + [False])

    @property
    def count(self) -> int:
        return int(self.flags.sum())

    @cached_property
    def cover(self) -> Cover:
        """Their windows, on the device's clock where there is one."""
        return union(
            [step.start_ns for step in self.steps if step.steady], [step.end_ns for step in self.steps if step.steady]
        )

    @cached_property
    def host_cover(self) -> Cover:
        return union(
            [step.host_start_ns for step in self.steps if step.steady],
            [step.host_end_ns for step in self.steps if step.steady],
        )

    @property
    def step_ms(self) -> float:
        return self.cover.length / 1e6 / self.count

    @property
    def typical(self) -> int:
        """Index of the step whose length is nearest to the median."""
        usual = np.median([step.ms for step in self.steps if step.steady])
        return min((k for k, step in enumerate(self.steps) if step.steady), key=lambda k: abs(self.steps[k].ms - usual))

    @property
    def notes(self) -> tuple[str, ...]:
        left_out = [f"{step.name} ({step.why_not})" for step in self.steps if not step.steady]
        few = self.count < FEWEST and len(self.steps) >= FEWEST
        return (f"only one step counts; left out: {', '.join(left_out)}",) if few else ()
