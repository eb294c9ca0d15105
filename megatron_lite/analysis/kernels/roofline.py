"""Operators with their shapes against what the hardware can do at most."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
BACKWARD_OF_ATTENTION, REPEATED_IN_ATTENTION = 2.5, 0.5
LARGEST = 2**40  # a size beyond it is damage

# Operators that do little arithmetic, whose bytes count.
ROLES = (Role.ELEMENTWISE, Role.NORM, Role.SOFTMAX, Role.REDUCTION, Role.CAST_COPY, Role.OPTIMIZER)
_BYTES = WORDS["operators"]
_ONLY_WRITE, _NO_RESULT, _NOT_KNOWN = (_BYTES[name].split() for name in ("write only", "no result", "unknown"))
_FUSED_ADAM = ("_fused_adamw", "_fused_adam")
_ADAM_PASSES = 7  # parameters, gradients and two moments are read; all but the gradients are written

Results = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]  # sizes: (input, weight) -> result


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


def compute_work(operator: str, shapes: Shapes, otherwise: str = "", results: Results | None = None) -> Work | None:
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
        place, layout = (ATTENTION_BACKWARD if backward else ATTENTION)[operator]
        return _compute_attention(shapes, otherwise, backward, place, layout)
    if operator in CONVOLUTIONS or operator in CONVOLUTIONS_BACKWARD:
        return _compute_convolution(operator, shapes, otherwise, results or {})
    return _count_bytes(operator, shapes, otherwise)


def count_results(operator: str, shapes: Shapes) -> Results:
    """{(input, weight): result} of a convolution's backward pass; {} for others."""
    places = CONVOLUTIONS_BACKWARD.get(operator)
    if not places or not all(_is_sound(one) for one in shapes.dims) or len(shapes.dims) < 3:
        return {}
    result, given, weight, _ = places
    return {(shapes.dims[given], shapes.dims[weight]): shapes.dims[result]}


def _is_sound(dims: object) -> bool:
    if isinstance(dims, tuple):
        return all(_is_sound(one) for one in dims)
    return isinstance(dims, int) and 0 <= dims < LARGEST


