"""A Comparison as sections: drawn on a terminal, on a page with charts, and in part as a table for a pull request."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair
from megatron_lite.analysis.compare.limits import Judged
from megatron_lite.analysis.compare.losses import Losses
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.report.charts import (
    Figure,
    axis,
    bars,
    choose_unit,
    draw_losses,
    draw_stacks,
    draw_steps,
    escape_name,
    layout,
    name_axis,
)  # fmt: skip
from megatron_lite.report.html import render_page
from megatron_lite.report.section import Block, Lines, Section, Table, drop_empty_columns, limit_rows, section_lines
from megatron_lite.report.sections.step import row_title
from megatron_lite.report.text import (
    BLUE,
    CATEGORY_COLORS,
    GREEN,
    GREY,
    VERMILION,
    Style,
    calls,
    heading,
    milliseconds,
    wrapped,
)
from megatron_lite.units import count, size

MAX_FLAGS, MAX_KERNELS, MAX_NAMES = 12, 8, 2
MIN_SHARE = 0.002  # of a step that a row or a kernel's difference must be to be listed
HEAD = ["A", "B", "B - A", "change", "noise", "result"]
ALIGN = "rrrrrl"
CLEAR = (Change.MORE, Change.LESS)
Names = str | tuple[str, ...]


def comparison_lines(
    found: Comparison, style: Style, everything: bool = False, judged: Sequence[Judged] = ()
) -> list[str]:
    """What changed and what did not, about 60 lines; `everything`: all rows of all tables."""
    lines = [*wrapped(f"A: {found.title_a}", ""), *wrapped(f"B: {found.title_b}", ""), ""]
    lines += map(style.warm, wrapped(found.sentence))
    for section in build_comparison_sections(found, judged, everything):
        lines += ["", *section_lines(section, style)]
    lines += ["", heading("To keep in mind", "", style)]
    return lines + [line for note in _list_notes(found) for line in wrapped(note, "  - ", "    ")]


def comparison_page(found: Comparison, judged: Sequence[Judged], a: Facts, b: Facts) -> str:
    """The whole page as text. a, b: what the comparison was made of."""
    said, charts, curves = (
        found.sentence.replace("->", "\u2192"),
        _build_charts(found),
        draw_losses({"A": a.run, "B": b.run}),
    )
    sections = list(build_comparison_sections(found, judged, True))
    if curves:
        charts["losses"] = curves
        if found.losses is None:
            told = "seed, data, model, optimizer or precision differ: the two are not meant to have equal losses"
            sections.append(Section("losses", "Losses", "of every step", [Lines([told], quiet=True)]))
    return render_page(
        sections,
        charts,
        title=f"A: {found.title_a}; B: {found.title_b}",
        command="compare",
        sentences=[
            said[:1].upper() + said[1:],
            *(f"{one.limit.text}: {one.outcome}" for one in judged),
        ],
        inconclusive=found.totals[0].pair.change is Change.UNCLEAR,
        confidence="",
        tiles=[
            (row[4] if total.pair.change in CLEAR else row[6], f"{row[0]}: {row[1]} \u2192 {row[2]}")
            for total, row in zip(found.totals, _list_totals(found))
        ],
        about={},
        of_gaps="To keep in mind",
        gaps=_list_notes(found),
        numbers="--json FILE",
    )


def _list_notes(found: Comparison) -> list[str]:
    return [*(f"compared by --force though {reason}" for reason in found.forced), *found.notes]


def _build_limits_section(judged: Sequence[Judged]) -> Section:
    rows = [[one.limit.text, *_describe_judged(one), str(one.outcome)] for one in judged]
    return Section("limits", "Limits", "", [Table(rows, "lrrl", ["fail if", "change", "noise", "result"])])


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
    """What Markdown would take for its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", text)


def _list_totals(found: Comparison) -> list[list[str]]:
    writers = {"bytes": size, "tokens/s": count, "%": "{:.1f}".format}
    return [
        [
            f"{total.name}, {total.unit}" if total.unit in ("ms", "%") else total.name,
            *_build_cells(total.pair, writers.get(total.unit) or _choose_ms([total.pair])),
        ]
        for total in found.totals
    ]


# --- sections


