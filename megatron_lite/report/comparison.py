"""A Comparison as sections: drawn on a terminal, on a page with charts, and in part as a table for a pull request."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair
from megatron_lite.analysis.compare.limits import Judged
from megatron_lite.analysis.compare.losses import Losses
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.report import draw, palette
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Figure
from megatron_lite.report.html import render_page
from megatron_lite.report.section import Block, Lines, Section, Table, limit_rows, section_lines
from megatron_lite.report.sections.step import row_title
from megatron_lite.report.text import Style, calls, heading, milliseconds, wrapped
from megatron_lite.terminal import escape
from megatron_lite.units import count, significant, size

MAX_FLAGS = 12  # rows
MAX_COMPARED_KERNELS = 8  # rows
MAX_KERNEL_NAMES = 2  # of an operator's kernels
MIN_LISTED_SHARE = 0.002  # of a step that a row or a kernel's difference must be to be listed
COLUMN_HEADS = ["A", "B", "B - A", "change", "noise", "result"]
COLUMN_ALIGNMENT = "rrrrrl"
LIMIT_HEADS = ["fail if", "change", "noise", "result"]
LIMIT_ALIGNMENT = "lrrl"
NOTES_TITLE = "To keep in mind"
CLEAR = (Change.MORE, Change.LESS)
FACTOR = 10  # B in times of A from which on a change is told as a factor, not in percent


def comparison_lines(
    found: Comparison, style: Style, everything: bool = False, judged: Sequence[Judged] = ()
) -> list[str]:
    """Write what changed and what did not as about 60 lines for a terminal.

    Args:
        found: the comparison.
        style: how the terminal may be written to.
        everything: show all rows of all tables.
        judged: limits of --fail-if with their outcome.
    """
    lines = wrapped(f"A: {found.title_a}", "")
    lines += wrapped(f"B: {found.title_b}", "")
    lines.append("")
    lines += map(style.warm, wrapped(found.sentence))
    for section in build_comparison_sections(found, judged, everything):
        lines.append("")
        lines += section_lines(section, style)
    lines.append("")
    lines.append(heading(NOTES_TITLE, "", style))
    for note in _list_notes(found):
        lines += wrapped(note, "  - ", "    ")
    return lines


def comparison_page(found: Comparison, judged: Sequence[Judged], a: Facts, b: Facts) -> str:
    """Write a comparison as a page.

    Args:
        found: the comparison.
        judged: limits of --fail-if with their outcome.
        a: what is known of the first run.
        b: what is known of the second run.

    Returns:
        The HTML of the page.
    """
    charts = _build_charts(found, a, b)
    sections = list(build_comparison_sections(found, judged, True))
    if charts["losses"] and found.losses is None:
        # the curves are drawn all the same
        why = "not judged: seed, data, model, optimizer and precision are not known to be the same"
        note = Lines([why], quiet=True)
        sections.append(Section("losses", "Losses", "of every step", [note]))
    sentences = [found.sentence.replace("->", "\u2192")]
    for one in judged:
        sentences.append(f"Limit {one.limit.text}: {one.outcome}")
    step = found.totals[0]
    is_unclear = step.pair.change is Change.UNCLEAR
    return render_page(
        sections,
        charts,
        title=f"A: {found.title_a}; B: {found.title_b}",
        command="compare",
        sentences=sentences,
        trust="inconclusive" if is_unclear else "",
        tiles=_build_tiles(found),
        gaps_title=NOTES_TITLE,
        gaps=_list_notes(found),
        numbers="--json FILE",
    )


def _build_tiles(found: Comparison) -> list[tuple[str, str]]:
    """Build a tile per total: how much it changed, where that is clear, else what became of it; and both values."""
    tiles = []
    for total, cells in zip(found.totals, _list_totals(found)):
        name, a, b, _, change, _, result = cells
        is_clear = total.pair.change in CLEAR
        head = change if is_clear else result
        tiles.append((head, f"{name}: {a} \u2192 {b}"))
    return tiles


def _list_notes(found: Comparison) -> list[str]:
    """List what holds of the whole comparison: why it would have been refused, then what makes it less certain."""
    forced = [f"compared by --force though {reason}" for reason in found.forced]
    return [*forced, *found.notes]


def _list_limit_cells(one: Judged) -> list[str]:
    """Write a limit of --fail-if, the change and its noise in percent of A, and the outcome."""
    change = "not known"
    noise = ""
    pair = one.pair
    if pair and pair.ratio is not None and pair.a:
        change = f"{pair.ratio - 1:+.1%}"
        if pair.band is not None:
            noise = f"{pair.band / pair.a:.1%}"
    return [one.limit.text, change, noise, str(one.outcome)]


def markdown_lines(found: Comparison, judged: Sequence[Judged]) -> list[str]:
    """Write the sentence, the limits and the totals as Markdown that GitHub and GitLab draw."""
    sentence = _escape_markdown(found.sentence)
    title_a = _escape_markdown(found.title_a)
    title_b = _escape_markdown(found.title_b)
    # two spaces at the end break the line
    lines = [f"**{sentence}**", "", f"A: {title_a}  ", f"B: {title_b}", ""]
    if judged:
        lines += [_write_markdown_row(LIMIT_HEADS), _write_markdown_rule(LIMIT_ALIGNMENT)]
        for one in judged:
            limit, *results = _list_limit_cells(one)
            lines.append(_write_markdown_row([f"`{limit}`", *results]))
        lines.append("")
    # nothing stands above the names
    lines.append(f"| {_write_markdown_row(COLUMN_HEADS)}")
    lines.append(_write_markdown_rule("l" + COLUMN_ALIGNMENT))
    for cells in _list_totals(found):
        lines.append(_write_markdown_row(map(_escape_markdown, cells)))
    return lines


def _write_markdown_rule(alignment: str) -> str:
    """Write the line below a table's head, which says which columns are numbers."""
    return _write_markdown_row("---:" if side == "r" else "---" for side in alignment)


