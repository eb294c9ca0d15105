"""Why memory peaks, and what was predicted of a run beside what was measured."""

from collections.abc import Sequence

from megatron_lite.analysis.memory.memory_results import OUTSIDE, Layer, MeasuredCategory, Snapshot, TraceMemory
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Compared, ComparedMemory, ComparedTime, Facts
from megatron_lite.report import palette
from megatron_lite.report.section import Block, Lines, Section, Table, build_share_table, limit_rows
from megatron_lite.report.sections.step import name_rank
from megatron_lite.report.text import milliseconds, percent
from megatron_lite.units import count, counted, size

MAX_CODE_ROWS = 2  # lines of code
MAX_LAYER_ROWS = 1
MAX_OTHERS = 8  # snapshots, ranks or pools
MAX_GROWING = 1  # lines of code
MAX_SMALL_SHARE = 0.01  # of the peak: such categories share a row
DIFFERS = 0.10  # of the formula: a category that the terminal shows although the rest agrees
OTHER_CATEGORIES = "others"
RECORD_BY_FLAG = "--record-memory-history"
RECORD_BY_WATCH = "megatron-lite watch --memory"


def memory_section(report: Report, everything: bool) -> Section | None:
    """Build what the snapshot with the highest peak shows, with the peaks of the others; without snapshots what a trace
    says."""
    facts = report.facts
    snapshot = facts.highest_snapshot
    if snapshot is None:
        how = RECORD_BY_WATCH if facts.is_foreign else RECORD_BY_FLAG
        return _build_traced_section(facts, how)
    ledger, agreement = _build_ledger(facts.ledger, everything)
    texts = [
        *agreement,
        *_describe_snapshot(snapshot, everything),
        *_name_other_peaks(facts, snapshot),
    ]
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
    least_bytes = MAX_SMALL_SHARE * snapshot.peak_bytes
    rest_bytes = snapshot.peak_bytes
    held = []
    colors = []
    for part in snapshot.held:
        if 0 < least_bytes <= part.num_bytes:
            held.append((part.category, part.num_bytes))
            colors.append(palette.HELD.get(part.category, palette.GREY))
            rest_bytes -= part.num_bytes
    if rest_bytes > 0:
        held.append((OTHER_CATEGORIES, rest_bytes))
        colors.append(palette.GREY)
    return build_share_table(held, snapshot.peak_bytes, size, colors)


def _build_sites(snapshot: Snapshot, everything: bool) -> Table:
    """Build the table of the lines of code whose allocations hold most of the peak."""
    shown, hidden = limit_rows(snapshot.sites, MAX_CODE_ROWS, everything)
    rows = []
    for site in shown:
        held = size(site.num_bytes)
        rows.append([site.site, site.module, site.category, site.phase, held, f"{site.blocks:,}"])
    head = ["allocated by", "module", "as", "phase", "at the peak", "blocks"]
    return Table(rows, "llllrr", head, hidden=hidden)


def _name_other_peaks(facts: Facts, shown: Snapshot) -> list[str]:
    """Write a line with the peaks of the snapshots beside the one that is shown; [] where there is no other."""
    others = [one for one in facts.snapshots if one is not shown]
    if not others:
        return []
    peaks = []
    for one in others[:MAX_OTHERS]:
        name = one.source if one.rank is None else f"rank {one.rank}"
        peaks.append(f"{name} {size(one.peak_bytes)}")
    return [f"peaks of others: {', '.join(peaks)}"]


def _build_ledger(categories: Sequence[MeasuredCategory], everything: bool) -> tuple[Table, list[str]]:
    """Build the table of formulas beside measurements, and name the categories in which they agree.

    Args:
        categories: each by its formula and as measured.
        everything: show all categories with their formulas, not only those that differ.
    """
    head = ["at its own peak", "measured", "formula"]
    align = "lrr"
    if everything:
        head.append("which is")
        align += "l"
    rows = []
    agreeing = []
    for one in categories:
        off_bytes = abs(one.difference_bytes)
        agrees = off_bytes == 0 or off_bytes < DIFFERS * one.formula_bytes
        if agrees and one.formula_bytes:
            agreeing.append(one.category)
        cells = [one.category, size(one.measured_bytes), size(one.formula_bytes)]
        if everything:
            rows.append([*cells, one.formula])
        elif not agrees:
            rows.append(cells)
    notes = []
    if agreeing:
        named = ", ".join(agreeing)
        notes.append(f"formula and measurement agree within {DIFFERS:.0%}: {named}")
    return Table(rows, align, head), notes


