"""Bytes that operators move which do little arithmetic: elementwise, normalisation, softmax, copies, optimizers."""

import math
from dataclasses import dataclass

from megatron_lite.analysis.kernels.figures import Role
from megatron_lite.analysis.kernels.number_formats import FORMAT_BYTES, TENSOR_TYPES
from megatron_lite.analysis.kernels.roles import bare_operator, role_of_operator
from megatron_lite.analysis.trace.columns import Shapes

ROLES = (Role.ELEMENTWISE, Role.NORM, Role.SOFTMAX, Role.REDUCTION, Role.CAST_COPY, Role.OPTIMIZER)
_ONLY_WRITE = ("fill", "zero", "normal", "uniform", "bernoulli", "random", "arange")
_ONLY_READ = ("sum", "nansum", "mean", "max", "min", "amax", "amin", "any", "all", "norm", "linalg_vector_norm")
# What they read or write does not follow from the shapes of their arguments.
_NOT_KNOWN = (
    "nll_loss_forward",
    "nll_loss",
    "cross_entropy_loss",
    "pad",
    "constant_pad_nd",
    "repeat",
    "to",
    "max_pool2d",
)
_FUSED_ADAM = ("_fused_adamw", "_fused_adam")
_ADAM_PASSES = 7  # parameters, gradients and two moments are read; all but the gradients are written


@dataclass(frozen=True)
class MemoryWork:
    """One call of an operator whose limit is memory bandwidth."""

    role: Role
    tensors: tuple[tuple[int, ...], ...]
    dtype: str
    num_bytes: float


def memory_bytes(operator: str, shapes: Shapes, otherwise: str) -> MemoryWork | None:
    """None where the shapes do not tell. otherwise: number format where the trace has none (lists of tensors)."""
    if not operator.startswith("aten::"):
        return None  # what code of other libraries does with its arguments is not known
    role, bare = role_of_operator(operator), bare_operator(operator)
    if bare in _FUSED_ADAM:
        return _fused_adam(role, shapes, otherwise)
    tensors = [
        (dims, *TENSOR_TYPES[dtype])
        for dims, dtype in zip(shapes.dims, shapes.dtypes)
        if dtype in TENSOR_TYPES and isinstance(dims, tuple) and all(isinstance(one, int) for one in dims)
    ]
    if not tensors:
        return None
    num_bytes = [math.prod(dims) * size for dims, _, size in tensors]
    if bare == "embedding" and len(tensors) > 1:
        (table, _, size), (indices, _, _) = tensors[:2]
        moved = 2 * math.prod(indices) * math.prod(table[1:]) * size + num_bytes[1]
    elif role in ROLES and bare not in _NOT_KNOWN:
        moved = _moved(bare, num_bytes)
    else:
        return None
    return MemoryWork(role, tuple(dims for dims, _, _ in tensors[:3]), tensors[0][1], float(moved))


def _moved(bare: str, num_bytes: list[int]) -> int:
    """Bytes to and from memory, for arguments of so many bytes."""
    if bare in _ONLY_WRITE:
        return num_bytes[0]
    if bare in _ONLY_READ or bare == "copy":  # copy_(target, source) has both among its arguments
        return sum(num_bytes)
    return sum(num_bytes) + max(num_bytes)  # the result is as large as the largest argument


def _fused_adam(role: Role, shapes: Shapes, otherwise: str) -> MemoryWork | None:
    parameters = shapes.dims[0] if shapes.dims else ()
    sound = (
        isinstance(parameters, tuple)
        and parameters
        and all(isinstance(one, tuple) and all(isinstance(size, int) for size in one) for one in parameters)
    )
    if not sound or otherwise not in FORMAT_BYTES:
        return None
    elements = sum(math.prod(one) for one in parameters)
    return MemoryWork(role, ((elements,),), otherwise, float(_ADAM_PASSES * elements * FORMAT_BYTES[otherwise]))
