"""Results of the kernel analysis of one rank. Milliseconds and counts are means per steady step."""

import enum
from dataclasses import dataclass, field


class Role(str, enum.Enum):
    """Purposes of device work."""

    GEMM = "matrix products"
    ATTENTION = "attention"
    STATE_SPACE = "state spaces and linear attention"
    NORM = "normalization"
    SOFTMAX = "softmax and loss"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reductions"
    EMBEDDING = "embedding and indexing"
    OPTIMIZER = "optimizer"
    CAST_COPY = "copies and casts on the device"
    CONVOLUTION = "convolution"
    FUSED = "compiled (fused)"
    COMMUNICATION = "communication"
    TRANSFER = "transfers"  # memcpy to and from the host, memset
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


# meanings of counters
SM_ACTIVE = "sm active"
MEMORY_BUSY = "memory"
MATRIX_ROLES = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)


class TensorCores(str, enum.Enum):
    YES = "yes"
    NO = "no"  # could, but did not
    UNKNOWN = "unknown"  # the name does not say
    NOT_APPLICABLE = ""


@dataclass(frozen=True)
class KernelRow:
    """All calls of one kernel."""

    name: str
    short: str  # readable: without template arguments
    role: Role
    phase: str  # where most of its time is
    operator: str  # host operator that launched most of it
    per_step: float
    ms: float
    share: float  # of all device time
    tensor_cores: TensorCores
    precision: str  # "fp16", "bf16", "tf32", "fp32", "" if the name does not say


@dataclass(frozen=True)
class OperatorRow:
    """All calls of one host operator; on CPU-only traces `self_ms` is the time that counts."""

    name: str
    role: Role
    per_step: float
    self_ms: float  # host time without children
    device_ms: float  # device work it launched, children included
    phase: str


@dataclass(frozen=True)
class RooflineRow:
    """Calls of one operator with one set of shapes, against the hardware."""

    operator: str
    phase: str
    shape: str  # "[8192, 1024] x [1024, 4096] bf16"
    dims: tuple[int, ...]  # GEMM: (m, n, k); attention: (batch, heads, queries, keys, head width); else ()
    role: Role
    dtype: str
    per_step: float
    ms: float
    flops: float  # per step
    num_bytes: float  # per step, inputs and outputs once
    achieved_tflops: float
    achieved_gb_s: float
    bound_ms: float | None  # max(flops / peak, bytes / bandwidth); None on unknown hardware
    bound_by: str  # "compute", "memory", "" if unknown
    efficiency: float | None  # bound_ms / ms; above 1: the data was in a cache already
    causal: bool | None = None  # attention: half of the scores are skipped, and not counted in flops; None: not known


@dataclass(frozen=True)
class CounterUse:
    """A counter of the device in the steady steps, as CUPTI's PM sampling read it. Means are weighted by time."""

    name: str  # as the file names it: "SM Active (%)", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    meaning: str  # "sm active", "memory": its share of the peak in %; "" for any other counter
    mean: float  # of the steady steps, in the unit that the name gives
    working: float | None  # of the samples in which the device worked all the time; None: there are none
    by_role: dict[Role, float]  # of the samples in which only kernels of one role ran, all the time
    samples: int  # in the steady steps


@dataclass(frozen=True)
class RankKernels:
    """Kernels, operators and speed of light of one rank; the defaults are of one whose kernels cannot be analyzed."""

    rank: int | None
    rows: tuple[KernelRow, ...] = ()  # most time first
    operators: tuple[OperatorRow, ...] = ()  # most time first
    roles: dict[Role, float] = field(default_factory=dict)  # ms per step; sums to device_ms
    device_ms: float = 0.0  # sum over device events (parallel streams count twice)
    matrix_ms: float = 0.0  # GEMM + attention + convolution
    tensor_core_ms: float = 0.0
    maybe_tensor_core_ms: float = 0.0  # names that do not say
    roofline: tuple[RooflineRow, ...] = ()  # largest loss against the bound first; () without shapes
    # per step, from shapes: products and attention (all scores), recomputation left out
    model_flops: float | None = None
    achieved_tflops: float | None = None  # model_flops / step time
    peak_tflops: float | None = None  # of the device for the dtype that most FLOPs have
    peak_dtype: str = ""
    mfu: float | None = None
    compiled_regions: float = 0.0  # calls per step
    notes: tuple[str, ...] = ()
    without_tensor_cores: dict[str, float] = field(default_factory=dict)  # reason -> ms of matrix_ms
    attention_flops: float | None = None  # part of model_flops: all scores; a causal model needs half of them
    counters: tuple[CounterUse, ...] = ()  # () where the trace has none
    recomputed_flops: float = 0.0  # per step, in recomputed activations; not part of model_flops

    def describe_counters(self) -> str:
        """Write "SMs active 41%, memory at 20% of its peak while the device works"; '' where neither was measured."""
        parts = []
        for one in self.counters:
            value = one.mean if one.working is None else one.working
            if one.meaning == SM_ACTIVE:
                parts.append(f"SMs active {value:.0f}% of the time")
            elif one.meaning == MEMORY_BUSY:
                parts.append(f"memory at {value:.0f}% of its peak")
        if not parts:
            return ""
        is_working = all(one.working is not None for one in self.counters if one.meaning)
        when = "while the device works" if is_working else "over whole steps"
        return f"{', '.join(parts)} {when}, by its counters (CUPTI PM sampling)"
