"""When the GPU was in which phase: timing events at the phases' edges, read once they have passed.

A span is the time from the GPU reaching a phase's first work on the current stream to its finishing the last; where the
stream is idle in between, because the host is slower, that counts too. Work on other streams counts as far as the current
one waits for it: gradients are reduced beside backward, and what of that is not hidden is part of backward's time.
"""

from collections import deque
from dataclasses import dataclass, field

import torch


@dataclass
class GpuStep:
    """The events of one step."""

    key: object  # what the times are for
    first: torch.cuda.Event
    last: torch.cuda.Event | None = None
    spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)


class GpuTimes:
    """Makes the host wait for nothing unless told to. Events are used again, so that their number stays that of a few steps.

    `event` makes one, `stream` gives the stream that a step computes on; others than CUDA's are for tests.
    """

    def __init__(self, event=lambda: torch.cuda.Event(enable_timing=True), stream=lambda: torch.cuda.current_stream()):
        self._make, self._current_stream = event, stream
        self._free: list[torch.cuda.Event] = []
        self._running: GpuStep | None = None
        self._waiting: deque[GpuStep] = deque()

    def begin(self, key):
        """A step begins. `key` comes back with its times."""
        self._stream = self._current_stream()  # once: asking for it costs as much as recording
        self._running = GpuStep(key, self.edge())

    def edge(self) -> torch.cuda.Event:
        """An event at this place of the step's stream."""
        event = self._free.pop() if self._free else self._make()
        event.record(self._stream)
        return event

    def span(self, name: str, first: torch.cuda.Event):
        """The phase that began at `first` ends here."""
        self._running.spans.append((name, first, self.edge()))

    def end(self):
        """The step ends here."""
        self._running.last = self.edge()
        self._waiting.append(self._running)
        self._running = None

    def arrived(self, wait: bool = False):
        """Yield (key, seconds, {phase: seconds}) of every step that the GPU has finished, the oldest first.

        wait: for the GPU to finish all that have ended. Not to be used while training.
        """
        if wait and self._waiting:
            self._waiting[-1].last.synchronize()
        while self._waiting and self._is_over(self._waiting[0]):
            step = self._waiting.popleft()
            phases: dict[str, float] = {}
            for name, first, last in step.spans:
                phases[name] = phases.get(name, 0.0) + _seconds(first, last)
            seconds = _seconds(step.first, step.last)
            self._free += [step.first, step.last, *(event for _, *edges in step.spans for event in edges)]
            yield step.key, seconds, phases

    @staticmethod
    def _is_over(step: GpuStep) -> bool:
        return step.last.query()  # and with it all before it on the same stream


def _seconds(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    return first.elapsed_time(last) / 1000
