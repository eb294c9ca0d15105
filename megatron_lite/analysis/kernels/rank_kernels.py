"""What one rank's device runs in the steady steps, and how well: kernels, operators, tensor cores, speed of light."""

import re
from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.kernels.kernel_names import KernelName, short_name, taken_apart
from megatron_lite.analysis.kernels.kernel_results import (
    MATRIX_ROLES,
    KernelRow,
    OperatorRow,
    RankKernels,
    Role,
    TensorCores,
)
from megatron_lite.analysis.kernels.kernel_words import get_operator_role
from megatron_lite.analysis.kernels.roofline import Calls, collect_calls, roofline_rows
from megatron_lite.analysis.kernels.selection import Selection, by_weight, heaviest
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.formats.hardware import match_processor, peak_tflops

DEEPEST = 64  # operators within operators; real traces have about ten
SHAPES_FLAG = "--pytorch-profiler-collect-shapes"
COVERED = 0.95  # of the time of matrix work should have shapes; below it the sum of FLOPs says too little
# torch.compile's regions; older versions mark only the graphs inside them.
_COMPILED = (re.compile(r"Torch-Compiled Region"), re.compile(r"## Call CompiledFxGraph"))


def rank_kernels(trace: Trace, placing: Placing, time: RankTime) -> RankKernels:
    """Analyze kernels, operators, tensor cores and roofline of the steady steps.

    Args:
        trace: one rank's trace.
        placing: where its events belong.
        time: where its steps go.

    Returns:
        Figures per steady step; empty ones, with a note, without a steady step.
    """
    chosen = Selection(trace, placing)
    if not chosen.steps:
        return RankKernels(trace.rank, notes=("no steady step, so no kernel figures",))
    known: dict[str, KernelName] = {}  # kernels' names taken apart
    kernels = _list_kernels(chosen, known)
    operators = _list_operators(chosen, time.on_gpu)
    calls = collect_calls(chosen, time.on_gpu, known)
    roles = _sum_by_role(kernels, operators, time.on_gpu)
    matrix = [row for row in kernels if row.role in MATRIX_ROLES]
    matrix_ms = sum(roles.get(role, 0.0) for role in MATRIX_ROLES)
    priced = [call for call in calls if call.work.role in MATRIX_ROLES]
    model = [(call, call.work.model_flops * call.per_step) for call in priced if not call.recomputed]
    flops = sum(flops for _, flops in model)
    achieved = flops / time.step_ms / 1e9 if flops and time.step_ms else None
    peak_dtype = _find_main_precision(model)
    peak = peak_tflops(time.device, "fp16" if peak_dtype == "fp16/bf16" else peak_dtype)
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
        model_flops=flops or None,
        achieved_tflops=achieved,
        peak_tflops=peak,
        peak_dtype=peak_dtype,
        mfu=achieved / peak if achieved and peak else None,
        compiled_regions=_count_compiled_regions(chosen),
        notes=_describe_gaps(priced, time, matrix_ms, trace.with_shapes, peak_dtype if peak is None else ""),
        without_tensor_cores=_sum_reasons(matrix, known),
        attention_flops=_sum_attention(model) if flops else None,
        recomputed_flops=sum(call.work.flops * call.per_step for call in priced if call.recomputed),
    )


def _sum_attention(model: Sequence[tuple[Calls, float]]) -> float:
    """Add up the FLOPs per step of attention. model: calls with their FLOPs."""
    return sum(flops for call, flops in model if call.work.role is Role.ATTENTION)


def _sum_by_role(kernels: Sequence[KernelRow], operators: Sequence[OperatorRow], on_gpu: bool) -> dict[Role, float]:
    """{role: ms}, most time first: of kernels; without a GPU of the operators' own time on the host."""
    rows = [(one.role, one.ms) for one in kernels] if on_gpu else [(one.role, one.self_ms) for one in operators]
    roles: dict[Role, float] = {}
    for role, ms in rows:
        roles[role] = roles.get(role, 0.0) + ms
    return dict(sorted(roles.items(), key=lambda pair: -pair[1]))


def _sum_reasons(matrix: Sequence[KernelRow], known: dict[str, KernelName]) -> dict[str, float]:
    """{why tensor cores are not used: ms} of matrix work. known: kernels' names taken apart."""
    reasons: dict[str, float] = {}
    for row in matrix:
        if row.tensor_cores is TensorCores.NO:
            why = known[row.name].why_not
            reasons[why] = reasons.get(why, 0.0) + row.ms
    return reasons


