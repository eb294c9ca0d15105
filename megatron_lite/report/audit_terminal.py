"""The points of an audit as lines for a terminal: the answer first, then what it rests on and the remedy."""

from collections import Counter
from collections.abc import Sequence

from megatron_lite.analysis.audit.answers import Answer, Point
from megatron_lite.report.text import WIDTH, Style, fit, wrapped

ANSWER_WIDTH = max(map(len, Answer))
INDENT = " " * (ANSWER_WIDTH + 7)
EVIDENCE_SHOWN = 3


def audit_lines(points: Sequence[Point], titles: Sequence[str], style: Style, everything: bool = False) -> list[str]:
    """Write an audit's answers as lines for a terminal.

    Args:
        points: the questions and their answers.
        titles: the title of the run, and of the one that it was compared with, if any.
        style: how the terminal may be written to.
        everything: show all evidence of all points.
    """
    number = Counter(point.answer for point in points)
    told = ", ".join(f"{number[answer]} {answer}" for answer in Answer)
    heads = [
        line
        for words, title in zip(("audit of", "held against"), titles)
        for line in wrapped(f"{words} {title}", "", "  ")
    ]
    lines = [*map(style.bold, heads), "", style.warm(told) if number[Answer.FAIL] else told, ""]
    paints = {Answer.PASS: style.accent, Answer.FAIL: style.warm}
    for point in points:
        answer = f"{str(point.answer).upper() if point.answer is Answer.FAIL else point.answer:<{ANSWER_WIDTH}}"
        question = style.bold(fit(point.question, WIDTH - len(INDENT)))
        lines.append(f"  {paints.get(point.answer, style.dim)(answer)}  {point.number:>2} {question}")
        shown = point.evidence if everything else point.evidence[:EVIDENCE_SHOWN]
        for one in shown:
            lines += wrapped(f"{one.text} ({one.where})" if one.where else one.text, INDENT, INDENT + "  ")
        if len(point.evidence) > len(shown):
            lines.append(style.dim(f"{INDENT}and {len(point.evidence) - len(shown)} more with --all"))
        if point.answer is not Answer.PASS:
            verb = "try" if point.answer is Answer.FAIL else "to see it"
            lines += wrapped(f"{verb}: {point.way_out}", INDENT, INDENT + "  ")
            lines += [f"{INDENT}megatron-lite explain {point.code}"] if point.code else []
    return lines