def _build_traced_section(facts: Facts, how: str) -> Section | None:
    """Build the table of each rank's peak, from traces, which do not say what held it.

    Args:
        facts: what was found.
        how: the flag or command that records a snapshot, which says it.
    """
    seen = facts.traced_memory
    if not seen:
        return None
    shown = seen[:MAX_OTHERS]
    head = ["rank", "memory of", "peak", "reserved", "phase", "operator"]
    rows = [_list_traced_cells(one, facts.has_one_rank) for one in shown]
    table = Table(rows, "llrrll", head, hidden=len(seen) - len(shown))
    texts = []
    if not all(one.total_is_given for one in seen):
        texts.append("+: in addition to memory allocated before the window")
    others = []
    for one in shown:
        others += [f"GPU {device} {size(peak_bytes)}" for device, peak_bytes in one.other_peaks]
    if others:
        texts.append(f"peaks of other devices: {', '.join(others)}")
    texts.append(f"To see what used this memory, record a snapshot: {how}")
    return Section("memory", "Memory", "from the trace's memory events", [table, Lines(texts, quiet=True)])


def _list_traced_cells(one: TraceMemory, has_one_rank: bool) -> list[str]:
    """Write a rank's peak: of whom and of which device, how much, and where it was; the only rank is not named."""
    whose = one.source
    if one.rank is not None:
        whose = "" if has_one_rank else str(one.rank)
    device = "host" if one.device < 0 else f"GPU {one.device}"
    peak = size(one.peak_bytes)
    if not one.total_is_given:
        peak = f"+ {peak}"
    reserved = "" if one.reserved_bytes is None else size(one.reserved_bytes)
    return [whose, device, peak, reserved, one.peak_phase, one.peak_operator]


def _describe_snapshot(snapshot: Snapshot, everything: bool) -> list[str]:
    """Describe activations by layer, growth, fragmentation, and where memory ran out, in a line for each that was
    found."""
    lines = [
        _describe_layers(snapshot, everything),
        _describe_growth(snapshot),
        _describe_reserved(snapshot),
        *_describe_private_pools(snapshot),
        _describe_failure(snapshot),
    ]
    return [line for line in lines if line]


def _describe_layers(snapshot: Snapshot, everything: bool) -> str:
    """Describe how much activations hold, by layer: all layers on demand, else the largest; '' without layers."""
    if not snapshot.layers:
        return ""
    layers = [layer for layer in snapshot.layers if layer.name != OUTSIDE]
    all_bytes = sum(layer.num_bytes for layer in snapshot.layers)
    inside_bytes = sum(layer.num_bytes for layer in layers)
    outside_bytes = all_bytes - inside_bytes
    line = f"activations of {counted(len(layers), 'layer')}: {size(inside_bytes)}"
    if outside_bytes:
        line += f", {OUTSIDE} {size(outside_bytes)}"
    if not layers:
        return line
    if everything:
        return f"{line}; {_name_layers(layers)}"
    largest_first = sorted(layers, key=lambda layer: -layer.num_bytes)
    largest = _name_layers(largest_first[:MAX_LAYER_ROWS])
    return f"{line}; most in {largest}"


def _name_layers(layers: Sequence[Layer]) -> str:
    return ", ".join(f"{layer.name} {size(layer.num_bytes)}" for layer in layers)


def _describe_growth(snapshot: Snapshot) -> str:
    """Describe how fast memory grows from step to step, and which lines of code allocate what stays; '' where it does
    not grow."""
    growth = snapshot.growth
    if growth is None:
        return ""
    each = size(growth.bytes_per_step)
    line = f"grows by {each} per step over {counted(growth.steps, 'step')}"
    sites = []
    for site in growth.sites[:MAX_GROWING]:
        sites.append(f"{size(site.num_bytes)} by {site.site}")
    return f"{line}: {'; '.join(sites)}" if sites else line


