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
from megatron_lite.planner.prediction import CATEGORIES
from megatron_lite.units import significant, size

# --- steps, rates and peaks of two runs beside each other, the phases of runs without traces, and the first line

STEP, TRACED_STEP, PEAK = "step", "traced step", "peak memory"


def pair_totals(a: Facts, b: Facts) -> list[Total]:
    """Step, tokens per second, MFU and peak memory, of each source that both have."""
    totals = []
    runs = [facts.run for facts in (a, b) if facts.run]
    ordinary = [run.training_ms[run.ordinary] for run in runs]
    if len(runs) == 2 and all(map(len, ordinary)):
        loads = (find_load(a, ORDINARY), find_load(b, ORDINARY))
        of = f"steps.jsonl, {len(ordinary[0])} and {len(ordinary[1])} typical steps"
        totals.append(Total(STEP, "ms", of, widen_band(paired_samples(*ordinary), loads)))
        # rates are of all ordinary time, as a report has them; they vary as one over the step does
        relative = compute_noise_band(*(ms.mean() / ms for ms in ordinary))
        for name, unit, field, factor in (
            ("tokens per second", "tokens/s", "tokens_per_second", 1),
            ("MFU, causal attention", "%", "mfu_causal", 100),
        ):
            rates = [getattr(run, field) for run in runs]
            if None not in rates:
                mine, theirs = (factor * rate for rate in rates)
                band = None if relative is None else relative * max(mine, theirs)
                totals.append(Total(name, unit, of, widen_rate(paired(mine, theirs, band), loads)))
    # the mean steady step of the critical ranks' traces, as their rows sum to it
    times = [facts.critical.time for facts in (a, b) if facts.critical]
    samples = [[step.ms for step in time.steady_steps] for time in times]
    if len(times) == 2 and all(samples):
        of = f"traces, {len(samples[0])} and {len(samples[1])} steady steps"
        pair = paired(times[0].step_ms, times[1].step_ms, compute_noise_band(*samples))
        totals.append(Total(TRACED_STEP, "ms", of, widen_band(pair, (find_load(a, PROFILED), find_load(b, PROFILED)))))
    # the most that tensors took: of snapshots, else as the GPU's allocator counted in each step
    snapshots = [facts.highest_snapshot.peak_bytes for facts in (a, b) if facts.highest_snapshot]
    counted = [float(run.peak_memory_bytes.max(initial=0.0, where=run.peak_memory_bytes > 0)) for run in runs]
    for of, peaks in (("memory snapshots", snapshots), ("steps.jsonl", counted)):
        if len(peaks) == 2 and all(peaks):
            return [*totals, Total(PEAK, "bytes", of, exact(*peaks))]
    return totals


