"""Two runs or traces beside each other: what changed, what did not, and what cannot be told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair, PhasePair, Total
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
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.units import significant, size

# --- steps, rates and peaks of two runs beside each other, the phases of runs without traces, and the first line

STEP, TRACED_STEP, PEAK = "step", "traced step", "peak memory"


def pair_totals(a: Facts, b: Facts) -> list[Total]:
    """Pair step, tokens per second, MFU and peak memory, of each source that both have."""
    return [*_pair_ordinary_steps(a, b), *_pair_traced_steps(a, b), *_pair_peaks(a, b)]


def _pair_ordinary_steps(a: Facts, b: Facts) -> list[Total]:
    """Pair the media typical step of two runs, and their rates; [] where one has no run folder or no typical step."""
    if a.run is None or b.run is None:
        return []
    steps_a_ms = a.run.training_ms[a.run.ordinary]
    steps_b_ms = b.run.training_ms[b.run.ordinary]
    if not len(steps_a_ms) or not len(steps_b_ms):
        return []
    loads = (find_load(a, ORDINARY), find_load(b, ORDINARY))
    of = f"steps.jsonl, {len(steps_a_ms)} and {len(steps_b_ms)} typical steps"
    totals = [Total(STEP, "ms", of, widen_band(paired_samples(steps_a_ms, steps_b_ms), loads))]
    # rates are of all ordinary time, as a report has them; they vary as one over the step does
    relative_band = compute_noise_band(steps_a_ms.mean() / steps_a_ms, steps_b_ms.mean() / steps_b_ms)

    def add_rate(name: str, unit: str, rate_a: float | None, rate_b: float | None) -> None:
        if rate_a is not None and rate_b is not None:
            band = None if relative_band is None else relative_band * max(rate_a, rate_b)
            totals.append(Total(name, unit, of, widen_rate(paired(rate_a, rate_b, band), loads)))

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
    steps_a_ms = [step.ms for step in a.critical.time.steady_steps]
    steps_b_ms = [step.ms for step in b.critical.time.steady_steps]
    if not steps_a_ms or not steps_b_ms:
        return []
    of = f"traces, {len(steps_a_ms)} and {len(steps_b_ms)} steady steps"
    band = compute_noise_band(steps_a_ms, steps_b_ms)
    pair = paired(a.critical.time.step_ms, b.critical.time.step_ms, band)
    return [Total(TRACED_STEP, "ms", of, widen_band(pair, (find_load(a, PROFILED), find_load(b, PROFILED))))]


def _pair_peaks(a: Facts, b: Facts) -> list[Total]:
    """Pair the most that tensors took: of snapshots, else as the GPU's allocator counted in each step; bytes."""
    of_snapshots = [facts.highest_snapshot.peak_bytes for facts in (a, b) if facts.highest_snapshot]
    if len(of_snapshots) == 2 and all(of_snapshots):
        return [Total(PEAK, "bytes", "memory snapshots", exact(*of_snapshots))]
    of_runs = []
    for facts in (a, b):
        if facts.run:
            peaks = facts.run.peak_memory_bytes
            of_runs.append(float(peaks.max(initial=0.0, where=peaks > 0)))
    if len(of_runs) == 2 and all(of_runs):
        return [Total(PEAK, "bytes", "steps.jsonl", exact(*of_runs))]
    return []


def pair_phases_of_runs(
    a: Run, b: Run, loads: tuple[CoreShortage | None, CoreShortage | None] = (None, None)
) -> tuple[PhasePair, ...]:
    """Pair the phases of two runs by their medians over typical steps.

    Args:
        a, b: the runs.
        loads: the shortage of cores in typical steps of each.

    Returns:
        Each phase on the host and, where there is a GPU, as its stream passed through it.
    """
    found = []
    for name in dict.fromkeys((*a.phases_ms, *b.phases_ms)):
        on_host = paired_samples(_of_ordinary(a, a.phases_ms.get(name)), _of_ordinary(b, b.phases_ms.get(name)))
        on_device = None
        if a.gpu_phases_ms or b.gpu_phases_ms:
            device_a_ms = _of_ordinary(a, a.gpu_phases_ms.get(name))
            device_b_ms = _of_ordinary(b, b.gpu_phases_ms.get(name))
            on_device = paired_samples(device_a_ms, device_b_ms)
        found.append(PhasePair(name, widen_band(on_host, loads), on_device))
    return tuple(found)


def _of_ordinary(run: Run, values: Numbers | None) -> Numbers:
    """A column's values in typical steps; none of a phase that the run has not."""
    return np.array([]) if values is None else values[run.ordinary]