def _write_markdown_row(cells: Iterable[str]) -> str:
    joined = " | ".join(cells)
    return f"| {joined} |"


def _escape_markdown(text: str) -> str:
    """Remove what a terminal would obey, and escape what Markdown would take for its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", escape(text))


def _list_totals(found: Comparison) -> list[list[str]]:
    """Write the totals: name with its unit, then the cells of _build_cells."""
    writers: dict[str, Callable[[float], str]] = {
        "bytes": size,
        "tokens/s": count,
        "%": "{:.1f}".format,
        "MHz": "{:,.0f}".format,
        "deg C": "{:.0f}".format,
    }
    rows = []
    for total in found.totals:
        name = total.name
        if total.unit in ("ms", "%", "MHz", "deg C"):
            name = f"{name}, {total.unit}"
        write = writers.get(total.unit) or _choose_ms([total.pair])
        cells = _build_cells(total.pair, write)
        rows.append([name, *cells])
    return rows


# --- sections


def build_comparison_sections(found: Comparison, judged: Sequence[Judged], everything: bool) -> Iterator[Section]:
    """Build the sections of a comparison: limits, how the two runs were started, then numbers from the whole to its
    parts.

    Args:
        found: the comparison.
        judged: limits of --fail-if with their outcome.
        everything: show all rows of all tables.
    """
    if judged:
        yield _build_limits_section(judged)
    if found.flags:
        yield _build_flags_section(found, everything)
    yield _build_totals_section(found)
    if found.rows:
        yield _build_rows_section(found)
    if found.groups:
        yield _build_groups_section(found)
    if found.phases:
        yield _build_phases_section(found)
    if found.roles:
        yield _build_roles_section(found)
    kernels = [kernel for kernel in found.kernels if everything or _differs(kernel, found)]
    if kernels:
        yield _build_kernels_section(kernels, everything)
    if found.losses:
        yield build_losses_section(found.losses)
    if found.memory:
        table = _build_table(found.memory, write=size)
        yield Section("memory", "At the peak of memory", "by what holds it", [table])


def _build_limits_section(judged: Sequence[Judged]) -> Section:
    rows = [_list_limit_cells(one) for one in judged]
    table = Table(rows, LIMIT_ALIGNMENT, LIMIT_HEADS)
    return Section("limits", "Limits", "", [table])


def _build_flags_section(found: Comparison, everything: bool) -> Section:
    shown, hidden = limit_rows(found.flags, MAX_FLAGS, everything)
    rows = [[flag.name, flag.a, flag.b] for flag in shown]
    table = Table(rows, "lll", ["", "A", "B"], hidden=hidden)
    return Section("flags", "What differs in how they were started", "", [table])


def _build_totals_section(found: Comparison) -> Section:
    """Build the table of step time, tokens per second and memory; which file each comes from stands in a line below."""
    names_by_source = defaultdict(list)
    for total in found.totals:
        names_by_source[total.of].append(total.name)
    sources = []
    for source, names in names_by_source.items():
        sources.append(f"{', '.join(names)}: {source}")
    note = Lines(["; ".join(sources)], quiet=True)
    pairs = [total.pair for total in found.totals]
    table = _make_table("", _list_totals(found), pairs)
    return Section("totals", "Speed and memory", "", [table, note])


def _build_rows_section(found: Comparison) -> Section:
    pairs = {row_title(row, found.on_gpu): pair for row, pair in found.rows.items()}
    table = _build_table(pairs)
    subtitle = "ms per step; rows sum to the traced step"
    return Section("rows", "Where a step goes", subtitle, [table])


def _build_groups_section(found: Comparison) -> Section:
    pairs = {name or "not named": pair for name, pair in found.groups.items()}
    table = _build_table(pairs)
    subtitle = "exposed ms per step, mean over the ranks with a trace"
    return Section("groups", "Communication not overlapped with compute, by group", subtitle, [table])


def _build_roles_section(found: Comparison) -> Section:
    pairs = _drop_unseen(found.roles, found.step_ms)
    table = _build_table(pairs)
    return Section("roles", "By kind of work", "ms per step, added up", [table])


def _build_kernels_section(kernels: Sequence[KernelPair], everything: bool) -> Section:
    """Build the table of the operators that changed most; where their kernels have other names, those stand below."""
    shown, hidden = limit_rows(kernels, MAX_COMPARED_KERNELS, everything)
    pairs = {_name_kernel(kernel): kernel.ms for kernel in shown}
    renamed = []
    for kernel in shown:
        if set(kernel.names_a) != set(kernel.names_b):
            renamed.append(_describe_kernels(kernel))
    table = _build_table(pairs, "operator, phase", hidden=hidden)
    blocks: list[Block] = [table, Lines(renamed, quiet=True)]
    return Section("kernels", "What changed most, by operator and phase", "ms per step", blocks)


def build_losses_section(found: Losses, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Section:
    """Build the table of the losses of the first step that both runs did, and of how far they are apart at most."""
    pairs = {"loss": found.first, "gradient norm": found.first_norms}
    rows = []
    for name, (a, b) in pairs.items():
        difference = significant(b - a, 2, signed=True)
        rows.append([name, significant(a, 7), significant(b, 7), difference])
    table = Table(rows, "lrrr", ["", *names])
    texts = [_describe_largest_difference(found)]
    if found.verdict:
        texts.insert(0, found.verdict)
    first, _ = found.iterations
    return Section("losses", "Do they compute the same?", f"step {first:,}", [table, Lines(texts)])


def _describe_largest_difference(found: Losses) -> str:
    """Describe how far the losses of a step are apart at most, and in which step."""
    first, last = found.iterations
    steps = f"steps {first:,} to {last:,}"
    largest = significant(found.largest, 2)
    return f"largest difference of a loss in {steps}: {largest}, in step {found.largest_at:,}"


def _build_phases_section(found: Comparison) -> Section:
    """Build the table of phases by the host's labels, and where there is a GPU before it that of the device's own time:
    the two tell different stories."""
    on_device = {}
    on_host = {}
    for phase in found.phases:
        clocks = {"host": phase.host}
        if phase.device:
            clocks["device"] = phase.device
        if not _drop_unseen(clocks, found.step_ms):
            continue
        on_host[phase.name] = phase.host
        if phase.device:
            on_device[phase.name] = phase.device
    blocks: list[Block] = []
    if on_device:
        blocks.append(_build_table(on_device, "on the device"))
    if on_host:
        blocks.append(_build_table(on_host, "by labels on the host"))
    if on_device:
        note = "labels on the host show when work was handed over, and waits; the device's time is what it takes"
        blocks.append(Lines([note], quiet=True))
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _drop_unseen(pairs: Mapping[str, Pair], step_ms: float) -> dict[str, Pair]:
    """Keep the pairs of which A or B is large enough of a step to be listed."""
    least_ms = MIN_LISTED_SHARE * step_ms
    kept = {}
    for name, pair in pairs.items():
        larger_ms = max(pair.a or 0.0, pair.b or 0.0)
        if larger_ms >= least_ms:
            kept[name] = pair
    return kept


def _differs(kernel: KernelPair, found: Comparison) -> bool:
    """Tell whether a kernel's time changed clearly, and by enough of a step to be listed."""
    if kernel.ms.change in (Change.SAME, Change.UNCLEAR):
        return False
    return abs(_measure_increase(kernel)) >= MIN_LISTED_SHARE * found.step_ms


