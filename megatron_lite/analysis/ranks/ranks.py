"""All ranks of one run, beside each other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.ranks.calls import Calls, What, bus_bytes, collect_calls
from megatron_lite.analysis.ranks.matching import Clocks, Group, align_clocks, match
from megatron_lite.analysis.ranks.rank_results import CollectiveRow, RankRow, Ranks, Straggler
from megatron_lite.analysis.time.time_results import Placing, RankTime, Step
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.phases import Phase

# --- collectives by kind, size and phase: waiting apart from transfer, what is not hidden, and the bandwidth


MAX_SIZES = 32  # of one kind in one phase; more (an all-to-all of experts, say) are one row of their mean size
MANY = -1


def collective_rows(
    ranks: Sequence[Calls],
    slots: Sequence[np.ndarray],
    transfer_ns: Sequence[np.ndarray],
    steps: int,
    group_size: int | None,
) -> tuple[CollectiveRow, ...]:
    """Most exposed first; means over the ranks that take part. slots (-1: does not count), transfer_ns (-1: not matched): by
    rank, per call. steps: that the slots are of. group_size: of collectives whose trace does not say; None if nothing shows it."""
    parts = defaultdict(list)
    for calls, slot, transfer in zip(ranks, slots, transfer_ns):
        for key, sums in _of_rank(calls, slot >= 0, transfer, group_size).items():
            parts[key].append(sums / steps)
    rows = [_row(key, np.mean(sums, axis=0)) for key, sums in parts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_ms, -row.kernel_ms)))


def _of_rank(calls: Calls, keep: np.ndarray, transfer: np.ndarray, group_size: int | None) -> dict[tuple, np.ndarray]:
    """(number, ns, exposed ns, transfer ns, not matched, bus bytes, bytes), added up by what rows tell apart."""
    kept, kinds = np.flatnonzero(keep), {}
    kind = np.array([kinds.setdefault((calls.whats[i], calls.phase[i]), len(kinds)) for i in kept.tolist()], np.int64)
    moved = np.array([_moved(what, group_size) for what, _ in kinds]).reshape(-1, 2)[kind]
    columns = (
        np.ones(len(kept)),
        (calls.end_ns - calls.start_ns)[kept],
        calls.exposed_ns[kept],
        np.maximum(transfer[kept], 0),
        transfer[kept] < 0,
        *moved.T,
    )
    table = np.stack([np.bincount(kind, column, len(kinds)) for column in columns], axis=1)
    sizes = Counter((what.kind, phase) for what, phase in kinds)
    sums = defaultdict(lambda: np.zeros(len(columns)))
    for (what, phase), values in zip(kinds, table):
        several = what.num_bytes is not None and sizes[what.kind, phase] > MAX_SIZES
        size = MANY if several else what.num_bytes
        sums[what.kind, what.algorithm, phase, what.group_size or group_size, size, what.dtype] += values
    return sums


def _moved(what: What, group_size: int | None) -> tuple[float, float]:
    """(bytes for the bus bandwidth, bytes) of one; 0 where unknown."""
    ranks, num_bytes = what.group_size or group_size, what.num_bytes
    return (bus_bytes(what.kind, num_bytes, ranks) if num_bytes and ranks else 0.0), num_bytes or 0


def _row(key: tuple, sums: np.ndarray) -> CollectiveRow:
    kind, algorithm, phase, ranks, size, dtype = key
    number, ns, exposed, transfer, unmatched, bus, num_bytes = sums.tolist()
    known = not unmatched
    return CollectiveRow(
        name=kind,
        algorithm=algorithm,
        phase=phase,
        group_size=ranks,
        per_step=number,
        num_bytes=round(num_bytes / number) if size == MANY else size,
        dtype=dtype,
        kernel_ms=ns / 1e6,
        transfer_ms=transfer / 1e6 if known else None,
        wait_ms=(ns - transfer) / 1e6 if known else None,
        exposed_ms=exposed / 1e6,
        bus_gb_s=bus / transfer if known and bus and transfer else None,  # bytes per ns = GB/s
    )


# --- the rank that others wait for, and the one quantity that explains it, if one does

SHARE_OF_STEP = 0.02  # that others must wait for one rank, or it does not matter; as in the trainer's own line
EXPLAINED = 0.8  # of the lag that a cause must be
BEYOND_CHANCE = 4 / 3  # times the share of all waiting that a rank would cause if all were alike
STANDARD_ERRORS = 2.0  # that the mean over steps must be above nothing

CAUSES: dict[str, Callable[[RankTime], float]] = {
    "data_wait": lambda time: time.rows.get("data_wait", 0.0),
    "compute": lambda time: time.rows.get("compute", 0.0),
    "copy": lambda time: time.rows.get("exposed_copy", 0.0),
    "host": lambda time: sum(
        time.rows.get(name, 0.0) for name in ("host", "sync", "garbage_collector", "allocator", "launch")
    ),
}
# no rank waits for another in these, so that their time is the rank's own
INDEPENDENT = tuple(map(str, (Phase.DATA, Phase.DATA_TO_DEVICE, Phase.FORWARD, Phase.OPTIMIZER_STEP)))


def find_straggler(rows: Sequence[RankRow], times: Sequence[RankTime], net_ms: np.ndarray) -> Straggler | None:
    """Of rows with waits, the same ranks' times, and what others waited for each rank beyond its own waits by step [R, S].

    None where no rank stands out, or where it does by one odd step only.
    """
    if len(rows) < 2 or any(row.caused_wait_ms is None for row in rows):
        return None
    late = max(range(len(rows)), key=lambda at: rows[at].caused_wait_ms)
    lag, whole = rows[late].caused_wait_ms, sum(row.caused_wait_ms for row in rows)
    least = SHARE_OF_STEP * median(row.step_ms for row in rows)
    share = min(max(0.5, BEYOND_CHANCE / len(rows)), 0.9)
    if lag < least or lag < share * whole or not _steadily(net_ms[late], least):
        return None
    cause, by = _excess(times, late, CAUSES, lag)
    phase, _ = _excess(times, late, {name: _of_phase(name) for name in _phases(times)}, lag)
    return Straggler(rows[late].rank, lag, rows[late].last_in, cause, by, phase)


def _steadily(net_ms: np.ndarray, least: float) -> bool:
    """Is the rank late in the usual step, and by more than steps differ among each other?"""
    error = net_ms.std(ddof=1) / np.sqrt(len(net_ms)) if len(net_ms) > 1 else 0.0
    return bool(np.median(net_ms) > least and net_ms.mean() > STANDARD_ERRORS * error)


def _excess(times: Sequence[RankTime], late: int, quantities: dict[str, Callable], lag: float) -> tuple[str, float]:
    """(name, ms): what the late rank has most more of than the median of the others; ("", 0) if it is no explanation."""
    found = {
        name: quantity(times[late]) - median(quantity(time) for at, time in enumerate(times) if at != late)
        for name, quantity in quantities.items()
    }
    name = max(found, key=found.get, default="")
    return (name, found[name]) if name and found[name] >= EXPLAINED * lag else ("", 0.0)


def _phases(times: Sequence[RankTime]) -> list[str]:
    return list(dict.fromkeys(phase.name for time in times for phase in time.phases))


def _of_phase(name: str) -> Callable[[RankTime], float]:
    """Time of a phase that is the rank's own: compute, and where no rank waits for another the host's if that is longer."""

    def of(time: RankTime) -> float:
        phase = next((phase for phase in time.phases if phase.name == name), None)
        if phase is None:
            return 0.0
        return max(phase.compute_ms, phase.host_ms) if name in INDEPENDENT and not time.on_gpu else phase.compute_ms

    return of


# --- who waits for whom inside collectives: of each, when every rank came and what the transfer itself takes


@dataclass(frozen=True)
class Waits:
    """[R ranks, S shared steps], over the collectives that were matched; ms and counts."""

    wait_ms: np.ndarray  # inside collectives for a rank that came later
    exposed_wait_ms: np.ndarray  # of it, what no compute hides
    caused_ms: np.ndarray  # its start - the median start of the others, where it came last
    last: np.ndarray  # how often it came last
    matched: np.ndarray  # collectives that it took part in
    transfer_ns: tuple[np.ndarray, ...]  # by rank: int64 [c] of all its calls, shortest over ranks; -1: not matched

    @property
    def net_ms(self) -> np.ndarray:
        """[R, S]: how much more others waited for the rank than it for them."""
        return self.caused_ms - self.wait_ms


def compute_waits(
    ranks: Sequence[Calls], groups: list[Group], clocks: Clocks, slots: Sequence[np.ndarray], steps: int
) -> Waits:
    """slots: by rank, int [c], the shared step of each call, -1 for what does not count."""
    found = Waits(
        *(np.zeros((len(ranks), steps)) for _ in range(5)), tuple(np.full(len(calls), -1, np.int64) for calls in ranks)
    )
    for group in groups:
        columns = list(zip(group.members.tolist(), group.call.T))
        start = np.stack([ranks[at].start_ns[calls] + clocks.start_ns[at] for at, calls in columns], axis=1)
        length = np.stack([ranks[at].end_ns[calls] - ranks[at].start_ns[calls] for at, calls in columns], axis=1)
        transfer = length.min(axis=1)
        for at, calls in columns:
            found.transfer_ns[at][calls] = transfer
        if clocks.aligned is not None:
            counts = np.stack([slots[at][calls] >= 0 for at, calls in columns], axis=1).all(axis=1)
            kept = [(at, calls[counts], slots[at][calls[counts]]) for at, calls in columns]
            _add(found, ranks, kept, start[counts], length[counts])
    return found


def _add(found: Waits, ranks: Sequence[Calls], columns: list, start: np.ndarray, length: np.ndarray):
    """The group's collectives [K, G] to the sums of its members."""
    wait = np.clip(start.max(axis=1, keepdims=True) - start, 0, length)
    last = start.argmax(axis=1)
    lag = start.max(axis=1) - np.median(np.sort(start, axis=1)[:, :-1], axis=1)
    for column, (at, calls, slot) in enumerate(columns):
        own, is_last = ranks[at].start_ns[calls], last == column
        hidden = ranks[at].compute.within(own, own + wait[:, column])
        for table, values in (
            (found.wait_ms, wait[:, column] / 1e6),
            (found.caused_ms, np.where(is_last, lag, 0) / 1e6),
            (found.exposed_wait_ms, (wait[:, column] - hidden) / 1e6),
            (found.last, is_last),
            (found.matched, np.ones(len(slot))),
        ):
            np.add.at(table[at], slot, values)


