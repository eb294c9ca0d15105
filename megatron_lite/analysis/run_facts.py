"""All that was found out about one run, for the rules and the renderers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot, TraceMemory
from megatron_lite.analysis.ranks.rank_results import Ranks
from megatron_lite.analysis.run.pipeline_times import PipelineTimes, measure_pipeline
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Trace


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


@dataclass(frozen=True)
class RankFacts:
    """One rank's trace and what was made of it."""

    trace: Trace
    time: RankTime
    kernels: RankKernels
    placing: Placing  # step, phase and operator of each event


@dataclass(frozen=True)
class Facts:
    """One run. Every part may be absent; a rule that needs it then has nothing to say."""

    ranks_seen: tuple[RankFacts, ...]  # by rank
    ranks: Ranks | None
    snapshots: tuple[Snapshot, ...]  # by rank
    run: Run | None
    gaps: tuple[str, ...]  # what could not be seen and why, a sentence each
    ledger: tuple[LedgerRow, ...] = ()  # of the snapshot with the highest peak; () without a plan of this trainer
    traced_memory: tuple[TraceMemory, ...] = ()  # by rank, from the traces; () where there are snapshots
    predicted: Predicted | None = None  # what the run said of itself before it started, beside what was measured

    @property
    def critical(self) -> RankFacts | None:
        """The rank whose time is the run's: the one that waits least for others (not simply rank 0)."""
        if not self.ranks_seen:
            return None
        wanted = self.ranks.critical_rank if self.ranks else None
        return next((one for one in self.ranks_seen if one.time.rank == wanted), self.ranks_seen[0])

    @property
    def highest_snapshot(self) -> Snapshot | None:
        """The one that decides whether the run fits."""
        return max(self.snapshots, key=lambda one: one.peak_bytes, default=None)

    @property
    def plan(self) -> dict[str, Any]:
        """The run's plan (flags as resolved); {} for foreign runs."""
        return self.run.plan if self.run else {}

    @property
    def is_watched(self) -> bool:
        """The run is of a script that is not this trainer's: its flags are unknown."""
        return self.run is not None and "command" in self.run.record

    @cached_property
    def pipeline(self) -> PipelineTimes | None:
        """Of a run with several stages, where the times of all are known."""
        return measure_pipeline(self.run) if self.run else None
