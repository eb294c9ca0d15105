"""Why memory peaks, and what was predicted of a run beside what was measured."""

from collections.abc import Sequence

from megatron_lite.analysis.memory.memory_results import OUTSIDE, LedgerRow, Snapshot
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Compared, Facts
from megatron_lite.report import palette
from megatron_lite.report.section import Block, Lines, Section, Table, build_share_table, limit_rows
from megatron_lite.report.sections.step import name_rank
from megatron_lite.report.text import milliseconds, percent
from megatron_lite.units import count, counted, size

MAX_SITES, MAX_LAYERS, MAX_OTHERS, MAX_GROWING = 2, 1, 8, 1
SMALL = 0.01  # of the peak: such categories share a row
DIFFERS = 0.10  # of the formula: a category that the terminal shows although the rest agrees
OTHERS = "others"
RECORD_BY_FLAG, RECORD_BY_WATCH = "--record-memory-history", "megatron-lite watch --memory"


def memory_section(report: Report, everything: bool) -> Section | None:
    """The snapshot with the highest peak, of the others the peak; without any what a trace says."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None:
        how = RECORD_BY_WATCH if report.facts.is_foreign else RECORD_BY_FLAG
        return _build_traced_section(report.facts, how)
    peak = snapshot.peak_bytes
    held = [(part.category, part.num_bytes) for part in snapshot.held if part.num_bytes >= SMALL * peak > 0]
    rest = peak - sum(num_bytes for _, num_bytes in held)
    held += [(OTHERS, rest)] if rest > 0 else []
    colors = [palette.HELD.get(category, palette.GREY) for category, _ in held]
    shown, hidden = limit_rows(snapshot.sites, MAX_SITES, everything)
    sites = []
    for site in shown:
        sites.append([site.site, site.module, site.category, site.phase, size(site.num_bytes), f"{site.blocks:,}"])
    head = ["allocated by", "module", "as", "phase", "at the peak", "blocks"]
    others = [one for one in report.facts.snapshots if one is not snapshot][:MAX_OTHERS]
    named = [f"{one.source if one.rank is None else f'rank {one.rank}'} {size(one.peak_bytes)}" for one in others]
    when = f" in {snapshot.peak_phase}" if snapshot.peak_phase else ""
    ledger, agreement = _build_ledger(report.facts.ledger, everything)
    texts = [*agreement, *_describe_snapshot(snapshot, everything)]
    texts += [f"peaks of others: {', '.join(named)}"] if named else []
    what = f"peak {size(peak)} allocated{when}, held by" if snapshot.events else f"{size(peak)} allocated, held by"
    blocks: list[Block] = [
        Lines([what]),
        build_share_table(held, peak, size, colors),
        Table(sites, "llllrr", head, hidden=hidden),
        ledger,
        Lines(texts),
    ]
    rank = name_rank(snapshot.rank, report.facts)
    of = f"{rank}{snapshot.source}{', simulated' if snapshot.simulated else ''}"
    return Section("memory", "Memory", of, [one for one in blocks if not isinstance(one, Table) or one.rows])


def _build_ledger(rows: Sequence[LedgerRow], everything: bool) -> tuple[Table, list[str]]:
    """(formula beside measured, by default only where they differ; where they agree)."""
    body, agreeing = [], []
    for row in rows:
        agrees = abs(row.difference_bytes) < DIFFERS * row.formula_bytes or row.difference_bytes == 0
        if agrees and row.formula_bytes:
            agreeing.append(row.category)
        if everything or not agrees:
            body.append([row.category, size(row.measured_bytes), size(row.formula_bytes), row.formula])
    columns = 4 if everything else 3
    head = ["at its own peak", "measured", "formula", "which is"]
    table = Table([row[:columns] for row in body], "lrrl"[:columns], head[:columns])
    told = [f"formula and measurement agree within {DIFFERS:.0%}: {', '.join(agreeing)}"] if agreeing else []
    return table, told


def _build_traced_section(facts: Facts, how: str) -> Section | None:
    """Peak and where, of each rank; a trace does not say what held it. how: to record a snapshot, which does."""
    seen = facts.traced_memory
    if not seen:
        return None
    rows = []
    for one in seen[:MAX_OTHERS]:
        rank = "" if facts.has_one_rank else str(one.rank)
        whose = one.source if one.rank is None else rank, "host" if one.device < 0 else f"GPU {one.device}"
        peak = ("" if one.total_is_given else "+ ") + size(one.peak_bytes)
        reserved = "" if one.reserved_bytes is None else size(one.reserved_bytes)
        rows.append([*whose, peak, reserved, one.peak_phase, one.peak_operator])
    head = ["rank", "memory of", "peak", "reserved", "phase", "operator"]
    told = (
        ["+: in addition to memory allocated before the window"] if not all(one.total_is_given for one in seen) else []
    )
    others = [f"GPU {device} {size(peak)}" for one in seen[:MAX_OTHERS] for device, peak in one.other_peaks]
    told += [f"peaks of other devices: {', '.join(others)}"] if others else []
    told.append(f"To see what used this memory, record a snapshot: {how}")
    table = Table(rows, "llrrll", head, hidden=max(len(seen) - MAX_OTHERS, 0))
    return Section("memory", "Memory", "from the trace's memory events", [table, Lines(told, quiet=True)])


def _describe_snapshot(snapshot: Snapshot, everything: bool) -> list[str]:
    """Activations by layer, growth, fragmentation, and where memory ran out."""
    texts, growth, found = [], snapshot.growth, snapshot.fragmentation
    if snapshot.layers:
        layers = [layer for layer in snapshot.layers if layer.name != OUTSIDE]
        outside = sum(layer.num_bytes for layer in snapshot.layers if layer.name == OUTSIDE)
        shown = layers if everything else sorted(layers, key=lambda layer: -layer.num_bytes)[:MAX_LAYERS]
        named = ", ".join(f"{layer.name} {size(layer.num_bytes)}" for layer in shown)
        most = f"; {'' if everything else 'most in '}{named}" if named else ""
        rest = f", {OUTSIDE} {size(outside)}" if outside else ""
        whole = size(sum(layer.num_bytes for layer in layers))
        texts.append(f"activations of {counted(len(layers), 'layer')}: {whole}{rest}{most}")
    if growth is not None:
        where = "; ".join(f"{size(site.num_bytes)} by {site.site}" for site in growth.sites[:MAX_GROWING])
        grown = f"grows by {size(growth.bytes_per_step)} per step over {counted(growth.steps, 'step')}"
        texts.append(grown + (f": {where}" if where else ""))
    if found.reserved_bytes:
        unused = found.reserved_bytes - found.allocated_bytes
        part = percent(unused / found.reserved_bytes)
        beside = " outside of private pools" if snapshot.private_pools else ""
        text = f"reserved{beside}: {size(found.reserved_bytes)} at most, {size(unused)} not allocated then ({part})"
        if found.expandable:
            text += "; expandable segments are on"
        elif found.replay_reserved_bytes is not None:
            saved = found.reserved_bytes - found.replay_reserved_bytes
            gain = f"{size(saved)} less" if saved > 0 else "no less"
            text += f"; replayed with expandable segments: {size(found.replay_reserved_bytes)}, {gain}"
        texts.append(text)
    for pool in snapshot.private_pools[:MAX_OTHERS]:
        held = f"{size(pool.allocated_bytes)} held by tensors"
        owner = "a CUDA graph's" if pool.of_graphs else "a CUDA graph's or torch.cuda.MemPool's"
        texts.append(f"private pool {pool.pool}, {owner}: {size(pool.reserved_bytes)} reserved, {held}")
    if snapshot.oom is not None:
        where = f" at {snapshot.oom.site}" if snapshot.oom.site else ""
        free = f"{size(snapshot.oom.device_free_bytes)} free on the device"
        after = "; the program went on" if snapshot.oom.went_on else ""
        texts.append(f"out of memory{where}: {size(snapshot.oom.requested_bytes)} wanted, {free}{after}")
    return texts


# --- what was predicted before the run, row by row beside what was measured

AS_FACTOR = 1.0  # difference from which on it is told as a factor


def prediction_section(report: Report, everything: bool) -> Section | None:
    """Memory with its categories; the step against the shortest possible one."""
    found = report.facts.predicted
    if found is None:
        return None
    blocks: list[Block] = []
    of = []
    if memory := found.memory:
        of.append(name_rank(memory.rank, report.facts) + memory.source)
        # small categories as one row; all of them on demand
        least = 0 if everything else SMALL * memory.peak.measured
        large = [row for row in memory.categories if max(row.predicted, row.measured) >= least]
        small = [row for row in memory.categories if row not in large]
        rows = [[row.name, size(row.predicted), size(row.measured), _describe_difference(row)] for row in large]
        if small:
            rest = [sum(row.predicted for row in small), sum(row.measured for row in small)]
            rows.append([OTHERS, *map(size, rest), ""])
        peak = memory.peak
        rows.append([peak.name, size(peak.predicted), size(peak.measured), _describe_difference(peak)])
        blocks.append(Table(rows, "lrrr", ["tensors at the peak", "predicted", "measured", "measured is"]))
        measured = f", measured in {memory.measured_in}" if memory.measured_in else ""
        blocks.append(Lines([f"the peak was predicted at {memory.predicted_at}{measured}"], quiet=True))
    if time := found.time:
        of.append(time.gpu)
        rows = []
        for row in (*time.parts, time.step):
            times = f"{row.measured / row.predicted:.2f} x the bound" if row.predicted else ""
            both = (milliseconds(value, time.step.measured) for value in (row.predicted, row.measured))
            rows.append([row.name, *both, times])
        if time.tokens:
            reached = f"{percent(time.tokens.measured / time.tokens.predicted)} of the bound"
            rows.append([time.tokens.name, count(time.tokens.predicted), count(time.tokens.measured), reached])
        blocks.append(Table(rows, "lrrr", ["ms per step", "at best", "measured", "measured is"]))
        best = "at best: every part runs at the hardware's peak, without gaps; real steps take longer"
        told = [*([best] if time.parts else []), *(f"not in the bound: {text}" for text in time.not_predicted)]
        blocks.append(Lines(told, quiet=True))
    if found.notes:
        blocks.append(Lines(found.notes, quiet=True))
    named = ", ".join(one for one in of if one)
    return Section("prediction", "Predicted against measured", named, blocks) if blocks else None


def _describe_difference(row: Compared) -> str:
    """'3.1% more', '2.4 x as much', 'as predicted', 'not predicted'."""
    if row.difference is None:
        return "not predicted" if row.measured else ""
    if abs(row.difference) < 0.0005:
        return "as predicted"
    if row.difference > AS_FACTOR:
        return f"{1 + row.difference:,.1f} x as much"
    share = f"{abs(row.difference):.1%}" if abs(row.difference) < 0.0995 else percent(abs(row.difference))
    return f"{share} {'more' if row.difference > 0 else 'less'}"
