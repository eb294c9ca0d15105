"""A Comparison as sections: drawn on a terminal, on a page with charts, and in part as a table for a pull request."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

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
    lines += ["", heading("To keep in mind", "", style)]
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
        told = "not judged: seed, data, model, optimizer and precision are not known to be the same"
        sections.append(Section("losses", "Losses", "of every step", [Lines([told], quiet=True)]))
    sentences = [found.sentence.replace("->", "\u2192")]
    sentences += [f"Limit {one.limit.text}: {one.outcome}" for one in judged]
    is_unclear = found.totals[0].pair.change is Change.UNCLEAR
    return render_page(
        sections,
        charts,
        title=f"A: {found.title_a}; B: {found.title_b}",
        command="compare",
        sentences=sentences,
        trust="inconclusive" if is_unclear else "",
        tiles=_build_tiles(found),
        of_gaps="To keep in mind",
        gaps=_list_notes(found),
        numbers="--json FILE",
    )


def _build_tiles(found: Comparison) -> list[tuple[str, str]]:
    """Build a tile per total: how much it changed, where that is clear, else what became of it; and both values."""
    tiles = []
    for total, cells in zip(found.totals, _list_totals(found)):
        name, a, b, _, change, _, result = cells
        is_clear = total.pair.change in CLEAR
        tiles.append((change if is_clear else result, f"{name}: {a} \u2192 {b}"))
    return tiles


def _list_notes(found: Comparison) -> list[str]:
    forced = [f"compared by --force though {reason}" for reason in found.forced]
    return [*forced, *found.notes]


def _describe_judged(one: Judged) -> tuple[str, str]:
    """The change and its noise, in percent."""
    pair = one.pair
    if pair is None or pair.ratio is None or not pair.a:
        return "not known", ""
    noise = ""
    if pair.band is not None:
        noise = f"{pair.band / pair.a:.1%}"
    return f"{pair.ratio - 1:+.1%}", noise


def markdown_lines(found: Comparison, judged: Sequence[Judged]) -> list[str]:
    """The sentence, the limits and the totals, as GitHub and GitLab draw them."""
    lines = [f"**{_escape(found.sentence)}**", ""]
    # two spaces at the end break the line
    lines += [f"A: {_escape(found.title_a)}  ", f"B: {_escape(found.title_b)}"]
    if judged:
        lines += ["", "| fail if | change | noise | result |", "| --- | ---: | ---: | --- |"]
        for one in judged:
            change, noise = _describe_judged(one)
            lines.append(f"| `{one.limit.text}` | {change} | {noise} | {one.outcome} |")
    numbers = " ---: |" * 5
    lines += ["", f"| | {' | '.join(COLUMN_HEADS)} |", f"| --- |{numbers} --- |"]
    for row in _list_totals(found):
        cells = " | ".join(map(_escape, row))
        lines.append(f"| {cells} |")
    return lines


def _escape(text: str) -> str:
    """Remove what a terminal would obey, and escape what Markdown would take for its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", escape(text))


def _list_totals(found: Comparison) -> list[list[str]]:
    """Write the totals: name with its unit, then the cells of _build_cells."""
    writers: dict[str, Callable[[float], str]] = {
        "bytes": size,
        "tokens/s": count,
        "%": "{:.1f}".format,
    }
    rows = []
    for total in found.totals:
        name = total.name
        if total.unit in ("ms", "%"):
            name = f"{name}, {total.unit}"
        write = writers.get(total.unit) or _choose_ms([total.pair])
        rows.append([name, *_build_cells(total.pair, write)])
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
    rows = []
    for one in judged:
        change, noise = _describe_judged(one)
        rows.append([one.limit.text, change, noise, str(one.outcome)])
    table = Table(rows, "lrrl", ["fail if", "change", "noise", "result"])
    return Section("limits", "Limits", "", [table])


def _build_flags_section(found: Comparison, everything: bool) -> Section:
    shown, hidden = limit_rows(found.flags, MAX_FLAGS, everything)
    rows = [[flag.name, flag.a, flag.b] for flag in shown]
    table = Table(rows, "lll", ["", "A", "B"], hidden=hidden)
    return Section("flags", "What differs in how they were started", "", [table])


