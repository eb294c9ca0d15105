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

MAX_FLAGS, MAX_KERNELS, MAX_NAMES = 12, 8, 2
MIN_SHARE = 0.002  # of a step that a row or a kernel's difference must be to be listed
HEAD = ["A", "B", "B - A", "change", "noise", "result"]
ALIGN = "rrrrrl"
CLEAR = (Change.MORE, Change.LESS)


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
    lines = [*wrapped(f"A: {found.title_a}", ""), *wrapped(f"B: {found.title_b}", ""), ""]
    lines += map(style.warm, wrapped(found.sentence))
    for section in build_comparison_sections(found, judged, everything):
        lines += ["", *section_lines(section, style)]
    lines += ["", heading("To keep in mind", "", style)]
    return lines + [line for note in _list_notes(found) for line in wrapped(note, "  - ", "    ")]


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
    charts, sections = _build_charts(found, a, b), list(build_comparison_sections(found, judged, True))
    if charts["losses"] and found.losses is None:
        told = "not judged: seed, data, model, optimizer and precision are not known to be the same"
        sections.append(Section("losses", "Losses", "of every step", [Lines([told], quiet=True)]))
    tiles = []
    for total, (name, mine, theirs, _, change, _, result) in zip(found.totals, _list_totals(found)):
        tiles.append((change if total.pair.change in CLEAR else result, f"{name}: {mine} \u2192 {theirs}"))
    return render_page(
        sections,
        charts,
        title=f"A: {found.title_a}; B: {found.title_b}",
        command="compare",
        sentences=[
            found.sentence.replace("->", "\u2192"),
            *(f"Limit {one.limit.text}: {one.outcome}" for one in judged),
        ],
        trust="inconclusive" if found.totals[0].pair.change is Change.UNCLEAR else "",
        tiles=tiles,
        of_gaps="To keep in mind",
        gaps=_list_notes(found),
        numbers="--json FILE",
    )


def _list_notes(found: Comparison) -> list[str]:
    return [*(f"compared by --force though {reason}" for reason in found.forced), *found.notes]


def _describe_judged(one: Judged) -> tuple[str, str]:
    """The change and its noise, in percent."""
    pair = one.pair
    if pair is None or pair.ratio is None or not pair.a:
        return "not known", ""
    return f"{pair.ratio - 1:+.1%}", "" if pair.band is None else f"{pair.band / pair.a:.1%}"


def markdown_lines(found: Comparison, judged: Sequence[Judged]) -> list[str]:
    """The sentence, the limits and the totals, as GitHub and GitLab draw them."""
    lines = [f"**{_escape(found.sentence)}**", "", f"A: {_escape(found.title_a)}  ", f"B: {_escape(found.title_b)}"]
    if judged:
        lines += ["", "| fail if | change | noise | result |", "| --- | ---: | ---: | --- |"]
        lines += [f"| `{one.limit.text}` | {' | '.join(_describe_judged(one))} | {one.outcome} |" for one in judged]
    lines += ["", f"| | {' | '.join(HEAD)} |", f"| --- |{' ---: |' * 5} --- |"]
    lines += [f"| {' | '.join(map(_escape, row))} |" for row in _list_totals(found)]
    return lines


