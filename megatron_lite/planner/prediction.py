"""Predictions of a run's memory and speed. Every number has the formula that it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.phases import Phase

# What memory is called, predicted or measured, in the order of a report.
# A weight's gradient is a gradient from where it is computed, also one that is added to another and
# ends there. Workspace is all else that does not outlive its phase: temporaries of forward, backward and the
# optimizer, and the buffers of libraries such as cublas. Gathered parameters are whole weights that each rank keeps
# a part of, and the buffers that gather them. Memory that awaits its free was given back by the program, and another
# stream may still use it (Tensor.record_stream). A KV cache is an inference server's.
CATEGORIES = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "activations",
    "logits and loss",
    "workspace",
    "communication",
    "gathered parameters",
    "awaiting free",
    "KV cache",
    "other",
    "before the record",
)


@dataclass(frozen=True)
class LedgerRow:
    """Bytes of one kind of tensors on one GPU at one moment."""

    category: str  # of CATEGORIES, as in the report of a measured run
    name: str  # "layers' activations", "fp32 masters"
    num_bytes: int
    formula: str  # with the numbers put in: "4 bytes x 355,919,872 parameters"


@dataclass(frozen=True)
class Moment:
    """One point of a step at which memory may be highest."""

    phase: str  # a Phase's value
    where: str  # "cross entropy", "backward of the last layer", "update of the weights"
    rows: tuple[LedgerRow, ...]  # largest first

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.num_bytes for row in self.rows)


@dataclass(frozen=True)
class ListedMoment:
    """A moment whose rows of the same name are not added up yet, which takes longer than to find how much they are."""

    phase: Phase
    where: str
    rows: Sequence[LedgerRow]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.num_bytes for row in self.rows)


def sum_moment(listed: ListedMoment) -> Moment:
    """A Moment with the sums of rows of the same name, largest first."""
    alike: dict[str, list[LedgerRow]] = {}
    for row in listed.rows:
        if row.num_bytes:
            alike.setdefault(row.name, []).append(row)
    merged = []
    for name, rows in alike.items():
        num_bytes = sum(row.num_bytes for row in rows)
        formula = " + ".join(row.formula for row in rows)
        merged.append(LedgerRow(rows[0].category, name, num_bytes, formula))
    return Moment(listed.phase.value, listed.where, tuple(sorted(merged, key=lambda row: -row.num_bytes)))


@dataclass(frozen=True)
class MemoryPrediction:
    """The moments of one step of one rank, in the order of the step."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment that holds the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)


@dataclass(frozen=True)
class TimeRow:
    """One part of a step, at the least that the hardware allows."""

    name: str  # "matrix products", "attention", "all-reduce, not overlapped"
    ms: float  # per step
    bound: str  # compute | memory | link: which of the hardware's limits it is
    formula: str


@dataclass(frozen=True)
class TimePrediction:
    """The shortest possible step of one rank on a named GPU. Real steps take longer; how much is what a report is for."""

    gpu: str
    rows: tuple[TimeRow, ...]  # in the order of a step; they add up to step_ms
    tokens: int  # of all ranks, per step
    flops_causal: int  # of one rank, per step; Megatron's convention, which counts half of the attention matrix
    flops_full: int  # nanoGPT's and PaLM's convention
    peak_tflops: float
    notes: tuple[str, ...] = ()  # what is not in it, in words

    @property
    def step_ms(self) -> float:
        """Sum of the rows."""
        return sum(row.ms for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """The most tokens per second, of all ranks together."""
        return 1000 * self.tokens / self.step_ms
