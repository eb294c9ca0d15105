"""What one rank's device runs, and how well."""

import re

import numpy as np

from megatron_lite.analysis.kernels.kernel_names import MATRIX_ROLES, KernelName, short_name, taken_apart
from megatron_lite.analysis.kernels.kernel_results import KernelRow, OperatorRow, RankKernels, Role, TensorCores
from megatron_lite.analysis.kernels.roles import get_operator_role
from megatron_lite.analysis.kernels.roofline import Calls, collect_calls, roofline_rows
from megatron_lite.analysis.kernels.selection import Selection, by_weight, heaviest
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.estimate.hardware import peak_tflops, processor_of

# --- all operators of a rank, one row each: the host's own time, and the device work that they launched


DEEPEST = 64  # operators within operators; real traces have about ten


def operator_rows(chosen: Selection, on_gpu: bool) -> tuple[OperatorRow, ...]:
    """Most time first: on the device where there is one, else on the host, where collectives' spans are rows too."""
    trace, placing = chosen.trace, chosen.placing
    own = own_ms(chosen)
    device = _device_ms(chosen) if on_gpu else np.zeros(len(own))
    rows = chosen.operators if on_gpu else np.concatenate([chosen.operators, chosen.spans])
    group, size, weights = trace.events.name[rows], len(trace.names), (device if on_gpu else own)[rows]
    host, launched = np.bincount(group, own[rows], size), np.bincount(group, device[rows], size)
    calls = np.bincount(group, minlength=size)
    phases = heaviest(group, placing.phase[rows].astype(np.int64), weights, size)
    return tuple(
        OperatorRow(
            name=trace.names[at],
            role=get_operator_role(trace.names[at]),
            per_step=float(calls[at] / chosen.steps),
            self_ms=float(host[at]),
            device_ms=float(launched[at]),
            phase=placing.phases[phases[at]] if phases[at] >= 0 else "",
        )
        for at in by_weight(launched, calls, host)
    )


def own_ms(chosen: Selection) -> np.ndarray:
    """float [n]: each event's time without the operators inside it, per steady step."""
    rows = chosen.operators
    parents = chosen.placing.operator[rows]
    inner = rows[parents >= 0]
    inside = np.bincount(parents[parents >= 0], chosen.ms[inner], len(chosen.trace.events))
    return np.maximum(chosen.ms - inside, 0.0)


def _device_ms(chosen: Selection) -> np.ndarray:
    """float [n]: device time of what an operator launched, itself or through operators inside it, per steady step.

    An operator inside another of the same name adds to the inner one only, so that a name's sum counts nothing twice.
    """
    names, operator = chosen.trace.events.name, chosen.placing.operator
    sums, rows, ms = np.zeros(len(names)), operator[chosen.device], chosen.ms[chosen.device]
    last = np.full(len(rows), -1)
    for _ in range(DEEPEST):
        here = rows >= 0
        if not here.any():
            break
        rows, ms, last = rows[here], ms[here], last[here]
        fresh = names[rows] != last
        sums += np.bincount(rows[fresh], ms[fresh], len(sums))
        rows, last = operator[rows], names[rows]
    return sums


# --- all kernels of a rank, one row each: time, role, tensor cores, who launched them


def kernel_rows(chosen: Selection, known: dict[str, KernelName]) -> tuple[KernelRow, ...]:
    """Most time first. `known` takes up every name that was taken apart."""
    trace, placing, rows = chosen.trace, chosen.placing, chosen.device
    group, weights, size = trace.events.name[rows], chosen.ms[rows], len(trace.names)
    ms, calls = np.bincount(group, weights, size), np.bincount(group, minlength=size)
    phases = heaviest(group, placing.phase[rows].astype(np.int64), weights, size)
    operator = placing.operator[rows]
    launchers = heaviest(group, np.where(operator >= 0, trace.events.name[operator], -1), weights, size)
    total = ms.sum()
    table = []
    for at in by_weight(ms, calls):
        name = trace.names[at]
        launcher = trace.names[launchers[at]] if launchers[at] >= 0 else ""
        known[name] = kernel = taken_apart(name)
        table.append(
            KernelRow(
                name=name,
                short=short_name(name),
                role=_role(kernel, launcher),
                phase=placing.phases[phases[at]] if phases[at] >= 0 else "",
                operator=launcher,
                per_step=float(calls[at] / chosen.steps),
                ms=float(ms[at]),
                share=float(ms[at] / total) if total else 0.0,
                tensor_cores=kernel.tensor_cores,
                precision=kernel.precision,
            )
        )
    return tuple(table)


def _role(kernel: KernelName, launcher: str) -> Role:
    """Where the kernel's name tells nothing, the operator that launched it may."""
    return get_operator_role(launcher) if kernel.role is Role.OTHER and launcher else kernel.role


# --- what one rank's device runs, and how well

_COMPILED = (re.compile(r"Torch-Compiled Region"), re.compile(r"## Call CompiledFxGraph"))
SHAPES_FLAG = "--pytorch-profiler-collect-shapes"
COVERED = 0.95  # of the time of matrix work should have shapes; below it the sum of FLOPs says too little


