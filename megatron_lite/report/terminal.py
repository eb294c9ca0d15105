"""A Report as lines for a terminal: verdict, where a step goes, findings, tables, at last what could not be seen."""

from megatron_lite.analysis.report import Report
from megatron_lite.report.section import section_lines
from megatron_lite.report.sections.all import build_limitations, build_sections, describe_confidence
from megatron_lite.report.text import Style, heading, wrapped

MAX_GAPS = 2
MAX_LINES = 82  # with the line that says what was left out: two screens
LEFT_OUT_FIRST = (
    "collectives",
    "roofline",
    "kernels",
    "operators",
    "every_step",
    "phases",
)  # what says least to most people


def terminal_lines(report: Report, style: Style, everything: bool = False) -> list[str]:
    """Write a report as lines of WIDTH columns: about 80 at most.

    Args:
        report: what was found.
        style: how the terminal may be written to.
        everything: show all rows of all tables, however many lines that takes.
    """
    lines = [heading(report.title, f"read in {report.read_s:.1f} s", style), ""]
    lines += map(style.warm, wrapped(report.verdict.headline))
    lines += map(style.dim, wrapped(describe_confidence(report)))
    gaps = build_limitations(report)
    shown = gaps if everything else gaps[:MAX_GAPS]
    end = ["", heading("What could not be seen", "", style)] if gaps else []
    for gap in shown:
        end += wrapped(gap, "  - ", "    ")
    if len(gaps) > len(shown):
        end.append(style.dim(f"  and {len(gaps) - len(shown)} more with --all"))
    sections = {section.key: section for section in build_sections(report, everything)}
    drawn = {key: ["", *section_lines(section, style)] for key, section in sections.items()}
    left_out = []
    for key in () if everything else LEFT_OUT_FIRST:
        if len(lines) + len(end) + sum(map(len, drawn.values())) <= MAX_LINES:
            break
        if drawn.pop(key, None):
            left_out.append(sections[key].title)
    for section in drawn.values():
        lines += section
    more = ["", style.dim(f"With --all: {', '.join(left_out)}")] if left_out else []
    return [*lines, *more, *end]