def _build_totals_section(found: Comparison) -> Section:
    """Step time, tokens per second, memory; which file each comes from stands in a line below."""
    names_by_source: dict[str, list[str]] = {}
    for total in found.totals:
        names_by_source.setdefault(total.of, []).append(total.name)
    sources = [f"{', '.join(names)}: {source}" for source, names in names_by_source.items()]
    unchanged = [total.pair.change is Change.SAME for total in found.totals]
    table = Table(_list_totals(found), "l" + COLUMN_ALIGNMENT, ["", *COLUMN_HEADS], faint=unchanged)
    return Section("totals", "Speed and memory", "", [table, Lines(["; ".join(sources)], quiet=True)])


def _build_rows_section(found: Comparison) -> Section:
    pairs = {row_title(row, found.on_gpu): pair for row, pair in found.rows.items()}
    return Section(
        "rows",
        "Where a step goes",
        "ms per step; rows sum to the traced step",
        [_build_table(pairs)],
    )


def _build_groups_section(found: Comparison) -> Section:
    pairs = {name or "not named": pair for name, pair in found.groups.items()}
    unit = "exposed ms per step, mean over the ranks with a trace"
    return Section(
        "groups",
        "Communication not overlapped with compute, by group",
        unit,
        [_build_table(pairs)],
    )


def _build_roles_section(found: Comparison) -> Section:
    pairs = {name: pair for name, pair in found.roles.items() if _is_seen(pair, found.step_ms)}
    return Section("roles", "By kind of work", "ms per step, added up", [_build_table(pairs)])


def _build_kernels_section(kernels: Sequence[KernelPair], everything: bool) -> Section:
    """The operators that changed most; where their kernels have other names, those stand below the table."""
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
    rows = []
    for name, (a, b) in (("loss", found.first), ("gradient norm", found.first_norms)):
        difference = significant(b - a, 2, signed=True)
        rows.append([name, significant(a, 7), significant(b, 7), difference])
    first, last = found.iterations
    largest = f"{significant(found.largest, 2)}, in step {found.largest_at:,}"
    texts = [f"largest difference of a loss in steps {first:,} to {last:,}: {largest}"]
    if found.verdict:
        texts.insert(0, found.verdict)
    blocks: list[Block] = [Table(rows, "lrrr", ["", *names]), Lines(texts)]
    return Section("losses", "Do they compute the same?", f"step {first:,}", blocks)


def _build_phases_section(found: Comparison) -> Section:
    """The host's labels beside the device's own time where there is a GPU: the two tell different stories."""
    on_device = {}
    on_host = {}
    for phase in found.phases:
        known = [pair for pair in (phase.host, phase.device) if pair]
        if not any(_is_seen(pair, found.step_ms) for pair in known):
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
        told = "labels on the host show when work was handed over, and waits; the device's time is what it takes"
        blocks.append(Lines([told], quiet=True))
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _is_seen(pair: Pair, step_ms: float) -> bool:
    return max(pair.a or 0.0, pair.b or 0.0) >= MIN_LISTED_SHARE * step_ms


def _differs(kernel: KernelPair, found: Comparison) -> bool:
    """Tell whether a kernel's time changed clearly, and by enough of a step to be listed."""
    if kernel.ms.change in (Change.SAME, Change.UNCLEAR):
        return False
    return abs(_measure_increase(kernel)) >= MIN_LISTED_SHARE * found.step_ms


def _measure_increase(kernel: KernelPair) -> float:
    """How many ms per step B takes more than A for a kind of work; below zero where it takes less."""
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
    rows = [[name, *_build_cells(pair, write)] for name, pair in pairs.items()]
    faint = [pair.change is Change.SAME for pair in pairs.values()]
    return Table(rows, "l" + COLUMN_ALIGNMENT, [head, *COLUMN_HEADS], hidden=hidden, faint=faint)