def _measure_increase(kernel: KernelPair) -> float:
    """Measure how many ms per step B takes more than A for a kind of work; below zero where it takes less."""
    return (kernel.ms.b or 0.0) - (kernel.ms.a or 0.0)


def _describe_kernels(pair: KernelPair) -> str:
    """Describe how an operator's kernels changed: 'aten::addmm, forward: ampere_sgemm_128x64_tn (24) ->
    ampere_fp16_s1688gemm_... (24)'."""
    before = _name_kernels(pair.names_a, pair.per_step.a)
    after = _name_kernels(pair.names_b, pair.per_step.b)
    return f"{_name_kernel(pair)}: {before} -> {after}"


def _name_kernels(names: Sequence[str], per_step: float | None) -> str:
    """Name the kernels of one run, and how often they ran per step; 'nothing' where there are none."""
    named = ", ".join(names[:MAX_KERNEL_NAMES])
    if per_step:
        named += f" ({calls(per_step)})"
    return named or "nothing"


def _name_kernel(pair: KernelPair) -> str:
    return f"{pair.operator}, {pair.phase}" if pair.phase else pair.operator


# --- tables of pairs


def _build_table(
    pairs: Mapping[str, Pair],
    head: str = "",
    write: Callable[[float], str] | None = None,
    hidden: int = 0,
) -> Table:
    """Build a table with a name and the cells of a pair in each row; what has not changed is faint.

    Args:
        pairs: the pairs by name.
        head: the head of the names.
        write: writes a value; None for milliseconds.
        hidden: how many rows were left out.
    """
    write = write or _choose_ms(pairs.values())
    rows = []
    for name, pair in pairs.items():
        cells = _build_cells(pair, write)
        rows.append([name, *cells])
    return _make_table(head, rows, pairs.values(), hidden)


