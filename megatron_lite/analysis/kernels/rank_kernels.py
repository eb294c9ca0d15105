"""Kernels and operators of one rank's steady steps, and how well they run: tensor cores, speed of light."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.kernels.device_counters import measure_counters
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
from megatron_lite.analysis.kernels.roofline import OperatorCalls, collect_calls, name_peak, roofline_rows
from megatron_lite.analysis.kernels.selection import Selection, by_weight, heaviest
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.formats.hardware import match_processor, peak_tflops

MAX_NESTED_OPERATORS = 64  # operators within operators; real traces have about ten
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
    flops = _sum_flops(priced, time)
    return RankKernels(
        rank=trace.rank,
        rows=kernels,
        operators=operators,
        roles=roles,
        device_ms=sum(roles.values()),
        matrix_ms=matrix_ms,
        tensor_core_ms=_sum_ms(matrix, TensorCores.YES),
        maybe_tensor_core_ms=_sum_ms(matrix, TensorCores.UNKNOWN),
        roofline=roofline_rows(calls, time.device),
        model_flops=flops.model or None,
        achieved_tflops=flops.achieved_tflops,
        peak_tflops=flops.peak_tflops,
        peak_dtype=flops.peak_dtype,
        mfu=flops.mfu,
        compiled_regions=_count_compiled_regions(chosen),
        notes=_describe_gaps(priced, time, matrix_ms, trace.with_shapes, flops),
        without_tensor_cores=_sum_reasons(matrix, known),
        attention_flops=flops.attention if flops.model else None,
        recomputed_flops=flops.recomputed,
        counters=measure_counters(chosen, time, {row.name: row.role for row in kernels}),
    )


@dataclass(frozen=True)
class _Flops:
    """FLOPs per step of matrix work, by shapes, and how fast they are computed."""

    model: float  # that the model asks for
    attention: float  # part of model
    recomputed: float  # not part of model
    peak_dtype: str  # the number format of most of them; "" without any
    peak_tflops: float | None  # of the device for that format; None if unknown
    achieved_tflops: float | None  # None without FLOPs

    @property
    def mfu(self) -> float | None:
        """The share of the peak that is achieved; None if unknown."""
        if not self.achieved_tflops or not self.peak_tflops:
            return None
        return self.achieved_tflops / self.peak_tflops


def _sum_flops(priced: Sequence[OperatorCalls], time: RankTime) -> _Flops:
    """Add up the FLOPs of calls of matrix work."""
    model = [call for call in priced if not call.recomputed]
    recomputed = [call for call in priced if call.recomputed]
    attention = [call for call in model if call.work.role is Role.ATTENTION]
    model_flops = sum(call.model_flops for call in model)
    peak_dtype = _find_main_precision(model)
    achieved = None
    if model_flops and time.step_ms:
        achieved = model_flops / time.step_ms / 1e9
    return _Flops(
        model=model_flops,
        attention=sum(call.model_flops for call in attention),
        recomputed=sum(call.work.flops * call.per_step for call in recomputed),
        peak_dtype=peak_dtype,
        peak_tflops=peak_tflops(time.device, name_peak(peak_dtype)),
        achieved_tflops=achieved,
    )


def _sum_ms(rows: Sequence[KernelRow], cores: TensorCores) -> float:
    """Add up the ms of kernels that use tensor cores so."""
    return sum(row.ms for row in rows if row.tensor_cores is cores)


def _sum_by_role(
    kernels: Sequence[KernelRow],
    operators: Sequence[OperatorRow],
    on_gpu: bool,
) -> dict[Role, float]:
    """Sum ms by role, most time first: of kernels; without a GPU of the operators' own time on the host."""
    if on_gpu:
        rows = [(one.role, one.ms) for one in kernels]
    else:
        rows = [(one.role, one.self_ms) for one in operators]
    roles: dict[Role, float] = {}
    for role, ms in rows:
        roles[role] = roles.get(role, 0.0) + ms
    return dict(sorted(roles.items(), key=lambda pair: -pair[1]))


def _sum_reasons(matrix: Sequence[KernelRow], known: dict[str, KernelName]) -> dict[str, float]:
    """Sum ms of matrix work by why it uses no tensor cores. `known`: kernels' names taken apart."""
    reasons: dict[str, float] = {}
    for row in matrix:
        if row.tensor_cores is TensorCores.NO:
            why = known[row.name].why_not
            reasons[why] = reasons.get(why, 0.0) + row.ms
    return reasons


def _find_main_precision(model: Sequence[OperatorCalls]) -> str:
    """The precision of most of the model's FLOPs; '' without any."""
    flops_of: dict[str, float] = {}
    for call in model:
        flops_of[call.precision] = flops_of.get(call.precision, 0.0) + call.model_flops
    return max(flops_of, key=lambda precision: flops_of[precision], default="")


