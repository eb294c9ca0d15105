"""What was predicted of a run before it started, beside what was then measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """One figure: bytes, ms per step or tokens per second."""

    name: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float | None:
        """0.03: measured 3% more than predicted; None where nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True)
class ComparedMemory:
    """Tensors of one rank at the highest moment of a step, in bytes without the allocator's rounding."""

    peak: Compared
    categories: tuple[Compared, ...]  # add up to the peak; () where the measurement does not tell them apart
    source: str  # the snapshot's name, or "steps.jsonl": the allocator's own count, with rounding
    rank: int | None
    predicted_at: str  # "cross entropy (forward)"
    measured_in: str  # phase; "" for unknown


@dataclass(frozen=True)
class ComparedTime:
    """A step against the shortest that the hardware allows. A bound: measured is more."""

    gpu: str
    step: Compared  # ms, outside of the profiler
    tokens: Compared | None  # per second, all ranks
    parts: tuple[Compared, ...]  # ms of a step in the trace, to which they add up; () without a trace of a GPU
    not_predicted: tuple[str, ...]  # what is not in the bound, in words


@dataclass(frozen=True)
class Predicted:
    """Each part may be missing, for a reason among the notes."""

    memory: ComparedMemory | None
    time: ComparedTime | None
    notes: tuple[str, ...]
