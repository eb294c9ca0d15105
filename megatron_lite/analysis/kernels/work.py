"""Arithmetic and memory traffic of an operator from the shapes of its arguments.

A multiply-add is two operations. Bytes: every input is read once and every output written once; no kernel needs less.
"""

import math
from dataclasses import dataclass

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.kernels.number_formats import FORMAT_BYTES, TENSOR_TYPES
from megatron_lite.analysis.kernels.roles import bare_operator, get_operator_role
from megatron_lite.analysis.trace.columns import Shapes

# --- bytes that operators move which do little arithmetic: elementwise, normalisation, softmax, copies, optimizers

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
    role, bare = get_operator_role(operator), bare_operator(operator)
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


# --- arithmetic and memory traffic of an operator from the shapes of its arguments

# First and second factor among the arguments; "t": the second one's rows are the result's columns.
PRODUCTS = {
    "aten::mm": (0, 1, "n"),
    "aten::bmm": (0, 1, "n"),
    "aten::addmm": (1, 2, "n"),
    "aten::baddbmm": (1, 2, "n"),
    "aten::addbmm": (1, 2, "n"),
    "aten::_addmm_activation": (1, 2, "n"),
    "aten::_scaled_mm": (0, 1, "n"),
    "aten::_int_mm": (0, 1, "n"),
    "aten::_mm": (0, 1, "n"),
    "mkldnn::_linear_pointwise": (0, 1, "t"),
    "aten::mkldnn_linear": (0, 1, "t"),
}
# Without a product of its own inside; as the innermost operator they compute it themselves.
WRAPPERS = {"aten::linear": (0, 1, "t"), "aten::matmul": (0, 1, "n")}
# Place of the queries among the arguments; "h": [batch, heads, tokens, width], "t": [batch, tokens, heads, width].
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": (0, "h"),
    "aten::_scaled_dot_product_efficient_attention": (0, "h"),
    "aten::_scaled_dot_product_cudnn_attention": (0, "h"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, "h"),
    "aten::_scaled_dot_product_fused_attention_overrideable": (0, "h"),
    "aten::_cudnn_attention_forward": (0, "h"),
    "aten::_flash_attention_forward": (0, "t"),
    "aten::_efficient_attention_forward": (0, "t"),
    "flash_attn::_flash_attn_forward": (0, "t"),
    "FlashAttnFunc": (0, "t"),
}
ATTENTION_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": (1, "h"),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, "h"),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, "h"),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, "h"),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": (1, "h"),
    "aten::_cudnn_attention_backward": (1, "h"),
    "aten::_flash_attention_backward": (1, "t"),
    "aten::_efficient_attention_backward": (1, "t"),
    "flash_attn::_flash_attn_backward": (1, "t"),
}
# Places of the result's gradient, the input and the weight; how many products of the forward pass's size are computed.
CONVOLUTIONS_BACKWARD = {
    "aten::convolution_backward": (0, 1, 2, 2),
    "aten::cudnn_convolution_backward": (1, 0, 2, 2),
    "aten::miopen_convolution_backward": (1, 0, 2, 2),
    "aten::mkldnn_convolution_backward": (1, 0, 2, 2),
}
CONVOLUTIONS = (
    "aten::cudnn_convolution", "aten::miopen_convolution", "aten::mkldnn_convolution", "aten::_convolution",
    "aten::thnn_conv2d", "aten::slow_conv2d_forward",
)  # fmt: skip
# Products in a backward pass by FlashAttention's algorithm: five, of which one repeats forward's; forward has two
# (Dao 2023, FlashAttention-2, algorithm 2).
BACKWARD_OF_ATTENTION, REPEATED_IN_ATTENTION = 2.5, 0.5
LARGEST = 2**40  # a size beyond it is damage


@dataclass(frozen=True)
class Work:
    """One call of an operator."""

    role: Role
    shape: str
    dims: tuple[int, ...]  # as RooflineRow.dims
    dtype: str  # "" where the trace does not say
    flops: float  # that it computes; attention: all scores
    num_bytes: float
    repeated: float = 0.0  # part of flops that only saves memory: attention's backward pass computes the scores again

    @property
    def model_flops(self) -> float:
        """That the model asks for, as MFU counts them."""
        return self.flops - self.repeated


def compute_work(operator: str, shapes: Shapes, otherwise: str = "", results: dict | None = None) -> Work | None:
    """None for what no formula is known, or whose shapes are missing or damaged.

    otherwise: number format to take where the trace has none. results: sizes of convolutions' results by (input,
    weight), which only the backward pass's arguments show; see count_results.
    """
    if not all(_is_sound(one) for one in shapes.dims):
        return None
    if operator in PRODUCTS or operator in WRAPPERS:
        return _product(shapes, otherwise, *(PRODUCTS.get(operator) or WRAPPERS[operator]))
    if operator in ATTENTION or operator in ATTENTION_BACKWARD:
        backward = operator in ATTENTION_BACKWARD
        return _attention(shapes, otherwise, *(ATTENTION_BACKWARD if backward else ATTENTION)[operator], backward)
    if operator in CONVOLUTIONS or operator in CONVOLUTIONS_BACKWARD:
        return _convolution(operator, shapes, otherwise, results or {})
    found = memory_bytes(operator, shapes, otherwise)
    return found and Work(found.role, described(found.tensors, found.dtype), (), found.dtype, 0.0, found.num_bytes)


