"""Host time of every step and of its phases: always on, a few microseconds per phase."""

import time
from dataclasses import dataclass, field

from megatron_lite.instruments.base import Instrument
from megatron_lite.phases import Phase

NOT_TRAINING = (Phase.EVAL.value, Phase.SAVE.value)


@dataclass
class StepTime:
    """One step. Phases that happen several times in a step (micro-batches) are added up."""

    step: int
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def training_seconds(self) -> float:
        """Without evaluation and saving, as Megatron's elapsed time per iteration counts."""
        return self.seconds - sum(self.phases.get(name, 0.0) for name in NOT_TRAINING)


class _Span:
    """Adds the time inside it to one phase of the running step."""

    def __init__(self, timeline: "Timeline", name: str):
        self.timeline, self.name = timeline, name

    def __enter__(self):
        self.started = time.perf_counter()

    def __exit__(self, *exception):
        self.timeline.add(self.name, time.perf_counter() - self.started)


class Timeline(Instrument):
    """Steps since the last `take`. On a GPU these are the host's times: kernels may still be running."""

    def __init__(self):
        self.current = StepTime(0)
        self._trained_seconds = 0.0  # by the finished steps, taken or not
        self._running = False
        self._finished: list[StepTime] = []
        self._started = time.perf_counter()

    def begin(self, step: int):
        self.current, self._started, self._running = StepTime(step), time.perf_counter(), True

    def end(self, step: int):
        self.current.seconds, self._running = time.perf_counter() - self._started, False
        self._trained_seconds += self.current.training_seconds
        self._finished.append(self.current)

    def phase(self, name):
        return _Span(self, str(name))

    def take(self) -> list[StepTime]:
        """The finished steps since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def add(self, name: str, seconds: float):
        """Count time towards a phase of the running step."""
        self.current.phases[name] = self.current.phases.get(name, 0.0) + seconds

    def training_seconds(self) -> float:
        """Inside steps since the run began, the running one included; evaluating, saving and what instruments do
        between steps left out."""
        if not self._running:
            return self._trained_seconds
        self.current.seconds = time.perf_counter() - self._started
        return self._trained_seconds + self.current.training_seconds
