"""A Comparison as lines for a terminal: the sentence, flags that differ, steps, phases, kernels, memory."""

from collections.abc import Iterable

from megatron_lite.analysis.compare.compare_results import Change, Comparison, KernelPair, Pair, Total
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.report.section import Lines, Section, Table, first, with_some_value
from megatron_lite.report.section_text import section_lines
from megatron_lite.report.text import Style, calls, heading, milliseconds, wrapped
from megatron_lite.units import count, size

FLAGS_SHOWN, KERNELS_SHOWN, NAMES_SHOWN = 12, 8, 2
MIN_SHARE = 0.002  # of a step that a row or a kernel's difference must be to be listed
PAIR_HEAD = ["A", "B", "B - A", "", "noise", ""]
PAIR_ALIGN = "rrrrrl"


def comparison_lines(found: Comparison, style: Style, everything: bool = False) -> list[str]:
    """What changed and what did not, about 60 lines; `everything`: all rows of all tables."""
    lines = [
        *wrapped(f"A: {found.title_a}", ""),
        *wrapped(f"B: {found.title_b}", ""),
        "",
        *map(style.warm, wrapped(found.sentence)),
    ]
    for section in filter(
        None,
        (
            _flags(found, everything),
            _totals(found),
            _rows(found),
            _phases(found),
            _roles(found),
            _kernels(found, everything),
            _memory(found),
        ),
    ):
        lines += ["", *section_lines(section, style)]
    told = [*(f"compared by --force though {reason}" for reason in found.forced), *found.notes]
    return [
        *lines,
        "",
        heading("To keep in mind", "", style),
        *(line for note in told for line in wrapped(note, "  - ", "    ")),
    ]


def _flags(found: Comparison, everything: bool) -> Section | None:
    shown, hidden = first(found.flags, FLAGS_SHOWN, everything)
    table = Table([[flag.name, flag.a, flag.b] for flag in shown], "lll", ["", "A", "B"], hidden=hidden)
    return Section("flags", "What differs in how they were started", "", [table]) if shown else None


def _totals(found: Comparison) -> Section:
    body = [
        [
            f"{total.name}, {total.unit}" if total.unit in ("ms", "%") else total.name,
            *_cells(total.pair, _writer(total)),
        ]
        for total in found.totals
    ]
    names: dict[str, list[str]] = {}
    for total in found.totals:
        names.setdefault(total.of, []).append(total.name)
    sources = [f"{', '.join(of)}: {source}" for source, of in names.items()]
    return Section("totals", "Speed and memory", "", [_table(body, "l", [""]), Lines(["; ".join(sources)], quiet=True)])


def _rows(found: Comparison) -> Section | None:
    if not found.rows:
        return None
    body = [[ROW_TITLES[name], *_cells(pair, _ms(found.rows.values()))] for name, pair in found.rows.items()]
    return Section("rows", "Where a step goes", "ms per step; rows sum to the traced step", [_table(body, "l", [""])])


def _phases(found: Comparison) -> Section | None:
    """The host's labels beside the device's own time where there is a GPU: the two tell different stories."""
    if not found.phases:
        return None
    shown = [
        phase
        for phase in found.phases
        if any(_seen(pair, found.step_ms) for pair in (phase.host, phase.device) if pair)
    ]
    on_device = [phase for phase in shown if phase.device]
    device, host = (
        Table(
            [[name, *_cells(pair, _ms(pairs.values()))] for name, pair in pairs.items()],
            "l" + PAIR_ALIGN,
            [title, *PAIR_HEAD],
        )
        for title, pairs in (
            ("on the device", {phase.name: phase.device for phase in on_device}),
            ("by labels on the host", {phase.name: phase.host for phase in shown}),
        )
    )
    blocks = [with_some_value(table) for table in (device, host) if table.rows]
    if on_device:
        blocks.append(
            Lines(
                ["labels on the host show when work was handed over, and waits; the device's time is what it takes"],
                quiet=True,
            )
        )
    return Section("phases", "Phases", f"ms per step, {found.phases_of}", blocks)


def _seen(pair: Pair, step_ms: float) -> bool:
    return max(pair.a or 0.0, pair.b or 0.0) >= MIN_SHARE * step_ms


def _roles(found: Comparison) -> Section | None:
    if not found.roles:
        return None
    body = [
        [name, *_cells(pair, _ms(found.roles.values()))]
        for name, pair in found.roles.items()
        if _seen(pair, found.step_ms)
    ]
    return Section("roles", "By kind of work", "ms per step, added up", [_table(body, "l", [""])])


def _kernels(found: Comparison, everything: bool) -> Section | None:
    shown, hidden = first(
        [pair for pair in found.kernels if everything or _matters(pair, found.step_ms)], KERNELS_SHOWN, everything
    )
    if not shown:
        return None
    writer = _ms(pair.ms for pair in shown)
    body = [[pair.operator, pair.phase, *_cells(pair.ms, writer)] for pair in shown]
    names = [text for pair in shown if (text := _names(pair))]
    blocks = [_table(body, "ll", ["operator", "phase"], hidden), Lines(names, quiet=True)]
    return Section("kernels", "What changed most, by operator and phase", "ms per step", blocks)


def _matters(pair: KernelPair, step_ms: float) -> bool:
    changed = pair.ms.change not in (Change.SAME, Change.UNCLEAR)
    return changed and abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0)) >= MIN_SHARE * step_ms


def _names(pair: KernelPair) -> str:
    """'aten::addmm, forward: ampere_sgemm_128x64_tn (24) -> ampere_fp16_s1688gemm_... (24)'; '' where the names are the same."""
    if set(pair.names_a) == set(pair.names_b):
        return ""
    sides = (
        ", ".join(names[:NAMES_SHOWN]) + (f" ({calls(number)})" if number else "") or "nothing"
        for names, number in ((pair.names_a, pair.per_step.a), (pair.names_b, pair.per_step.b))
    )
    return f"{pair.operator}{f', {pair.phase}' if pair.phase else ''}: {' -> '.join(sides)}"


def _memory(found: Comparison) -> Section | None:
    if not found.memory:
        return None
    body = [[name, *_cells(pair, _size)] for name, pair in found.memory.items()]
    return Section("memory", "At the peak of memory", "by what holds it", [_table(body, "l", [""])])


def _table(body: list[list[str]], align: str, head: list[str], hidden: int = 0) -> Table:
    return with_some_value(Table(body, align + PAIR_ALIGN, [*head, *PAIR_HEAD], hidden=hidden))


def _cells(pair: Pair, write) -> list[str]:
    """A, B, their difference, in percent, the noise, what became of it."""
    by = pair.difference
    return [
        "" if pair.a is None else write(pair.a),
        "" if pair.b is None else write(pair.b),
        "" if by is None else f"{'+' if by > 0 else '-' if by < 0 else ''}{write(abs(by))}",
        _ratio(pair.ratio),
        "" if not pair.band else write(pair.band),
        str(pair.change),
    ]


def _ratio(ratio: float | None) -> str:
    """+12%, -43%, x 25."""
    return "" if ratio is None else f"{ratio - 1:+.0%}" if ratio < 10 else f"x {ratio:,.0f}"


def _writer(total: Total):
    if total.unit == "bytes":
        return _size
    if total.unit == "tokens/s":
        return count
    return _ms([total.pair]) if total.unit == "ms" else lambda value: f"{value:.1f}"


def _ms(pairs: Iterable[Pair]):
    largest = max((value for pair in pairs for value in (pair.a, pair.b) if value is not None), default=0.0)
    return lambda value: milliseconds(value, largest)


def _size(value: float) -> str:
    return size(value)