def _build_cells(pair: Pair, write: Callable[[float], str]) -> list[str]:
    """Write A, B, their difference, the change, the noise, and what became of it; '' for what is not known."""
    a = "" if pair.a is None else write(pair.a)
    b = "" if pair.b is None else write(pair.b)
    difference = ""
    if pair.difference is not None:
        difference = _sign(write(abs(pair.difference)), pair.difference)
    noise = write(pair.band) if pair.band else ""
    return [a, b, difference, _describe_change(pair.ratio), noise, str(pair.change)]


def _describe_change(ratio: float | None) -> str:
    """Write B over A as a change: '+12%', '-43%', 'x 25'; '' where it is not known."""
    if ratio is None:
        return ""
    if ratio >= FACTOR:
        return f"x {ratio:,.0f}"
    return _sign(f"{abs(ratio - 1):.0%}", ratio - 1)


def _sign(text: str, value: float) -> str:
    """Write + or - before a number, unless it is written as zero."""
    if not re.search("[1-9]", text):
        return text
    return f"+{text}" if value > 0 else f"-{text}"


def _choose_ms(pairs: Iterable[Pair]) -> Callable[[float], str]:
    """Choose how milliseconds are written: all with the decimals that suit the largest."""
    values = [value for pair in pairs for value in (pair.a, pair.b) if value is not None]
    largest = max(values, default=0.0)
    return partial(milliseconds, of=largest)


# --- charts of the page

MAX_BARS = 16  # kernels
MAX_COMPARED_PHASES = 40
KERNEL_WIDTH = 40  # letters of a name


def _build_charts(found: Comparison, a: Facts, b: Facts) -> dict[str, Figure | None]:
    """Build the charts of a comparison, by the key of the section that each belongs to."""
    charts: dict[str, Figure | None] = {"losses": draw.losses({"A": a.run, "B": b.run})}
    if found.rows:
        says = "Where a step of A goes, and one of B, in milliseconds"
        charts["rows"] = draw.steps(says, _split(found.rows), found.on_gpu)
    if found.memory:
        peaks = [sum(held.values()) for held in _split(found.memory).values()]
        unit, bytes_of_unit = draw.choose_unit(max(peaks))
        says = "What holds memory at the peak of A, and of B"
        charts["memory"] = draw.stacks(says, _split(found.memory, bytes_of_unit), palette.HELD, unit)
    charts["phases"] = _draw_phases(found)
    charts["kernels"] = _draw_kernels(found)
    return charts


def _draw_phases(found: Comparison) -> Figure | None:
    pairs = {phase.name: phase.device or phase.host for phase in found.phases}
    seen = [(name, pair) for name, pair in pairs.items() if _is_seen(pair, found.step_ms)]
    shown = dict(seen[:MAX_COMPARED_PHASES])
    if not shown:
        return None
    rows = draw.fit_names(list(shown))
    series = []
    for (side, ms_by_phase), color in zip(_split(shown).items(), (palette.GREY, palette.BLUE)):
        series.append(Bars(side, rows, list(ms_by_phase.values()), [color]))
    says = "How long each phase takes in A, and in B, in milliseconds"
    return BarChart(says, series, Axis("ms per step"), Arrangement.BESIDE, 34)


def _draw_kernels(found: Comparison) -> Figure | None:
    changed = [kernel for kernel in found.kernels if _differs(kernel, found)][:MAX_BARS]
    if not changed:
        return None
    increases_ms = [_measure_increase(kernel) for kernel in changed]
    colors = [palette.VERMILION if ms > 0 else palette.GREEN for ms in increases_ms]
    names = draw.fit_names([_name_kernel(kernel) for kernel in changed], KERNEL_WIDTH)
    bars = Bars("", names, increases_ms, colors)
    says = "How much longer B takes for each kind of work that changed"
    return BarChart(says, [bars], Axis("ms per step, B - A"))


def _split(pairs: Mapping[str, Pair], of: float = 1.0) -> dict[str, dict[str, float]]:
    """Split pairs into the numbers of A and those of B, in units of `of`."""
    return {
        "A": {name: (pair.a or 0.0) / of for name, pair in pairs.items()},
        "B": {name: (pair.b or 0.0) / of for name, pair in pairs.items()},
    }
