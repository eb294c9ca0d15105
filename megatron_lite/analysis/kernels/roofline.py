"""Operators with their shapes against what the hardware can do at most."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.kernels.kernel_names import KernelName
from megatron_lite.analysis.kernels.kernel_results import Role, RooflineRow
from megatron_lite.analysis.kernels.kernel_words import (
    FORMAT_BYTES,
    TENSOR_TYPES,
    WORDS,
    bare_operator,
    get_operator_role,
)
from megatron_lite.analysis.kernels.selection import Selection, heaviest
from megatron_lite.analysis.trace.columns import Kind, Shapes
from megatron_lite.formats.hardware import match_processor, peak_tflops

# --- arithmetic and memory traffic of an operator from the shapes of its arguments
#
# A multiply-add is two operations. Bytes: every input is read once and every output written once; no kernel needs less.

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
# Places of the result's gradient, the input and the weight; how many products of the forward pass's size are computed
# where no output mask tells: the gradients of both.
CONVOLUTIONS_BACKWARD = {
    "aten::convolution_backward": (0, 1, 2, 2),
    "aten::cudnn_convolution_backward": (1, 0, 2, 2),
    "aten::miopen_convolution_backward": (1, 0, 2, 2),
    "aten::mkldnn_convolution_backward": (1, 0, 2, 2),
}
CONVOLUTIONS = tuple(WORDS["operators"]["convolutions"].split())
# Products in a backward pass by FlashAttention's algorithm: five, of which one repeats forward's; forward has two
# (Dao 2023, FlashAttention-2, algorithm 2).
BACKWARD_OF_ATTENTION = 2.5
REPEATED_IN_ATTENTION = 0.5
LARGEST = 2**40  # a size beyond it is damage

# Operators that do little arithmetic, whose bytes count.
ROLES = (Role.ELEMENTWISE, Role.NORM, Role.SOFTMAX, Role.REDUCTION, Role.CAST_COPY, Role.OPTIMIZER)
_BYTES = WORDS["operators"]
_ONLY_WRITE = _BYTES["write only"].split()
_NO_RESULT = _BYTES["no result"].split()
_NOT_KNOWN = _BYTES["unknown"].split()
_FUSED_ADAM = ("_fused_adamw", "_fused_adam")
_ADAM_PASSES = 7  # parameters, gradients and two moments are read; all but the gradients are written

Results = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]  # sizes: (input, weight) -> result


@dataclass(frozen=True)
class Work:
    """A call of an operator."""

    role: Role
    shape: str
    dims: tuple[int, ...]  # as RooflineRow.dims
    dtype: str  # "" where the trace does not say
    flops: float  # that it computes; attention: all scores
    num_bytes: float
    repeated: float = 0.0  # part of flops that only saves memory: attention's backward pass computes the scores again

    @property
    def model_flops(self) -> float:
        """FLOPs that the model asks for, as MFU counts them."""
        return self.flops - self.repeated


def compute_work(
    operator: str,
    shapes: Shapes,
    otherwise: str = "",
    results: Results | None = None,
) -> Work | None:
    """Compute what one call of an operator does.

    Args:
        operator: its name.
        shapes: of its arguments.
        otherwise: number format to take where the trace has none.
        results: sizes of convolutions' results by (input, weight), which only the backward pass's arguments show; see
            count_results.

    Returns:
        None for what no formula is known, or whose shapes are missing or damaged.
    """
    if not all(_is_sound(one) for one in shapes.dims):
        return None
    if operator in PRODUCTS:
        return _compute_product(shapes, otherwise, *PRODUCTS[operator])
    if operator in WRAPPERS:
        return _compute_product(shapes, otherwise, *WRAPPERS[operator])
    if operator in ATTENTION:
        return _compute_attention(shapes, otherwise, *ATTENTION[operator])
    if operator in ATTENTION_BACKWARD:
        forward = _compute_attention(shapes, otherwise, *ATTENTION_BACKWARD[operator])
        return _turn_backward(forward) if forward else None
    if operator in CONVOLUTIONS or operator in CONVOLUTIONS_BACKWARD:
        return _compute_convolution(operator, shapes, otherwise, results or {})
    return _count_bytes(operator, shapes, otherwise)


def count_results(operator: str, shapes: Shapes) -> Results:
    """Find the products of a convolution's backward pass, result by input and weight; {} for others."""
    places = CONVOLUTIONS_BACKWARD.get(operator)
    if not places or not all(_is_sound(one) for one in shapes.dims) or len(shapes.dims) < 3:
        return {}
    result_at, given_at, weight_at, _ = places
    sizes = (shapes.dims[given_at], shapes.dims[weight_at])
    return {sizes: shapes.dims[result_at]}