def pair_phases_of_runs(
    a: Run, b: Run, loads: tuple[CoreShortage | None, CoreShortage | None] = (None, None)
) -> tuple[PhasePair, ...]:
    """Medians over typical steps: of the host, and where there is a GPU as its stream passed through them.

    loads: the shortage of cores in typical steps of each.
    """
    found = []
    for name in dict.fromkeys((*a.phases_ms, *b.phases_ms)):
        host = widen_band(paired_samples(*(_of_ordinary(run, run.phases_ms.get(name)) for run in (a, b))), loads)
        device = None
        if a.gpu_phases_ms or b.gpu_phases_ms:
            device = paired_samples(*(_of_ordinary(run, run.gpu_phases_ms.get(name)) for run in (a, b)))
        found.append(PhasePair(name, host, device))
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
    step, peak, parts = by_name.get(STEP) or by_name.get(TRACED_STEP), by_name.get(PEAK), []
    if step:
        numbers = f"{_format_ms(step.a)} -> {_format_ms(step.b)} ms"
        noise = "too few steps" if step.band is None else f"noise {_format_ms(step.band)} ms"
        if step.change is Change.SAME:
            parts.append(f"B's steps take as long as A's ({numbers}, {noise})")
        elif step.change is Change.UNCLEAR:
            parts.append(f"it is unclear whether B's steps take longer ({numbers}, {noise})")
        else:
            said = f"B takes {abs((step.ratio or 0.0) - 1):.0%} {step.change} time per step ({numbers})"
            parts.append(said + _describe_reasons(step.change, step.difference or 0.0, rows, phases))
    if peak and peak.change is Change.SAME:
        parts.append(f"peak memory is the same ({size(peak.b or 0.0)})")
    elif peak:
        by = f"{abs((peak.ratio or 0.0) - 1):.0%} {peak.change}"
        parts.append(f"peak memory is {by} ({size(peak.a or 0.0)} -> {size(peak.b or 0.0)})")
    return "; ".join(parts)


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
    """One purpose: kernels are matched by what they are for, since names change with precision, shapes and libraries."""

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
        Work by operator and phase, and ms of each steady step by role. On a GPU the work that operators launched, and what
        has none by its own name; on a CPU the operators' own time.
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
    names = one.trace.names
    own_name = one.trace.events.name.astype(np.int64)
    operator = one.placing.operator[pieces.rows] if on_gpu else pieces.rows
    operator_name = np.where(operator >= 0, own_name[operator], own_name[pieces.rows])
    phases = ("", *one.placing.phases)
    keys, group = np.unique(operator_name * len(phases) + one.placing.phase[pieces.rows] + 1, return_inverse=True)
    ms_by_step = pieces.sum_by_step(group, len(keys))
    per_step = np.bincount(group, minlength=len(keys)) / pieces.steps
    pairs, where = np.unique(np.stack([group, own_name[pieces.rows]]), axis=1, return_inverse=True)
    longest_first = np.argsort(-np.bincount(where.ravel(), pieces.ms, pairs.shape[1]), kind="stable")
    work = {}
    for at, key in enumerate(keys.tolist()):
        own_names = [names[code] for code in pairs[1, longest_first[pairs[0, longest_first] == at]].tolist()]
        role = (get_kernel_role if on_gpu else get_operator_role)(own_names[0])
        kernels = dict.fromkeys(map(short_name, own_names[:MAX_NAMES])) if on_gpu else ()
        name = names[key // len(phases)]
        # 'autograd::engine::evaluate_function: X' and long C++ names as people call them
        name = name if name.startswith("aten::") else short_name(name)
        phase = phases[key % len(phases)]
        work[name, phase] = Work(str(role), ms_by_step[at].tolist(), float(per_step[at]), tuple(kernels))
    return work


# --- two traces beside each other: rows, phases, roles and kernels, each with the noise that it has itself


def pair_traces(a: Side, b: Side) -> dict[str, Any]:
    """The fields of Comparison that come from traces, in the order of a report; kernels by their difference."""

    def pair(figure: Callable[[RankTime], float | None]) -> Pair:
        samples = [[figure(time) or 0.0 for time in side.steps] for side in (a, b)]
        return paired(figure(a.time), figure(b.time), compute_noise_band(*samples))

    def pair_row(name: str) -> Pair:
        return pair(lambda time: time.rows.get(name, 0.0))

    def pair_phase(name: str, what: str) -> Pair:
        return pair(lambda time: next((getattr(one, what) for one in time.phases if one.name == name), None))

    row_names = [name for name in ROW_TITLES if a.time.rows.get(name) or b.time.rows.get(name)]
    phase_names = dict.fromkeys(phase.name for side in (a, b) for phase in side.time.phases)
    on_gpu = a.time.on_gpu or b.time.on_gpu
    roles, kernels = {}, []
    if a.time.on_gpu == b.time.on_gpu:  # kernels of a GPU and operators of a CPU are no pairs
        for name in sorted({**a.roles, **b.roles}, key=lambda name: -max(a.roles.get(name, 0), b.roles.get(name, 0))):
            band = compute_noise_band(*(side.role_steps.get(name, ()) for side in (a, b)))
            roles[name] = paired(a.roles.get(name), b.roles.get(name), band)
        for key in {**a.work, **b.work}:
            mine, theirs = (side.work.get(key, Work("", [], None, ())) for side in (a, b))
            calls = paired(mine.per_step, theirs.per_step, 0.0)
            ms = paired_samples(mine.ms, theirs.ms, center=fmean)
            kernels.append(KernelPair(mine.role or theirs.role, *key, mine.names, theirs.names, calls, ms))
    return {
        "on_gpu": on_gpu,
        "rows": {name: pair_row(name) for name in row_names},
        "phases": tuple(
            PhasePair(name, pair_phase(name, "host_ms"), pair_phase(name, "device_ms") if on_gpu else None)
            for name in phase_names
        ),
        "phases_of": "traces of the profiled steps",
        "roles": roles,
        "kernels": tuple(sorted(kernels, key=lambda pair: -abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0)))),
    }