def _list_kernels(chosen: Selection, known: dict[str, KernelName]) -> tuple[KernelRow, ...]:
    """A row per name of device work, most time first. `known` takes up every name that was taken apart."""
    trace = chosen.trace
    rows = chosen.device
    size = len(trace.names)
    name_of_row = trace.events.name[rows]
    weights = chosen.ms[rows]
    ms = np.bincount(name_of_row, weights, size)
    calls = np.bincount(name_of_row, minlength=size)
    phase = chosen.placing.phase[rows].astype(np.int64)
    phases = heaviest(name_of_row, phase, weights, size)
    operator = chosen.placing.operator[rows]
    operator_name = np.where(operator >= 0, trace.events.name[operator], -1)
    launchers = heaviest(name_of_row, operator_name, weights, size)
    total = ms.sum()
    table = []
    for at in by_weight(ms, calls):
        name = trace.names[at]
        launcher = trace.names[launchers[at]] if launchers[at] >= 0 else ""
        kernel = taken_apart(name)
        known[name] = kernel
        role = kernel.role
        if role is Role.OTHER and launcher:
            # Where the kernel's name tells nothing, the operator that launched it may.
            role = get_operator_role(launcher)
        table.append(
            KernelRow(
                name=name,
                short=short_name(name),
                role=role,
                phase=_name_phase(chosen, phases[at]),
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
    trace = chosen.trace
    size = len(trace.names)
    own = own_ms(chosen)
    if on_gpu:
        rows = chosen.operators
        launched = _sum_launched(chosen)
        weights = launched[rows]
    else:
        rows = np.concatenate([chosen.operators, chosen.spans])
        launched = np.zeros(len(own))
        weights = own[rows]
    name_of_row = trace.events.name[rows]
    self_ms = np.bincount(name_of_row, own[rows], size)
    device_ms = np.bincount(name_of_row, launched[rows], size)
    calls = np.bincount(name_of_row, minlength=size)
    phase = chosen.placing.phase[rows].astype(np.int64)
    phases = heaviest(name_of_row, phase, weights, size)
    table = []
    for at in by_weight(device_ms, calls, self_ms):
        table.append(
            OperatorRow(
                name=trace.names[at],
                role=get_operator_role(trace.names[at]),
                per_step=float(calls[at] / chosen.steps),
                self_ms=float(self_ms[at]),
                device_ms=float(device_ms[at]),
                phase=_name_phase(chosen, phases[at]),
            )
        )
    return tuple(table)


def _name_phase(chosen: Selection, phase: int) -> str:
    """The phase with that number; '' for -1."""
    return chosen.placing.phases[phase] if phase >= 0 else ""


def own_ms(chosen: Selection) -> Numbers:
    """Measure each event's time without the operators inside it, ms per steady step; float [n]."""
    parents = chosen.placing.operator[chosen.operators]
    has_parent = parents >= 0
    inner_ms = chosen.ms[chosen.operators[has_parent]]
    inside_ms = np.bincount(parents[has_parent], inner_ms, len(chosen.trace.events))
    return np.maximum(chosen.ms - inside_ms, 0.0)


def _sum_launched(chosen: Selection) -> Numbers:
    """Sum device time that an operator launched, itself or through operators inside it, ms per steady step; float [n].

    An operator inside another of the same name adds to the inner one only, so that a name's sum counts nothing twice.
    """
    names = chosen.trace.events.name
    operator = chosen.placing.operator
    sums = np.zeros(len(names))
    ms = chosen.ms[chosen.device]
    # all device work at once goes outwards by one operator in each turn
    rows = operator[chosen.device]
    last = np.full(len(rows), -1)
    for _ in range(MAX_NESTED_OPERATORS):
        here = rows >= 0
        if not here.any():
            break
        rows = rows[here]
        ms = ms[here]
        own = names[rows]
        is_fresh = own != last[here]
        sums += np.bincount(rows[is_fresh], ms[is_fresh], len(sums))
        rows = operator[rows]
        last = own
    return sums


def _describe_gaps(
    matrix: list[OperatorCalls],
    time: RankTime,
    matrix_ms: float,
    with_shapes: bool,
    flops: _Flops,
) -> tuple[str, ...]:
    """Notes on what is missing of FLOPs and peaks. matrix: calls with shapes; matrix_ms: all matrix work."""
    if not with_shapes:
        flag = f"torch.profiler records them with {SHAPES_FLAG}"
        return (f"the trace has no shapes, so no FLOPs and no roofline: {flag}",)
    notes = []
    covered = sum(one.ms for one in matrix)
    if matrix_ms and time.on_gpu and covered < COVERED * matrix_ms:
        explained = f"shapes explain {covered / matrix_ms:.0%} of the time of matrix products and attention"
        notes.append(f"{explained}: FLOPs are too low")
    notes += _describe_missing_peak(time, flops)
    attention = [one for one in matrix if one.work.role is Role.ATTENTION]
    if time.on_gpu and any(one.is_causal is None for one in attention):
        notes.append("kernel names of attention do not show whether they skip masked scores: all scores are counted")
    return tuple(notes)


def _describe_missing_peak(time: RankTime, flops: _Flops) -> list[str]:
    """A note on why no share of a peak is given; none where one may be."""
    if not time.on_gpu:
        return ["no peak is known for this processor, so no share of it is given"]
    if match_processor(time.device) is None:
        device = time.device or "this GPU, whose name the trace lacks"
        return [f"no peak is known for {device}: no share of it is given"]
    if flops.peak_tflops is None and flops.peak_dtype:
        return [f"no {flops.peak_dtype} peak of {time.device} is known, so no share of it is given"]
    return []


def _count_compiled_regions(chosen: Selection) -> float:
    """Count the calls of compiled regions per step."""
    is_mark = np.isin(chosen.trace.events.kind, (Kind.OP, Kind.ANNOTATION))
    is_mark &= chosen.placing.counts
    for pattern in _COMPILED:
        is_region = is_mark & chosen.trace.matching(pattern.match)
        if is_region.any():
            return float(is_region.sum() / chosen.steps)
    return 0.0