def _is_sound(dims: object) -> bool:
    """No size of these dimensions, which may be nested, is damaged."""
    if isinstance(dims, tuple):
        return all(_is_sound(one) for one in dims)
    return isinstance(dims, int) and 0 <= dims < LARGEST


def _is_flat(dims: object) -> TypeGuard[tuple[int, ...]]:
    """Tell whether these are the dimensions of one tensor."""
    return isinstance(dims, tuple) and all(isinstance(one, int) for one in dims)


def _get_tensor(shapes: Shapes, place: int, fewest: int) -> tuple[int, ...] | None:
    """An argument's dimensions; None for fewer than `fewest`."""
    dims = shapes.dims[place] if place < len(shapes.dims) else ()
    return dims if _is_flat(dims) and len(dims) >= fewest else None


def _get_format(shapes: Shapes, place: int, otherwise: str) -> tuple[str, int]:
    """Find the number format of an argument and the bytes of an element; ("", 0) if unknown."""
    written = shapes.dtypes[place] if place < len(shapes.dtypes) else ""
    return TENSOR_TYPES.get(written) or (otherwise, FORMAT_BYTES.get(otherwise, 0))


def _describe(tensors: Iterable[tuple[int, ...]], dtype: str) -> str:
    """Write shapes: "[8192, 1024] x [1024, 4096] bf16"."""
    sizes = " x ".join(str(list(one)) for one in tensors)
    return f"{sizes} {dtype}" if dtype else sizes


def _compute_product(
    shapes: Shapes,
    otherwise: str,
    first: int,
    second: int,
    layout: str,
) -> Work | None:
    """Compute a matrix product.

    Args:
        shapes: of the operator's arguments.
        otherwise: number format to take where the trace has none.
        first: place of the first factor among the arguments.
        second: place of the second one.
        layout: "t": the second factor's rows are the result's columns; else "n".
    """
    a = _get_tensor(shapes, first, 2)
    b = _get_tensor(shapes, second, 2)
    if a is None or b is None:
        return None
    inner = b[-1] if layout == "t" else b[-2]
    columns = b[-2] if layout == "t" else b[-1]
    if a[-1] != inner:
        return None
    if layout == "t" or len(b) == 2:
        # leading dimensions are rows
        batch = 1
        rows = math.prod(a[:-1])
    else:
        batch = max(math.prod(a[:-2]), math.prod(b[:-2]))
        rows = a[-2]
    dtype, size = _get_format(shapes, first, otherwise)
    elements = math.prod(a) + math.prod(b) + batch * rows * columns
    return Work(
        role=Role.GEMM,
        shape=_describe((a, b), dtype),
        dims=(rows, columns, inner),
        dtype=dtype,
        flops=2.0 * batch * rows * columns * inner,
        num_bytes=float(size * elements),
    )


def _compute_attention(
    shapes: Shapes,
    otherwise: str,
    place: int,
    layout: str,
) -> Work | None:
    """Compute attention's forward pass.

    Args:
        shapes: of the operator's arguments.
        otherwise: number format to take where the trace has none.
        place: of the queries among the arguments; keys and values follow.
        layout: as in _LAYOUTS.
    """
    q = _get_tensor(shapes, place, 4)
    k = _get_tensor(shapes, place + 1, 4)
    v = _get_tensor(shapes, place + 2, 4)
    if q is None or k is None or v is None or len(q) != 4:
        return None
    heads_at = 1 if layout == "h" else 2
    tokens_at = 3 - heads_at
    batch = q[0]
    heads = q[heads_at]
    queries = q[tokens_at]
    keys = k[tokens_at]
    width = q[3]
    value_width = v[3]
    dtype, size = _get_format(shapes, place, otherwise)
    arguments = math.prod(q) + math.prod(k) + math.prod(v)
    result = batch * heads * queries * value_width
    return Work(
        role=Role.ATTENTION,
        shape=_describe((q, k), dtype),
        dims=(batch, heads, queries, keys, width),
        dtype=dtype,
        flops=2.0 * batch * heads * queries * keys * (width + value_width),
        num_bytes=float(size * (arguments + result)),
    )