def _find_main_precision(model: Sequence[tuple[Calls, float]]) -> str:
    """The precision of most of the model's FLOPs; '' without any. model: calls with their FLOPs."""
    flops_of: dict[str, float] = {}
    for one, flops in model:
        flops_of[one.precision] = flops_of.get(one.precision, 0.0) + flops
    return max(flops_of, key=lambda precision: flops_of[precision], default="")


def _list_kernels(chosen: Selection, known: dict[str, KernelName]) -> tuple[KernelRow, ...]:
    """A row per name of device work, most time first. `known` takes up every name that was taken apart."""
    trace, placing, rows = chosen.trace, chosen.placing, chosen.device
    group, weights, size = trace.events.name[rows], chosen.ms[rows], len(trace.names)
    ms, calls = np.bincount(group, weights, size), np.bincount(group, minlength=size)
    phases = heaviest(group, placing.phase[rows].astype(np.int64), weights, size)
    operator = placing.operator[rows]
    launchers = heaviest(group, np.where(operator >= 0, trace.events.name[operator], -1), weights, size)
    total = ms.sum()
    table = []
    for at in by_weight(ms, calls):
        name, launcher = trace.names[at], trace.names[launchers[at]] if launchers[at] >= 0 else ""
        known[name] = kernel = taken_apart(name)
        table.append(
            KernelRow(
                name=name,
                short=short_name(name),
                # Where the kernel's name tells nothing, the operator that launched it may.
                role=get_operator_role(launcher) if kernel.role is Role.OTHER and launcher else kernel.role,
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


def _list_operators(chosen: Selection, on_gpu: bool) -> tuple[OperatorRow, ...]:
    """A row per operator, most time first: on the device, else on the host, where collectives' spans are rows too."""
    trace, placing = chosen.trace, chosen.placing
    own = own_ms(chosen)
    device = _sum_launched(chosen) if on_gpu else np.zeros(len(own))
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


def own_ms(chosen: Selection) -> Numbers:
    """float [n]: each event's time without the operators inside it, per steady step."""
    parents = chosen.placing.operator[chosen.operators]
    inner = chosen.operators[parents >= 0]
    inside = np.bincount(parents[parents >= 0], chosen.ms[inner], len(chosen.trace.events))
    return np.maximum(chosen.ms - inside, 0.0)


def _sum_launched(chosen: Selection) -> Numbers:
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


def _describe_gaps(
    matrix: list[Calls], time: RankTime, matrix_ms: float, with_shapes: bool, peakless: str
) -> tuple[str, ...]:
    """What is missing of FLOPs and peaks. `peakless`: number format of most FLOPs if no peak is known for it."""
    if not with_shapes:
        flag = f"torch.profiler records them with {SHAPES_FLAG}"
        return (f"the trace has no shapes, so no FLOPs and no roofline: {flag}",)
    notes, covered = [], sum(one.ms for one in matrix)
    if matrix_ms and time.on_gpu and covered < COVERED * matrix_ms:
        explained = f"shapes explain {covered / matrix_ms:.0%} of the time of matrix products and attention"
        notes.append(f"{explained}: FLOPs are too low")
    if not time.on_gpu:
        notes.append("no peak is known for this processor, so no share of it is given")
    elif match_processor(time.device) is None:
        device = time.device or "this GPU, whose name the trace lacks"
        notes.append(f"no peak is known for {device}: no share of it is given")
    elif peakless:
        notes.append(f"no {peakless} peak of {time.device} is known, so no share of it is given")
    attention = [one.kernel for one in matrix if one.work.role is Role.ATTENTION]
    if time.on_gpu and any(not kernel or kernel.causal is None for kernel in attention):
        notes.append("kernel names of attention do not show whether they skip masked scores: all scores are counted")
    return tuple(notes)


def _count_compiled_regions(chosen: Selection) -> float:
    """Calls per step."""
    kinds = chosen.trace.events.kind
    for pattern in _COMPILED:
        marks = (
            chosen.trace.matching(pattern.match)
            & chosen.placing.counts
            & ((kinds == Kind.OP) | (kinds == Kind.ANNOTATION))
        )
        if marks.any():
            return float(marks.sum() / chosen.steps)
    return 0.0