def rank_kernels(trace: Trace, placing: Placing, time: RankTime) -> RankKernels:
    """Kernels, operators, tensor cores and roofline of the steady steps. Empty, with a note, without a steady step."""
    chosen, known = Selection(trace, placing), {}
    if not chosen.steps:
        return _nothing(trace)
    kernels, operators = kernel_rows(chosen, known), operator_rows(chosen, time.on_gpu)
    calls = collect_calls(chosen, time.on_gpu, known)
    roles = _roles(kernels) if time.on_gpu else _roles(operators)
    matrix = [row for row in kernels if row.role in MATRIX_ROLES]
    matrix_ms = sum(roles.get(role, 0.0) for role in MATRIX_ROLES)
    speed = _speed(calls, time, matrix_ms, trace.with_shapes)
    return RankKernels(
        rank=trace.rank,
        rows=kernels,
        operators=operators,
        roles=roles,
        device_ms=sum(roles.values()),
        matrix_ms=matrix_ms,
        tensor_core_ms=sum(row.ms for row in matrix if row.tensor_cores is TensorCores.YES),
        maybe_tensor_core_ms=sum(row.ms for row in matrix if row.tensor_cores is TensorCores.UNKNOWN),
        roofline=roofline_rows(calls, time.device),
        compiled_regions=_compiled_regions(chosen),
        without_tensor_cores=_reasons(matrix, known),
        **speed,
    )


def _roles(rows: tuple[KernelRow, ...] | tuple[OperatorRow, ...]) -> dict[Role, float]:
    """ms by role, longest first. Without a GPU the operators' own time counts."""
    sums: dict[Role, float] = {}
    for row in rows:
        sums[row.role] = sums.get(row.role, 0.0) + (row.ms if isinstance(row, KernelRow) else row.self_ms)
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def _reasons(matrix: list[KernelRow], known: dict[str, KernelName]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in matrix:
        if row.tensor_cores is TensorCores.NO:
            reason = known[row.name].why_not
            sums[reason] = sums.get(reason, 0.0) + row.ms
    return sums


def _speed(calls: list[Calls], time: RankTime, matrix_ms: float, with_shapes: bool) -> dict:
    """The fields of RankKernels about FLOPs; `notes` say what is missing."""
    matrix = [one for one in calls if one.work.role in MATRIX_ROLES]
    model = [one for one in matrix if not one.recomputed]
    flops = sum(one.work.model_flops * one.per_step for one in model)
    attention = sum(one.work.model_flops * one.per_step for one in model if one.work.role is Role.ATTENTION)
    formats: dict[str, float] = {}
    for one in model:
        formats[one.precision] = formats.get(one.precision, 0.0) + one.work.model_flops * one.per_step
    peak_dtype = max(formats, key=formats.get) if formats else ""
    peak = peak_tflops(time.device, "fp16" if peak_dtype == "fp16/bf16" else peak_dtype)
    achieved = flops / time.step_ms / 1e9 if flops and time.step_ms else None
    return {
        "model_flops": flops or None,
        "attention_flops": attention if flops else None,
        "recomputed_flops": sum(one.work.flops * one.per_step for one in matrix if one.recomputed),
        "achieved_tflops": achieved,
        "peak_tflops": peak,
        "peak_dtype": peak_dtype,
        "mfu": achieved / peak if achieved and peak else None,
        "notes": _notes(matrix, time, matrix_ms, with_shapes, peak_dtype if peak is None else ""),
    }


def _notes(matrix: list[Calls], time: RankTime, matrix_ms: float, with_shapes: bool, peakless: str) -> tuple[str, ...]:
    """`peakless`: number format of most FLOPs if no peak is known for it."""
    if not with_shapes:
        return (
            f"the trace has no shapes, so no FLOPs and no roofline: torch.profiler records them with {SHAPES_FLAG}",
        )
    notes, covered = [], sum(one.ms for one in matrix)
    if matrix_ms and time.on_gpu and covered < COVERED * matrix_ms:
        notes.append(
            f"shapes explain {covered / matrix_ms:.0%} of the time of matrix products and attention: FLOPs are too low"
        )
    if not time.on_gpu:
        notes.append("no peak is known for this processor, so no share of it is given")
    elif processor_of(time.device) is None:
        notes.append(
            f"no peak is known for {time.device or 'this GPU, whose name the trace lacks'}: no share of it is given"
        )
    elif peakless:
        notes.append(f"no {peakless} peak of {time.device} is known, so no share of it is given")
    unclear = [
        one for one in matrix if one.work.role is Role.ATTENTION and (not one.kernel or one.kernel.causal is None)
    ]
    if time.on_gpu and unclear:
        notes.append("attention's names do not say whether they skip what a causal mask hides: all scores are counted")
    return tuple(notes)


def _compiled_regions(chosen: Selection) -> float:
    """Calls of torch.compile's regions per step; older versions mark only the graphs inside them."""
    kinds = chosen.trace.events.kind
    for pattern in _COMPILED:
        marks = chosen.trace.matching(pattern.match) & chosen.counts & ((kinds == Kind.OP) | (kinds == Kind.ANNOTATION))
        if marks.any():
            return float(marks.sum() / chosen.steps)
    return 0.0


def _nothing(trace: Trace) -> RankKernels:
    return RankKernels(
        rank=trace.rank, rows=(), operators=(), roles={}, device_ms=0.0, matrix_ms=0.0, tensor_core_ms=0.0,
        maybe_tensor_core_ms=0.0, roofline=(), model_flops=None, achieved_tflops=None, peak_tflops=None, peak_dtype="",
        mfu=None, compiled_regions=0.0, notes=("no steady step, so no kernel figures",),
    )  # fmt: skip