def _turn_backward(forward: Work) -> Work:
    """Attention's backward pass, which reads q, k, v, the result and its gradient, and writes three gradients."""
    return replace(
        forward,
        flops=BACKWARD_OF_ATTENTION * forward.flops,
        num_bytes=2 * forward.num_bytes,
        repeated=REPEATED_IN_ATTENTION * forward.flops,
    )


def _compute_convolution(
    operator: str,
    shapes: Shapes,
    otherwise: str,
    results: Results,
) -> Work | None:
    """Compute a convolution, forward or backward. The arguments are compute_work's."""
    result_at, given_at, weight_at, products = CONVOLUTIONS_BACKWARD.get(operator, (None, 0, 1, 1))
    given = _get_tensor(shapes, given_at, 3)
    weight = _get_tensor(shapes, weight_at, 3)
    if given is None or weight is None:
        return None
    if result_at is None:
        result = results.get((given, weight))
    else:
        result = _get_tensor(shapes, result_at, 3)
        if shapes.output_mask:
            # input and weight; the bias's gradient is a sum
            products = sum(shapes.output_mask[:2])
    if result is None or not products:
        return None
    dtype, size = _get_format(shapes, given_at, otherwise)
    elements = math.prod(given) + math.prod(weight) + math.prod(result)
    # weight: [out, in / groups, *kernel]; every element of the result takes one pass over a filter.
    filter_size = math.prod(weight[1:])
    return Work(
        role=Role.CONVOLUTION,
        shape=_describe((given, weight), dtype),
        dims=(),
        dtype=dtype,
        flops=2.0 * products * math.prod(result) * filter_size,
        num_bytes=float(size * products * elements),
    )


def _count_bytes(operator: str, shapes: Shapes, otherwise: str) -> Work | None:
    """Count the bytes of an operator whose limit is memory bandwidth.

    Args:
        operator: its name.
        shapes: of its arguments.
        otherwise: number format to take where the trace has none.

    Returns:
        Its work; None where it is not known what the operator moves.
    """
    # what code of other libraries does with its arguments is not known
    if not operator.startswith("aten::"):
        return None
    role = get_operator_role(operator)
    bare = bare_operator(operator)
    if bare in _FUSED_ADAM:
        return _count_adam_bytes(role, shapes, otherwise)
    tensors = _list_tensors(shapes)
    if not tensors:
        return None
    is_known = role in ROLES and bare not in _NOT_KNOWN
    if bare == "embedding" and len(tensors) > 1:
        table, indices, *_ = tensors
        row_bytes = math.prod(table.dims[1:]) * table.element_bytes
        # each row is read and written
        moved = 2 * math.prod(indices.dims) * row_bytes + indices.num_bytes
    elif not is_known:
        return None
    elif bare in _ONLY_WRITE:
        moved = tensors[0].num_bytes
    else:
        moved = sum(tensor.num_bytes for tensor in tensors)
        if bare not in _NO_RESULT:
            # the result is as large as the largest argument
            moved += max(tensor.num_bytes for tensor in tensors)
    dtype = tensors[0].dtype
    shape = _describe([tensor.dims for tensor in tensors[:3]], dtype)
    return _make_moving_work(role, shape, dtype, moved)


def _make_moving_work(role: Role, shape: str, dtype: str, num_bytes: int) -> Work:
    """Work that only moves bytes."""
    return Work(
        role=role,
        shape=shape,
        dims=(),
        dtype=dtype,
        flops=0.0,
        num_bytes=float(num_bytes),
    )


