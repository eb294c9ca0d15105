"""Results of reading memory snapshots.

Bytes are tensors' sizes as the allocator rounds them unless a name says otherwise.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Integers

CURVE_POINTS = 800


def choose_points(curve: Integers) -> Integers:
    """Indices of the highest point of each of CURVE_POINTS stretches of a curve; of the first,
    the last and the peak too."""
    edges = np.unique(np.linspace(0, len(curve), min(len(curve), CURVE_POINTS) + 1).astype(np.int64))
    highest = [int(start + np.argmax(curve[start:end])) for start, end in itertools.pairwise(edges)]
    return np.unique([0, *highest, len(curve) - 1])


@dataclass(frozen=True)
class Held:
    """A category at the peak."""

    category: str
    num_bytes: int
    blocks: int
    requested_bytes: int = 0  # without the allocator's rounding: what a formula gives


@dataclass(frozen=True)
class SiteBytes:
    """A source line at the peak, or one that grows."""

    site: str  # "gpt.py:81 forward": innermost frame outside torch
    category: str
    phase: str  # when it was allocated
    module: str  # "decoder.layers.*.mlp": the same line in several layers is one row; "" if unknown
    num_bytes: int
    blocks: int


OUTSIDE = "outside of layers"  # the name of the row for what belongs to none


@dataclass(frozen=True)
class Layer:
    """Activations of one layer at the peak."""

    name: str  # or OUTSIDE
    num_bytes: int


@dataclass(frozen=True)
class CurvePoint:
    """A point of the memory curve."""

    time_us: int  # since the record's first event
    allocated: int
    reserved: int
    by_category: tuple[int, ...]  # parallel to CATEGORIES


@dataclass(frozen=True)
class StepMemory:
    """A step of the record."""

    name: str
    start_us: int
    end_us: int
    allocated_at_end: int
    peak: int


@dataclass(frozen=True)
class SnapshotGrowth:
    """Memory that stays after each step."""

    bytes_per_step: float
    steps: int
    sites: tuple[SiteBytes, ...]  # per step, largest first


@dataclass(frozen=True)
class Fragmentation:
    """Reserved but not allocated in the default pool, and what another allocator would reserve for it."""

    reserved_bytes: int  # at its largest
    allocated_bytes: int  # at that moment
    largest_free_block: int  # at the end of the record
    expandable: bool  # expandable segments were on
    replay_reserved_bytes: int | None  # by replaying the record with expandable segments; None if it cannot be replayed
    replay_as_it_was_bytes: int | None = None  # by a replay of the allocator as it was: how far it can be trusted


@dataclass(frozen=True)
class PrivatePool:
    """Memory that only a CUDA graph's captures, or a torch.cuda.MemPool, can use."""

    pool: str  # its id, as in a snapshot's segment_pool_id: "(0, 1)"
    of_graphs: bool  # stacks or the id say that CUDA graphs own it; False: nothing tells them from a MemPool
    reserved_bytes: int  # when a request failed, else at the end of the record
    allocated_bytes: int  # by tensors, at that moment
    site: str  # the line that asked for most of it; "" if unknown


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation in the record."""

    requested_bytes: int
    device_free_bytes: int
    site: str
    held_bytes: int = 0  # by tensors, at that moment
    unused_private_bytes: int = 0  # reserved in private pools and not allocated: out of this request's reach
    unused_bytes: int = (
        0  # reserved in the default pool and not allocated: free pieces, none of which this request fitted
    )
    held: tuple[Held, ...] = ()  # by category, at that moment; largest first
    went_on: bool = False  # as many bytes were allocated afterwards: the program got around it


@dataclass(frozen=True)
class Gathered:
    """Whole weights at the peak of which each rank keeps a part (ZeRO-3, FSDP)."""

    library: str  # "DeepSpeed"
    num_bytes: int
    blocks: int
    kept_blocks: int  # gathered in a phase that was over: not for what ran at the peak
    gathered_in_phase: int  # pieces that the phase of the peak gathers in all
    site: str


# Categories whose bytes grow with the micro-batch. Workspace does: it is what lives within one forward or backward
# pass. Walked steps of twice the micro-batch had twice the workspace
# (tests/analysis/test_analysis_memory_growth_with_batch.py).
GROWS_WITH_BATCH = ("activations", "logits and loss", "workspace")


@dataclass(frozen=True)
class Snapshot:
    """Memory of a rank, by its snapshot."""

    source: str
    rank: int | None
    simulated: bool  # of a CPU run, or predicted
    peak_bytes: int  # allocated
    peak_time_us: int
    peak_phase: str  # "forward"; "" if the record has no annotations and stacks do not tell
    held: tuple[Held, ...]  # at the peak, largest first; sums to peak_bytes
    sites: tuple[SiteBytes, ...]  # at the peak, largest first
    layers: tuple[Layer, ...]  # activations at the peak, in the model's order
    curve: tuple[CurvePoint, ...]  # thinned to a picture's resolution; keeps the peak
    steps: tuple[StepMemory, ...]
    growth: SnapshotGrowth | None  # None if it does not grow or too few steps are seen
    fragmentation: Fragmentation
    oom: OutOfMemory | None
    events: int
    complete: bool  # at least 99% of the peak's bytes have a known origin: the record began early enough
    notes: tuple[str, ...]
    # each category at its own highest moment, which need not be the peak; of gradients those that outlive backward
    highest: tuple[Held, ...] = ()
    device: int = 0  # number of the GPU in the file
    private_pools: tuple[PrivatePool, ...] = ()  # largest first
    gathered: Gathered | None = None

    @property
    def has_history(self) -> bool:
        """Whether allocations were recorded. Without them the peak is what was held when the snapshot was taken."""
        return self.events > 0

    @property
    def grows_bytes(self) -> int:
        """Bytes at the peak that grow with the micro-batch."""
        return sum(held.num_bytes for held in self.held if held.category in GROWS_WITH_BATCH)

    @property
    def ran_out(self) -> bool:
        """Whether a request failed and the program did not get around it."""
        return self.oom is not None and not self.oom.went_on


@dataclass(frozen=True)
class MeasuredCategory:
    """A category by a formula and as measured; requested bytes, without the allocator's rounding."""

    category: str
    formula: str  # "2 bytes x 355,919,872 parameters"
    formula_bytes: int
    measured_bytes: int  # at the category's own highest moment

    @property
    def difference_bytes(self) -> int:
        return self.measured_bytes - self.formula_bytes


@dataclass(frozen=True)
class TraceMemory:
    """Memory by a profiler's trace with memory events, for runs without a snapshot.

    It does not say what held memory.
    """

    source: str
    rank: int | None
    device: int  # -1: the host
    peak_bytes: int  # allocated
    peak_ns: int  # on the trace's clock
    peak_phase: str  # "" if unknown
    peak_operator: str  # "aten::log_softmax", "" if unknown
    reserved_bytes: int | None  # most in the window; None if the trace does not say
    curve: tuple[tuple[int, int], ...]  # (ns, bytes allocated), thinned to a picture's resolution; keeps the peak
    total_is_given: bool  # False: sums of what the window saw, without what was there before
    other_peaks: tuple[tuple[int, int], ...] = ()  # (device, bytes) of the trace's other GPUs
    steps: int = 0  # steady steps of which the least that is allocated is known
    # by which that rises from each of these steps to the next, on average; None where it does not in each
    rise_bytes_per_step: int | None = None