def count_results(operator: str, shapes: Shapes) -> dict[tuple, tuple]:
    """{(input, weight): result} of a convolution's backward pass; {} for others."""
    places = CONVOLUTIONS_BACKWARD.get(operator)
    if not places or not all(_is_sound(one) for one in shapes.dims) or len(shapes.dims) < 3:
        return {}
    result, given, weight, _ = places
    return {(shapes.dims[given], shapes.dims[weight]): shapes.dims[result]}


def described(tensors, dtype: str) -> str:
    """'[8192, 1024] x [1024, 4096] bf16'."""
    return " x ".join(str(list(one)) for one in tensors) + (f" {dtype}" if dtype else "")


def find_format(shapes: Shapes, place: int, otherwise: str) -> tuple[str, int]:
    """(number format, bytes of an element) of an argument; ("", 0) if unknown."""
    written = shapes.dtypes[place] if place < len(shapes.dtypes) else ""
    return TENSOR_TYPES.get(written) or (otherwise, FORMAT_BYTES.get(otherwise, 0))


def _is_sound(dims) -> bool:
    if isinstance(dims, tuple):
        return all(_is_sound(one) for one in dims)
    return isinstance(dims, int) and 0 <= dims < LARGEST


def _tensor(shapes: Shapes, place: int, fewest: int) -> tuple[int, ...] | None:
    dims = shapes.dims[place] if place < len(shapes.dims) else ()
    flat = isinstance(dims, tuple) and all(isinstance(one, int) for one in dims)
    return dims if flat and len(dims) >= fewest else None


def _product(shapes: Shapes, otherwise: str, first: int, second: int, layout: str) -> Work | None:
    a, b = _tensor(shapes, first, 2), _tensor(shapes, second, 2)
    if a is None or b is None:
        return None
    inner, columns = (b[-1], b[-2]) if layout == "t" else (b[-2], b[-1])
    if a[-1] != inner:
        return None
    dtype, size = find_format(shapes, first, otherwise)
    folded = layout == "t" or len(b) == 2  # leading dimensions are rows
    batch = 1 if folded else max(math.prod(a[:-2]), math.prod(b[:-2]))
    rows = math.prod(a[:-1]) if folded else a[-2]
    elements = math.prod(a) + math.prod(b) + batch * rows * columns
    return Work(
        Role.GEMM,
        described((a, b), dtype),
        (rows, columns, inner),
        dtype,
        2.0 * batch * rows * columns * inner,
        float(size * elements),
    )


def _attention(shapes: Shapes, otherwise: str, place: int, layout: str, backward: bool) -> Work | None:
    q, k, v = (_tensor(shapes, place + at, 4) for at in range(3))
    if q is None or k is None or v is None or len(q) != 4:
        return None
    dtype, size = find_format(shapes, place, otherwise)
    heads_at, tokens_at = (1, 2) if layout == "h" else (2, 1)
    batch, heads, queries, keys, width = q[0], q[heads_at], q[tokens_at], k[tokens_at], q[3]
    forward = 2.0 * batch * heads * queries * keys * (width + v[3])
    flops, repeated = (BACKWARD_OF_ATTENTION * forward, REPEATED_IN_ATTENTION * forward) if backward else (forward, 0.0)
    result = batch * heads * queries * v[3]
    once = math.prod(q) + math.prod(k) + math.prod(v)
    # Backward reads q, k, v, the result and its gradient, and writes three gradients.
    elements = 2 * once + 2 * result if backward else once + result
    return Work(
        Role.ATTENTION,
        described((q, k), dtype),
        (batch, heads, queries, keys, width),
        dtype,
        flops,
        float(size * elements),
        repeated,
    )


def _convolution(operator: str, shapes: Shapes, otherwise: str, results: dict) -> Work | None:
    result_at, given_at, weight_at, products = CONVOLUTIONS_BACKWARD.get(operator, (None, 0, 1, 1))
    given, weight = _tensor(shapes, given_at, 3), _tensor(shapes, weight_at, 3)
    if given is None or weight is None:
        return None
    result = results.get((given, weight)) if result_at is None else _tensor(shapes, result_at, 3)
    if result is None:
        return None
    dtype, size = find_format(shapes, given_at, otherwise)
    # weight: [out, in / groups, *kernel]; every element of the result takes one pass over a filter.
    flops = 2.0 * products * math.prod(result) * math.prod(weight[1:])
    elements = products * (math.prod(given) + math.prod(weight) + math.prod(result))
    return Work(Role.CONVOLUTION, described((given, weight), dtype), (), dtype, flops, float(size * elements))