def _list_tensors(shapes: Shapes) -> list["_Tensor"]:
    """The arguments that are tensors of a known type."""
    tensors = []
    for dims, written in zip(shapes.dims, shapes.dtypes):
        if written in TENSOR_TYPES and _is_flat(dims):
            dtype, size = TENSOR_TYPES[written]
            tensors.append(_Tensor(dims, dtype, size))
    return tensors


@dataclass(frozen=True)
class _Tensor:
    """An argument of an operator."""

    dims: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.dims) * self.element_bytes


def _count_adam_bytes(role: Role, shapes: Shapes, otherwise: str) -> Work | None:
    """Count the bytes of a fused Adam step, whose first argument is the list of parameters.

    Args:
        role: the operator's role.
        shapes: of its arguments.
        otherwise: the parameters' number format, which lists of tensors do not show.
    """
    parameters = shapes.dims[0] if shapes.dims else ()
    is_sound = isinstance(parameters, tuple) and parameters and all(_is_flat(dims) for dims in parameters)
    if not is_sound or otherwise not in FORMAT_BYTES:
        return None
    elements = sum(math.prod(dims) for dims in parameters)
    num_bytes = _ADAM_PASSES * elements * FORMAT_BYTES[otherwise]
    return _make_moving_work(role, _describe([(elements,)], otherwise), otherwise, num_bytes)


# --- operators with their shapes against what the hardware can do at most

MAX_LEVELS_UP = 12  # from a kernel's operator up to the one with a formula: three or four in real traces
_INNERMOST = {*PRODUCTS, *CONVOLUTIONS, *CONVOLUTIONS_BACKWARD}  # aten::addmm rather than aten::linear around it
# Attention's arguments tell heads from tokens, those of the operators inside do not.
_OUTERMOST = {*ATTENTION, *ATTENTION_BACKWARD}
_ENGINE = "autograd::engine::evaluate_function"
_MOVES = (Role.TRANSFER, Role.COMMUNICATION)  # limited by other things than the device's arithmetic and memory


@dataclass(frozen=True)
class OperatorCalls:
    """Calls of one operator with one set of shapes in one phase. ms and calls are per steady step."""

    operator: str
    phase: str
    work: Work
    kernel: KernelName | None  # the one that takes most of their time
    per_step: float
    ms: float
    recomputed: bool

    @property
    def precision(self) -> str:
        """The number format whose peak counts: the kernel's where it is TF32, which no argument shows."""
        is_tf32 = self.kernel is not None and self.kernel.precision == "tf32"
        return "tf32" if is_tf32 else self.work.dtype

    @property
    def is_causal(self) -> bool | None:
        """Tell whether attention skips what a causal mask hides; None where no name says, and for other work."""
        if self.kernel is None or self.work.role is not Role.ATTENTION:
            return None
        return self.kernel.causal

    @property
    def flops(self) -> float:
        """FLOPs per step, as a kernel does them that skips what a causal mask hides."""
        flops = self.work.flops * self.per_step
        if self.is_causal and len(self.work.dims) == 5:
            _, _, queries, keys, _ = self.work.dims
            if queries == keys:
                return 0.5 * flops
        return flops

    @property
    def model_flops(self) -> float:
        """FLOPs per step that the model asks for; attention: all scores."""
        return self.work.model_flops * self.per_step

    @property
    def num_bytes(self) -> float:
        """Bytes that are moved per step."""
        return self.work.num_bytes * self.per_step


def collect_calls(
    chosen: Selection,
    on_gpu: bool,
    known: dict[str, KernelName],
) -> list[OperatorCalls]:
    """Collect all calls whose work follows from their shapes.

    Args:
        chosen: the trace's events in steady steps.
        on_gpu: whether the device's work is priced; else the operators' own time on the host.
        known: kernels' names taken apart.
    """
    trace = chosen.trace
    rows, operator = _find_priced(chosen, on_gpu, known)
    if not len(rows):
        return []
    groups = _group_calls(chosen, rows, operator)
    count = len(groups.heads)
    ms = np.bincount(groups.group, chosen.ms[rows], count)
    kernels = heaviest(groups.group, trace.events.name[rows].astype(np.int64), chosen.ms[rows], count)
    calls = _count_calls(operator, groups.group, len(trace.events), count)
    # sizes of convolutions' results, by the sizes of their input and weight
    results: Results = {}
    for head in groups.heads:
        results |= count_results(head.operator, head.shapes)
    found = []
    for at, head in enumerate(groups.heads):
        kernel = known.get(trace.names[kernels[at]])
        precision = kernel.precision if kernel else ""
        work = compute_work(head.operator, head.shapes, precision, results)
        if work is None:
            continue
        found.append(
            OperatorCalls(
                operator=head.operator,
                phase=head.phase,
                work=work,
                kernel=kernel,
                per_step=float(calls[at] / chosen.steps),
                ms=float(ms[at]),
                recomputed=head.is_recomputed,
            )
        )
    return found