def _escape(text: str) -> str:
    """Remove what a terminal would obey, and escape what Markdown would take for its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", escape(text))


def _list_totals(found: Comparison) -> list[list[str]]:
    writers, rows = {"bytes": size, "tokens/s": count, "%": "{:.1f}".format}, []
    for total in found.totals:
        name = f"{total.name}, {total.unit}" if total.unit in ("ms", "%") else total.name
        rows.append([name, *_build_cells(total.pair, writers.get(total.unit) or _choose_ms([total.pair]))])
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
        yield Section("memory", "At the peak of memory", "by what holds it", [_build_table(found.memory, write=size)])


def _build_limits_section(judged: Sequence[Judged]) -> Section:
    rows = [[one.limit.text, *_describe_judged(one), str(one.outcome)] for one in judged]
    return Section("limits", "Limits", "", [Table(rows, "lrrl", ["fail if", "change", "noise", "result"])])


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
    sources = "; ".join(f"{', '.join(names)}: {source}" for source, names in names_by_source.items())
    unchanged = [total.pair.change is Change.SAME for total in found.totals]
    table = Table(_list_totals(found), "l" + ALIGN, ["", *HEAD], faint=unchanged)
    return Section("totals", "Speed and memory", "", [table, Lines([sources], quiet=True)])


def _build_rows_section(found: Comparison) -> Section:
    pairs = {row_title(row, found.on_gpu): pair for row, pair in found.rows.items()}
    return Section("rows", "Where a step goes", "ms per step; rows sum to the traced step", [_build_table(pairs)])


def _build_groups_section(found: Comparison) -> Section:
    pairs = {name or "not named": pair for name, pair in found.groups.items()}
    unit = "exposed ms per step, mean over the ranks with a trace"
    return Section("groups", "Communication not overlapped with compute, by group", unit, [_build_table(pairs)])


def _build_roles_section(found: Comparison) -> Section:
    pairs = {name: pair for name, pair in found.roles.items() if _is_seen(pair, found.step_ms)}
    return Section("roles", "By kind of work", "ms per step, added up", [_build_table(pairs)])


def _build_kernels_section(kernels: Sequence[KernelPair], everything: bool) -> Section:
    """The operators that changed most; where their kernels have other names, those stand below the table."""
    shown, hidden = limit_rows(kernels, MAX_KERNELS, everything)
    pairs = {_name_kernel(kernel): kernel.ms for kernel in shown}
    renamed = [_describe_kernels(kernel) for kernel in shown if set(kernel.names_a) != set(kernel.names_b)]
    blocks: list[Block] = [_build_table(pairs, "operator, phase", hidden=hidden), Lines(renamed, quiet=True)]
    return Section("kernels", "What changed most, by operator and phase", "ms per step", blocks)


def build_losses_section(found: Losses, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Section:
    """Build the table of the losses of the first step that both runs did, and of how far they are apart at most."""
    rows = [
        [name, significant(mine, 7), significant(theirs, 7), significant(theirs - mine, 2, signed=True)]
        for name, (mine, theirs) in (("loss", found.first), ("gradient norm", found.first_norms))
    ]
    first, last = found.iterations
    most = f"largest difference of a loss in steps {first:,} to {last:,}: {significant(found.largest, 2)}, in step {found.largest_at:,}"
    texts = [found.verdict, most] if found.verdict else [most]
    blocks: list[Block] = [Table(rows, "lrrr", ["", *names]), Lines(texts)]
    return Section("losses", "Do they compute the same?", f"step {first:,}", blocks)


def _build_phases_section(found: Comparison) -> Section:
    """The host's labels beside the device's own time where there is a GPU: the two tell different stories."""
    pairs = [(phase, [pair for pair in (phase.host, phase.device) if pair]) for phase in found.phases]
    seen = [phase for phase, both in pairs if any(_is_seen(pair, found.step_ms) for pair in both)]
    device = {phase.name: phase.device for phase in seen if phase.device}
    blocks: list[Block] = [_build_table(device, "on the device")] if device else []
    blocks += [_build_table({phase.name: phase.host for phase in seen}, "by labels on the host")] if seen else []
    if device:
        told = "labels on the host show when work was handed over, and waits; the device's time is what it takes"
        blocks.append(Lines([told], quiet=True))
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _is_seen(pair: Pair, step_ms: float) -> bool:
    return max(pair.a or 0.0, pair.b or 0.0) >= MIN_SHARE * step_ms


def _differs(one: KernelPair, found: Comparison) -> bool:
    changed = one.ms.change not in (Change.SAME, Change.UNCLEAR)
    return changed and abs((one.ms.b or 0.0) - (one.ms.a or 0.0)) >= MIN_SHARE * found.step_ms


def _describe_kernels(pair: KernelPair) -> str:
    """Describe how an operator's kernels changed: 'aten::addmm, forward: ampere_sgemm_128x64_tn (24) ->
    ampere_fp16_s1688gemm_... (24)'."""
    sides = []
    for names, number in ((pair.names_a, pair.per_step.a), (pair.names_b, pair.per_step.b)):
        sides.append(", ".join(names[:MAX_NAMES]) + (f" ({calls(number)})" if number else "") or "nothing")
    return f"{_name_kernel(pair)}: {' -> '.join(sides)}"


def _name_kernel(pair: KernelPair) -> str:
    return f"{pair.operator}{f', {pair.phase}' if pair.phase else ''}"


