"""A Comparison as lines for a terminal: the sentence, flags that differ, steps, phases, kernels, memory."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair
from megatron_lite.analysis.compare.limits import Judged
from megatron_lite.analysis.compare.losses import Losses
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.report.section import Block, Lines, Section, Table, drop_empty_columns, limit_rows, section_lines
from megatron_lite.report.text import Style, calls, heading, milliseconds, wrapped
from megatron_lite.units import count, significant, size

MAX_FLAGS, MAX_KERNELS, MAX_NAMES = 12, 8, 2
MIN_SHARE = 0.002  # of a step that a row or a kernel's difference must be to be listed


def comparison_lines(
    found: Comparison, style: Style, everything: bool = False, judged: Sequence[Judged] = ()
) -> list[str]:
    """What changed and what did not, about 60 lines; `everything`: all rows of all tables."""
    lines = [*wrapped(f"A: {found.title_a}", ""), *wrapped(f"B: {found.title_b}", ""), ""]
    lines += map(style.warm, wrapped(found.sentence))
    if judged:
        lines += ["", *section_lines(_build_limits_section(judged), style)]
    for section in _build_sections(found, everything):
        lines += ["", *section_lines(section, style)]
    lines += ["", heading("To keep in mind", "", style)]
    for note in (*(f"compared by --force though {reason}" for reason in found.forced), *found.notes):
        lines += wrapped(note, "  - ", "    ")
    return lines


def _build_limits_section(judged: Sequence[Judged]) -> Section:
    rows = [[one.limit.text, *_describe_judged(one), str(one.outcome)] for one in judged]
    return Section("limits", "Limits", "", [Table(rows, "lrrl", ["fail if", "change", "noise", ""])])


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
        lines += ["", "| fail if | change | noise | |", "| --- | ---: | ---: | --- |"]
        lines += [f"| `{one.limit.text}` | {' | '.join(_describe_judged(one))} | {one.outcome} |" for one in judged]
    lines += ["", "| | A | B | B - A | | noise | |", f"| --- |{' ---: |' * 5} --- |"]
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


def _build_sections(found: Comparison, everything: bool) -> Iterator[Section]:
    if found.flags:
        shown_flags, hidden = limit_rows(found.flags, MAX_FLAGS, everything)
        table = Table([[flag.name, flag.a, flag.b] for flag in shown_flags], "lll", ["", "A", "B"], hidden=hidden)
        yield Section("flags", "What differs in how they were started", "", [table])
    sources: dict[str, list[str]] = {}
    for total in found.totals:
        sources.setdefault(total.of, []).append(total.name)
    told = "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
    yield Section("totals", "Speed and memory", "", [_build_table("", _list_totals(found)), Lines([told], quiet=True)])
    if found.rows:
        write = _choose_ms(found.rows.values())
        body = [[ROW_TITLES[name], *_build_cells(pair, write)] for name, pair in found.rows.items()]
        yield Section("rows", "Where a step goes", "ms per step; rows sum to the traced step", [_build_table("", body)])
    if found.groups:
        write = _choose_ms(found.groups.values())
        body = [[name or "not named", *_build_cells(pair, write)] for name, pair in found.groups.items()]
        told = "exposed ms per step, mean over the ranks with a trace"
        yield Section("groups", "Communication that nothing hides, by group", told, [_build_table("", body)])
    if found.phases:
        yield _build_phases_section(found)
    if found.roles:
        write = _choose_ms(found.roles.values())
        seen = {name: pair for name, pair in found.roles.items() if _is_seen(pair, found.step_ms)}
        body = [[name, *_build_cells(pair, write)] for name, pair in seen.items()]
        yield Section("roles", "By kind of work", "ms per step, added up", [_build_table("", body)])
    kernels = []
    for pair in found.kernels:
        changed = pair.ms.change not in (Change.SAME, Change.UNCLEAR)
        by = abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0))
        kernels += [pair] if everything or (changed and by >= MIN_SHARE * found.step_ms) else []
    shown, hidden = limit_rows(kernels, MAX_KERNELS, everything)
    if shown:
        write = _choose_ms(pair.ms for pair in shown)
        body = [[pair.operator, pair.phase, *_build_cells(pair.ms, write)] for pair in shown]
        table = drop_empty_columns(Table(body, "ll" + ALIGN, ["operator", "phase", *HEAD], hidden=hidden))
        names = Lines([_describe_kernels(pair) for pair in shown if set(pair.names_a) != set(pair.names_b)], quiet=True)
        yield Section("kernels", "What changed most, by operator and phase", "ms per step", [table, names])
    if found.losses:
        yield build_losses_section(found.losses)
    if found.memory:
        body = [[name, *_build_cells(pair, size)] for name, pair in found.memory.items()]
        yield Section("memory", "At the peak of memory", "by what holds it", [_build_table("", body)])


def build_losses_section(found: Losses, names: tuple[str, str, str] = ("A", "B", "B - A")) -> Section:
    """Of the first step that both did, and how far they are apart at most."""
    rows = [
        [name, significant(mine, 7), significant(theirs, 7), significant(theirs - mine, 2, signed=True)]
        for name, (mine, theirs) in (("loss", found.first), ("gradient norm", found.first_norms))
    ]
    first, last = found.iterations
    most = f"largest difference of a loss in steps {first:,} to {last:,}: {significant(found.largest, 2)}, in step {found.largest_at:,}"
    texts = [found.verdict, most] if found.verdict else [most]
    return Section(
        "losses",
        "Do they compute the same?",
        f"step {first:,}",
        [Table(rows, "lrrr", ["", *names]), Lines(texts)],
    )


def _build_phases_section(found: Comparison) -> Section:
    """The host's labels beside the device's own time where there is a GPU: the two tell different stories."""
    blocks: list[Block] = []
    seen = [
        phase
        for phase in found.phases
        if any(_is_seen(pair, found.step_ms) for pair in (phase.host, phase.device) if pair)
    ]
    device = [(phase.name, phase.device) for phase in seen if phase.device]
    host = [(phase.name, phase.host) for phase in seen]
    for title, pairs in (("on the device", device), ("by labels on the host", host)):
        write = _choose_ms(pair for _, pair in pairs)
        blocks += [_build_table(title, [[name, *_build_cells(pair, write)] for name, pair in pairs])] if pairs else []
    if device:
        told = "labels on the host show when work was handed over, and waits; the device's time is what it takes"
        blocks.append(Lines([told], quiet=True))
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _is_seen(pair: Pair, step_ms: float) -> bool:
    return max(pair.a or 0.0, pair.b or 0.0) >= MIN_SHARE * step_ms


def _describe_kernels(pair: KernelPair) -> str:
    """'aten::addmm, forward: ampere_sgemm_128x64_tn (24) -> ampere_fp16_s1688gemm_... (24)'."""
    sides = []
    for names, number in ((pair.names_a, pair.per_step.a), (pair.names_b, pair.per_step.b)):
        sides.append(", ".join(names[:MAX_NAMES]) + (f" ({calls(number)})" if number else "") or "nothing")
    return f"{pair.operator}{f', {pair.phase}' if pair.phase else ''}: {' -> '.join(sides)}"


# --- tables of pairs

HEAD = ["A", "B", "B - A", "", "noise", ""]
ALIGN = "rrrrrl"


def _build_table(title: str, body: list[list[str]]) -> Table:
    """A name and cells of a pair in each row."""
    return drop_empty_columns(Table(body, "l" + ALIGN, [title, *HEAD]))


def _build_cells(pair: Pair, write: Callable[[float], str]) -> list[str]:
    """A, B, their difference, in percent (+12%, -43%, x 25), the noise, what became of it."""
    by, ratio = pair.difference, pair.ratio
    return [
        "" if pair.a is None else write(pair.a),
        "" if pair.b is None else write(pair.b),
        "" if by is None else f"{'+' if by > 0 else '-' if by < 0 else ''}{write(abs(by))}",
        "" if ratio is None else f"{ratio - 1:+.0%}" if ratio < 10 else f"x {ratio:,.0f}",
        "" if not pair.band else write(pair.band),
        str(pair.change),
    ]


def _choose_ms(pairs: Iterable[Pair]) -> Callable[[float], str]:
    largest = max((value for pair in pairs for value in (pair.a, pair.b) if value is not None), default=0.0)
    return partial(milliseconds, of=largest)
