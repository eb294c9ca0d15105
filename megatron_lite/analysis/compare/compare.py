"""Two runs or traces beside each other: what changed, what did not, and what cannot be told."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair, PhasePair, Total
from megatron_lite.analysis.compare.settings import (
    compute_noise_band,
    exact,
    flags_that_differ,
    objections,
    paired,
    paired_samples,
)
from megatron_lite.analysis.compare.times import STEP, TRACED_STEP, build_sentence, pair_phases_of_runs, pair_totals
from megatron_lite.analysis.contradictions import find_contradictions
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.kernels.rank_kernels import own_ms
from megatron_lite.analysis.kernels.roles import get_kernel_role, get_operator_role
from megatron_lite.analysis.kernels.selection import Selection
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.estimate.memory_categories import CATEGORIES

# --- what one rank spends on each purpose, step by step: device work by the operator that launched it and the phase, on a CPU
#
# the operators' own time.

NAMES_KEPT = 4  # kernels of one purpose, most time first


@dataclass(frozen=True)
class Work:
    """One purpose."""

    role: str
    ms: np.ndarray  # float [S], of each steady step
    per_step: float
    names: tuple[str, ...]  # kernels, most time first; () on a CPU, where the operator is all


@dataclass(frozen=True)
class _Timed:
    """m events that count, of S steady steps."""

    rows: np.ndarray  # of the trace
    ms: np.ndarray  # float [m]
    step: np.ndarray  # int [m], 0 to S - 1
    steps: int

    def table(self, group: np.ndarray, size: int) -> np.ndarray:
        """ms [size, S]"""
        table = np.zeros((size, self.steps))
        np.add.at(table, (group, self.step), self.ms)
        return table


def _timed(one: RankFacts) -> _Timed | None:
    chosen = Selection(one.trace, one.placing)
    if not chosen.steps:
        return None
    rows = chosen.device if one.time.on_gpu else np.concatenate([chosen.operators, chosen.spans])
    ms = (chosen.ms if one.time.on_gpu else own_ms(chosen))[rows] * chosen.steps
    order = np.cumsum([step.steady for step in one.placing.steps]) - 1
    return _Timed(rows, ms, order[one.placing.step[rows]], chosen.steps)


def collect_work(one: RankFacts) -> dict[tuple[str, str], Work]:
    """By (operator, phase); device work without an operator goes by its own name."""
    timed = _timed(one)
    if timed is None:
        return {}
    trace, placing, name, on_gpu = one.trace, one.placing, one.trace.events.name, one.time.on_gpu
    operator = placing.operator[timed.rows] if on_gpu else timed.rows
    purpose = np.where(operator >= 0, name[operator], name[timed.rows]).astype(np.int64)
    phases = len(placing.phases) + 1
    keys, group = np.unique(purpose * phases + placing.phase[timed.rows] + 1, return_inverse=True)
    table, calls = timed.table(group, len(keys)), np.bincount(group, minlength=len(keys)) / timed.steps
    names = _names(name[timed.rows], group, timed.ms, len(keys))
    return {
        (_bare(trace.names[key // phases]), placing.phases[key % phases - 1] if key % phases else ""): _work(
            trace.names, names[at], table[at], float(calls[at]), on_gpu
        )
        for at, key in enumerate(keys.tolist())
    }


def roles_by_step(one: RankFacts) -> dict[str, np.ndarray]:
    """ms of each steady step by role, as the rank's kernel figures assign it."""
    timed = _timed(one)
    if timed is None:
        return {}
    role_of = {row.name: str(row.role) for row in (one.kernels.rows if one.time.on_gpu else one.kernels.operators)}
    names, group = np.unique(one.trace.events.name[timed.rows], return_inverse=True)
    sums: dict[str, np.ndarray] = {}
    for name, ms in zip(names.tolist(), timed.table(group, len(names))):
        role = role_of.get(one.trace.names[name], "")
        sums[role] = sums.get(role, 0.0) + ms
    return sums


def _names(name: np.ndarray, group: np.ndarray, ms: np.ndarray, size: int) -> list[list[int]]:
    """Of each group its names, most time first."""
    pairs, where = np.unique(np.stack([group, name.astype(np.int64)]), axis=1, return_inverse=True)
    sums = np.bincount(where.ravel(), ms, pairs.shape[1])
    found: list[list[int]] = [[] for _ in range(size)]
    for at in np.argsort(-sums, kind="stable").tolist():
        found[pairs[0, at]].append(int(pairs[1, at]))
    return found