# --- tables of pairs


def _build_table(
    pairs: Mapping[str, Pair], head: str = "", write: Callable[[float], str] | None = None, hidden: int = 0
) -> Table:
    """A name and the cells of a pair in each row; `write` None: milliseconds. What has not changed is faint."""
    own = write or _choose_ms(pairs.values())
    rows = [[name, *_build_cells(pair, own)] for name, pair in pairs.items()]
    faint = [pair.change is Change.SAME for pair in pairs.values()]
    return Table(rows, "l" + ALIGN, [head, *HEAD], hidden=hidden, faint=faint)


def _build_cells(pair: Pair, write: Callable[[float], str]) -> list[str]:
    """A, B, their difference, in percent (+12%, -43%, x 25), the noise, what became of it."""
    by, ratio = pair.difference, pair.ratio
    return [
        "" if pair.a is None else write(pair.a),
        "" if pair.b is None else write(pair.b),
        "" if by is None else _sign(write(abs(by)), by),
        "" if ratio is None else _sign(f"{abs(ratio - 1):.0%}", ratio - 1) if ratio < 10 else f"x {ratio:,.0f}",
        "" if not pair.band else write(pair.band),
        str(pair.change),
    ]


def _sign(text: str, value: float) -> str:
    """Write + or - before a number, unless it is written as zero."""
    return f"{'+' if value > 0 else '-'}{text}" if re.search("[1-9]", text) else text


def _choose_ms(pairs: Iterable[Pair]) -> Callable[[float], str]:
    largest = max((value for pair in pairs for value in (pair.a, pair.b) if value is not None), default=0.0)
    return partial(milliseconds, of=largest)


# --- charts of the page

MAX_BARS, MAX_PHASES, KERNEL_WIDTH = 16, 40, 40


def _build_charts(found: Comparison, a: Facts, b: Facts) -> dict[str, Figure | None]:
    """Build the charts of a comparison, by the key of the section that each belongs to."""
    charts: dict[str, Figure | None] = {"losses": draw.losses({"A": a.run, "B": b.run})}
    if found.rows:
        steps = _split(found.rows)
        charts["rows"] = draw.steps("Where a step of A goes, and one of B, in milliseconds", steps, found.on_gpu)
    if found.memory:
        unit, of = draw.choose_unit(max(sum(parts.values()) for parts in _split(found.memory).values()))
        held = _split(found.memory, of)
        charts["memory"] = draw.stacks("What holds memory at the peak of A, and of B", held, palette.HELD, unit)
    charts["phases"] = _draw_phases(found)
    charts["kernels"] = _draw_kernels(found)
    return charts


def _draw_phases(found: Comparison) -> Figure | None:
    pairs = {phase.name: phase.device or phase.host for phase in found.phases}
    phases = {name: pair for name, pair in pairs.items() if _is_seen(pair, found.step_ms)}
    phases = dict(list(phases.items())[:MAX_PHASES])
    if not phases:
        return None
    rows = draw.fit_names(list(phases))
    sides = zip(_split(phases).items(), (palette.GREY, palette.BLUE))
    series = [Bars(side, rows, list(ms.values()), [color]) for (side, ms), color in sides]
    says = "How long each phase takes in A, and in B, in milliseconds"
    return BarChart(says, series, Axis("ms per step"), Arrangement.BESIDE, 34)


def _draw_kernels(found: Comparison) -> Figure | None:
    changed = [one for one in found.kernels if _differs(one, found)][:MAX_BARS]
    if not changed:
        return None
    by = [(one.ms.b or 0.0) - (one.ms.a or 0.0) for one in changed]
    colors = [palette.VERMILION if ms > 0 else palette.GREEN for ms in by]
    bars = Bars("", draw.fit_names([_name_kernel(one) for one in changed], KERNEL_WIDTH), by, colors)
    says = "How much longer B takes for each kind of work that changed"
    return BarChart(says, [bars], Axis("ms per step, B - A"))


def _split(pairs: Mapping[str, Pair], of: float = 1.0) -> dict[str, dict[str, float]]:
    """Both sides' numbers, in units of `of`."""
    return {side: {name: (getattr(pair, side.lower()) or 0.0) / of for name, pair in pairs.items()} for side in "AB"}
