"""Comparison of two runs or traces: what changed, what did not, and what cannot be told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair, PhasePair, Total
from megatron_lite.analysis.compare.hardware import describe_host, describe_lower_clock, pair_hardware
from megatron_lite.analysis.compare.load import describe_load, describe_unknown_load, find_load, widen_band, widen_rate
from megatron_lite.analysis.compare.losses import compare_losses
from megatron_lite.analysis.compare.models import object_to_models
from megatron_lite.analysis.compare.settings import (
    compute_noise_band,
    exact,
    flags_that_differ,
    objections,
    paired,
    paired_samples,
)
from megatron_lite.analysis.contradictions import find_contradictions
from megatron_lite.analysis.core_use import ORDINARY, PROFILED, CoreShortage
from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.kernels.kernel_words import get_kernel_role, get_operator_role
from megatron_lite.analysis.kernels.rank_kernels import own_ms
from megatron_lite.analysis.kernels.selection import Selection
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.rank_results import name_ranks
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.units import significant, size

# --- steps, rates and peaks of two runs beside each other, the phases of runs without traces, and the first line

WHOLE_STEP = "step"
TRACED_STEP = "traced step"
PEAK = "peak memory"
SNAPSHOTS = "memory snapshots"
Loads = tuple[CoreShortage | None, CoreShortage | None]  # the shortage of cores in compared steps of A and of B


def pair_totals(a: Facts, b: Facts) -> list[Total]:
    """Pair step, tokens per second, MFU and peak memory, of each source that both have."""
    return [
        *_pair_ordinary_steps(a, b),
        *_pair_traced_steps(a, b),
        *_pair_peaks(a, b),
    ]


def _pair_ordinary_steps(a: Facts, b: Facts) -> list[Total]:
    """Pair the median typical step of two runs, and their rates; [] where one has no run folder or no typical step."""
    if a.run is None or b.run is None:
        return []
    steps_a_ms = a.run.training_ms[a.run.ordinary]
    steps_b_ms = b.run.training_ms[b.run.ordinary]
    if not len(steps_a_ms) or not len(steps_b_ms):
        return []
    loads = (find_load(a, ORDINARY), find_load(b, ORDINARY))
    of = f"steps.jsonl, {len(steps_a_ms)} and {len(steps_b_ms)} typical steps"
    step = widen_band(paired_samples(steps_a_ms, steps_b_ms), loads)
    totals = [Total(WHOLE_STEP, "ms", of, step)]
    # rates are of all ordinary time, as a report has them; they vary as one over the step does
    relative_a = steps_a_ms.mean() / steps_a_ms
    relative_b = steps_b_ms.mean() / steps_b_ms
    relative_band = compute_noise_band(relative_a, relative_b)

    def add_rate(
        name: str,
        unit: str,
        rate_a: float | None,
        rate_b: float | None,
    ) -> None:
        """Add the pair of a rate that both runs have."""
        if rate_a is None or rate_b is None:
            return
        band = None
        if relative_band is not None:
            band = relative_band * max(rate_a, rate_b)
        rate = widen_rate(paired(rate_a, rate_b, band), loads)
        totals.append(Total(name, unit, of, rate))

    add_rate("tokens per second", "tokens/s", a.run.tokens_per_second, b.run.tokens_per_second)
    add_rate("MFU, causal attention", "%", _in_percent(a.run.mfu_causal), _in_percent(b.run.mfu_causal))
    return totals


def _in_percent(share: float | None) -> float | None:
    """Turn a share into percent; None stays None."""
    return None if share is None else 100 * share


def _pair_traced_steps(a: Facts, b: Facts) -> list[Total]:
    """Pair the mean steady step of the critical ranks' traces, as their rows sum to it; [] without two such traces."""
    if a.critical is None or b.critical is None:
        return []
    time_a = a.critical.time
    time_b = b.critical.time
    steps_a_ms = [step.ms for step in time_a.steady_steps]
    steps_b_ms = [step.ms for step in time_b.steady_steps]
    if not steps_a_ms or not steps_b_ms:
        return []
    of = f"traces, {len(steps_a_ms)} and {len(steps_b_ms)} steady steps"
    band = compute_noise_band(steps_a_ms, steps_b_ms)
    pair = paired(time_a.step_ms, time_b.step_ms, band)
    loads = (find_load(a, PROFILED), find_load(b, PROFILED))
    return [Total(TRACED_STEP, "ms", of, widen_band(pair, loads))]