def build_comparison_sections(found: Comparison, judged: Sequence[Judged], everything: bool) -> Iterator[Section]:
    """Limits, how the two were started, then numbers from the whole to its parts."""
    if judged:
        yield _build_limits_section(judged)
    if found.flags:
        shown_flags, hidden = limit_rows(found.flags, MAX_FLAGS, everything)
        table = Table([[flag.name, flag.a, flag.b] for flag in shown_flags], "lll", ["", "A", "B"], hidden=hidden)
        yield Section("flags", "What differs in how they were started", "", [table])
    sources: dict[str, list[str]] = {}
    for total in found.totals:
        sources.setdefault(total.of, []).append(total.name)
    told = "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
    faint = [total.pair.change is Change.SAME for total in found.totals]
    table = drop_empty_columns(Table(_list_totals(found), "l" + ALIGN, ["", *HEAD], faint=faint))
    yield Section("totals", "Speed and memory", "", [table, Lines([told], quiet=True)])
    rows = _name_rows(found)
    if rows:
        yield Section("rows", "Where a step goes", "ms per step; rows sum to the traced step", [_build_table(rows)])
    if found.groups:
        groups = {name or "not named": pair for name, pair in found.groups.items()}
        told = "exposed ms per step, mean over the ranks with a trace"
        yield Section("groups", "Communication that nothing hides, by group", told, [_build_table(groups)])
    if found.phases:
        yield _build_phases_section(found)
    if found.roles:
        seen = {name: pair for name, pair in found.roles.items() if _is_seen(pair, found.step_ms)}
        yield Section("roles", "By kind of work", "ms per step, added up", [_build_table(seen)])
    shown, hidden = limit_rows(
        [one for one in found.kernels if everything or _differs(one, found)], MAX_KERNELS, everything
    )
    if shown:
        pairs = {(one.operator, one.phase): one.ms for one in shown}
        names = Lines([_describe_kernels(pair) for pair in shown if set(pair.names_a) != set(pair.names_b)], quiet=True)
        blocks: list[Block] = [_build_table(pairs, ("operator", "phase"), hidden=hidden), names]
        yield Section("kernels", "What changed most, by operator and phase", "ms per step", blocks)
    if found.losses:
        yield build_losses_section(found.losses)
    if found.memory:
        yield Section("memory", "At the peak of memory", "by what holds it", [_build_table(found.memory, write=size)])


