"""Why memory peaks: when, held by what, from which lines and layers, formula beside measured, growth, fragmentation."""

from collections.abc import Sequence

from megatron_lite.analysis.memory.memory_results import OUTSIDE, LedgerRow, Snapshot, TraceMemory
from megatron_lite.analysis.report import Report
from megatron_lite.report.section import Lines, Section, Table, first, with_some_value
from megatron_lite.report.text import CATEGORY_COLORS, GREY, percent, share
from megatron_lite.units import size

SITES_SHOWN, LAYERS_SHOWN, OTHERS_SHOWN, GROWING_SHOWN = 2, 1, 8, 1

SMALL = 0.01  # of the peak
DIFFERS = 0.10  # of the formula: a category that the terminal shows although the rest agrees


def memory_section(report: Report, everything: bool) -> Section | None:
    """The snapshot with the highest peak, of the others the peak; without any what a trace says."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None:
        return _traced(report.facts.traced_memory)
    when = f" in {snapshot.peak_phase}" if snapshot.peak_phase else ""
    made = ", simulated" if snapshot.simulated else ""
    rank = "" if snapshot.rank is None else f"rank {snapshot.rank}, "
    texts = [
        *_layers(snapshot, everything),
        *_growth(snapshot),
        *_fragmentation(snapshot),
        *_oom(snapshot),
        *_others(report, snapshot),
    ]
    blocks = [
        Lines([f"peak {size(snapshot.peak_bytes)} allocated{when}, held by"]),
        _held(snapshot),
        _sites(snapshot, everything),
        _ledger(report.facts.ledger, everything),
        Lines([*_agreement(report.facts.ledger), *texts]),
    ]
    return Section("memory", "Memory", f"{rank}{snapshot.source}{made}", [block for block in blocks if block])


def _held(snapshot: Snapshot) -> Table | None:
    """Categories; those under 1% together."""
    held = [
        (part.category, part.num_bytes) for part in snapshot.held if part.num_bytes >= SMALL * snapshot.peak_bytes > 0
    ]
    rest = snapshot.peak_bytes - sum(num_bytes for _, num_bytes in held)
    held += [("others", rest)] if rest > 0 else []
    rows = [(category, size(num_bytes), percent(share(num_bytes, snapshot.peak_bytes))) for category, num_bytes in held]
    shares = [share(num_bytes, snapshot.peak_bytes) for _, num_bytes in held]
    colors = [CATEGORY_COLORS.get(category, GREY) for category, _ in held]
    return Table(rows, "lrr", shares=shares, colors=colors) if rows else None


def _sites(snapshot: Snapshot, everything: bool) -> Table | None:
    shown, hidden = first(snapshot.sites, SITES_SHOWN, everything)
    rows = [
        [site.site, site.module, site.category, site.phase, size(site.num_bytes), f"{site.blocks:,}"] for site in shown
    ]
    head = ["allocated by", "module", "as", "phase", "at the peak", "blocks"]
    return with_some_value(Table(rows, "llllrr", head, hidden=hidden)) if rows else None


def _ledger(rows: Sequence[LedgerRow], everything: bool) -> Table | None:
    """Formula beside measured; by default only where they differ."""
    chosen = [row for row in rows if everything or not _agrees(row)]
    body = [
        [row.category, size(row.measured_bytes), size(row.formula_bytes), *([row.formula] if everything else [])]
        for row in chosen
    ]
    head = ["at their own highest", "measured", "formula", "which is"][: 4 if everything else 3]
    return Table(body, "lrrl"[: len(head)], head) if body else None


def _agrees(row: LedgerRow) -> bool:
    return abs(row.difference_bytes) < DIFFERS * row.formula_bytes or row.difference_bytes == 0


def _agreement(rows: Sequence[LedgerRow]) -> list[str]:
    named = ", ".join(row.category for row in rows if _agrees(row) and row.formula_bytes)
    return [f"formula and measurement agree within {DIFFERS:.0%}: {named}"] if named else []


def _traced(seen: Sequence[TraceMemory]) -> Section | None:
    """Peak and where, of each rank; a trace does not say what held it."""
    if not seen:
        return None
    rows = [
        [
            one.source if one.rank is None else str(one.rank),
            "host" if one.device < 0 else f"GPU {one.device}",
            ("" if one.total_is_given else "+ ") + size(one.peak_bytes),
            "" if one.reserved_bytes is None else size(one.reserved_bytes),
            one.peak_phase,
            one.peak_operator,
        ]
        for one in seen[:OTHERS_SHOWN]
    ]
    head = ["rank", "memory of", "peak", "reserved", "phase", "operator"]
    told = ["+: on top of what was there before the window"] if not all(one.total_is_given for one in seen) else []
    told.append("what held it stands in a snapshot: --record-memory-history")
    table = with_some_value(Table(rows, "llrrll", head, hidden=max(len(seen) - OTHERS_SHOWN, 0)))
    return Section("memory", "Memory", "by the trace's memory events", [table, Lines(told, quiet=True)])


def _layers(snapshot: Snapshot, everything: bool) -> list[str]:
    if not snapshot.layers:
        return []
    layers = [layer for layer in snapshot.layers if layer.name != OUTSIDE]
    outside = sum(layer.num_bytes for layer in snapshot.layers if layer.name == OUTSIDE)
    shown = layers if everything else sorted(layers, key=lambda layer: -layer.num_bytes)[:LAYERS_SHOWN]
    named = ", ".join(f"{layer.name} {size(layer.num_bytes)}" for layer in shown)
    most = f"; {'' if everything else 'most in '}{named}" if named else ""
    rest = f", {OUTSIDE} {size(outside)}" if outside else ""
    return [f"activations of {len(layers)} layers: {size(sum(layer.num_bytes for layer in layers))}{rest}{most}"]


def _growth(snapshot: Snapshot) -> list[str]:
    growth = snapshot.growth
    if growth is None:
        return []
    where = "; ".join(f"{size(site.num_bytes)} by {site.site}" for site in growth.sites[:GROWING_SHOWN])
    return [
        f"grows by {size(growth.bytes_per_step)} per step over {growth.steps} steps" + (f": {where}" if where else "")
    ]


def _fragmentation(snapshot: Snapshot) -> list[str]:
    found = snapshot.fragmentation
    if not found.reserved_bytes:
        return []
    unused = found.reserved_bytes - found.allocated_bytes
    part = percent(unused / found.reserved_bytes)
    text = f"reserved: {size(found.reserved_bytes)} at most, {size(unused)} not allocated then ({part})"
    if found.expandable:
        return [f"{text}; expandable segments are on"]
    if found.replay_reserved_bytes is None:
        return [text]
    saved = found.reserved_bytes - found.replay_reserved_bytes
    gain = f"{size(saved)} less" if saved > 0 else "no less"
    return [f"{text}; replayed with expandable segments: {size(found.replay_reserved_bytes)}, {gain}"]


def _oom(snapshot: Snapshot) -> list[str]:
    if snapshot.oom is None:
        return []
    where = f" at {snapshot.oom.site}" if snapshot.oom.site else ""
    free = f"{size(snapshot.oom.device_free_bytes)} free on the device"
    return [f"out of memory{where}: {size(snapshot.oom.requested_bytes)} wanted, {free}"]


def _others(report: Report, shown: Snapshot) -> list[str]:
    others = [one for one in report.facts.snapshots if one is not shown]
    named = ", ".join(
        f"{one.source if one.rank is None else f'rank {one.rank}'} {size(one.peak_bytes)}"
        for one in others[:OTHERS_SHOWN]
    )
    return [f"peaks of others: {named}"] if others else []
