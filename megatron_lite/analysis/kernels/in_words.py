"""Says in plain sentences what a kernel's name tells."""

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part
from megatron_lite.analysis.kernels.names import MATRIX_ROLES, taken_apart
from megatron_lite.analysis.kernels.readable import short_name

_PURPOSES = {
    Role.GEMM: "a matrix product",
    Role.ATTENTION: "attention",
    Role.NORM: "a normalisation",
    Role.SOFTMAX: "a softmax or the loss",
    Role.ELEMENTWISE: "arithmetic element by element: memory bandwidth is its limit",
    Role.REDUCTION: "a sum, mean or maximum: memory bandwidth is its limit",
    Role.EMBEDDING: "a look-up or sort by index",
    Role.OPTIMIZER: "the optimizer (or its gradient norms)",
    Role.CAST_COPY: "a copy, or a change of layout or number format, on the device: it can often be avoided",
    Role.CONVOLUTION: "a convolution, or a helper of one",
    Role.FUSED: "several operators that torch.compile made one kernel of",
    Role.COMMUNICATION: "communication between processes; much of its time may be waiting for the slowest of them",
    Role.TRANSFER: "a transfer to or from the host, or memory being filled",
    Role.OTHER: "unknown: no pattern of this tool fits the name",
}
INFERRED = "inferred: seen in use, documented by nobody"


def in_words(name: str) -> list[str]:
    """Lines for the terminal: what it is for, each piece of the name, tensor cores, traps. Never fails."""
    kernel = taken_apart(name)
    by = f" (by {kernel.family})" if kernel.family else ""
    lines = [short_name(name), f"What it is for: {_PURPOSES[kernel.role]}{by}."]
    width = max((len(part.text) for part in kernel.parts), default=0)
    lines += [_line(part, min(width, 32)) for part in kernel.parts]
    if any(part.inferred for part in kernel.parts):
        lines.append(f"(*) {INFERRED}.")
    if kernel.role in MATRIX_ROLES:
        lines.append(_tensor_cores(kernel))
    return [*lines, *([f"Beware: {kernel.note}."] if kernel.note else [])]


def _line(part: Part, width: int) -> str:
    return f"  {part.text:<{width}}  {part.field}: {part.meaning}{' (*)' if part.inferred else ''}"


def _tensor_cores(kernel: KernelName) -> str:
    precision = kernel.precision.replace("/", " or ")
    if kernel.tensor_cores is TensorCores.YES:
        return f"Tensor cores: yes{f', with {precision} operands' if precision else ''}."
    if kernel.tensor_cores is TensorCores.UNKNOWN:
        return "Tensor cores: the name does not say."
    if kernel.tensor_cores is TensorCores.NOT_APPLICABLE:
        return "Tensor cores: of no use to it."
    ways_out = {
        "fp32 operands": "; try --bf16 or --fp16, or allow TF32 (torch.backends.cuda.matmul.allow_tf32)",
        "odd sizes": "; make the sizes multiples of 8, --make-vocab-size-divisible-by for the vocabulary",
    }
    return f"Tensor cores: no ({kernel.why_not}){ways_out.get(kernel.why_not, '')}."
