"""Draws what `megatron-lite prove` found."""

from collections.abc import Iterator

from megatron_lite.formats.prove_report import ComparedRow, Difference, ProofReport
from megatron_lite.report.section import Block, Lines, Section, Table, section_lines
from megatron_lite.report.text import Style, wrapped
from megatron_lite.units import counted, duration, significant

MAX_OTHERS_NAMED = 4
SMALLEST_WRITTEN = 1e-3  # below which a share is written as a power of ten


def proof_lines(report: ProofReport, style: Style) -> list[str]:
    """Draw the whole answer: the verdict first, then what it rests on.

    Args:
        report: What was found.
        style: How the terminal may be written to.
    """
    lines = wrapped(style.bold(judge_proof(report)), "")
    for section in list_proof_sections(report):
        lines += ["", *section_lines(section, style)]
    return lines


def judge_proof(report: ProofReport) -> str:
    """Say in a sentence whether both compute the same."""
    if report.differences:
        first = report.differences[0]
        where = f", first at {first.where}" if first.where else ""
        return f"DIFFERS: {first.kind.value}{where}: {first.evidence}"
    beside = f"{counted(report.ranks, 'rank')} and {report.reference}"
    if report.coverage == "nothing":
        reason = report.not_compared[0] if report.not_compared else "nothing was recorded"
        return f"NOT COMPARED: {reason}"
    if report.coverage == "partial":
        return f"EQUAL within rounding in what was compared: {beside}; {len(report.not_compared)} things were not"
    return f"EQUAL within rounding: {beside}"


def list_proof_sections(report: ProofReport) -> Iterator[Section]:
    """List what stands below the verdict."""
    if report.rows:
        head = ("", "reference", "proved", "apart", "rounding", "tensors")
        rows = [_write_row(row) for row in report.rows]
        beside = f"beside {report.reference}" if report.reference else ""
        faint = [row.difference <= row.tolerance for row in report.rows]
        table = Table(rows, "lrrrrr", head, faint=faint if report.differences else ())
        yield Section("compared", "What was compared", beside, [table])
    if report.differences:
        blocks: list[Block] = []
        for number, difference in enumerate(report.differences, 1):
            blocks.append(Lines(_write_difference(number, difference)))
        yield Section("differences", "What differs", "", blocks)
    if report.not_compared:
        yield Section("left", "What was not compared", "", [Lines(list(report.not_compared))])
    notes = list(report.notes)
    if report.seconds:
        notes.append(f"took {duration(report.seconds)}")
    if notes:
        yield Section("notes", "What ran", report.command, [Lines(notes, quiet=True)])


def _write_difference(number: int, difference: Difference) -> list[str]:
    """Write a difference: its kind and place, its evidence, what to do, and what else shows it."""
    where = f" at {difference.where}" if difference.where else ""
    head = f"{number}. {difference.kind.value}{where}, step {difference.step}, confidence {difference.confidence}"
    lines = [head, difference.evidence, f"try: {difference.remedy}"]
    if difference.others:
        named = ", ".join(difference.others[:MAX_OTHERS_NAMED])
        rest = len(difference.others) - MAX_OTHERS_NAMED
        lines.append(f"so do {named} and {rest} more" if rest > 0 else f"so do {named}")
    return lines


def _write_row(row: ComparedRow) -> tuple[str, ...]:
    return (
        row.name,
        _write_figure(row.reference),
        _write_figure(row.proved),
        write_share(row.difference),
        write_share(row.tolerance),
        str(row.tensors) if row.tensors > 1 else "",
    )


def _write_figure(value: float | None) -> str:
    return "" if value is None else significant(value, 6)


def write_share(value: float) -> str:
    """Write a relative difference: 0 -> "0", 0.00000021 -> "2.1e-07", 0.5 -> "0.5"."""
    if not value:
        return "0"
    return f"{value:.1e}" if abs(value) < SMALLEST_WRITTEN else significant(value, 2)
