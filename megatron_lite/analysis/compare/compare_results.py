"""Results of comparing two runs: A is the one before, B the one after."""

import enum
from dataclasses import dataclass

from megatron_lite.analysis.compare.losses import Losses


class Change(str, enum.Enum):
    """How one number changed from A to B."""

    MORE = "more"
    LESS = "less"
    SAME = "not changed"
    UNCLEAR = "cannot tell"  # the noise is too large, or too few steps were seen
    ONLY_A = "only in A"
    ONLY_B = "only in B"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Pair:
    """A number of both runs."""

    a: float | None  # None: that run does not say
    b: float | None
    band: float | None  # a difference up to this may be noise; None: unknown
    change: Change

    @property
    def difference(self) -> float | None:
        """How much more B is; None where one does not say."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """B as a multiple of A."""
        return self.b / self.a if self.a and self.b is not None else None


@dataclass(frozen=True)
class ChangedFlag:
    """A setting that differs; words as a person would type or read them."""

    name: str  # "--recompute-granularity", "torch"
    a: str
    b: str


@dataclass(frozen=True)
class Total:
    """A number of the whole run, of both."""

    name: str  # "step", "tokens per second"
    unit: str  # "ms", "tokens/s", "bytes", "%"
    of: str  # where it comes from: "steps.jsonl, 9 and 11 typical steps"
    pair: Pair


@dataclass(frozen=True)
class PhasePair:
    """A phase per step, ms: what labels on the host show, and what the device really does."""

    name: str
    host: Pair
    device: Pair | None  # None without a GPU


@dataclass(frozen=True)
class KernelPair:
    """Device work of one role for one operator in one phase (on a CPU: the operator's own time), ms per step."""

    role: str
    operator: str
    phase: str
    names_a: tuple[str, ...]  # kernels, most time first
    names_b: tuple[str, ...]
    per_step: Pair
    ms: Pair


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other. Rows sum to the traced steps,
    so that their differences sum to the step's difference."""

    title_a: str
    title_b: str
    sentence: str
    flags: tuple[ChangedFlag, ...]
    totals: tuple[Total, ...]
    on_gpu: bool  # by the traces
    rows: dict[str, Pair]  # keys of ROW_TITLES
    # by dimension of the layout: communication not overlapped with compute, ms per step, mean over ranks
    groups: dict[str, Pair]
    phases: tuple[PhasePair, ...]
    phases_of: str  # where host and device times come from
    roles: dict[str, Pair]
    kernels: tuple[KernelPair, ...]  # largest difference first
    memory: dict[str, Pair]  # by category at the peak, bytes
    losses: Losses | None  # None where the two were not meant to compute the same
    notes: tuple[str, ...]
    forced: tuple[str, ...]  # why the runs are not comparable, if it was said to compare them all the same

    @property
    def step_ms(self) -> float:
        """The longer of the two steps that rows, phases and kernels are of; 0 if only memory is compared."""
        pair = next((total.pair for total in reversed(self.totals) if total.unit == "ms"), None)
        return max(pair.a or 0.0, pair.b or 0.0) if pair else 0.0