def _describe_reserved(snapshot: Snapshot) -> str:
    """Describe what the allocator reserved, and how much of it expandable segments would save."""
    found = snapshot.fragmentation
    if not found.reserved_bytes:
        return ""
    unused_bytes = found.reserved_bytes - found.allocated_bytes
    share = percent(unused_bytes / found.reserved_bytes)
    unused = f"{size(unused_bytes)} not allocated then ({share})"
    place = " outside of private pools" if snapshot.private_pools else ""
    line = f"reserved{place}: {size(found.reserved_bytes)} at most, {unused}"
    if found.expandable:
        return f"{line}; expandable segments are on"
    replayed_bytes = found.replay_reserved_bytes
    if replayed_bytes is None:
        return line
    saved_bytes = found.reserved_bytes - replayed_bytes
    gain = f"{size(saved_bytes)} less" if saved_bytes > 0 else "no less"
    return f"{line}; replayed with expandable segments: {size(replayed_bytes)}, {gain}"


def _describe_private_pools(snapshot: Snapshot) -> list[str]:
    lines = []
    for pool in snapshot.private_pools[:MAX_OTHERS]:
        owner = "a CUDA graph's" if pool.of_graphs else "a CUDA graph's or torch.cuda.MemPool's"
        reserved = size(pool.reserved_bytes)
        held = size(pool.allocated_bytes)
        lines.append(f"private pool {pool.pool}, {owner}: {reserved} reserved, {held} held by tensors")
    return lines


def _describe_failure(snapshot: Snapshot) -> str:
    """Describe the request that found no memory; '' where each found some."""
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
    """Build the tables of predicted and measured memory by category, and of the step and the shortest possible one."""
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
    """Build the table of predicted and measured bytes of each category at the peak; small categories share a row unless
    all are wanted."""
    least = 0 if everything else MAX_SMALL_SHARE * memory.peak.measured
    rows = []
    # bytes of the small categories
    predicted: float = 0
    measured: float = 0
    has_small = False
    for row in memory.categories:
        if max(row.predicted, row.measured) >= least:
            rows.append(_build_memory_row(row))
        else:
            has_small = True
            predicted += row.predicted
            measured += row.measured
    if has_small:
        rows.append([OTHER_CATEGORIES, size(predicted), size(measured), ""])
    rows.append(_build_memory_row(memory.peak))
    where = f"the peak was predicted at {memory.predicted_at}"
    if memory.measured_in:
        where += f", measured in {memory.measured_in}"
    table = Table(rows, "lrrr", ["tensors at the peak", "predicted", "measured", "measured is"])
    return [table, Lines([where], quiet=True)]


def _build_memory_row(row: Compared) -> list[str]:
    return [row.name, size(row.predicted), size(row.measured), _describe_difference(row)]


def _compare_time(time: ComparedTime) -> list[Block]:
    """Build the table of each part of the step beside the shortest time that the hardware allows."""
    step_ms = time.step.measured
    rows = [_build_time_row(row, step_ms) for row in (*time.parts, time.step)]
    tokens = time.tokens
    if tokens:
        reached = percent(tokens.measured / tokens.predicted)
        rows.append(
            [
                tokens.name,
                count(tokens.predicted),
                count(tokens.measured),
                f"{reached} of the bound",
            ]
        )
    notes = []
    if time.parts:
        notes.append("at best: every part runs at the hardware's peak, without gaps; real steps take longer")
    for text in time.not_predicted:
        notes.append(f"not in the bound: {text}")
    table = Table(rows, "lrrr", ["ms per step", "at best", "measured", "measured is"])
    return [table, Lines(notes, quiet=True)]


def _build_time_row(row: Compared, step_ms: float) -> list[str]:
    """Write a part of the step. `step_ms`: the measured step, whose decimals all have."""
    times = ""
    if row.predicted:
        times = f"{row.measured / row.predicted:.2f} x the bound"
    predicted = milliseconds(row.predicted, step_ms)
    return [row.name, predicted, milliseconds(row.measured, step_ms), times]


def _describe_difference(row: Compared) -> str:
    """Describe how a measurement differs from its prediction: '3.1% more', '2.4 x as much', 'as predicted', 'not
    predicted'."""
    if row.difference is None:
        return "not predicted" if row.measured else ""
    difference = abs(row.difference)
    if difference < 0.0005:
        return "as predicted"
    if row.difference > AS_FACTOR:
        return f"{1 + row.difference:,.1f} x as much"
    # from 9.95% on a decimal would say more than is known
    share = f"{difference:.1%}" if difference < 0.0995 else percent(difference)
    return f"{share} more" if row.difference > 0 else f"{share} less"
