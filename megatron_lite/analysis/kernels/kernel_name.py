"""A kernel's name taken apart."""

from dataclasses import dataclass

from megatron_lite.analysis.kernels.figures import Role, TensorCores


@dataclass(frozen=True)
class Part:
    """One piece of a name. `inferred`: its meaning is seen in practice, but no vendor documents it."""

    text: str  # as it stands in the name
    field: str  # "architecture", "instruction tile", "layout" ...
    meaning: str  # a plain clause
    inferred: bool = False


@dataclass(frozen=True)
class KernelName:
    """What a name says, and how to read it."""

    name: str
    family: str  # "cuBLAS", "FlashAttention", ... "" where nobody is recognised
    role: Role
    tensor_cores: TensorCores
    precision: (
        str  # of the operands: "fp16", "bf16", "fp16/bf16" (16 bits: not said which), "tf32", "fp32", ...; "" unknown
    )
    parts: tuple[Part, ...] = ()  # in the order of the name
    why_not: str = ""  # where tensor_cores is NO: the reason, a few words
    alignment: int | None = None  # elements at which operands are known to be aligned; 1 and 2 tell of odd sizes
    causal: bool | None = None  # attention: is half of the scores skipped? None: the name does not say
    note: str = ""  # a trap in reading it
