"""Arithmetic and memory traffic of an operator from the shapes of its arguments.

A multiply-add is two operations. Bytes: every input is read once and every output written once; no kernel needs less.
"""

import math
from dataclasses import dataclass

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.kernels.number_formats import FORMAT_BYTES, TENSOR_TYPES, WORDS
from megatron_lite.analysis.kernels.roles import bare_operator, get_operator_role
from megatron_lite.analysis.trace.columns import Shapes

# First and second factor among the arguments; "t": the second one's rows are the result's columns.
PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_mm", "aten::_scaled_mm", "aten::_int_mm"), (0, 1, "n")),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation"), (1, 2, "n")),
    **dict.fromkeys(("mkldnn::_linear_pointwise", "aten::mkldnn_linear"), (0, 1, "t")),
}
# Without a product of its own inside; as the innermost operator they compute it themselves.
WRAPPERS = {"aten::linear": (0, 1, "t"), "aten::matmul": (0, 1, "n")}
# "h": [batch, heads, tokens, width], "t": [batch, tokens, heads, width].
_LAYOUTS = {
    "aten::_scaled_dot_product_flash_attention": "h",
    "aten::_scaled_dot_product_efficient_attention": "h",
    "aten::_scaled_dot_product_cudnn_attention": "h",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "h",
    "aten::_scaled_dot_product_fused_attention_overrideable": "h",
    "aten::_cudnn_attention_forward": "h",
    "aten::_flash_attention_forward": "t",
    "aten::_efficient_attention_forward": "t",
    "flash_attn::_flash_attn_forward": "t",
    "FlashAttnFunc": "t",
}
# Place of the queries among the arguments, and the layout.
ATTENTION = {name: (0, layout) for name, layout in _LAYOUTS.items()}
ATTENTION_BACKWARD = {f"{name.removesuffix('_forward')}_backward": (1, layout) for name, layout in _LAYOUTS.items()}
# Places of the result's gradient, the input and the weight; how many products of the forward pass's size are computed.
CONVOLUTIONS_BACKWARD = {
    "aten::convolution_backward": (0, 1, 2, 2),
    "aten::cudnn_convolution_backward": (1, 0, 2, 2),
    "aten::miopen_convolution_backward": (1, 0, 2, 2),
    "aten::mkldnn_convolution_backward": (1, 0, 2, 2),
}
CONVOLUTIONS = tuple(WORDS["operators"]["convolutions"].split())
# Products in a backward pass by FlashAttention's algorithm: five, of which one repeats forward's; forward has two
# (Dao 2023, FlashAttention-2, algorithm 2).
BACKWARD_OF_ATTENTION, REPEATED_IN_ATTENTION = 2.5, 0.5
LARGEST = 2**40  # a size beyond it is damage

# Operators that do little arithmetic, whose bytes count.
ROLES = (Role.ELEMENTWISE, Role.NORM, Role.SOFTMAX, Role.REDUCTION, Role.CAST_COPY, Role.OPTIMIZER)
_ONLY_WRITE, _NO_RESULT, _NOT_KNOWN = (
    WORDS["operators"][name].split() for name in ("write only", "no result", "unknown")
)
_FUSED_ADAM = ("_fused_adamw", "_fused_adam")
_ADAM_PASSES = 7  # parameters, gradients and two moments are read; all but the gradients are written


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
        return _compute_product(shapes, otherwise, *(PRODUCTS.get(operator) or WRAPPERS[operator]))
    if operator in ATTENTION or operator in ATTENTION_BACKWARD:
        backward = operator in ATTENTION_BACKWARD
        return _compute_attention(
            shapes, otherwise, backward, *(ATTENTION_BACKWARD if backward else ATTENTION)[operator]
        )
    if operator in CONVOLUTIONS or operator in CONVOLUTIONS_BACKWARD:
        return _compute_convolution(operator, shapes, otherwise, results or {})
    return _count_bytes(operator, shapes, otherwise)


def count_results(operator: str, shapes: Shapes) -> dict[tuple, tuple]:
    """{(input, weight): result} of a convolution's backward pass; {} for others."""
    places = CONVOLUTIONS_BACKWARD.get(operator)
    if not places or not all(_is_sound(one) for one in shapes.dims) or len(shapes.dims) < 3:
        return {}
    result, given, weight, _ = places
    return {(shapes.dims[given], shapes.dims[weight]): shapes.dims[result]}


def _is_sound(dims) -> bool:
    if isinstance(dims, tuple):
        return all(_is_sound(one) for one in dims)
    return isinstance(dims, int) and 0 <= dims < LARGEST


def _is_flat(dims) -> bool:
    return isinstance(dims, tuple) and all(isinstance(one, int) for one in dims)


def _get_tensor(shapes: Shapes, place: int, fewest: int) -> tuple[int, ...] | None:
    """An argument's dimensions; None for fewer than `fewest`."""
    dims = shapes.dims[place] if place < len(shapes.dims) else ()
    return dims if _is_flat(dims) and len(dims) >= fewest else None


def _get_format(shapes: Shapes, place: int, otherwise: str) -> tuple[str, int]:
    """(number format, bytes of an element) of an argument; ("", 0) if unknown."""
    written = shapes.dtypes[place] if place < len(shapes.dtypes) else ""
    return TENSOR_TYPES.get(written) or (otherwise, FORMAT_BYTES.get(otherwise, 0))