def _is_flat(dims: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(dims, tuple) and all(isinstance(one, int) for one in dims)


def _get_tensor(shapes: Shapes, place: int, fewest: int) -> tuple[int, ...] | None:
    """An argument's dimensions; None for fewer than `fewest`."""
    dims = shapes.dims[place] if place < len(shapes.dims) else ()
    return dims if _is_flat(dims) and len(dims) >= fewest else None


def _get_format(shapes: Shapes, place: int, otherwise: str) -> tuple[str, int]:
    """(number format, bytes of an element) of an argument; ("", 0) if unknown."""
    written = shapes.dtypes[place] if place < len(shapes.dtypes) else ""
    return TENSOR_TYPES.get(written) or (otherwise, FORMAT_BYTES.get(otherwise, 0))


def _describe(tensors: Iterable[tuple[int, ...]], dtype: str) -> str:
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


def _compute_convolution(operator: str, shapes: Shapes, otherwise: str, results: Results) -> Work | None:
    result_at, given_at, weight_at, products = CONVOLUTIONS_BACKWARD.get(operator, (None, 0, 1, 1))
    given, weight = _get_tensor(shapes, given_at, 3), _get_tensor(shapes, weight_at, 3)
    if given is None or weight is None:
        return None
    result = results.get((given, weight)) if result_at is None else _get_tensor(shapes, result_at, 3)
    if result_at is not None and shapes.output_mask:
        products = sum(shapes.output_mask[:2])  # input and weight; the bias's gradient is a sum
    if result is None or not products:
        return None
    dtype, size = _get_format(shapes, given_at, otherwise)
    # weight: [out, in / groups, *kernel]; every element of the result takes one pass over a filter.
    flops = 2.0 * products * math.prod(result) * math.prod(weight[1:])
    num_bytes = float(size * products * (math.prod(given) + math.prod(weight) + math.prod(result)))
    return Work(Role.CONVOLUTION, _describe((given, weight), dtype), (), dtype, flops, num_bytes)


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
    tensors = []
    for dims, written in zip(shapes.dims, shapes.dtypes):
        if written in TENSOR_TYPES and _is_flat(dims):
            dtype, size = TENSOR_TYPES[written]
            tensors.append(_Tensor(dims, dtype, size))
    if not tensors:
        return None
    if bare == "embedding" and len(tensors) > 1:
        table = tensors[0]
        indices = tensors[1]
        moved = 2 * math.prod(indices.dims) * math.prod(table.dims[1:]) * table.element_bytes + indices.num_bytes
    elif role not in ROLES or bare in _NOT_KNOWN:
        return None
    elif bare in _ONLY_WRITE:
        moved = tensors[0].num_bytes
    else:
        moved = sum(tensor.num_bytes for tensor in tensors)
        if bare not in _NO_RESULT:
            # the result is as large as the largest argument
            moved += max(tensor.num_bytes for tensor in tensors)
    dtype = tensors[0].dtype
    return Work(role, _describe([tensor.dims for tensor in tensors[:3]], dtype), (), dtype, 0.0, float(moved))


@dataclass(frozen=True)
class _Tensor:
    """One argument of an operator."""

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
    num_bytes = float(_ADAM_PASSES * elements * FORMAT_BYTES[otherwise])
    return Work(role, _describe([(elements,)], otherwise), (), otherwise, 0.0, num_bytes)


# --- operators with their shapes against what the hardware can do at most

DEEPEST = 12  # from a kernel's operator up to the one with a formula: three or four in real traces
_INNERMOST = {*PRODUCTS, *CONVOLUTIONS, *CONVOLUTIONS_BACKWARD}  # aten::addmm rather than aten::linear around it
# Attention's arguments tell heads from tokens, those of the operators inside do not.
_OUTERMOST = {*ATTENTION, *ATTENTION_BACKWARD}
_ENGINE = "autograd::engine::evaluate_function"
_MOVES = (Role.TRANSFER, Role.COMMUNICATION)  # limited by other things than the device's arithmetic and memory


@dataclass(frozen=True)
class Calls:
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
        return "tf32" if self.kernel and self.kernel.precision == "tf32" else self.work.dtype

    @property
    def flops(self) -> float:
        """Per step, as a kernel does them that skips what a causal mask hides."""
        causal = self.work.role is Role.ATTENTION and self.kernel and self.kernel.causal
        square = len(self.work.dims) == 5 and self.work.dims[2] == self.work.dims[3]
        return self.work.flops * self.per_step * (0.5 if causal and square else 1.0)


def collect_calls(chosen: Selection, on_gpu: bool, known: dict[str, KernelName]) -> list[Calls]:
    """Collect all calls whose work follows from their shapes.

    Args:
        chosen: the trace's events in steady steps.
        on_gpu: whether the device's work is priced; else the operators' own time on the host.
        known: kernels' names taken apart.
    """
    trace = chosen.trace
    events = trace.events
    phase_names = ("", *chosen.placing.phases)
    rows, operator = _find_priced(chosen, on_gpu, known)
    if not len(rows):
        return []
    recomputed = _find_recomputed(chosen, operator)
    phase = chosen.placing.phase[rows] + 1
    # calls of one operator with the same shapes, in the same phase, are one group
    keys = events.name[operator].astype(np.int64) * len(trace.shapes) + events.shapes[operator]
    keys = (keys * len(phase_names) + phase) * 2 + recomputed
    groups, first, group = np.unique(keys, return_index=True, return_inverse=True)
    ms = np.bincount(group, chosen.ms[rows], len(groups))
    longest = heaviest(group, events.name[rows].astype(np.int64), chosen.ms[rows], len(groups))
    per_step = _count_calls(operator, group, len(events), len(groups)) / chosen.steps
    heads = [(trace.name_of(row), trace.shapes[events.shapes[row]]) for row in operator[first].tolist()]
    # sizes of convolutions' results, by the sizes of their input and weight
    results: Results = {}
    for name, shapes in heads:
        results |= count_results(name, shapes)
    found = []
    for at, (name, shapes) in enumerate(heads):
        kernel = known.get(trace.names[longest[at]])
        work = compute_work(name, shapes, kernel.precision if kernel else "", results)
        if work:
            head = first[at]
            phase_name = phase_names[phase[head]]
            is_recomputed = bool(recomputed[head])
            found.append(Calls(name, phase_name, work, kernel, float(per_step[at]), float(ms[at]), is_recomputed))
    return found


def _count_calls(operator: Integers, group: Integers, events: int, groups: int) -> Integers:
    """Count the operators of each group; one may launch several kernels, and counts once.

    Args:
        operator: [k] the operator of each piece of work, a row of the trace.
        group: [k] its group.
        events: how many events the trace has.
        groups: how many groups there are.

    Returns:
        int64 [groups].
    """
    group_of_event = np.full(events, -1)
    group_of_event[operator] = group
    return np.bincount(group_of_event[group_of_event >= 0], minlength=groups)


def _find_priced(chosen: Selection, on_gpu: bool, known: dict[str, KernelName]) -> tuple[Integers, Integers]:
    """(events whose work follows from shapes, the operator of each that has them).

    known: kernels' names taken apart.
    """
    trace = chosen.trace
    rows, operator = (_find_targets if on_gpu else _find_host_targets)(chosen)
    moves = [name in known and known[name].role in _MOVES for name in trace.names] or [False]
    is_move = np.array(moves, bool)[trace.events.name[rows]]
    priced = (operator >= 0) & (trace.events.shapes[operator] >= 0) & ~is_move
    return rows[priced], operator[priced]


def _named(chosen: Selection, wanted: set[str]) -> Flags:
    return np.array([name in wanted for name in chosen.trace.names] or [False], bool)


def _find_targets(chosen: Selection) -> tuple[Integers, Integers]:
    """(device events, the operator of each whose shapes count): products' innermost, attention's outermost, or its own.

    -1 stands for none.
    """
    events, operator = chosen.trace.events, chosen.placing.operator
    inner, outer = (_named(chosen, names) for names in (_INNERMOST, _OUTERMOST))
    rows = operator[chosen.device]
    target, current = np.full(len(rows), -1, np.int64), rows
    for _ in range(DEEPEST):
        here = current >= 0
        if not here.any():
            break
        names = np.where(here, events.name[current], 0)
        target = np.where(here & inner[names] & (target < 0) | here & outer[names], current, target)
        current = np.where(here, operator[current], -1)
    return chosen.device, np.where(target < 0, rows, target)


def _find_host_targets(chosen: Selection) -> tuple[Integers, Integers]:
    """Operators that no other formula covers, twice: without a GPU their own duration is the time of the work."""
    events, operator = chosen.trace.events, chosen.placing.operator
    rows = chosen.operators
    covering = _named(chosen, _INNERMOST | _OUTERMOST)
    covered, current = np.zeros(len(rows), bool), operator[rows]
    for _ in range(DEEPEST):
        here = current >= 0
        covered |= here & covering[np.where(here, events.name[current], 0)]
        current = np.where(here, operator[current], -1)
    leaf = np.ones(len(events), bool)
    leaf[operator[rows][operator[rows] >= 0]] = False
    rows = rows[~covered & (leaf[rows] | covering[events.name[rows]])]
    return rows, rows


def _find_recomputed(chosen: Selection, rows: Integers) -> Flags:
    """bool per operator row: a forward operator within the backward pass, which is activation recomputation.

    It has a sequence number of its own (gradients are recorded) and no forward thread, unlike the backward pass itself.
    """
    events, operator = chosen.trace.events, chosen.placing.operator
    engine = chosen.trace.matching(lambda name: name.startswith(_ENGINE))
    own = (events.sequence >= 0) & (events.forward_thread <= 0) & (events.kind == Kind.OP) & ~engine
    asked, within, recorded = np.zeros((3, len(events)), bool)
    asked[rows] = True
    start = current = np.flatnonzero(asked)
    for _ in range(DEEPEST):
        within[start] |= engine[current]
        recorded[start] |= own[current]
        above = operator[current]
        start, current = start[above >= 0], above[above >= 0]
        if not len(current):
            break
    return within[rows] & recorded[rows]


def roofline_rows(calls: list[Calls], device: str | None) -> tuple[RooflineRow, ...]:
    """Largest loss against the bound first; without a bound the longest first."""
    processor, rows = match_processor(device), []
    memory_gb_s = processor.memory_gb_s if processor else None
    for one in calls:
        peak = peak_tflops(device, "fp16" if one.precision == "fp16/bf16" else one.precision)
        flops, num_bytes, bound_ms, bound_by = one.flops, one.work.num_bytes * one.per_step, None, ""
        # Both limits must be known that the work has.
        if (flops or num_bytes) and (peak or not flops) and (memory_gb_s or not num_bytes):
            compute_ms = flops / peak / 1e9 if flops and peak else 0.0
            memory_ms = num_bytes / memory_gb_s / 1e6 if num_bytes and memory_gb_s else 0.0
            bound_ms, bound_by = max(compute_ms, memory_ms), "compute" if compute_ms >= memory_ms else "memory"
        attention = one.work.role is Role.ATTENTION
        rows.append(
            RooflineRow(
                operator=one.operator,
                phase=one.phase,
                shape=one.work.shape,
                dims=one.work.dims,
                role=one.work.role,
                dtype=one.work.dtype,
                per_step=one.per_step,
                ms=one.ms,
                flops=flops,
                num_bytes=num_bytes,
                achieved_tflops=flops / one.ms / 1e9 if one.ms else 0.0,
                achieved_gb_s=num_bytes / one.ms / 1e6 if one.ms else 0.0,
                bound_ms=bound_ms,
                bound_by=bound_by,
                efficiency=bound_ms / one.ms if bound_ms is not None and one.ms else None,
                causal=one.kernel.causal if attention and one.kernel else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.ms - (row.bound_ms or 0.0))))
