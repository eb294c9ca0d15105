"""All that was found out about one run, for the rules and the renderers."""

from dataclasses import dataclass

from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot, TraceMemory
from megatron_lite.analysis.predicted.predicted_results import Predicted
from megatron_lite.analysis.ranks.rank_results import Ranks
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Trace


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
    def plan(self) -> dict:
        """The run's plan (flags as resolved); {} for foreign runs."""
        return self.run.plan if self.run else {}