def _work(all_names: tuple[str, ...], names: list[int], ms: np.ndarray, per_step: float, on_gpu: bool) -> Work:
    role = (get_kernel_role if on_gpu else get_operator_role)(all_names[names[0]])
    kernels = dict.fromkeys(short_name(all_names[name]) for name in names[:NAMES_KEPT]) if on_gpu else ()
    return Work(str(role), ms, per_step, tuple(kernels))


def _bare(name: str) -> str:
    """'autograd::engine::evaluate_function: X' and long C++ names as people call them."""
    return name if name.startswith("aten::") else short_name(name)


# --- two traces beside each other: rows and phases of their steps, each with the noise that it has itself

MAX_STEPS = 10  # steady steps that are looked at one by one; evenly chosen of more


@dataclass(frozen=True)
class Side:
    """One run's critical rank."""

    time: RankTime  # of all steady steps together
    steps: tuple[RankTime, ...]  # of single ones: how much every number varies
    work: dict[tuple[str, str], Work]
    roles: dict[str, float]
    role_steps: dict[str, np.ndarray]  # ms of each steady step

    def pair_with(self, other: "Side", figure: Callable[[RankTime], float | None]) -> Pair:
        """A figure of both, and its noise from single steps."""
        samples = [[figure(time) or 0.0 for time in side.steps] for side in (self, other)]
        return paired(figure(self.time), figure(other.time), compute_noise_band(*samples))


def build_side(one: RankFacts) -> Side:
    """The rank's steps one by one; as many times the work of `rank_time` as there are."""
    steady = [at for at, step in enumerate(one.placing.steps) if step.steady]
    chosen = [steady[len(steady) * at // MAX_STEPS] for at in range(MAX_STEPS)] if len(steady) > MAX_STEPS else steady
    roles = {str(role): ms for role, ms in one.kernels.roles.items()}
    return Side(one.time, tuple(_only(one, at) for at in chosen), collect_work(one), roles, roles_by_step(one))


def _only(one: RankFacts, at: int) -> RankTime:
    steps = tuple(replace(step, steady=number == at) for number, step in enumerate(one.placing.steps))
    return rank_time(one.trace, replace(one.placing, steps=steps))


def pair_rows(a: Side, b: Side) -> dict[str, Pair]:
    """Where the steps go, in the order of a report."""
    names = [name for name in ROW_TITLES if a.time.rows.get(name) or b.time.rows.get(name)]
    return {name: a.pair_with(b, lambda time, name=name: time.rows.get(name, 0.0)) for name in names}


def pair_phases(a: Side, b: Side) -> tuple[PhasePair, ...]:
    """In the order of a step. A phase that one run lacks is None there."""
    names = dict.fromkeys(phase.name for side in (a, b) for phase in side.time.phases)
    on_gpu = a.time.on_gpu or b.time.on_gpu
    return tuple(
        PhasePair(
            name,
            a.pair_with(b, _of_phase(name, "host_ms")),
            a.pair_with(b, _of_phase(name, "device_ms")) if on_gpu else None,
        )
        for name in names
    )


def _of_phase(name: str, what: str) -> Callable[[RankTime], float | None]:
    return lambda time: next((getattr(phase, what) for phase in time.phases if phase.name == name), None)


def pair_roles(a: Side, b: Side) -> dict[str, Pair]:
    """ms per step by role, largest first."""
    names = sorted({**a.roles, **b.roles}, key=lambda name: -max(a.roles.get(name, 0.0), b.roles.get(name, 0.0)))
    return {
        name: paired(
            a.roles.get(name),
            b.roles.get(name),
            compute_noise_band(*(side.role_steps.get(name, ()) for side in (a, b))),
        )
        for name in names
    }


# --- kernels of two runs, matched by what they are for: names change with the precision, shapes and libraries

Purposes = dict[tuple[str, str], Work]  # by operator and phase


def pair_kernels(a: Purposes, b: Purposes) -> tuple[KernelPair, ...]:
    """Largest difference first. On CPUs operators take the place of kernels."""
    found = [_pair(key, a.get(key), b.get(key)) for key in {**a, **b}]
    return tuple(sorted(found, key=lambda pair: -abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0))))


