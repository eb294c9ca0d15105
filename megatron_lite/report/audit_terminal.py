"""The points of an audit as lines for a terminal: the answer first, then what it rests on and the remedy."""

from collections import Counter
from collections.abc import Sequence

from megatron_lite.analysis.findings.base import Outcome as Answer
from megatron_lite.analysis.findings.check_case import Check as Point
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
    lines: list[str] = []
    for words, title in zip(("audit of", "held against"), titles):
        lines += map(style.bold, wrapped(f"{words} {title}", "", "  "))
    numbers = Counter(point.answer for point in points)
    total = ", ".join(f"{numbers[answer]} {answer}" for answer in Answer)
    lines += ["", style.warm(total) if numbers[Answer.FAILED] else total, ""]
    for point in points:
        lines.append(_write_answer(point, style))
        lines += _write_evidence(point, style, everything)
        if point.answer is not Answer.PASSED:
            lines += _write_remedy(point)
    return lines


def _write_answer(point: Point, style: Style) -> str:
    """Write the answer, its number and the question in a line; a failure in capitals."""
    answer = str(point.answer)
    paint = style.dim
    if point.answer is Answer.PASSED:
        paint = style.accent
    elif point.answer is Answer.FAILED:
        answer = answer.upper()
        paint = style.warm
    question = style.bold(fit(point.question, WIDTH - len(INDENT)))
    return f"  {paint(f'{answer:<{ANSWER_WIDTH}}')}  {point.number:>2} {question}"


def _write_evidence(point: Point, style: Style, everything: bool) -> list[str]:
    """Write what an answer rests on, some of it unless all is wanted."""
    shown = point.evidence if everything else point.evidence[:EVIDENCE_SHOWN]
    lines = []
    for evidence in shown:
        text = f"{evidence.text} ({evidence.where})" if evidence.where else evidence.text
        lines += wrapped(text, INDENT, INDENT + "  ")
    hidden = len(point.evidence) - len(shown)
    if hidden:
        lines.append(style.dim(f"{INDENT}and {hidden} more with --all"))
    return lines


def _write_remedy(point: Point) -> list[str]:
    """Write what to try, or what it takes to see the answer, and the command that explains it."""
    verb = "try" if point.answer is Answer.FAILED else "to see it"
    lines = wrapped(f"{verb}: {point.way_out}", INDENT, INDENT + "  ")
    if point.code:
        lines.append(f"{INDENT}megatron-lite explain {point.code}")
    return lines
