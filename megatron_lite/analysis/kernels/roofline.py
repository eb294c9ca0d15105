"""Operators with their shapes against what the hardware can do at most."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.kernels.kernel_names import KernelName
from megatron_lite.analysis.kernels.kernel_results import Role, RooflineRow
from megatron_lite.analysis.kernels.selection import Selection, heaviest
from megatron_lite.analysis.kernels.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTIONS,
    CONVOLUTIONS_BACKWARD,
    PRODUCTS,
    Work,
    compute_work,
    count_results,
)
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.estimate.hardware import peak_tflops, processor_of

# --- which operator's shapes explain a piece of device work

DEEPEST = 12  # from a kernel's operator up to the one with a formula: three or four in real traces
_INNERMOST = {*PRODUCTS, *CONVOLUTIONS, *CONVOLUTIONS_BACKWARD}  # aten::addmm rather than aten::linear around it
_OUTERMOST = {
    *ATTENTION,
    *ATTENTION_BACKWARD,
}  # its arguments tell heads from tokens, those of the operators inside do not
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Targets:
    """Pieces of work: device events where there are any, else operators themselves."""

    rows: np.ndarray  # int64 [p], the pieces
    operator: np.ndarray  # int64 [p], row of the operator whose shapes count; -1: none


def device_targets(chosen: Selection) -> Targets:
    """For each device event the operator whose shapes count: products' innermost, attention's outermost, or its own."""
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
    return Targets(chosen.device, _with_shapes(chosen, np.where(target < 0, rows, target)))


def host_targets(chosen: Selection) -> Targets:
    """Operators with shapes that no other formula covers: without a GPU their own duration is the time of the work."""
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
    return Targets(rows, _with_shapes(chosen, rows))


def is_recomputed(chosen: Selection, rows: np.ndarray) -> np.ndarray:
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


def _named(chosen: Selection, wanted: set[str]) -> np.ndarray:
    return np.array([name in wanted for name in chosen.trace.names] or [False], bool)


def _with_shapes(chosen: Selection, rows: np.ndarray) -> np.ndarray:
    return np.where((rows >= 0) & (chosen.trace.events.shapes[rows] >= 0), rows, -1)


# --- operators with their shapes against what the hardware can do at most

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
    """All calls whose work follows from their shapes."""
    trace, placing, targets = chosen.trace, chosen.placing, device_targets(chosen) if on_gpu else host_targets(chosen)
    moves = [bool(name in known and known[name].role in _MOVES) for name in trace.names] or [False]
    counted = (targets.operator >= 0) & ~np.array(moves)[trace.events.name[targets.rows]]
    rows, operator = targets.rows[counted], targets.operator[counted]
    if not len(rows):
        return []
    again = is_recomputed(chosen, operator)
    phases = len(placing.phases) + 1
    keys = (trace.events.name[operator].astype(np.int64) * len(trace.shapes) + trace.events.shapes[operator]) * phases
    keys = (keys + placing.phase[rows] + 1) * 2 + again
    groups, first, group = np.unique(keys, return_index=True, return_inverse=True)
    size = len(groups)
    ms = np.bincount(group, chosen.ms[rows], size)
    main = heaviest(group, trace.events.name[rows].astype(np.int64), chosen.ms[rows], size)
    group_of = np.full(len(trace.events), -1)
    group_of[operator] = group  # one operator may launch several kernels, and counts once
    counts = np.bincount(group_of[group_of >= 0], minlength=size) / chosen.steps
    heads = operator[first]
    results = _convolution_results(chosen, heads)
    found = []
    for at, head in enumerate(heads.tolist()):
        name, kernel, phase = trace.name_of(head), known.get(trace.names[main[at]]), placing.phase[rows[first[at]]]
        work = compute_work(name, trace.shapes[trace.events.shapes[head]], kernel.precision if kernel else "", results)
        if work:
            where = placing.phases[phase] if phase >= 0 else ""
            found.append(Calls(name, where, work, kernel, float(counts[at]), float(ms[at]), bool(again[first[at]])))
    return found


def roofline_rows(calls: list[Calls], device: str | None) -> tuple[RooflineRow, ...]:
    """Largest loss against the bound first; without a bound the longest first."""
    rows = [_row(one, device) for one in calls]
    return tuple(sorted(rows, key=lambda row: -(row.ms - (row.bound_ms or 0.0))))


def _row(one: Calls, device: str | None) -> RooflineRow:
    processor, peak = processor_of(device), peak_tflops(device, _peak_format(one.precision))
    flops, num_bytes = one.flops, one.work.num_bytes * one.per_step
    bound_ms, bound_by = _bound(flops, num_bytes, peak, processor.memory_gb_s if processor else None)
    attention = one.work.role is Role.ATTENTION
    return RooflineRow(
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


def _bound(flops: float, num_bytes: float, peak: float | None, memory_gb_s: float | None) -> tuple[float | None, str]:
    """(ms, what limits): None unless both limits are known that the work has."""
    if (flops and not peak) or (num_bytes and not memory_gb_s) or not (flops or num_bytes):
        return None, ""
    compute_ms, memory_ms = flops / peak / 1e9 if flops else 0.0, num_bytes / memory_gb_s / 1e6 if num_bytes else 0.0
    return max(compute_ms, memory_ms), "compute" if compute_ms >= memory_ms else "memory"


def _peak_format(precision: str) -> str:
    return "fp16" if precision == "fp16/bf16" else precision


def _convolution_results(chosen: Selection, operators: np.ndarray) -> dict[tuple, tuple]:
    """Sizes of convolutions' results, by the sizes of their input and weight, from one operator of each kind."""
    trace, results = chosen.trace, {}
    for row in operators.tolist():
        results |= count_results(trace.name_of(row), trace.shapes[trace.events.shapes[row]])
    return results