def _make_table(head: str, rows: Sequence[Sequence[str]], pairs: Iterable[Pair], hidden: int = 0) -> Table:
    """Make a table of rows that are written already; what has not changed is faint.

    Args:
        head: the head of the names.
        rows: a name, and what _build_cells wrote of a pair.
        pairs: the pair of each row.
        hidden: how many rows were left out.
    """
    return Table(
        rows,
        align="l" + COLUMN_ALIGNMENT,
        head=[head, *COLUMN_HEADS],
        hidden=hidden,
        faint=[pair.change is Change.SAME for pair in pairs],
    )


def _build_cells(pair: Pair, write: Callable[[float], str]) -> list[str]:
    """Write A, B, their difference, the change, the noise, and what became of it; '' for what is not known."""
    difference = ""
    if pair.difference is not None:
        amount = write(abs(pair.difference))
        difference = _sign(amount, pair.difference)
    return [
        "" if pair.a is None else write(pair.a),
        "" if pair.b is None else write(pair.b),
        difference,
        _describe_change(pair.ratio),
        write(pair.band) if pair.band else "",
        str(pair.change),
    ]


def _describe_change(ratio: float | None) -> str:
    """Write B over A as a change: '+12%', '-43%', 'x 25'; '' where it is not known."""
    if ratio is None:
        return ""
    if ratio >= FACTOR:
        return f"x {ratio:,.0f}"
    increase = ratio - 1
    return _sign(f"{abs(increase):.0%}", increase)