def _pair_peaks(a: Facts, b: Facts) -> list[Total]:
    """Pair the most that tensors took: of snapshots, else as the GPU's allocator counted in each step; bytes.

    Snapshots without a history are compared last: what they hold is no more than a lower bound of the peak.
    """
    sources = (
        (SNAPSHOTS, _measure_snapshot_peak),
        ("steps.jsonl", _measure_run_peak),
    )
    for source, measure in sources:
        peak_a = measure(a)
        peak_b = measure(b)
        if peak_a and peak_b:
            return [Total(PEAK, "bytes", source, exact(peak_a, peak_b))]
    highest_a = a.highest_snapshot
    highest_b = b.highest_snapshot
    if highest_a is None or highest_b is None:
        return []
    pair = paired(highest_a.peak_bytes, highest_b.peak_bytes, None)
    return [Total(PEAK, "bytes", SNAPSHOTS, pair)]


def _measure_snapshot_peak(facts: Facts) -> float | None:
    """Bytes at the highest peak of the snapshots; None without one, or where one has no history."""
    for snapshot in facts.snapshots:
        if not snapshot.has_history:
            return None
    highest = facts.highest_snapshot
    return highest.peak_bytes if highest else None


def _measure_run_peak(facts: Facts) -> float | None:
    """Bytes at the peak of the steps, 0 where the allocator did not count; None without a run folder."""
    return facts.run.counted_peak_bytes if facts.run else None


def pair_phases_of_runs(
    a: Run,
    b: Run,
    loads: Loads = (None, None),
) -> tuple[PhasePair, ...]:
    """Pair the phases of two runs by their medians over typical steps.

    Args:
        a: the run before.
        b: the run after.
        loads: the shortage of cores in typical steps of each.

    Returns:
        Each phase on the host and, where there is a GPU, as its stream passed through it.
    """
    has_gpu = bool(a.gpu_phases_ms or b.gpu_phases_ms)
    found = []
    for name in dict.fromkeys((*a.phases_ms, *b.phases_ms)):
        host_a_ms = _take_typical(a, a.phases_ms.get(name))
        host_b_ms = _take_typical(b, b.phases_ms.get(name))
        on_host = paired_samples(host_a_ms, host_b_ms)
        on_device = None
        if has_gpu:
            device_a_ms = _take_typical(a, a.gpu_phases_ms.get(name))
            device_b_ms = _take_typical(b, b.gpu_phases_ms.get(name))
            on_device = paired_samples(device_a_ms, device_b_ms)
        found.append(PhasePair(name, widen_band(on_host, loads), on_device))
    return tuple(found)


def _take_typical(run: Run, values: Numbers | None) -> Numbers:
    """A column's values in typical steps; none of a phase that the run has not."""
    return np.array([]) if values is None else values[run.ordinary]


# --- the first line of a comparison

MIN_DIFFERENCE_SHARE = 0.15  # of the step's difference that a phase must be to be named
MAX_NAMED_CHANGES = 3
MOSTLY_COMPUTE = 0.5  # of the step's difference: then phases say more than the one row "compute"