# --- the first line of a comparison

MIN_SHARE = 0.15  # of the step's difference that a phase must be to be named
MAX_NAMED = 3
MOSTLY_COMPUTE = 0.5  # of the step's difference: then phases say more than the one row "compute"


def build_sentence(totals: Sequence[Total], rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """'B takes 43% less time per step (185 -> 106 ms): backward -50 ms, forward -28 ms; peak memory is 20% less (...)'.

    rows, phases: of the same steps as the first of `totals` that is a step.
    """
    by_name = {total.name: total.pair for total in totals}
    parts = []
    step = by_name.get(STEP) or by_name.get(TRACED_STEP)
    if step:
        parts.append(_describe_step(step, rows, phases))
    peak = by_name.get(PEAK)
    if peak:
        parts.append(_describe_peak(peak))
    return "; ".join(parts)


def _describe_step(step: Pair, rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """Write how B's step differs from A's, and why.

    Args:
        step: the step of both, ms.
        rows, phases: what the same steps consist of.
    """
    numbers = f"{_format_ms(step.a)} -> {_format_ms(step.b)} ms"
    noise = "too few steps" if step.band is None else f"noise {_format_ms(step.band)} ms"
    if step.change is Change.SAME:
        return f"B's steps take as long as A's ({numbers}, {noise})"
    if step.change is Change.UNCLEAR:
        return f"it is unclear whether B's steps take longer ({numbers}, {noise})"
    reasons = _describe_reasons(step.change, step.difference or 0.0, rows, phases)
    return f"B takes {abs((step.ratio or 0.0) - 1):.0%} {step.change} time per step ({numbers}){reasons}"


def _describe_peak(peak: Pair) -> str:
    """Write how B's peak memory differs from A's."""
    if peak.change is Change.SAME:
        return f"peak memory is the same ({size(peak.b or 0.0)})"
    by = f"{abs((peak.ratio or 0.0) - 1):.0%} {peak.change}"
    return f"peak memory is {by} ({size(peak.a or 0.0)} -> {size(peak.b or 0.0)})"


def _find_loads(a: Facts, b: Facts, totals: Sequence[Total]) -> dict[str, CoreShortage]:
    """By run, "A" and "B", the shortage of cores in the steps whose times are compared."""
    names = {total.name for total in totals}
    kinds = [kind for name, kind in ((STEP, ORDINARY), (TRACED_STEP, PROFILED)) if name in names]
    found = {}
    for name, facts in (("A", a), ("B", b)):
        loads = [load for kind in kinds if (load := find_load(facts, kind))]
        if loads:
            found[name] = loads[0]
    return found


def _describe_reasons(change: Change, whole_ms: float, rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """Phases where computing changed; else the rows, which name the other reasons."""
    compute = rows.get("compute")
    computing = compute is not None and (compute.difference or 0.0) / whole_ms >= MOSTLY_COMPUTE
    if rows and not computing:
        parts = {ROW_TITLES[name]: pair for name, pair in rows.items()}
    else:
        parts = {}
        for phase in phases:
            on_device = phase.device and phase.device.difference is not None
            parts[phase.name] = phase.device if phase.device and on_device else phase.host
    # a phase that takes longer explains no shorter step
    told = {name: pair.difference for name, pair in parts.items() if pair.change is change and pair.difference}
    large = [(abs(ms), ms, name) for name, ms in told.items() if abs(ms) >= MIN_SHARE * abs(whole_ms)]
    named = [
        f"{name} {'+' if ms > 0 else '-'}{_format_ms(by)} ms"
        for by, ms, name in sorted(large, key=lambda one: -one[0])[:MAX_NAMED]
    ]
    return f": {', '.join(named)}" if named else ""


def _format_ms(value: float | None) -> str:
    return f"{value:,.0f}" if value and value >= 100 else significant(value or 0.0)


# --- one run's critical rank: what it spends on each purpose, step by step

MAX_NAMES = 4  # kernels of one purpose, most time first
MAX_STEPS = 10  # steady steps that are looked at one by one; evenly chosen of more


@dataclass(frozen=True)
class Work:
    """One purpose: kernels are matched by what they are for, since names change with precision,
    shapes and libraries."""

    role: str
    ms: list[float]  # of each steady step
    per_step: float | None  # None for work that this run does not do
    names: tuple[str, ...]  # kernels, most time first; () on a CPU, where the operator is all


@dataclass(frozen=True)
class Side:
    """One run's critical rank."""

    time: RankTime  # of all steady steps together
    steps: list[RankTime]  # of single ones: how much every number varies
    work: dict[tuple[str, str], Work]  # by operator and phase
    role_steps: dict[str, Numbers]  # ms of each steady step
    roles: dict[str, float]


def build_side(one: RankFacts) -> Side:
    """The rank's steps one by one; as many times the work of `rank_time` as there are."""
    placing = one.placing
    steady = [at for at, step in enumerate(placing.steps) if step.steady]
    chosen = [steady[len(steady) * at // MAX_STEPS] for at in range(MAX_STEPS)] if len(steady) > MAX_STEPS else steady
    times = []
    for at in chosen:
        alone = tuple(replace(step, steady=number == at) for number, step in enumerate(placing.steps))
        times.append(rank_time(one.trace, replace(placing, steps=alone)))
    roles = {str(role): ms for role, ms in one.kernels.roles.items()}
    return Side(one.time, times, *_measure_work(one), roles)


def _measure_work(one: RankFacts) -> tuple[dict[tuple[str, str], Work], dict[str, Numbers]]:
    """Measure the work of each steady step.

    Returns:
        Work by operator and phase, and ms of each steady step by role. On a GPU the work that operators launched, and
        what has none by its own name; on a CPU the operators' own time.
    """
    chosen = Selection(one.trace, one.placing)
    if not chosen.steps:
        return {}, {}
    on_gpu = one.time.on_gpu
    rows = chosen.device if on_gpu else np.concatenate([chosen.operators, chosen.spans])
    ms = (chosen.ms if on_gpu else own_ms(chosen))[rows] * chosen.steps
    step = (np.cumsum([step.steady for step in one.placing.steps]) - 1)[one.placing.step[rows]]
    pieces = _Pieces(rows, ms, step, chosen.steps)
    return _group_by_operator(one, pieces), _sum_by_role(one, pieces)


@dataclass(frozen=True)
class _Pieces:
    """p pieces of work in the steady steps."""

    rows: Integers  # [p], the trace's events
    ms: Numbers  # [p]
    step: Integers  # [p], which of the steady steps
    steps: int  # how many steady steps there are

    def sum_by_step(self, group: Integers, groups: int) -> Numbers:
        """float64 [groups, steps]: ms of the pieces of each group in each step. group: [p]."""
        ms = np.zeros((groups, self.steps))
        np.add.at(ms, (group, self.step), self.ms)
        return ms


def _sum_by_role(one: RankFacts, pieces: _Pieces) -> dict[str, Numbers]:
    """{role: ms of each steady step}"""
    by_name, group = np.unique(one.trace.events.name[pieces.rows].astype(np.int64), return_inverse=True)
    role_of = {row.name: str(row.role) for row in (one.kernels.rows if one.time.on_gpu else one.kernels.operators)}
    roles: dict[str, Numbers] = {}
    for name, ms_by_step in zip(by_name.tolist(), pieces.sum_by_step(group, len(by_name))):
        role = role_of.get(one.trace.names[name], "")
        roles[role] = roles.get(role, 0.0) + ms_by_step
    return roles


def _group_by_operator(one: RankFacts, pieces: _Pieces) -> dict[tuple[str, str], Work]:
    """{(operator, phase): its work}; on a GPU what no operator launched stands under its own name."""
    on_gpu = one.time.on_gpu
    get_role = get_kernel_role if on_gpu else get_operator_role
    names = one.trace.names
    all_names = one.trace.events.name.astype(np.int64)
    own_name = all_names[pieces.rows]
    operator = one.placing.operator[pieces.rows] if on_gpu else pieces.rows
    operator_name = np.where(operator >= 0, all_names[operator], own_name)
    # 0 is for work outside of all phases
    phases = ("", *one.placing.phases)
    phase_number = one.placing.phase[pieces.rows] + 1
    keys, group = np.unique(operator_name * len(phases) + phase_number, return_inverse=True)
    ms_by_step = pieces.sum_by_step(group, len(keys))
    per_step = np.bincount(group, minlength=len(keys)) / pieces.steps
    codes_of_group = _sort_names(group, own_name, pieces.ms)
    work = {}
    for at, key in enumerate(keys.tolist()):
        operator_code, phase_at = divmod(key, len(phases))
        own_names = [names[code] for code in codes_of_group[at]]
        kernels = dict.fromkeys(short_name(name) for name in own_names[:MAX_NAMES]) if on_gpu else ()
        name = names[operator_code]
        if not name.startswith("aten::"):
            # 'autograd::engine::evaluate_function: X' and long C++ names as people call them
            name = short_name(name)
        role = str(get_role(own_names[0]))
        work[name, phases[phase_at]] = Work(role, ms_by_step[at].tolist(), float(per_step[at]), tuple(kernels))
    return work


def _sort_names(group: Integers, name: Integers, ms: Numbers) -> dict[int, list[int]]:
    """Sort the names of each group's pieces by their time.

    Args:
        group: [p], the group of each piece.
        name: [p], the code of its name.
        ms: [p], its time.

    Returns:
        The codes of each group's names, the one of the longest time first.
    """
    pairs, where = np.unique(np.stack([group, name]), axis=1, return_inverse=True)
    total_ms = np.bincount(where.ravel(), ms, pairs.shape[1])
    longest_first = np.argsort(-total_ms, kind="stable")
    codes: dict[int, list[int]] = {}
    for at, code in pairs[:, longest_first].T.tolist():
        codes.setdefault(at, []).append(code)
    return codes


# --- two traces beside each other: rows, phases, roles and kernels, each with the noise that it has itself


def pair_traces(a: Side, b: Side) -> dict[str, Any]:
    """Build the fields of Comparison that come from traces, in the order of a report; kernels by their difference."""
    row_names = [name for name in ROW_TITLES if a.time.rows.get(name) or b.time.rows.get(name)]
    # kernels of a GPU and operators of a CPU are no pairs
    are_alike = a.time.on_gpu == b.time.on_gpu
    return {
        "on_gpu": a.time.on_gpu or b.time.on_gpu,
        "rows": {name: _pair_row(a, b, name) for name in row_names},
        "phases": _pair_traced_phases(a, b),
        "phases_of": "traces of the profiled steps",
        "roles": _pair_roles(a, b) if are_alike else {},
        "kernels": _pair_kernels(a, b) if are_alike else (),
    }


def _pair_figure(a: Side, b: Side, measure: Callable[[RankTime], float | None]) -> Pair:
    """Pair one figure of two traces.

    Args:
        a, b: the traces.
        measure: takes the figure from a rank's time; None where it has none.

    Returns:
        The figure over all steady steps, with the noise of the single ones.
    """
    of_steps_a = [measure(time) or 0.0 for time in a.steps]
    of_steps_b = [measure(time) or 0.0 for time in b.steps]
    return paired(measure(a.time), measure(b.time), compute_noise_band(of_steps_a, of_steps_b))


def _pair_row(a: Side, b: Side, name: str) -> Pair:
    """Pair a row of the step, ms per step; a row that one has not is 0."""
    return _pair_figure(a, b, lambda time: time.rows.get(name, 0.0))


def _pair_traced_phases(a: Side, b: Side) -> tuple[PhasePair, ...]:
    """Pair the phases of two traces, ms per step; on the device only where one ran on a GPU."""
    on_gpu = a.time.on_gpu or b.time.on_gpu
    names = dict.fromkeys(phase.name for side in (a, b) for phase in side.time.phases)
    pairs = []
    for name in names:
        on_device = _pair_phase(a, b, name, "device_ms") if on_gpu else None
        pairs.append(PhasePair(name, _pair_phase(a, b, name, "host_ms"), on_device))
    return tuple(pairs)


def _pair_phase(a: Side, b: Side, name: str, field: str) -> Pair:
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
    longest_ms = {name: max(a.roles.get(name, 0), b.roles.get(name, 0)) for name in {**a.roles, **b.roles}}
    pairs = {}
    for name in sorted(longest_ms, key=lambda name: -longest_ms[name]):
        band = compute_noise_band(a.role_steps.get(name, ()), b.role_steps.get(name, ()))
        pairs[name] = paired(a.roles.get(name), b.roles.get(name), band)
    return pairs


def _pair_kernels(a: Side, b: Side) -> tuple[KernelPair, ...]:
    """Pair the work of each operator and phase, the largest difference first."""
    absent = Work("", [], None, ())
    pairs = []
    for operator, phase in {**a.work, **b.work}:
        work_a = a.work.get((operator, phase), absent)
        work_b = b.work.get((operator, phase), absent)
        pairs.append(
            KernelPair(
                work_a.role or work_b.role,
                operator,
                phase,
                work_a.names,
                work_b.names,
                paired(work_a.per_step, work_b.per_step, 0.0),
                paired_samples(work_a.ms, work_b.ms, center=fmean),
            )
        )
    return tuple(sorted(pairs, key=lambda pair: -abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0))))


# --- the comparison

ONE_START = (
    "one start of each: what differs from start to start (clock speeds, neighbors, "
    "placement) is not in the noise bands; "
    "repeat both, alternating, before you trust a small difference"
)


def compare(a: Facts, b: Facts, force: bool = False, titles: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare B against A.

    Args:
        a, b: the runs.
        force: compare runs of another model or batch, too.
        titles: how messages and the report name the runs.

    Raises:
        ConfigError: they are of another model or batch, a line for each reason, and `force` is not given.
        UserError: they have nothing in common.
    """
    reasons = [*objections(a, b), *object_to_models(a, b)]
    if reasons and not force:
        raise ConfigError([f"{reason}; --force compares all the same." for reason in reasons])
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
        parts = pair_traces(build_side(a.critical), build_side(b.critical))
    else:
        parts = _build_untraced(phases)
    if STEP in names:
        # a profiler slows its steps down: differences of its phases are no parts of a typical step's difference
        sentence = build_sentence(totals, {}, phases)
    else:
        sentence = build_sentence(totals, parts["rows"], parts["phases"])
    busy = " and ".join(_find_loads(a, b, totals))
    if busy:
        sentence += f"; on a busy machine: {busy}"
    return Comparison(
        title_a=titles[0],
        title_b=titles[1],
        sentence=sentence,
        flags=flags_that_differ(a, b),
        totals=totals,
        memory=_pair_memory(a, b),
        groups=_pair_groups(a, b, parts["rows"].get("exposed_communication")),
        losses=compare_losses(a.run, b.run),
        notes=tuple(_collect_notes(a, b, totals)),
        forced=tuple(reasons),
        **parts,
    )


def _build_untraced(phases: tuple[PhasePair, ...]) -> dict[str, Any]:
    """Build the fields of Comparison that pair_traces builds, for runs without two traces."""
    of = "steps.jsonl, typical steps" if phases else ""
    return {"on_gpu": False, "rows": {}, "phases": phases, "phases_of": of, "roles": {}, "kernels": ()}


def _pair_memory(a: Facts, b: Facts) -> dict[str, Pair]:
    """Pair bytes by category at the highest peak of each, in the order of a report; {} without two snapshots."""
    if a.highest_snapshot is None or b.highest_snapshot is None:
        return {}
    held_a = {held.category: held.num_bytes for held in a.highest_snapshot.held}
    held_b = {held.category: held.num_bytes for held in b.highest_snapshot.held}
    names = [name for name in CATEGORIES if held_a.get(name) or held_b.get(name)]
    return {name: exact(held_a.get(name, 0), held_b.get(name, 0)) for name in names}


def _pair_groups(a: Facts, b: Facts, whole: Pair | None) -> dict[str, Pair]:
    """Exposed communication by dimension of the layout, largest difference first; with the noise of all of it,
    `whole`."""
    sides = [{row.group: row.exposed_ms for row in facts.ranks.groups} if facts.ranks else {} for facts in (a, b)]
    names = {**sides[0], **sides[1]}
    if whole is None or len(names) < 2:  # one alone is a row of its own already
        return {}
    pairs = {name: paired(sides[0].get(name, 0.0), sides[1].get(name, 0.0), whole.band) for name in names}
    return dict(sorted(pairs.items(), key=lambda item: -abs(item[1].difference or 0.0)))


def _collect_notes(a: Facts, b: Facts, totals: tuple[Total, ...]) -> list[str]:
    notes = [describe_load(name, load) for name, load in _find_loads(a, b, totals).items()]
    notes += [text for name, facts in (("A", a), ("B", b)) if (text := describe_unknown_load(name, facts))]
    if not (a.has_plan and b.has_plan):
        notes.append(
            "model and batch are known only for runs of this trainer: check yourself that both did the same work"
        )
    devices = [facts.critical.time.device or "CPU" for facts in (a, b) if facts.critical]
    if len(set(devices)) > 1:
        notes.append(f"the devices differ: {devices[0]} against {devices[1]}")
    for name, facts in (("A", a), ("B", b)):
        notes += [f"{name}: {doubt}" for doubt in find_contradictions(facts)]
        slower = facts.run.profiler_slowdown if facts.run else None
        if slower and slower > 1.1 and facts.critical:
            notes.append(
                f"{name}'s profiled steps took {slower:.2f} times as long as those before: "
                "compare traced times among themselves only"
            )
    if any(facts.snapshots and facts.snapshots[0].simulated for facts in (a, b)):
        notes.append("memory is what tensors on the CPU took, not a GPU's allocator")
    unclear = [total for total in totals if total.pair.change is Change.UNCLEAR]
    if any(total.unit == "ms" and total.pair.band for total in unclear):
        notes.append("steps vary too much to distinguish the runs: changes in single rows may come from the machine")
    elif unclear:
        notes.append("few steps were seen: use a longer run or a longer window")
    return [*notes, ONE_START] if any(total.unit == "ms" for total in totals) else notes