# --- the comparison

ONE_START = (
    "one start of each: what differs from start to start (clock speeds, neighbors, placement) is not in the noise bands; "
    "repeat both, alternating, before you trust a small difference"
)


def compare(a: Facts, b: Facts, force: bool = False, titles: tuple[str, str] = ("A", "B")) -> Comparison:
    """B against A. ConfigError, a line for each reason, where they are of another model or batch and `force` is not given;
    UserError where they have nothing in common."""
    reasons = [*objections(a, b), *object_to_models(a, b)]
    if reasons and not force:
        raise ConfigError([f"{reason}; --force compares all the same." for reason in reasons])
    totals = tuple(pair_totals(a, b))
    if not totals:
        raise UserError(
            f"{titles[0]}, {titles[1]}: they have nothing in common to compare; both need steps.jsonl with typical "
            "steps, a trace with a steady step, or a memory snapshot."
        )
    named = {total.name for total in totals}
    loads = (find_load(a, ORDINARY), find_load(b, ORDINARY))
    phases = pair_phases_of_runs(a.run, b.run, loads) if a.run and b.run else ()
    of = "steps.jsonl, typical steps" if phases else ""
    parts: dict[str, Any] = {"rows": {}, "phases": phases, "phases_of": of, "roles": {}, "kernels": (), "on_gpu": False}
    if a.critical and b.critical and TRACED_STEP in named:
        parts = pair_traces(build_side(a.critical), build_side(b.critical))
    # a profiler slows its steps down: differences of its phases are no parts of an typical step's difference
    rows, phases = ({}, phases) if STEP in named else (parts["rows"], parts["phases"])
    # bytes by category at the highest peak of either, in the order of a report; none without two snapshots
    memory, snapshots = {}, [facts.highest_snapshot for facts in (a, b) if facts.highest_snapshot]
    if len(snapshots) == 2:
        mine, theirs = ({held.category: held.num_bytes for held in one.held} for one in snapshots)
        held = [name for name in CATEGORIES if mine.get(name) or theirs.get(name)]
        memory = {name: exact(mine.get(name, 0), theirs.get(name, 0)) for name in held}
    busy = " and ".join(_find_loads(a, b, totals))
    told = f"; on a busy machine: {busy}" if busy else ""
    return Comparison(
        title_a=titles[0],
        title_b=titles[1],
        sentence=f"{build_sentence(totals, rows, phases)}{told}",
        flags=flags_that_differ(a, b),
        totals=totals,
        memory=memory,
        groups=_pair_groups(a, b, parts["rows"].get("exposed_communication")),
        losses=compare_losses(a.run, b.run),
        notes=tuple(_collect_notes(a, b, totals)),
        forced=tuple(reasons),
        **parts,
    )


def _pair_groups(a: Facts, b: Facts, whole: Pair | None) -> dict[str, Pair]:
    """Exposed communication by dimension of the layout, largest difference first; with the noise of all of it, `whole`."""
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
                f"{name}'s profiled steps took {slower:.2f} times as long as those before: compare traced times among themselves only"
            )
    if any(facts.snapshots and facts.snapshots[0].simulated for facts in (a, b)):
        notes.append("memory is what tensors on the CPU took, not a GPU's allocator")
    unclear = [total for total in totals if total.pair.change is Change.UNCLEAR]
    if any(total.unit == "ms" and total.pair.band for total in unclear):
        notes.append("steps vary too much to distinguish the runs: changes in single rows may come from the machine")
    elif unclear:
        notes.append("few steps were seen: use a longer run or a longer window")
    return [*notes, ONE_START] if any(total.unit == "ms" for total in totals) else notes
