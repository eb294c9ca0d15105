"""A plan as lines for a terminal: the verdict first, then what it is made of, at last what was assumed."""

from megatron_lite.report.plan_figures import PlanReport
from megatron_lite.report.plan_sections import plan_sections
from megatron_lite.report.plan_verdict import verdicts
from megatron_lite.report.section_text import section_lines
from megatron_lite.report.text import Style, heading, wrapped


def plan_lines(report: PlanReport, style: Style, why: bool = False) -> list[str]:
    """`why`: the formula behind each line."""
    lines = [heading(report.title, report.facts, style), ""]
    for sentence in verdicts(report):
        lines += [style.warm(line) for line in wrapped(sentence, hanging="    ")]
    for note in report.notes:
        lines += [style.dim(line) for line in wrapped(note, hanging="    ")]
    for section in plan_sections(report, why):
        lines += ["", *section_lines(section, style)]
    return lines
