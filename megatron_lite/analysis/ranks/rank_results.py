"""Results of comparing ranks: collectives and who waits for whom. Milliseconds are means per steady step."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.units import significant

MAX_NAMED_MISSING = 8
OFTEN = 0.5  # of the steps: ranks that are late in fewer are late at times
OTHER_KIND = "other"  # the kind of a collective whose names no pattern knows


@dataclass(frozen=True)
class GroupRow:
    """All communication of ranks along one dimension of their layout."""

    group: str  # "tensor", "data", "context and data", "8 adjacent ranks"; "" if the trace does not say
    per_step: float  # calls; these are means over the ranks that take part
    num_bytes: float | None  # per step; None if any call does not say
    busy_ms: float  # while at least one call is under way, waiting included
    # of it, without compute beside; the groups' add up: what several have under way is the inner one's
    exposed_ms: float
    most_exposed_rank: int | None
    most_exposed_ms: float


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind and size in one phase and group."""

    name: str  # all_reduce
    group: str  # as in GroupRow
    algorithm: str  # from the kernel's name: "ring, LL128"; "" if it does not say
    phase: str
    group_size: int | None
    per_step: float
    num_bytes: int | None  # of one
    dtype: str
    kernel_ms: float  # mean over ranks, waiting included
    transfer_ms: float | None  # shortest over ranks: without waiting; None with one rank
    wait_ms: float | None  # kernel_ms - transfer_ms
    exposed_ms: float  # not hidden by compute, mean over ranks
    bus_gb_s: float | None  # by NCCL's definition: bytes * 2(n-1)/n / transfer for all_reduce


@dataclass(frozen=True)
class RankRow:
    """A rank's figures beside the others'."""

    rank: int
    host: str
    step_ms: float
    compute_ms: float | None = None  # this and the next two: None without a trace
    communication_ms: float | None = None
    exposed_communication_ms: float | None = None
    wait_ms: float | None = None  # for others inside collectives
    data_wait_ms: float | None = None  # None: not seen
    host_idle_ms: float | None = None  # device idle because of the host; None without a trace
    last_in: float | None = None  # share of collectives in which it came last
    # wait of others for it: sum over collectives of (its start - median of the others') where it was last, as far as
    # they had nothing to compute beside
    caused_wait_ms: float | None = None
    exposed_wait_ms: float | None = None  # of exposed_communication_ms what is waiting for others; the rest is transfer


@dataclass(frozen=True)
class Straggler:
    """The rank that others wait for, and why."""

    rank: int
    caused_wait_ms: float
    share_last: float | None  # of the collectives; None without a trace
    cause: str  # "compute", "data_wait", "host", "copy"; "" if nothing explains 80% of the lag
    cause_ms: float  # how much more of it the rank has than the median of the others
    phase: str = ""  # where the lag arises, if one phase explains 80% of it
    alike: tuple[int, ...] = ()  # other ranks that come nearly as late: they hardly wait, either


@dataclass(frozen=True)
class Imbalance:
    """Waiting for ranks that take turns being late, or for one that comes late in some steps only."""

    rank: int | None  # the one that is late in some steps; None: ranks are late in turns
    lost_ms: float  # that others wait, mean over all steps
    late_ms: float  # in a step in which a rank is late (median of those)
    late_steps: int
    steps: int
    every: int | None  # steps from one late step to the next, where it is always the same
    ranks: tuple[tuple[int, float], ...]  # (rank, its share of the waiting), most first
    computes: bool | None  # the late rank computes longer in its late steps; None for unknown
    # (rank, ms) that comes late in the usual step, too; of a straggler, beyond whose lateness the others are counted
    usual: tuple[int, float] | None = None


@dataclass(frozen=True)
class Disorder:
    """The first collective of a process group that two ranks do not have in the same place."""

    group: str  # "data", "process group '3'"
    step: str  # "ProfilerStep#12"
    place: int  # within the group's collectives of the step, from 1
    rank: int
    what: str  # "all_reduce of 4.0 MiB"
    other_rank: int
    other_what: str
    steps: int  # in which orders differ
    of_steps: int
    reordered: bool  # the same collectives in another order; else other ones


@dataclass(frozen=True)
class RankComparison:
    """All ranks of one run."""

    world_size: int | None
    present: tuple[int, ...]
    missing: tuple[int, ...]
    rows: tuple[RankRow, ...]
    groups: tuple[GroupRow, ...]  # most exposed first
    collectives: tuple[CollectiveRow, ...]  # most exposed first
    straggler: Straggler | None
    clocks_aligned: bool | None  # starts compared on one clock (ends of collectives coincide); None with one rank
    critical_rank: int | None  # the one that waits least for others: its time is the run's
    notes: tuple[str, ...]
    imbalance: Imbalance | None = None  # beside a straggler: of the other ranks, beyond its lateness
    disorder: Disorder | None = None

    def describe_missing(self) -> str:
        """Write "15 of 16 ranks were not read (1 to 15)"; '' where all were, or nothing says how many there are."""
        if not self.missing or not self.world_size:
            return ""
        verb = "was" if len(self.missing) == 1 else "were"
        return f"{len(self.missing)} of {self.world_size} ranks {verb} not read ({name_ranks(self.missing)})"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, at least one: "1 to 15", or the first few of them."""
    number = len(ranks)
    first = ranks[0]
    last = ranks[-1]
    if number > 1 and last - first == number - 1:
        return f"{first} to {last}"
    named = ", ".join(map(str, ranks[:MAX_NAMED_MISSING]))
    return f"{named} ..." if number > MAX_NAMED_MISSING else named


def describe_imbalance(found: Imbalance) -> str:
    """Write which ranks are late, in which steps, and what the others wait.

    "rank 1 makes the others wait 300 ms in 2 of 13 steps", "different ranks are late from step to step, and the others
    wait 15 ms per step", "different ranks are late in 5 of 20 steps, ...".
    """
    steps = f"in {found.late_steps} of {found.steps} steps"
    if found.rank is not None:
        return f"rank {found.rank} makes the others wait {significant(found.late_ms)} ms {steps}"
    if found.late_steps >= OFTEN * found.steps:
        steps = "from step to step"
    return f"different ranks are late {steps}, and the others wait {significant(found.lost_ms)} ms per step"