@dataclass(frozen=True)
class _Head:
    """Traits that the calls of a group have in common."""

    operator: str
    shapes: Shapes
    phase: str
    is_recomputed: bool


@dataclass(frozen=True)
class _Groups:
    """Calls of one operator with the same shapes in the same phase, as groups."""

    heads: list[_Head]  # of each group
    group: Integers  # [k], the group of each piece of work


def _group_calls(
    chosen: Selection,
    rows: Integers,  # [k], pieces of work
    operator: Integers,  # [k], row of the operator of each
) -> _Groups:
    trace = chosen.trace
    names = trace.events.name[operator].astype(np.int64)
    shapes = trace.events.shapes[operator]
    phase_names = ("", *chosen.placing.phases)
    phase = chosen.placing.phase[rows] + 1
    recomputed = _find_recomputed(chosen, operator)
    # the four as one number
    keys = names * len(trace.shapes) + shapes
    keys = keys * len(phase_names) + phase
    keys = keys * 2 + recomputed
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    heads = []
    for at in first.tolist():
        heads.append(
            _Head(
                operator=trace.names[names[at]],
                shapes=trace.shapes[shapes[at]],
                phase=phase_names[phase[at]],
                is_recomputed=bool(recomputed[at]),
            )
        )
    return _Groups(heads, group)


def _count_calls(
    operator: Integers,  # [k], row of the operator of each piece of work
    group: Integers,  # [k]
    events: int,
    groups: int,
) -> Integers:
    """Count the operators of each group, int64 [groups]; one may launch several kernels, and counts once."""
    group_of_event = np.full(events, -1)
    group_of_event[operator] = group
    groups_of_operators = group_of_event[group_of_event >= 0]
    return np.bincount(groups_of_operators, minlength=groups)


def _find_priced(
    chosen: Selection,
    on_gpu: bool,
    known: dict[str, KernelName],
) -> tuple[Integers, Integers]:
    """Find events whose work follows from shapes, and the operator of each. The arguments are collect_calls'."""
    events = chosen.trace.events
    if on_gpu:
        rows = chosen.device
        operator = _find_targets(chosen)
    else:
        rows = _find_uncovered(chosen)
        operator = rows
    roles = {name: kernel.role for name, kernel in known.items()}
    is_move = chosen.trace.matching(lambda name: roles.get(name) in _MOVES)
    has_shapes = (operator >= 0) & (events.shapes[operator] >= 0)
    is_priced = has_shapes & ~is_move[rows]
    return rows[is_priced], operator[is_priced]


def _find_targets(chosen: Selection) -> Integers:
    """Find the operator of each piece of device work whose shapes count, int64 [k]; -1 for none.

    It is products' innermost operator, attention's outermost, or its own.
    """
    is_inner = chosen.trace.matching(_INNERMOST.__contains__)
    is_outer = chosen.trace.matching(_OUTERMOST.__contains__)
    own = chosen.placing.operator[chosen.device]
    target = np.full(len(own), -1, np.int64)
    # all pieces at once go outwards by one operator in each turn
    current = own
    for _ in range(MAX_LEVELS_UP):
        here = current >= 0
        if not here.any():
            break
        is_first_inner = is_inner[current] & (target < 0)
        is_target = here & (is_first_inner | is_outer[current])
        target = np.where(is_target, current, target)
        current = np.where(here, chosen.placing.operator[current], -1)
    return np.where(target < 0, own, target)