# --- the steady steps that all ranks' traces have: windows may begin and end apart, and ranks must be compared over the same


def shared_steps(ranks: Sequence[Calls], placings: Sequence[Placing]) -> tuple[list[np.ndarray], int]:
    """(by rank: int [c], which of the S shared steps a call is in, -1: none; S, at least 1).

    By the steps' numbers where all ranks have some in common, else the k-th steady one is the same everywhere.
    """
    numbers = [{step.number for step in placing.steps if step.steady} for placing in placings]
    common = sorted(set.intersection(*numbers) - {None})
    if common:
        slot_of = [_by_number(placing.steps, common) for placing in placings]
    else:
        fewest = min(sum(step.steady for step in placing.steps) for placing in placings)
        slot_of = [_by_order(placing.steps, fewest) for placing in placings]
    slots = [table[calls.step] for table, calls in zip(slot_of, ranks)]  # the last entry is for -1
    return slots, max(1, len(common) or fewest)


def _by_number(steps: Sequence[Step], common: list[int]) -> np.ndarray:
    slot = {number: at for at, number in enumerate(common)}
    return np.array([slot.get(step.number, -1) if step.steady else -1 for step in steps] + [-1], np.int64)


def _by_order(steps: Sequence[Step], fewest: int) -> np.ndarray:
    steady = np.array([step.steady for step in steps] + [False], bool)
    order = np.cumsum(steady) - 1
    return np.where(steady & (order < fewest), order, -1)


