"""All ranks of one run, beside each other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.analysis.ranks.calls import calls_of
from megatron_lite.analysis.ranks.clocks import Clocks, clocks_of
from megatron_lite.analysis.ranks.figures import RankRow, Ranks
from megatron_lite.analysis.ranks.matching import match
from megatron_lite.analysis.ranks.rows import collective_rows
from megatron_lite.analysis.ranks.shared_steps import shared_steps
from megatron_lite.analysis.ranks.straggler import straggler_of
from megatron_lite.analysis.ranks.waits import Waits, waits_of
from megatron_lite.analysis.time.figures import RankTime
from megatron_lite.analysis.time.placing import Placing
from megatron_lite.analysis.trace.columns import Trace


class Seen(NamedTuple):
    """One rank's trace and what is known of it."""

    trace: Trace
    placing: Placing
    time: RankTime


def ranks_of(seen: Sequence[tuple[Trace, Placing, RankTime]]) -> Ranks | None:
    """What the traces of one run's ranks say of each other; None without a trace."""
    if not seen:
        return None
    one_each, notes = _one_each([Seen(*one) for one in seen])
    world_size = max((one.trace.world_size or 0 for one in one_each), default=0) or None
    calls = [calls_of(one.trace, one.placing, world_size) for one in one_each]
    slots, steps = shared_steps(calls, [one.placing for one in one_each])
    base_ns = [one.trace.base_ns for one in one_each]
    groups, unmatched = match(calls, slots, base_ns)
    clocks = clocks_of(calls, groups, base_ns, [_host(one.trace) for one in one_each])
    waits = waits_of(calls, groups, clocks, slots, steps)
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
        straggler=straggler_of(rows, [one.time for one in one_each], waits.net_ms),
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
