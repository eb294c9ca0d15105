"""Operators with their shapes against what the hardware can do at most."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.kernels.figures import Role, RooflineRow
from megatron_lite.analysis.kernels.kernel_names import KernelName
from megatron_lite.analysis.kernels.selection import Selection, heaviest
from megatron_lite.analysis.kernels.targets import device_targets, host_targets, is_recomputed
from megatron_lite.analysis.kernels.work import Work, results_of, work_of
from megatron_lite.estimate.hardware import peak_tflops, processor_of

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


def calls_of(chosen: Selection, on_gpu: bool, known: dict[str, KernelName]) -> list[Calls]:
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
        work = work_of(name, trace.shapes[trace.events.shapes[head]], kernel.precision if kernel else "", results)
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
        results |= results_of(trace.name_of(row), trace.shapes[trace.events.shapes[row]])
    return results