# --- all ranks of one run, beside each other


class Seen(NamedTuple):
    """One rank's trace and what is known of it."""

    trace: Trace
    placing: Placing
    time: RankTime


def compare_ranks(seen: Sequence[tuple[Trace, Placing, RankTime]]) -> Ranks | None:
    """What the traces of one run's ranks say of each other; None without a trace."""
    if not seen:
        return None
    one_each, notes = _one_each([Seen(*one) for one in seen])
    world_size = max((one.trace.world_size or 0 for one in one_each), default=0) or None
    calls = [collect_calls(one.trace, one.placing, world_size) for one in one_each]
    slots, steps = shared_steps(calls, [one.placing for one in one_each])
    base_ns = [one.trace.base_ns for one in one_each]
    groups, unmatched = match(calls, slots, base_ns)
    clocks = align_clocks(calls, groups, base_ns, [_host(one.trace) for one in one_each])
    waits = compute_waits(calls, groups, clocks, slots, steps)
    everyone = len(one_each) == world_size and len(groups) == 1 and len(groups[0].members) == world_size
    rows = tuple(_rank_row(at, one, waits, clocks) for at, one in enumerate(one_each) if one.time.rank is not None)
    present = tuple(row.rank for row in rows)
    missing = tuple(sorted(set(range(world_size or 0)) - set(present))) if present else ()
    return Ranks(
        world_size=world_size,
        present=present,
        missing=missing,
        rows=rows,
        collectives=collective_rows(calls, slots, waits.transfer_ns, steps, world_size if everyone else None),
        straggler=find_straggler(rows, [one.time for one in one_each], waits.net_ms),
        clocks_aligned=clocks.aligned,
        critical_rank=_critical(rows),
        notes=(*notes, *unmatched, *clocks.notes),
    )