def build_losses_section(found: Losses, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Section:
    """Of the first step that both did, and how far they are apart at most."""
    rows = [
        [name, f"{mine:.7g}", f"{theirs:.7g}", f"{theirs - mine:+.1e}"]
        for name, (mine, theirs) in (("loss", found.first), ("gradient norm", found.first_norms))
    ]
    first, last = found.iterations
    most = f"largest difference of a loss in steps {first:,} to {last:,}: {found.largest:.1e}, in step {found.largest_at:,}"
    texts = [found.verdict, most] if found.verdict else [most]
    return Section(
        "losses",
        "Do they compute the same?",
        f"step {first:,}",
        [Table(rows, "lrrr", ["", *names]), Lines(texts)],
    )


def _build_phases_section(found: Comparison) -> Section:
    """The host's labels beside the device's own time where there is a GPU: the two tell different stories."""
    seen = [
        phase
        for phase in found.phases
        if any(_is_seen(pair, found.step_ms) for pair in (phase.host, phase.device) if pair)
    ]
    device = {phase.name: phase.device for phase in seen if phase.device}
    blocks: list[Block] = [_build_table(device, "on the device")] if device else []
    blocks += [_build_table({phase.name: phase.host for phase in seen}, "by labels on the host")] if seen else []
    if device:
        told = "labels on the host show when work was handed over, and waits; the device's time is what it takes"
        blocks.append(Lines([told], quiet=True))
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _name_rows(found: Comparison) -> dict[str, Pair]:
    return {row_title(row, found.on_gpu): pair for row, pair in found.rows.items()}


def _is_seen(pair: Pair, step_ms: float) -> bool:
    return max(pair.a or 0.0, pair.b or 0.0) >= MIN_SHARE * step_ms


def _differs(one: KernelPair, found: Comparison) -> bool:
    changed = one.ms.change not in (Change.SAME, Change.UNCLEAR)
    return changed and abs((one.ms.b or 0.0) - (one.ms.a or 0.0)) >= MIN_SHARE * found.step_ms


def _describe_kernels(pair: KernelPair) -> str:
    """'aten::addmm, forward: ampere_sgemm_128x64_tn (24) -> ampere_fp16_s1688gemm_... (24)'."""
    sides = []
    for names, number in ((pair.names_a, pair.per_step.a), (pair.names_b, pair.per_step.b)):
        sides.append(", ".join(names[:MAX_NAMES]) + (f" ({calls(number)})" if number else "") or "nothing")
    return f"{pair.operator}{f', {pair.phase}' if pair.phase else ''}: {' -> '.join(sides)}"


# --- tables of pairs


def _build_table(
    pairs: Mapping[str, Pair] | Mapping[tuple[str, str], Pair],
    head: Names = "",
    write: Callable[[float], str] | None = None,
    hidden: int = 0,
) -> Table:
    """A name, or several, and the cells of a pair in each row; `write` None: milliseconds. What has not changed is faint."""
    own = write or _choose_ms(pairs.values())
    rows = [
        [*((names,) if isinstance(names, str) else names), *_build_cells(pair, own)] for names, pair in pairs.items()
    ]
    heads = (head,) if isinstance(head, str) else head
    faint = [pair.change is Change.SAME for pair in pairs.values()]
    return drop_empty_columns(Table(rows, "l" * len(heads) + ALIGN, [*heads, *HEAD], hidden=hidden, faint=faint))


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
    """+ or - before what does not read as nothing."""
    return f"{'+' if value > 0 else '-'}{text}" if re.search("[1-9]", text) else text


def _choose_ms(pairs: Iterable[Pair]) -> Callable[[float], str]:
    largest = max((value for pair in pairs for value in (pair.a, pair.b) if value is not None), default=0.0)
    return partial(milliseconds, of=largest)


# --- charts of the page

MAX_BARS = 16


def _build_charts(found: Comparison) -> dict[str, Figure]:
    """Section.key: its chart."""
    charts = {}
    if found.rows:
        steps = {side: {row: getattr(pair, side.lower()) or 0.0 for row, pair in found.rows.items()} for side in "AB"}
        charts["rows"] = draw_steps("Where a step of A goes, and one of B, in milliseconds", steps, found.on_gpu)
    if found.memory:
        held = {
            side: {name: getattr(pair, side.lower()) or 0.0 for name, pair in found.memory.items()} for side in "AB"
        }
        unit, of = choose_unit(max(sum(parts.values()) for parts in held.values()))
        stacks = {side: {name: value / of for name, value in parts.items()} for side, parts in held.items()}
        charts["memory"] = draw_stacks("What holds memory at the peak of A, and of B", stacks, CATEGORY_COLORS, unit)
    phases = {phase.name: phase.device or phase.host for phase in found.phases}
    phases = {name: pair for name, pair in phases.items() if _is_seen(pair, found.step_ms)}
    if phases:
        names, hover = [escape_name(name, 22) for name in phases], "%{fullData.name}: %{x:.4r} ms<extra>%{y}</extra>"
        sides = {side: [getattr(pair, side.lower()) or 0.0 for pair in phases.values()] for side in "AB"}
        data = [bars(names, ms, color, hover, name=side) for (side, ms), color in zip(sides.items(), (GREY, BLUE))]
        look = layout(70 + 34 * len(names), axis("ms per step"), name_axis(), barmode="group", bargap=0.3)
        charts["phases"] = Figure("How long each phase takes in A, and in B, in milliseconds", data, look)
    changed = [one for one in found.kernels if _differs(one, found)][:MAX_BARS]
    if changed:
        names = [escape_name(f"{one.operator}, {one.phase or 'no phase'}", 40) for one in changed]
        by = [(one.ms.b or 0.0) - (one.ms.a or 0.0) for one in changed]
        colors = [VERMILION if ms > 0 else GREEN for ms in by]
        look = layout(70 + 24 * len(names), axis("ms per step, B - A"), name_axis(), bargap=0.3)
        data = [bars(names, by, colors, "%{y}: %{x:+.4r} ms<extra></extra>")]
        charts["kernels"] = Figure("How much longer B takes for each kind of work that changed", data, look)
    return charts