def _sign(text: str, value: float) -> str:
    """Write + or - before a number, unless it is written as zero."""
    if not re.search("[1-9]", text):
        return text
    return f"+{text}" if value > 0 else f"-{text}"


def _choose_ms(pairs: Iterable[Pair]) -> Callable[[float], str]:
    """Choose how milliseconds are written: all with the decimals that suit the largest."""
    values: list[float | None] = []
    for pair in pairs:
        values += [pair.a, pair.b]
    largest_ms = max((value for value in values if value is not None), default=0.0)
    return partial(milliseconds, largest=largest_ms)


# --- charts of the page

MAX_BARS = 16  # kernels
MAX_COMPARED_PHASES = 40
KERNEL_WIDTH = 40  # letters of a name


def _build_charts(found: Comparison, a: Facts, b: Facts) -> dict[str, Figure | None]:
    """Build the charts of a comparison, by the key of the section that each belongs to."""
    losses = draw.losses({"A": a.run, "B": b.run})
    charts: dict[str, Figure | None] = {"losses": losses}
    if found.rows:
        description = "Where a step of A goes, and one of B, in milliseconds"
        charts["rows"] = draw.steps(description, _split(found.rows), found.on_gpu)
    if found.memory:
        charts["memory"] = _draw_memory(found.memory)
    charts["phases"] = _draw_phases(found)
    charts["kernels"] = _draw_kernels(found)
    return charts


def _draw_memory(pairs: Mapping[str, Pair]) -> Figure:
    """Draw a stacked bar for A and one for B, in the unit that suits the higher peak."""
    bytes_by_side = _split(pairs)
    peak_bytes = max(sum(held.values()) for held in bytes_by_side.values())
    unit, bytes_of_unit = draw.choose_unit(peak_bytes)
    held_by_side = {}
    for side, held in bytes_by_side.items():
        held_by_side[side] = {name: num_bytes / bytes_of_unit for name, num_bytes in held.items()}
    description = "What holds memory at the peak of A, and of B"
    return draw.stacks(description, held_by_side, palette.HELD, unit)


def _draw_phases(found: Comparison) -> Figure | None:
    """Draw two bars for each phase, by the device's clock where there is one; None without phases."""
    pairs = {phase.name: phase.device or phase.host for phase in found.phases}
    seen = _drop_unseen(pairs, found.step_ms)
    shown = dict(islice(seen.items(), MAX_COMPARED_PHASES))
    if not shown:
        return None
    rows = draw.fit_names(list(shown))
    colors = {"A": palette.GREY, "B": palette.BLUE}
    series = []
    for side, ms_by_phase in _split(shown).items():
        values = list(ms_by_phase.values())
        series.append(Bars(side, rows, values, [colors[side]]))
    description = "How long each phase takes in A, and in B, in milliseconds"
    return BarChart(description, series, Axis("ms per step"), Arrangement.BESIDE, 34)


def _draw_kernels(found: Comparison) -> Figure | None:
    """Draw a bar for each kind of work that changed: how much longer B takes, or how much shorter."""
    changed = [kernel for kernel in found.kernels if _differs(kernel, found)]
    changed = changed[:MAX_BARS]
    if not changed:
        return None
    names = draw.fit_names(list(map(_name_kernel, changed)), KERNEL_WIDTH)
    increases_ms = list(map(_measure_increase, changed))
    colors = [palette.VERMILION if ms > 0 else palette.GREEN for ms in increases_ms]
    bars = Bars("", names, increases_ms, colors)
    description = "How much longer B takes for each kind of work that changed"
    return BarChart(description, [bars], Axis("ms per step, B - A"))


def _split(pairs: Mapping[str, Pair]) -> dict[str, dict[str, float]]:
    """Split pairs into the numbers of A and those of B, each by the names of the pairs."""
    return {
        "A": {name: pair.a or 0.0 for name, pair in pairs.items()},
        "B": {name: pair.b or 0.0 for name, pair in pairs.items()},
    }