def _one_each(seen: list[Seen]) -> tuple[list[Seen], list[str]]:
    """By rank, of several windows of a rank the last; without a rank only if there is nothing else."""
    known = [one for one in seen if one.time.rank is not None]
    if not known:
        return seen[:1], [
            f"{len(seen)} traces do not say which rank they are of: only {seen[0].trace.source} is looked at"
        ] if len(seen) > 1 else []
    notes = (
        [f"{len(seen) - len(known)} traces do not say which rank they are of: they are left out"]
        if len(known) < len(seen)
        else []
    )
    latest: dict[int, Seen] = {}
    for one in sorted(known, key=lambda one: one.trace.base_ns or 0):
        latest[one.time.rank] = one
    if len(latest) < len(known):
        notes.append("a rank has several traces: its last one is compared with the others")
    return [latest[rank] for rank in sorted(latest)], notes


def _host(trace: Trace) -> str:
    return str(trace.facts.get("host_name") or "")


def _rank_row(at: int, one: Seen, waits: Waits, clocks: Clocks) -> RankRow:
    time, matched = one.time, waits.matched[at].sum()
    row = RankRow(
        rank=time.rank,
        host=_host(one.trace),
        step_ms=time.step_ms,
        compute_ms=time.rows.get("compute", 0.0),
        communication_ms=time.communication_ms,
        exposed_communication_ms=time.rows.get("exposed_communication", 0.0),
        wait_ms=None,
        data_wait_ms=time.rows.get("data_wait", 0.0),
        host_idle_ms=time.rows.get("host", 0.0) + time.rows.get("sync", 0.0),
        last_in=None,
        caused_wait_ms=None,
    )
    if not matched or clocks.aligned is None:
        return row
    return replace(
        row,
        wait_ms=float(waits.wait_ms[at].mean()),
        last_in=float(waits.last[at].sum() / matched),
        caused_wait_ms=float(waits.caused_ms[at].mean()),
        exposed_wait_ms=min(float(waits.exposed_wait_ms[at].mean()), row.exposed_communication_ms),
    )


def _critical(rows: Sequence[RankRow]) -> int | None:
    """The rank that waits least: its own work is what the run takes. Without waits the slowest, or the only one."""
    if not rows:
        return None
    if any(row.wait_ms is None for row in rows):
        return max(rows, key=lambda row: row.step_ms).rank
    return min(rows, key=lambda row: row.wait_ms).rank