def _describe(tensors, dtype: str) -> str:
    """'[8192, 1024] x [1024, 4096] bf16'."""
    return " x ".join(str(list(one)) for one in tensors) + (f" {dtype}" if dtype else "")


def _compute_product(shapes: Shapes, otherwise: str, first: int, second: int, layout: str) -> Work | None:
    a, b = _get_tensor(shapes, first, 2), _get_tensor(shapes, second, 2)
    if a is None or b is None:
        return None
    inner, columns = (b[-1], b[-2]) if layout == "t" else (b[-2], b[-1])
    if a[-1] != inner:
        return None
    dtype, size = _get_format(shapes, first, otherwise)
    folded = layout == "t" or len(b) == 2  # leading dimensions are rows
    batch = 1 if folded else max(math.prod(a[:-2]), math.prod(b[:-2]))
    rows = math.prod(a[:-1]) if folded else a[-2]
    num_bytes = float(size * (math.prod(a) + math.prod(b) + batch * rows * columns))
    flops = 2.0 * batch * rows * columns * inner
    return Work(Role.GEMM, _describe((a, b), dtype), (rows, columns, inner), dtype, flops, num_bytes)


def _compute_attention(shapes: Shapes, otherwise: str, backward: bool, place: int, layout: str) -> Work | None:
    q, k, v = (_get_tensor(shapes, place + at, 4) for at in range(3))
    if q is None or k is None or v is None or len(q) != 4:
        return None
    dtype, size = _get_format(shapes, place, otherwise)
    heads_at, tokens_at = (1, 2) if layout == "h" else (2, 1)
    batch, heads, queries, keys, width = q[0], q[heads_at], q[tokens_at], k[tokens_at], q[3]
    forward = 2.0 * batch * heads * queries * keys * (width + v[3])
    flops, repeated = (BACKWARD_OF_ATTENTION * forward, REPEATED_IN_ATTENTION * forward) if backward else (forward, 0.0)
    once, result = math.prod(q) + math.prod(k) + math.prod(v), batch * heads * queries * v[3]
    # Backward reads q, k, v, the result and its gradient, and writes three gradients.
    num_bytes = float(size * (2 * (once + result) if backward else once + result))
    dims = (batch, heads, queries, keys, width)
    return Work(Role.ATTENTION, _describe((q, k), dtype), dims, dtype, flops, num_bytes, repeated)


def _compute_convolution(operator: str, shapes: Shapes, otherwise: str, results: dict) -> Work | None:
    result_at, given_at, weight_at, products = CONVOLUTIONS_BACKWARD.get(operator, (None, 0, 1, 1))
    given, weight = _get_tensor(shapes, given_at, 3), _get_tensor(shapes, weight_at, 3)
    if given is None or weight is None:
        return None
    result = results.get((given, weight)) if result_at is None else _get_tensor(shapes, result_at, 3)
    if result is None:
        return None
    dtype, size = _get_format(shapes, given_at, otherwise)
    # weight: [out, in / groups, *kernel]; every element of the result takes one pass over a filter.
    flops = 2.0 * products * math.prod(result) * math.prod(weight[1:])
    num_bytes = float(size * products * (math.prod(given) + math.prod(weight) + math.prod(result)))
    return Work(Role.CONVOLUTION, _describe((given, weight), dtype), (), dtype, flops, num_bytes)


def _count_bytes(operator: str, shapes: Shapes, otherwise: str) -> Work | None:
    """Of an operator whose limit is memory bandwidth."""
    if not operator.startswith("aten::"):
        return None  # what code of other libraries does with its arguments is not known
    role, bare = get_operator_role(operator), bare_operator(operator)
    if bare in _FUSED_ADAM:
        parameters = shapes.dims[0] if shapes.dims else ()
        sound = isinstance(parameters, tuple) and parameters and all(map(_is_flat, parameters))
        if not sound or otherwise not in FORMAT_BYTES:
            return None
        elements = sum(map(math.prod, parameters))
        num_bytes = float(_ADAM_PASSES * elements * FORMAT_BYTES[otherwise])
        return Work(role, _describe([(elements,)], otherwise), (), otherwise, 0.0, num_bytes)
    tensors = [
        (dims, *TENSOR_TYPES[dtype])
        for dims, dtype in zip(shapes.dims, shapes.dtypes)
        if dtype in TENSOR_TYPES and _is_flat(dims)
    ]
    if not tensors:
        return None
    each = [math.prod(dims) * size for dims, _, size in tensors]
    if bare == "embedding" and len(tensors) > 1:
        (table, _, size), (indices, _, _) = tensors[:2]
        moved = 2 * math.prod(indices) * math.prod(table[1:]) * size + each[1]
    elif role not in ROLES or bare in _NOT_KNOWN:
        return None
    elif bare in _ONLY_WRITE:
        moved = each[0]
    else:  # the result is as large as the largest argument
        moved = sum(each) + (0 if bare in _NO_RESULT else max(each))
    dtype = tensors[0][1]
    return Work(role, _describe([dims for dims, _, _ in tensors[:3]], dtype), (), dtype, 0.0, float(moved))
