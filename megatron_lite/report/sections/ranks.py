"""Ranks beside each other: who waits for whom, and what communication costs."""

import math

from megatron_lite.analysis.ranks.rank_results import CollectiveRow, RankRow, Ranks
from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import calls, milliseconds, percent
from megatron_lite.report.section import Lines, Section, Table, first, with_some_value
from megatron_lite.units import size

RANKS_SHOWN, COLLECTIVES_SHOWN, MISSING_SHOWN = 4, 2, 8
HEAD = ["rank", "host", "step", "compute", "comm.", "exposed", "waits", "data wait", "host idle", "last in", "awaited"]
MIN_GB_S = 0.001
CAUSES = {"compute": "computing", "data_wait": "waiting for data", "host": "a slow host", "copy": "copies"}


def ranks_section(report: Report, everything: bool) -> Section | None:
    """One line per rank; of many, those that others wait for most and least."""
    ranks = report.facts.ranks
    if ranks is None or len(ranks.rows) < 2:
        return None
    rows = list(ranks.rows) if everything else _chosen(ranks)
    largest = max((row.step_ms for row in rows if not math.isnan(row.step_ms)), default=0.0)
    body = [
        [
            str(row.rank),
            row.host,
            *(
                milliseconds(value, largest)
                for value in (
                    row.step_ms,
                    row.compute_ms,
                    row.communication_ms,
                    row.exposed_communication_ms,
                    row.wait_ms,
                    row.data_wait_ms,
                    row.host_idle_ms,
                )
            ),
            percent(row.last_in),
            milliseconds(row.caused_wait_ms, largest),
        ]
        for row in rows
    ]
    table = with_some_value(Table(body, "rl" + "r" * 9, HEAD, hidden=len(ranks.rows) - len(rows)))
    told = Lines([*_straggler(ranks), *_missing(ranks)])
    return Section("ranks", "Ranks", "ms per step; waits: in collectives for others; awaited: by others", [told, table])


def _straggler(ranks: Ranks) -> list[str]:
    late = ranks.straggler
    if late is None:
        return []
    why = (
        f"it spends {milliseconds(late.cause_ms)} ms more than the others on {CAUSES.get(late.cause, late.cause)}"
        if late.cause
        else "no single quantity explains why"
    )
    last = "" if late.share_last is None else f", last in {percent(late.share_last)} of the collectives"
    where = f" in {late.phase}" if late.phase else ""
    return [
        f"rank {late.rank} makes the others wait {milliseconds(late.caused_wait_ms)} ms per step{where}{last}: {why}"
    ]


def _missing(ranks: Ranks) -> list[str]:
    if not ranks.missing:
        return []
    named = ", ".join(map(str, ranks.missing[:MISSING_SHOWN]))
    more = f" and {len(ranks.missing) - MISSING_SHOWN} more" if len(ranks.missing) > MISSING_SHOWN else ""
    return [f"no trace of rank{'s' if len(ranks.missing) > 1 else ''} {named}{more}"]


def _chosen(ranks: Ranks) -> list[RankRow]:
    if len(ranks.rows) <= RANKS_SHOWN:
        return list(ranks.rows)
    awaited = sorted(ranks.rows, key=lambda row: -(row.caused_wait_ms or 0.0))
    kept = awaited[: RANKS_SHOWN // 2] + awaited[-(RANKS_SHOWN // 2) :]
    return [row for row in ranks.rows if row in kept]


def collectives_section(report: Report, everything: bool) -> Section | None:
    """By kind and size: time in the kernel, of it transfer and waiting, what is not hidden, bus bandwidth."""
    ranks = report.facts.ranks
    if ranks is None or not ranks.collectives:
        return None
    shown, hidden = first(ranks.collectives, COLLECTIVES_SHOWN, everything)
    largest = max(row.kernel_ms for row in shown)
    head = ["collective", "phase", "ranks", "calls", "each", "ms", "transfer", "waiting", "exposed", "bus GB/s"]
    body = [_collective(row, largest, everything) for row in shown]
    table = with_some_value(Table(body, "llrrrrrrrr", head, hidden=hidden))
    return Section("collectives", "Collectives", "ms per step, mean over ranks", [table])


def _collective(row: CollectiveRow, largest: float, everything: bool) -> list[str]:
    return [
        row.name + (f" ({row.algorithm})" if row.algorithm and everything else ""),
        row.phase,
        str(row.group_size or ""),
        calls(row.per_step),
        "" if row.num_bytes is None else size(row.num_bytes),
        *(milliseconds(value, largest) for value in (row.kernel_ms, row.transfer_ms, row.wait_ms, row.exposed_ms)),
        _bandwidth(row.bus_gb_s),
    ]


def _bandwidth(gb_s: float | None) -> str:
    if gb_s is None:
        return ""
    return f"{gb_s:,.3g}" if gb_s >= MIN_GB_S else f"<{MIN_GB_S}"
