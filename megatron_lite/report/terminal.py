"""A Report as lines for a terminal: verdict, where a step goes, findings, tables, at last what could not be seen."""

from megatron_lite.analysis.report import Report
from megatron_lite.report.section_text import section_lines
from megatron_lite.report.sections.all import build_limitations, build_sections, describe_confidence
from megatron_lite.report.text import Style, heading, wrapped

GAPS_SHOWN = 2
MAX_LINES = 82  # with the line that says what was left out: two screens
LEFT_OUT_FIRST = ("collectives", "roofline", "kernels", "operators", "phases")  # what says least to most people


def terminal_lines(report: Report, style: Style, everything: bool = False) -> list[str]:
    """At most about 80 lines of WIDTH columns, or all rows of all tables."""
    head, gaps = _head(report, style), _gaps(report, style, everything)
    sections = {section.key: section for section in build_sections(report, everything)}
    drawn = {key: ["", *section_lines(section, style)] for key, section in sections.items()}
    left_out = []
    for key in () if everything else LEFT_OUT_FIRST:
        if len(head) + len(gaps) + sum(map(len, drawn.values())) <= MAX_LINES:
            break
        if drawn.pop(key, None):
            left_out.append(sections[key].title)
    more = ["", style.dim(f"With --all: {', '.join(left_out)}")] if left_out else []
    return [*head, *(line for lines in drawn.values() for line in lines), *more, *gaps]


def _head(report: Report, style: Style) -> list[str]:
    sentence = wrapped(report.verdict.sentence)
    return [
        heading(report.title, f"read in {report.read_s:.1f} s", style),
        "",
        *(style.warm(line) for line in sentence),
        *(style.dim(line) for line in wrapped(describe_confidence(report))),
    ]


def _gaps(report: Report, style: Style, everything: bool) -> list[str]:
    gaps = build_limitations(report)
    if not gaps:
        return []
    shown = gaps if everything else gaps[:GAPS_SHOWN]
    lines = ["", heading("What could not be seen", "", style)]
    for gap in shown:
        lines += wrapped(gap, "  - ", "    ")
    if len(gaps) > len(shown):
        lines.append(style.dim(f"  and {len(gaps) - len(shown)} more with --all"))
    return lines