def _find_uncovered(chosen: Selection) -> Integers:
    """Rows of the operators that no other formula covers: without a GPU their own duration is the time of the work."""
    operator = chosen.placing.operator
    rows = chosen.operators
    covers = chosen.trace.matching((_INNERMOST | _OUTERMOST).__contains__)
    is_covered = np.zeros(len(rows), bool)
    current = operator[rows]
    for _ in range(MAX_LEVELS_UP):
        here = current >= 0
        is_covered |= here & covers[current]
        current = np.where(here, operator[current], -1)
    is_leaf = np.ones(len(operator), bool)
    parents = operator[rows]
    is_leaf[parents[parents >= 0]] = False
    has_formula = is_leaf[rows] | covers[rows]
    return rows[has_formula & ~is_covered]


def _find_recomputed(chosen: Selection, rows: Integers) -> Flags:
    """Find forward operators within the backward pass, which are activation recomputation; bool per operator row.

    It has a sequence number of its own (gradients are recorded) and no forward thread, unlike the backward pass itself.
    """
    events = chosen.trace.events
    operator = chosen.placing.operator
    is_engine = chosen.trace.matching(lambda name: name.startswith(_ENGINE))
    is_forward = (events.kind == Kind.OP) & (events.forward_thread <= 0)
    records = is_forward & (events.sequence >= 0) & ~is_engine
    is_within = np.zeros(len(events), bool)
    is_recorded = np.zeros(len(events), bool)
    # all operators at once go outwards by one in each turn, and begin with themselves
    start = np.unique(rows)
    current = start
    for _ in range(MAX_LEVELS_UP):
        is_within[start] |= is_engine[current]
        is_recorded[start] |= records[current]
        above = operator[current]
        start = start[above >= 0]
        current = above[above >= 0]
        if not len(current):
            break
    return is_within[rows] & is_recorded[rows]


def roofline_rows(calls: list[OperatorCalls], device: str | None) -> tuple[RooflineRow, ...]:
    """Hold calls against the hardware: largest loss against the bound first; without a bound the longest first."""
    rows = [_make_row(one, device) for one in calls]
    return tuple(sorted(rows, key=lambda row: -(row.ms - (row.bound_ms or 0.0))))


def _make_row(call: OperatorCalls, device: str | None) -> RooflineRow:
    """Hold a call against the device."""
    bound_ms, bound_by = _find_bound(call, device)
    return RooflineRow(
        operator=call.operator,
        phase=call.phase,
        shape=call.work.shape,
        dims=call.work.dims,
        role=call.work.role,
        dtype=call.work.dtype,
        per_step=call.per_step,
        ms=call.ms,
        flops=call.flops,
        num_bytes=call.num_bytes,
        achieved_tflops=call.flops / call.ms / 1e9 if call.ms else 0.0,
        achieved_gb_s=call.num_bytes / call.ms / 1e6 if call.ms else 0.0,
        bound_ms=bound_ms,
        bound_by=bound_by,
        efficiency=bound_ms / call.ms if bound_ms is not None and call.ms else None,
        causal=call.is_causal,
    )


def _find_bound(call: OperatorCalls, device: str | None) -> tuple[float | None, str]:
    """Find the least ms per step of the device, and "compute" or "memory" as its bound; (None, "") if unknown."""
    peak = peak_tflops(device, name_peak(call.precision))
    processor = match_processor(device)
    memory_gb_s = processor.memory_gb_s if processor else None
    compute_ms = _divide(call.flops, peak, 1e9)
    memory_ms = _divide(call.num_bytes, memory_gb_s, 1e6)
    # Both limits must be known that the work has.
    if compute_ms is None or memory_ms is None or not (call.flops or call.num_bytes):
        return None, ""
    if compute_ms >= memory_ms:
        return compute_ms, "compute"
    return memory_ms, "memory"


def name_peak(precision: str) -> str:
    """The number format whose peak a precision has: both of 16 bits have the same."""
    return "fp16" if precision == "fp16/bf16" else precision


def _divide(amount: float, rate: float | None, per_unit: float) -> float | None:
    """How long an amount takes at a rate; nothing takes no time, whatever the rate, and None is not known."""
    if not amount:
        return 0.0
    return amount / rate / per_unit if rate else None
