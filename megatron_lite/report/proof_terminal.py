"""Draws what `megatron-lite prove` found."""

from collections.abc import Iterator

from megatron_lite.formats.prove_report import NOTHING_COMPARED, ComparedRow, Difference, ProofReport
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
    left_out = report.not_compared
    if report.coverage == NOTHING_COMPARED:
        reason = left_out[0] if left_out else "nothing was recorded"
        return f"NOT COMPARED: {reason}"
    ranks = counted(report.ranks, "rank")
    both = f"{ranks} and {report.reference}"
    if report.coverage == "partial":
        return f"EQUAL within rounding in what was compared: {both}; {len(left_out)} things were not"
    return f"EQUAL within rounding: {both}"


def list_proof_sections(report: ProofReport) -> Iterator[Section]:
    """List the sections below the verdict: figures of both, differences, what was not compared, and what ran."""
    if report.rows:
        subtitle = f"beside {report.reference}" if report.reference else ""
        table = _build_figures(report)
        yield Section("compared", "What was compared", subtitle, [table])
    if report.differences:
        blocks: list[Block] = []
        for number, difference in enumerate(report.differences, 1):
            texts = _write_difference(number, difference)
            blocks.append(Lines(texts))
        yield Section("differences", "What differs", "", blocks)
    if report.not_compared:
        left_out = Lines(report.not_compared)
        yield Section("left", "What was not compared", "", [left_out])
    notes = list(report.notes)
    if report.seconds:
        notes.append(f"took {duration(report.seconds)}")
    if notes:
        yield Section("notes", "What ran", report.command, [Lines(notes, quiet=True)])


def _build_figures(report: ProofReport) -> Table:
    """Build the table of the figures of both; beside differences, what agrees is faint."""
    rows = [_write_row(row) for row in report.rows]
    head = ("", "reference", "proved", "apart", "rounding", "tensors")
    agrees = []
    if report.differences:
        agrees = [is_within_rounding(row) for row in report.rows]
    return Table(rows, "lrrrrr", head, faint=agrees)


def _write_difference(number: int, difference: Difference) -> list[str]:
    """Write a difference: its kind and place, its evidence, what to do, and what else shows it."""
    what = difference.kind.value
    if difference.where:
        what += f" at {difference.where}"
    head = f"{number}. {what}, step {difference.step}, confidence {difference.confidence}"
    lines = [head, difference.evidence, f"try: {difference.remedy}"]
    others = difference.others
    if others:
        named = ", ".join(others[:MAX_OTHERS_NAMED])
        hidden = len(others) - MAX_OTHERS_NAMED
        more = f" and {hidden} more" if hidden > 0 else ""
        lines.append(f"so do {named}{more}")
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


def is_within_rounding(row: ComparedRow) -> bool:
    """Whether rounding explains a row's difference."""
    return row.difference is not None and row.difference <= row.tolerance


def write_share(value: float | None) -> str:
    """Write a relative difference: 0 -> "0", 0.00000021 -> "2.1e-07", 0.5 -> "0.5", no finite one -> "not finite"."""
    if value is None:
        return "not finite"
    if not value:
        return "0"
    if abs(value) < SMALLEST_WRITTEN:
        return f"{value:.1e}"
    return significant(value, 2)
