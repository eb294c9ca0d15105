"""Why memory peaks, and what was predicted of a run beside what was measured."""

from collections.abc import Sequence

from megatron_lite.analysis.memory.memory_results import OUTSIDE, Layer, LedgerRow, Snapshot
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts
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
    facts = report.facts
    snapshot = facts.highest_snapshot
    if snapshot is None:
        how = RECORD_BY_WATCH if facts.is_foreign else RECORD_BY_FLAG
        return _build_traced_section(facts, how)
    ledger, agreement = _build_ledger(facts.ledger, everything)
    texts = [*agreement, *_describe_snapshot(snapshot, everything), *_name_other_peaks(facts, snapshot)]
    blocks: list[Block] = [
        Lines([_describe_peak(snapshot)]),
        _build_holders(snapshot),
        _build_sites(snapshot, everything),
        ledger,
        Lines(texts),
    ]
    filled = [block for block in blocks if not isinstance(block, Table) or block.rows]
    how_made = ", simulated" if snapshot.simulated else ""
    source = f"{name_rank(snapshot.rank, facts)}{snapshot.source}{how_made}"
    return Section("memory", "Memory", source, filled)


def _describe_peak(snapshot: Snapshot) -> str:
    """Describe the peak, 'peak 39.4 GiB allocated in backward, held by'."""
    peak = size(snapshot.peak_bytes)
    if not snapshot.events:
        return f"{peak} allocated, held by"
    phase = f" in {snapshot.peak_phase}" if snapshot.peak_phase else ""
    return f"peak {peak} allocated{phase}, held by"


def _build_holders(snapshot: Snapshot) -> Block:
    """Build the table of what holds the peak, by category; small categories share a row."""
    peak = snapshot.peak_bytes
    held = [(part.category, part.num_bytes) for part in snapshot.held if part.num_bytes >= SMALL * peak > 0]
    rest = peak - sum(num_bytes for _, num_bytes in held)
    if rest > 0:
        held.append((OTHERS, rest))
    colors = [palette.HELD.get(category, palette.GREY) for category, _ in held]
    return build_share_table(held, peak, size, colors)


def _build_sites(snapshot: Snapshot, everything: bool) -> Table:
    """The lines of code whose allocations hold most of the peak."""
    shown, hidden = limit_rows(snapshot.sites, MAX_SITES, everything)
    rows = []
    for site in shown:
        rows.append([site.site, site.module, site.category, site.phase, size(site.num_bytes), f"{site.blocks:,}"])
    head = ["allocated by", "module", "as", "phase", "at the peak", "blocks"]
    return Table(rows, "llllrr", head, hidden=hidden)


def _name_other_peaks(facts: Facts, shown: Snapshot) -> list[str]:
    """A line with the peaks of the snapshots beside the one that is shown."""
    named = []
    others = [one for one in facts.snapshots if one is not shown]
    for one in others[:MAX_OTHERS]:
        name = one.source if one.rank is None else f"rank {one.rank}"
        named.append(f"{name} {size(one.peak_bytes)}")
    return [f"peaks of others: {', '.join(named)}"] if named else []


def _build_ledger(rows: Sequence[LedgerRow], everything: bool) -> tuple[Table, list[str]]:
    """Build two tables of formulas beside measurements: those that differ (all of them with `everything`), and those
    that agree."""
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
    """Activations by layer, growth, fragmentation, and where memory ran out; a line for each that was found."""
    lines = [
        _describe_layers(snapshot, everything),
        _describe_growth(snapshot),
        _describe_reserved(snapshot),
        *_describe_private_pools(snapshot),
        _describe_failure(snapshot),
    ]
    return [line for line in lines if line]


def _describe_layers(snapshot: Snapshot, everything: bool) -> str:
    """How much activations hold, by layer: all layers on demand, else the largest."""
    if not snapshot.layers:
        return ""
    layers = [layer for layer in snapshot.layers if layer.name != OUTSIDE]
    total = size(sum(layer.num_bytes for layer in layers))
    line = f"activations of {counted(len(layers), 'layer')}: {total}"
    outside = sum(layer.num_bytes for layer in snapshot.layers if layer.name == OUTSIDE)
    if outside:
        line += f", {OUTSIDE} {size(outside)}"
    if not layers:
        return line
    if everything:
        return f"{line}; {_name_layers(layers)}"
    largest = sorted(layers, key=lambda layer: -layer.num_bytes)[:MAX_LAYERS]
    return f"{line}; most in {_name_layers(largest)}"


def _name_layers(layers: Sequence[Layer]) -> str:
    return ", ".join(f"{layer.name} {size(layer.num_bytes)}" for layer in layers)


def _describe_growth(snapshot: Snapshot) -> str:
    """How fast memory grows from step to step, and which lines of code allocate what stays."""
    growth = snapshot.growth
    if growth is None:
        return ""
    line = f"grows by {size(growth.bytes_per_step)} per step over {counted(growth.steps, 'step')}"
    sites = "; ".join(f"{size(site.num_bytes)} by {site.site}" for site in growth.sites[:MAX_GROWING])
    return f"{line}: {sites}" if sites else line