def build_sentence(totals: Sequence[Total], rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """Write the first line of a comparison.

    'B takes 43% less time per step (185 -> 106 ms): backward -50 ms, forward -28 ms; peak memory is 20% less (...)'.

    Args:
        totals: the figures of the whole runs.
        rows: parts of the same steps as the first of `totals` that is a step, by name.
        phases: the phases of these steps.
    """
    by_name = {total.name: total.pair for total in totals}
    parts = []
    step = by_name.get(WHOLE_STEP) or by_name.get(TRACED_STEP)
    if step:
        parts.append(_describe_step(step, rows, phases))
    peak = by_name.get(PEAK)
    if peak:
        parts.append(_describe_peak(peak))
    return "; ".join(parts)


def _describe_step(
    step: Pair,  # ms
    rows: dict[str, Pair],  # what the same steps consist of
    phases: Sequence[PhasePair],
) -> str:
    """Write how B's step differs from A's, and why."""
    numbers = f"{_format_ms(step.a)} -> {_format_ms(step.b)} ms"
    noise = "too few steps" if step.band is None else f"noise {_format_ms(step.band)} ms"
    if step.change is Change.SAME:
        return f"B's steps take as long as A's ({numbers}, {noise})"
    if step.change is Change.UNCLEAR:
        return f"it is unclear whether B's steps take longer ({numbers}, {noise})"
    reasons = _describe_reasons(step, rows, phases)
    return f"B takes {_format_change(step)} time per step ({numbers}){reasons}"


def _format_change(pair: Pair) -> str:
    """Write by how much B is more or less than A: '43% less'."""
    relative = (pair.ratio or 0.0) - 1
    return f"{abs(relative):.0%} {pair.change}"


def _describe_peak(peak: Pair) -> str:
    """Write how B's peak memory differs from A's."""
    if peak.change is Change.SAME:
        return f"peak memory is the same ({size(peak.b or 0.0)})"
    numbers = f"{size(peak.a or 0.0)} -> {size(peak.b or 0.0)}"
    if peak.change is Change.UNCLEAR:
        return f"it is unclear whether peak memory differs ({numbers}, a snapshot without history)"
    return f"peak memory is {_format_change(peak)} ({numbers})"


def _find_loads(
    a: Facts,
    b: Facts,
    totals: Sequence[Total],
) -> dict[str, CoreShortage]:
    """Find the shortage of cores in the steps whose times are compared, by run, "A" and "B"."""
    names = {total.name for total in totals}
    kinds = []
    if WHOLE_STEP in names:
        kinds.append(ORDINARY)
    if TRACED_STEP in names:
        kinds.append(PROFILED)
    found = {}
    for name, facts in (("A", a), ("B", b)):
        loads = [find_load(facts, kind) for kind in kinds]
        known = [load for load in loads if load is not None]
        if known:
            found[name] = known[0]
    return found


def _describe_reasons(
    step: Pair,
    rows: dict[str, Pair],
    phases: Sequence[PhasePair],
) -> str:
    """Name phases where computing changed; else the rows, which name the other reasons."""
    whole_ms = step.difference or 0.0
    parts = _list_parts(whole_ms, rows, phases)
    large = []
    for name, pair in parts.items():
        ms = pair.difference
        # a phase that takes longer explains no shorter step
        if ms and pair.change is step.change and abs(ms) >= MIN_DIFFERENCE_SHARE * abs(whole_ms):
            large.append((name, ms))
    large.sort(key=lambda part: -abs(part[1]))
    named = []
    for name, ms in large[:MAX_NAMED_CHANGES]:
        sign = "+" if ms > 0 else "-"
        named.append(f"{name} {sign}{_format_ms(abs(ms))} ms")
    return f": {', '.join(named)}" if named else ""


def _list_parts(
    whole_ms: float,  # by which the steps differ
    rows: dict[str, Pair],
    phases: Sequence[PhasePair],
) -> dict[str, Pair]:
    """List the parts of a step by name: its phases where most of the difference is computing, else its rows."""
    compute_ms = 0.0
    if "compute" in rows:
        compute_ms = rows["compute"].difference or 0.0
    if rows and compute_ms / whole_ms < MOSTLY_COMPUTE:
        return {ROW_TITLES[name]: pair for name, pair in rows.items()}
    parts = {}
    for phase in phases:
        parts[phase.name] = phase.host
        if phase.device and phase.device.difference is not None:
            parts[phase.name] = phase.device
    return parts


def _format_ms(value: float | None) -> str:
    """Write milliseconds: whole from 100 on, else with the digits that matter."""
    return f"{value:,.0f}" if value and value >= 100 else significant(value or 0.0)


# --- one run's critical rank: what it spends on each purpose, step by step

MAX_PURPOSE_KERNELS = 4  # kernels of one purpose, most time first
MAX_COMPARED_STEPS = 10  # steady steps that are looked at one by one; evenly chosen of more


@dataclass(frozen=True)
class ComparedWork:
    """The work for one purpose: kernels are matched by what they are for, since names change with precision, shapes
    and libraries."""

    role: str
    ms: list[float]  # of each steady step
    per_step: float | None  # None for work that this run does not do
    names: tuple[str, ...]  # kernels, most time first; () on a CPU, where the operator is all


@dataclass(frozen=True)
class Side:
    """The critical rank of a run."""

    time: RankTime  # of all steady steps together
    steps: list[RankTime]  # of single ones: how much every number varies
    work: dict[tuple[str, str], ComparedWork]  # by operator and phase
    role_steps: dict[str, Numbers]  # ms of each steady step
    roles: dict[str, float]


def build_side(one: RankFacts) -> Side:
    """Measure the rank's steps one by one; as many times the work of `rank_time` as there are."""
    placing = one.placing
    times = []
    for at in _choose_steps(one):
        alone = [replace(step, steady=number == at) for number, step in enumerate(placing.steps)]
        of_step = replace(placing, steps=tuple(alone))
        times.append(rank_time(one.trace, of_step))
    work, role_steps = _measure_work(one)
    return Side(
        time=one.time,
        steps=times,
        work=work,
        role_steps=role_steps,
        roles={str(role): ms for role, ms in one.kernels.roles.items()},
    )


def _choose_steps(one: RankFacts) -> list[int]:
    """Indices of the steady steps, or of MAX_COMPARED_STEPS evenly chosen ones."""
    steady = [at for at, step in enumerate(one.placing.steps) if step.steady]
    count = len(steady)
    if count <= MAX_COMPARED_STEPS:
        return steady
    return [steady[count * at // MAX_COMPARED_STEPS] for at in range(MAX_COMPARED_STEPS)]


def _measure_work(one: RankFacts) -> tuple[dict[tuple[str, str], ComparedWork], dict[str, Numbers]]:
    """Measure the work of each steady step.

    Returns:
        Work by operator and phase, and ms of each steady step by role. On a GPU the work that operators launched, and
        what has none by its own name; on a CPU the operators' own time.
    """
    chosen = Selection(one.trace, one.placing)
    if not chosen.steps:
        return {}, {}
    if one.time.on_gpu:
        rows = chosen.device
        ms_per_step = chosen.ms
    else:
        rows = np.concatenate([chosen.operators, chosen.spans])
        ms_per_step = own_ms(chosen)
    is_steady = [step.steady for step in one.placing.steps]
    number_of_step = np.cumsum(is_steady) - 1
    pieces = _Pieces(
        rows=rows,
        ms=ms_per_step[rows] * chosen.steps,
        step=number_of_step[one.placing.step[rows]],
        steps=chosen.steps,
    )
    return _group_by_operator(one, pieces), _sum_by_role(one, pieces)


@dataclass(frozen=True)
class _Pieces:
    """Work in the steady steps, in p pieces."""

    rows: Integers  # [p], the trace's events
    ms: Numbers  # [p]
    step: Integers  # [p], which of the steady steps
    steps: int  # how many steady steps there are

    def sum_by_step(self, group: Integers, groups: int) -> Numbers:
        """Sum the ms of the pieces of each group in each step: float64 [groups, steps].

        Args:
            group: int [p], the group of each piece.
            groups: how many there are.
        """
        ms = np.zeros((groups, self.steps))
        np.add.at(ms, (group, self.step), self.ms)
        return ms


def _sum_by_role(one: RankFacts, pieces: _Pieces) -> dict[str, Numbers]:
    """Sum the time of each role, ms of each steady step."""
    codes = one.trace.events.name[pieces.rows]
    distinct, group = np.unique(codes, return_inverse=True)
    ms_by_step = pieces.sum_by_step(group, len(distinct))
    rows = one.kernels.rows if one.time.on_gpu else one.kernels.operators
    role_of = {row.name: str(row.role) for row in rows}
    roles: dict[str, Numbers] = {}
    for name, ms in zip(distinct.tolist(), ms_by_step):
        role = role_of.get(one.trace.names[name], "")
        roles[role] = roles.get(role, 0.0) + ms
    return roles


def _group_by_operator(one: RankFacts, pieces: _Pieces) -> dict[tuple[str, str], ComparedWork]:
    """Group work by operator and phase; on a GPU what no operator launched stands under its own name."""
    on_gpu = one.time.on_gpu
    names = one.trace.names
    get_role = get_kernel_role if on_gpu else get_operator_role
    own_code = one.trace.events.name[pieces.rows].astype(np.int64)
    operator_code = _find_operator_names(one, pieces) if on_gpu else own_code
    # 0 is for work outside of all phases
    phases = ("", *one.placing.phases)
    phase = one.placing.phase[pieces.rows] + 1
    # an operator and a phase make one number
    key_of_piece = operator_code * len(phases) + phase
    keys, group = np.unique(key_of_piece, return_inverse=True)
    ms_by_step = pieces.sum_by_step(group, len(keys))
    calls = np.bincount(group, minlength=len(keys))
    codes_of_group = _sort_names(group, own_code, pieces.ms)
    work = {}
    for at, key in enumerate(keys.tolist()):
        code, phase_number = divmod(key, len(phases))
        own_names = [names[own] for own in codes_of_group[at]]
        kernels = [short_name(name) for name in own_names[:MAX_PURPOSE_KERNELS]] if on_gpu else []
        operator_name = _shorten_operator(names[code])
        work[operator_name, phases[phase_number]] = ComparedWork(
            role=str(get_role(own_names[0])),
            ms=ms_by_step[at].tolist(),
            per_step=float(calls[at] / pieces.steps),
            names=tuple(dict.fromkeys(kernels)),
        )
    return work


def _find_operator_names(one: RankFacts, pieces: _Pieces) -> Integers:
    """Find the code of the operator's name that launched each piece, else of the piece's own; int64 [p]."""
    names = one.trace.events.name
    operator = one.placing.operator[pieces.rows]
    codes = np.where(operator >= 0, names[operator], names[pieces.rows])
    return codes.astype(np.int64)


def _shorten_operator(name: str) -> str:
    """Name an operator as people call it, not 'autograd::engine::evaluate_function: X' or by long C++ names."""
    return name if name.startswith("aten::") else short_name(name)


def _sort_names(
    group: Integers,  # [p], of each piece
    name: Integers,  # [p], the code of its name
    ms: Numbers,  # [p]
) -> dict[int, list[int]]:
    """Sort the names of each group's pieces by their time.

    Returns:
        The codes of each group's names, the one of the longest time first.
    """
    columns = np.stack([group, name])
    pairs, which = np.unique(columns, axis=1, return_inverse=True)
    total_ms = np.bincount(which.ravel(), ms, pairs.shape[1])
    longest_first = np.argsort(-total_ms, kind="stable")
    codes: dict[int, list[int]] = {}
    for of_group, code in pairs[:, longest_first].T.tolist():
        codes.setdefault(of_group, []).append(code)
    return codes


# --- two traces beside each other: rows, phases, roles and kernels, each with the noise that it has itself


def pair_traces(a: Side, b: Side) -> dict[str, Any]:
    """Build the fields of Comparison that come from traces, in the order of a report; kernels by their difference."""
    rows = {}
    for name in ROW_TITLES:
        if a.time.rows.get(name) or b.time.rows.get(name):
            rows[name] = _pair_row(a, b, name)
    # kernels of a GPU and operators of a CPU are no pairs
    are_alike = a.time.on_gpu == b.time.on_gpu
    return {
        "on_gpu": a.time.on_gpu or b.time.on_gpu,
        "rows": rows,
        "phases": _pair_traced_phases(a, b),
        "phases_of": "traces of the profiled steps",
        "roles": _pair_roles(a, b) if are_alike else {},
        "kernels": _pair_kernels(a, b) if are_alike else (),
    }


def _pair_figure(a: Side, b: Side, measure: Callable[[RankTime], float | None]) -> Pair:
    """Pair one figure of two traces.

    Args:
        a: the trace before.
        b: the trace after.
        measure: takes the figure from a rank's time; None where it has none.

    Returns:
        The figure over all steady steps, with the noise of the single ones.
    """
    whole_a = measure(a.time)
    whole_b = measure(b.time)
    of_steps_a = [measure(time) or 0.0 for time in a.steps]
    of_steps_b = [measure(time) or 0.0 for time in b.steps]
    band = compute_noise_band(of_steps_a, of_steps_b)
    return paired(whole_a, whole_b, band)


def _pair_row(a: Side, b: Side, name: str) -> Pair:
    """Pair a row of the step, ms per step; a row that one has not is 0."""
    return _pair_figure(a, b, lambda time: time.rows.get(name, 0.0))


def _pair_traced_phases(a: Side, b: Side) -> tuple[PhasePair, ...]:
    """Pair the phases of two traces, ms per step; on the device only where one ran on a GPU."""
    on_gpu = a.time.on_gpu or b.time.on_gpu
    names = [phase.name for side in (a, b) for phase in side.time.phases]
    pairs = []
    for name in dict.fromkeys(names):
        on_host = _pair_phase(a, b, name, "host_ms")
        on_device = _pair_phase(a, b, name, "device_ms") if on_gpu else None
        pairs.append(PhasePair(name, on_host, on_device))
    return tuple(pairs)


def _pair_phase(
    a: Side,
    b: Side,
    name: str,
    field: str,  # of PhaseTime: host_ms or device_ms
) -> Pair:
    """Pair a field of the phase with this name, ms per step."""
    return _pair_figure(a, b, lambda time: _measure_phase(time, name, field))


def _measure_phase(time: RankTime, name: str, field: str) -> float | None:
    """Take a field of the phase with this name; None where the rank has no such phase."""
    for phase in time.phases:
        if phase.name == name:
            return float(getattr(phase, field))
    return None


def _pair_roles(a: Side, b: Side) -> dict[str, Pair]:
    """Pair the time of each role, ms per step, the longest first."""
    longest_ms = {}
    for name in {**a.roles, **b.roles}:
        ms_a = a.roles.get(name, 0)
        ms_b = b.roles.get(name, 0)
        longest_ms[name] = max(ms_a, ms_b)
    pairs = {}
    for name in sorted(longest_ms, key=lambda name: -longest_ms[name]):
        of_steps_a = a.role_steps.get(name, ())
        of_steps_b = b.role_steps.get(name, ())
        band = compute_noise_band(of_steps_a, of_steps_b)
        pairs[name] = paired(a.roles.get(name), b.roles.get(name), band)
    return pairs


def _pair_kernels(a: Side, b: Side) -> tuple[KernelPair, ...]:
    """Pair the work of each operator and phase, the largest difference first."""
    absent = ComparedWork("", [], None, ())
    pairs = []
    for operator, phase in {**a.work, **b.work}:
        work_a = a.work.get((operator, phase), absent)
        work_b = b.work.get((operator, phase), absent)
        pair = KernelPair(
            role=work_a.role or work_b.role,
            operator=operator,
            phase=phase,
            names_a=work_a.names,
            names_b=work_b.names,
            per_step=paired(work_a.per_step, work_b.per_step, 0.0),
            ms=paired_samples(work_a.ms, work_b.ms, center=fmean),
        )
        pairs.append(pair)
    return tuple(sorted(pairs, key=_measure_difference, reverse=True))


def _measure_difference(pair: KernelPair) -> float:
    """Measure by how many ms the two differ; work that one has not takes 0."""
    difference_ms = (pair.ms.b or 0.0) - (pair.ms.a or 0.0)
    return abs(difference_ms)


# --- the comparison

MAX_COMPARED_SLOWDOWN = 1.1  # by the profiler: beyond it traced times say little about the run's own
ONE_START = (
    "one start of each: what differs from start to start (clock speeds, neighbors, "
    "placement) is not in the noise bands; "
    "repeat both, alternating, before you trust a small difference"
)


def compare(
    a: Facts,
    b: Facts,
    force: bool = False,
    titles: tuple[str, str] = ("A", "B"),
) -> Comparison:
    """Compare B against A.

    Args:
        a: the run before.
        b: the run after.
        force: compare runs of another model or batch, too.
        titles: how messages and the report name the runs.

    Raises:
        ConfigError: they are of another model or batch, a line for each reason, and `force` is not given.
        UserError: they have nothing in common.
    """
    reasons = _object(a, b, force)
    totals = tuple(pair_totals(a, b))
    if not totals:
        raise UserError(
            f"{titles[0]}, {titles[1]}: they have nothing in common to compare; both need steps.jsonl with typical "
            "steps, a trace with a steady step, or a memory snapshot."
        )
    loads = (find_load(a, ORDINARY), find_load(b, ORDINARY))
    phases = pair_phases_of_runs(a.run, b.run, loads) if a.run and b.run else ()
    names = {total.name for total in totals}
    if a.critical and b.critical and TRACED_STEP in names:
        side_a = build_side(a.critical)
        side_b = build_side(b.critical)
        parts = pair_traces(side_a, side_b)
    else:
        parts = _build_untraced(phases)
    of_hardware = pair_hardware(a, b)
    sentences = []
    lower_clock = describe_lower_clock(a, b, of_hardware)
    if lower_clock:
        # before the code is blamed
        sentences.append(lower_clock)
    sentences.append(_describe_times(totals, parts, phases))
    busy = _find_loads(a, b, totals)
    if busy:
        sentences.append(f"on a busy machine: {' and '.join(busy)}")
    return Comparison(
        title_a=titles[0],
        title_b=titles[1],
        sentence="; ".join(sentences),
        flags=flags_that_differ(a, b),
        totals=(*totals, *of_hardware),
        memory=_pair_memory(a, b),
        groups=_pair_groups(a, b, parts["rows"].get("exposed_communication")),
        losses=compare_losses(a.run, b.run),
        notes=tuple(_collect_notes(a, b, totals)),
        forced=tuple(reasons),
        **parts,
    )


def _object(a: Facts, b: Facts, force: bool) -> list[str]:
    """List why the runs are not comparable. a, b, force: as of `compare`, whose ConfigError this raises."""
    reasons = [*objections(a, b), *object_to_models(a, b)]
    if reasons and not force:
        raise ConfigError([f"{reason}; --force compares all the same." for reason in reasons])
    return reasons


def _describe_times(totals: Sequence[Total], parts: dict[str, Any], phases: tuple[PhasePair, ...]) -> str:
    """Write how the steps differ, and what makes the difference.

    Args:
        totals: What both runs have.
        parts: What `pair_traces` gives.
        phases: Pairs of the phases of typical steps.
    """
    if any(total.name == WHOLE_STEP for total in totals):
        # a profiler slows its steps down: differences of its phases are no parts of a typical step's difference
        return build_sentence(totals, {}, phases)
    return build_sentence(totals, parts["rows"], parts["phases"])


def _build_untraced(phases: tuple[PhasePair, ...]) -> dict[str, Any]:
    """Build the fields of Comparison that pair_traces builds, for runs without two traces."""
    return {
        "on_gpu": False,
        "rows": {},
        "phases": phases,
        "phases_of": "steps.jsonl, typical steps" if phases else "",
        "roles": {},
        "kernels": (),
    }


def _pair_memory(a: Facts, b: Facts) -> dict[str, Pair]:
    """Pair bytes by category at the highest peak of each, in the order of a report; {} without two snapshots."""
    if a.highest_snapshot is None or b.highest_snapshot is None:
        return {}
    held_a = {held.category: held.num_bytes for held in a.highest_snapshot.held}
    held_b = {held.category: held.num_bytes for held in b.highest_snapshot.held}
    is_peak_of_a = _measure_snapshot_peak(a) is not None
    is_peak_of_b = _measure_snapshot_peak(b) is not None
    pairs = {}
    for name in CATEGORIES:
        bytes_a = held_a.get(name, 0)
        bytes_b = held_b.get(name, 0)
        if not bytes_a and not bytes_b:
            continue
        if is_peak_of_a and is_peak_of_b:
            pairs[name] = exact(bytes_a, bytes_b)
        else:
            pairs[name] = paired(bytes_a, bytes_b, None)
    return pairs


def _pair_groups(a: Facts, b: Facts, whole: Pair | None) -> dict[str, Pair]:
    """Exposed communication by dimension of the layout, largest difference first; with the noise of all of it,
    `whole`."""
    exposed_a = _list_exposed(a)
    exposed_b = _list_exposed(b)
    names = {**exposed_a, **exposed_b}
    if whole is None or len(names) < 2:  # one alone is a row of its own already
        return {}
    pairs = {}
    for name in names:
        ms_a = exposed_a.get(name, 0.0)
        ms_b = exposed_b.get(name, 0.0)
        pairs[name] = paired(ms_a, ms_b, whole.band)
    by_difference = sorted(pairs.items(), key=lambda item: -abs(item[1].difference or 0.0))
    return dict(by_difference)


def _list_exposed(facts: Facts) -> dict[str, float]:
    """Exposed communication of each dimension of the layout, ms per step; {} where no ranks are compared."""
    if not facts.ranks:
        return {}
    return {row.group: row.exposed_ms for row in facts.ranks.groups}


def _collect_notes(a: Facts, b: Facts, totals: tuple[Total, ...]) -> list[str]:
    """Collect sentences on what a reader should know of the two before trusting their differences."""
    loads = _find_loads(a, b, totals)
    notes = [describe_load(name, load) for name, load in loads.items()]
    for name, facts in (("A", a), ("B", b)):
        if doubt := describe_unknown_load(name, facts):
            notes.append(doubt)
        notes += describe_host(name, facts)
    if not (a.has_plan and b.has_plan):
        notes.append(
            "model and batch are known only for runs of this trainer: check yourself that both did the same work"
        )
    devices = [facts.critical.time.device or "CPU" for facts in (a, b) if facts.critical]
    if len(set(devices)) > 1:
        notes.append(f"the devices differ: {devices[0]} against {devices[1]}")
    for name, facts in (("A", a), ("B", b)):
        notes += [f"{name}: {doubt}" for doubt in find_contradictions(facts)]
        notes += _describe_unread_ranks(name, facts)
        notes += _describe_slowdown(name, facts)
        notes += _describe_missing_history(name, facts)
    if any(total.of == SNAPSHOTS for total in totals):
        notes += _describe_other_ranks(a, b)
    snapshots = (*a.snapshots[:1], *b.snapshots[:1])
    if any(snapshot.simulated for snapshot in snapshots):
        notes.append("memory is what tensors on the CPU took, not a GPU's allocator")
    return notes + _describe_noise(totals)


def _describe_unread_ranks(name: str, facts: Facts) -> list[str]:
    """Describe in one sentence how many ranks of run `name` have no trace here; [] where all have, or none has."""
    missing = facts.ranks.describe_missing() if facts.ranks else ""
    return [f"{name}: {missing}, and one of them may take longer"] if missing else []


def _describe_other_ranks(a: Facts, b: Facts) -> list[str]:
    """Describe in one sentence that the snapshots of the two are of other ranks.

    [] where they are of the same, or do not say.
    """
    ranks_a = _list_snapshot_ranks(a)
    ranks_b = _list_snapshot_ranks(b)
    if not ranks_a or not ranks_b or ranks_a == ranks_b:
        return []
    named_a = name_ranks(ranks_a)
    named_b = name_ranks(ranks_b)
    return [f"peaks are the highest of the snapshots read: of rank {named_a} in A and of rank {named_b} in B"]


def _list_snapshot_ranks(facts: Facts) -> list[int]:
    """List the ranks whose memory was read, ascending; [] where a snapshot does not name its rank."""
    ranks = []
    for snapshot in facts.snapshots:
        if snapshot.rank is None:
            return []
        ranks.append(snapshot.rank)
    ranks.sort()
    return ranks


def _describe_missing_history(name: str, facts: Facts) -> list[str]:
    """Describe in one sentence that the peak of run `name` is unknown; [] where each snapshot tells its own."""
    for snapshot in facts.snapshots:
        if not snapshot.has_history:
            return [f"{name}: a snapshot has no history, so its peak is unknown"]
    return []


def _describe_slowdown(name: str, facts: Facts) -> list[str]:
    """Describe in one sentence how much the profiler slowed run `name` down; [] where it hardly did."""
    slower = facts.run.profiler_slowdown if facts.run else None
    if not slower or slower <= MAX_COMPARED_SLOWDOWN or not facts.critical:
        return []
    advice = "compare traced times among themselves only"
    return [f"{name}'s profiled steps took {slower:.2f} times as long as those before: {advice}"]


def _describe_noise(totals: tuple[Total, ...]) -> list[str]:
    """Collect sentences on how far differences of times can be trusted."""
    unclear = []
    for total in totals:
        # a peak does not vary with steps
        if total.pair.change is Change.UNCLEAR and total.name != PEAK:
            unclear.append(total)
    unclear_times = [total for total in unclear if total.unit == "ms"]
    notes = []
    if any(total.pair.band for total in unclear_times):
        notes.append("steps vary too much to distinguish the runs: changes in single rows may come from the machine")
    elif unclear:
        notes.append("few steps were seen: use a longer run or a longer window")
    if any(total.unit == "ms" for total in totals):
        notes.append(ONE_START)
    return notes
