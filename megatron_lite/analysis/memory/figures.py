"""What a memory snapshot says. Bytes are tensors' sizes as the allocator rounds them unless a name says otherwise."""

from dataclasses import dataclass

# Categories of memory, in the order of a report.
CATEGORIES = (
    "parameters", "gradients", "master weights", "moments", "activations", "logits and loss", "workspace", "communication",
    "other", "before the record",
)


@dataclass(frozen=True)
class Held:
    """One category at the peak."""

    category: str
    num_bytes: int
    blocks: int


@dataclass(frozen=True)
class SiteBytes:
    """One source line at the peak, or one that grows."""

    site: str  # "gpt.py:81 forward": innermost frame outside torch
    category: str
    phase: str  # when it was allocated
    module: str  # "layers.3.mlp", "" if unknown
    num_bytes: int
    blocks: int


@dataclass(frozen=True)
class Layer:
    """Activations of one layer at the peak."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Moment:
    """One point of the memory curve."""

    time_us: int  # since the record's first event
    allocated: int
    reserved: int
    by_category: tuple[int, ...]  # parallel to CATEGORIES


@dataclass(frozen=True)
class StepMemory:
    """One step of the record."""

    name: str
    start_us: int
    end_us: int
    allocated_at_end: int
    peak: int


@dataclass(frozen=True)
class Growth:
    """Memory that stays after each step."""

    bytes_per_step: float
    steps: int
    sites: tuple[SiteBytes, ...]  # per step, largest first


@dataclass(frozen=True)
class Fragmentation:
    """Reserved but not allocated, and what another allocator would reserve."""

    reserved_bytes: int  # at its largest
    allocated_bytes: int  # at that moment
    largest_free_block: int  # at the end of the record
    expandable: bool  # expandable segments were on
    replay_reserved_bytes: int | None  # by replaying the record with expandable segments; None if it cannot be replayed


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation in the record."""

    requested_bytes: int
    device_free_bytes: int
    site: str


@dataclass(frozen=True)
class Snapshot:
    """One rank's memory."""

    source: str
    rank: int | None
    simulated: bool  # of a CPU run, or predicted
    peak_bytes: int  # allocated
    peak_time_us: int
    peak_phase: str  # "forward"; "" if the record has no annotations and stacks do not tell
    held: tuple[Held, ...]  # at the peak, largest first; sums to peak_bytes
    sites: tuple[SiteBytes, ...]  # at the peak, largest first
    layers: tuple[Layer, ...]  # activations at the peak, in the model's order
    curve: tuple[Moment, ...]  # thinned to a picture's resolution; keeps the peak
    steps: tuple[StepMemory, ...]
    growth: Growth | None  # None if it does not grow or too few steps are seen
    fragmentation: Fragmentation
    oom: OutOfMemory | None
    events: int
    complete: bool  # the ring did not drop events that the peak needs
    notes: tuple[str, ...]