def _pair(key: tuple[str, str], one: Work | None, other: Work | None) -> KernelPair:
    samples = [work.ms.tolist() if work else [] for work in (one, other)]
    return KernelPair(
        (one or other).role,
        *key,
        one.names if one else (),
        other.names if other else (),
        paired(one and one.per_step, other and other.per_step, 0.0),
        paired_samples(*samples, centre=fmean),
    )


# --- two runs or traces beside each other: what changed, what did not, and what cannot be told

ONE_START = (
    "one start of each: what differs from start to start (clock speeds, neighbours, placement) is not in the noise bands; "
    "repeat both, alternating, before a small difference is believed"
)


def compare(a: Facts, b: Facts, force: bool = False, titles: tuple[str, str] = ("A", "B")) -> Comparison:
    """B against A. ConfigError, a line for each reason, where they are of another model or batch and `force` is not given;
    UserError where they have nothing in common."""
    reasons = objections(a, b)
    if reasons and not force:
        raise ConfigError([f"{reason}; --force compares all the same." for reason in reasons])
    totals = tuple(pair_totals(a, b))
    if not totals:
        raise UserError(
            f"{titles[0]}, {titles[1]}: they have nothing in common to compare; both need steps.jsonl with ordinary "
            "steps, a trace with a steady step, or a memory snapshot."
        )
    parts = _traced(a, b) if any(total.name == TRACED_STEP for total in totals) else _told_by_runs(a, b)
    return Comparison(
        title_a=titles[0],
        title_b=titles[1],
        sentence=_sentence(a, b, totals, parts),
        flags=flags_that_differ(a, b),
        totals=totals,
        memory=_memory(a, b),
        notes=tuple(_notes(a, b, totals)),
        forced=tuple(reasons),
        **parts,
    )


def _sentence(a: Facts, b: Facts, totals: tuple[Total, ...], parts: dict) -> str:
    """A profiler slows its steps down: differences of its phases are no parts of an ordinary step's difference."""
    if any(total.name == STEP for total in totals):
        return build_sentence(totals, {}, pair_phases_of_runs(a.run, b.run))
    return build_sentence(totals, parts["rows"], parts["phases"])


def _traced(a: Facts, b: Facts) -> dict:
    """The fields of Comparison that come from traces."""
    one, other = build_side(a.critical), build_side(b.critical)
    alike = one.time.on_gpu == other.time.on_gpu  # kernels of a GPU and operators of a CPU are no pairs
    return {
        "rows": pair_rows(one, other),
        "phases": pair_phases(one, other),
        "phases_of": "traces of the profiled steps",
        "roles": pair_roles(one, other) if alike else {},
        "kernels": pair_kernels(one.work, other.work) if alike else (),
    }


def _told_by_runs(a: Facts, b: Facts) -> dict:
    """The same fields, as far as steps.jsonl has them."""
    phases = pair_phases_of_runs(a.run, b.run) if a.run and b.run else ()
    return {
        "rows": {},
        "phases": phases,
        "phases_of": "steps.jsonl, ordinary steps" if phases else "",
        "roles": {},
        "kernels": (),
    }


def _memory(a: Facts, b: Facts) -> dict[str, Pair]:
    """Bytes by category at the highest peak of either, in the order of a report; {} without two snapshots."""
    if not a.snapshots or not b.snapshots:
        return {}
    mine, theirs = (
        {held.category: held.num_bytes for held in max(facts.snapshots, key=lambda one: one.peak_bytes).held}
        for facts in (a, b)
    )
    return {
        name: exact(mine.get(name, 0), theirs.get(name, 0)) for name in CATEGORIES if mine.get(name) or theirs.get(name)
    }


def _notes(a: Facts, b: Facts, totals: tuple[Total, ...]) -> list[str]:
    notes = []
    if not (a.plan and b.plan):
        notes.append(
            "model and batch are known of runs of this trainer only: whether both did the same work is for you to say"
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
        notes.append(
            "steps vary so much that whole runs cannot be told apart: what seems to change in single rows may be the machine"
        )
    elif unclear:
        notes.append("few steps were seen: a longer run or a longer window would tell more")
    return [*notes, ONE_START] if any(total.unit == "ms" for total in totals) else notes
