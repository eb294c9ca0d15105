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
    """All calls whose work follows from their shapes."""
    trace, placing, events = chosen.trace, chosen.placing, chosen.trace.events
    rows, operator = (_find_targets if on_gpu else _find_host_targets)(chosen)
    moves = [bool(name in known and known[name].role in _MOVES) for name in trace.names] or [False]
    counted = (operator >= 0) & (events.shapes[operator] >= 0) & ~np.array(moves)[events.name[rows]]
    rows, operator = rows[counted], operator[counted]
    if not len(rows):
        return []
    again = _find_recomputed(chosen, operator)
    keys = events.name[operator].astype(np.int64) * len(trace.shapes) + events.shapes[operator]
    keys = (keys * (len(placing.phases) + 1) + placing.phase[rows] + 1) * 2 + again
    groups, first, group = np.unique(keys, return_index=True, return_inverse=True)
    size = len(groups)
    ms = np.bincount(group, chosen.ms[rows], size)
    main = heaviest(group, events.name[rows].astype(np.int64), chosen.ms[rows], size)
    group_of = np.full(len(events), -1)
    group_of[operator] = group  # one operator may launch several kernels, and counts once
    counts = np.bincount(group_of[group_of >= 0], minlength=size) / chosen.steps
    heads = [(trace.name_of(row), trace.shapes[events.shapes[row]]) for row in operator[first].tolist()]
    results = {}  # sizes of convolutions' results, by the sizes of their input and weight
    for name, shapes in heads:
        results |= count_results(name, shapes)
    found = []
    for at, (name, shapes) in enumerate(heads):
        kernel, phase = known.get(trace.names[main[at]]), placing.phase[rows[first[at]]]
        work = compute_work(name, shapes, kernel.precision if kernel else "", results)
        if work:
            where = placing.phases[phase] if phase >= 0 else ""
            found.append(Calls(name, where, work, kernel, float(counts[at]), float(ms[at]), bool(again[first[at]])))
    return found


def _named(chosen: Selection, wanted: set[str]) -> np.ndarray:
    return np.array([name in wanted for name in chosen.trace.names] or [False], bool)


def _find_targets(chosen: Selection) -> tuple[np.ndarray, np.ndarray]:
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


def _find_host_targets(chosen: Selection) -> tuple[np.ndarray, np.ndarray]:
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


def _find_recomputed(chosen: Selection, rows: np.ndarray) -> np.ndarray:
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
    processor, rows = processor_of(device), []
    memory_gb_s = processor.memory_gb_s if processor else None
    for one in calls:
        peak = peak_tflops(device, "fp16" if one.precision == "fp16/bf16" else one.precision)
        flops, num_bytes, bound_ms, bound_by = one.flops, one.work.num_bytes * one.per_step, None, ""
        # Both limits must be known that the work has.
        if (flops or num_bytes) and (peak or not flops) and (memory_gb_s or not num_bytes):
            compute_ms = flops / peak / 1e9 if flops else 0.0
            memory_ms = num_bytes / memory_gb_s / 1e6 if num_bytes else 0.0
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
