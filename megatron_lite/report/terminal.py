"""A Report as lines for a terminal: verdict, where a step goes, findings, tables, what could not be seen, checks."""

from collections.abc import Mapping, Sequence

from megatron_lite.analysis.report import Report
from megatron_lite.report.section import section_lines
from megatron_lite.report.sections.all import build_limitations, build_sections, describe_confidence
from megatron_lite.report.sections.checked import KEY as LAST
from megatron_lite.report.text import Style, heading, wrapped

MAX_GAPS = 2
MAX_LINES = 85  # before the checks, with the line that says what was left out: two screens
# what says least to most people
LEFT_OUT_FIRST = ("collectives", "roofline", "kernels", "operators", "every_step", "phases")


def terminal_lines(report: Report, style: Style, everything: bool = False) -> list[str]:
    """Write a report as lines of WIDTH columns: about 80 at most, and a line per check.

    Args:
        report: what was found.
        style: how the terminal may be written to.
        everything: show all rows of all tables, however many lines that takes.
    """
    lines = [heading(report.title, f"read in {report.read_s:.1f} s", style), ""]
    lines += map(style.warm, wrapped(report.verdict.headline))
    if report.verdict.next_steps:
        lines += map(style.warm, wrapped(report.verdict.next_steps))
    lines += map(style.dim, wrapped(describe_confidence(report)))
    limitations = _write_limitations(report, style, everything)
    sections = build_sections(report, everything)
    drawn = {section.key: ["", *section_lines(section, style)] for section in sections}
    checked = drawn.pop(LAST, [])
    left_out = []
    if not everything:
        room = MAX_LINES - len(lines) - len(limitations)
        left_out = _choose_left_out(drawn, room)
    for key, section_text in drawn.items():
        if key not in left_out:
            lines += section_text
    if left_out:
        titles = {section.key: section.title for section in sections}
        named = ", ".join(titles[key] for key in left_out)
        lines += ["", style.dim(f"With --all: {named}")]
    return [*lines, *limitations, *checked]


def _choose_left_out(drawn: Mapping[str, Sequence[str]], room: int) -> list[str]:
    """Choose the sections that are left out so that the others take at most `room` lines, if that is possible."""
    length = sum(map(len, drawn.values()))
    left_out: list[str] = []
    for key in LEFT_OUT_FIRST:
        if length <= room:
            break
        if key in drawn:
            left_out.append(key)
            length -= len(drawn[key])
    return left_out


def _write_limitations(report: Report, style: Style, everything: bool) -> list[str]:
    """Write what could not be seen, the first ones unless all is wanted; [] where nothing was missed."""
    gaps = build_limitations(report)
    if not gaps:
        return []
    shown = gaps if everything else gaps[:MAX_GAPS]
    lines = ["", heading("What could not be seen", "", style)]
    for gap in shown:
        lines += wrapped(gap, "  - ", "    ")
    hidden = len(gaps) - len(shown)
    if hidden:
        lines.append(style.dim(f"  and {hidden} more with --all"))
    return lines