def _describe_reserved(snapshot: Snapshot) -> str:
    """Describe what the allocator reserved, and how much of it expandable segments would save."""
    found = snapshot.fragmentation
    if not found.reserved_bytes:
        return ""
    unused = found.reserved_bytes - found.allocated_bytes
    share = percent(unused / found.reserved_bytes)
    place = " outside of private pools" if snapshot.private_pools else ""
    line = f"reserved{place}: {size(found.reserved_bytes)} at most, {size(unused)} not allocated then ({share})"
    if found.expandable:
        return f"{line}; expandable segments are on"
    if found.replay_reserved_bytes is None:
        return line
    saved = found.reserved_bytes - found.replay_reserved_bytes
    gain = f"{size(saved)} less" if saved > 0 else "no less"
    return f"{line}; replayed with expandable segments: {size(found.replay_reserved_bytes)}, {gain}"


def _describe_private_pools(snapshot: Snapshot) -> list[str]:
    lines = []
    for pool in snapshot.private_pools[:MAX_OTHERS]:
        owner = "a CUDA graph's" if pool.of_graphs else "a CUDA graph's or torch.cuda.MemPool's"
        reserved = size(pool.reserved_bytes)
        held = size(pool.allocated_bytes)
        lines.append(f"private pool {pool.pool}, {owner}: {reserved} reserved, {held} held by tensors")
    return lines


def _describe_failure(snapshot: Snapshot) -> str:
    """The request that found no memory."""
    oom = snapshot.oom
    if oom is None:
        return ""
    where = f" at {oom.site}" if oom.site else ""
    after = "; the program went on" if oom.went_on else ""
    free = size(oom.device_free_bytes)
    return f"out of memory{where}: {size(oom.requested_bytes)} wanted, {free} free on the device{after}"


# --- what was predicted before the run, row by row beside what was measured

AS_FACTOR = 1.0  # difference from which on it is told as a factor


def prediction_section(report: Report, everything: bool) -> Section | None:
    """Memory with its categories; the step against the shortest possible one."""
    found = report.facts.predicted
    if found is None:
        return None
    blocks: list[Block] = []
    sources = []
    if found.memory:
        sources.append(name_rank(found.memory.rank, report.facts) + found.memory.source)
        blocks += _compare_memory(found.memory, everything)
    if found.time:
        sources.append(found.time.gpu)
        blocks += _compare_time(found.time)
    if found.notes:
        blocks.append(Lines(found.notes, quiet=True))
    if not blocks:
        return None
    named = ", ".join(source for source in sources if source)
    return Section("prediction", "Predicted against measured", named, blocks)


def _compare_memory(memory: ComparedMemory, everything: bool) -> list[Block]:
    """Predicted and measured bytes of each category at the peak; small categories share a row unless all are wanted."""
    least = 0 if everything else SMALL * memory.peak.measured
    large = [row for row in memory.categories if max(row.predicted, row.measured) >= least]
    small = [row for row in memory.categories if row not in large]
    rows = [_build_memory_row(row) for row in large]
    if small:
        predicted = sum(row.predicted for row in small)
        measured = sum(row.measured for row in small)
        rows.append([OTHERS, size(predicted), size(measured), ""])
    rows.append(_build_memory_row(memory.peak))
    where = f"the peak was predicted at {memory.predicted_at}"
    if memory.measured_in:
        where += f", measured in {memory.measured_in}"
    table = Table(rows, "lrrr", ["tensors at the peak", "predicted", "measured", "measured is"])
    return [table, Lines([where], quiet=True)]


def _build_memory_row(row: Compared) -> list[str]:
    return [row.name, size(row.predicted), size(row.measured), _describe_difference(row)]


def _compare_time(time: ComparedTime) -> list[Block]:
    """Each part of the step beside the shortest time that the hardware allows."""
    rows = [_build_time_row(row, time.step.measured) for row in (*time.parts, time.step)]
    tokens = time.tokens
    if tokens:
        reached = f"{percent(tokens.measured / tokens.predicted)} of the bound"
        rows.append([tokens.name, count(tokens.predicted), count(tokens.measured), reached])
    told = []
    if time.parts:
        told.append("at best: every part runs at the hardware's peak, without gaps; real steps take longer")
    told += [f"not in the bound: {text}" for text in time.not_predicted]
    return [Table(rows, "lrrr", ["ms per step", "at best", "measured", "measured is"]), Lines(told, quiet=True)]


def _build_time_row(row: Compared, step_ms: float) -> list[str]:
    times = f"{row.measured / row.predicted:.2f} x the bound" if row.predicted else ""
    return [row.name, milliseconds(row.predicted, step_ms), milliseconds(row.measured, step_ms), times]


def _describe_difference(row: Compared) -> str:
    """Describe how a measurement differs from its prediction: '3.1% more', '2.4 x as much', 'as predicted', 'not
    predicted'."""
    if row.difference is None:
        return "not predicted" if row.measured else ""
    if abs(row.difference) < 0.0005:
        return "as predicted"
    if row.difference > AS_FACTOR:
        return f"{1 + row.difference:,.1f} x as much"
    share = f"{abs(row.difference):.1%}" if abs(row.difference) < 0.0995 else percent(abs(row.difference))
    return f"{share} {'more' if row.difference > 0 else 'less'}"
