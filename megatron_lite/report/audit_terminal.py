"""The points of an audit as lines for a terminal: the answer first, then what it rests on and the remedy."""

from collections import Counter
from collections.abc import Sequence

from megatron_lite.analysis.audit.answers import Answer, Point
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.report.text import WIDTH, Style, fit, wrapped

ANSWER_WIDTH = max(map(len, Answer))
INDENT = " " * (ANSWER_WIDTH + 7)
EVIDENCE_SHOWN = 3


def audit_lines(points: Sequence[Point], titles: Sequence[str], style: Style, everything: bool = False) -> list[str]:
    """`titles`: of the run, and of the one it was held against. `everything`: all evidence of all points."""
    number = Counter(point.answer for point in points)
    told = ", ".join(f"{number[answer]} {answer}" for answer in Answer)
    heads = [
        line
        for words, title in zip(("audit of", "held against"), titles)
        for line in wrapped(f"{words} {title}", "", "  ")
    ]
    lines = [*map(style.bold, heads), "", style.warm(told) if number[Answer.FAIL] else told, ""]
    for point in points:
        lines += _point(point, style, everything)
    return lines


def _point(point: Point, style: Style, everything: bool) -> list[str]:
    question = fit(point.question, WIDTH - len(INDENT))
    answer = f"{str(point.answer).upper() if point.answer is Answer.FAIL else point.answer:<{ANSWER_WIDTH}}"
    shown = point.evidence if everything else point.evidence[:EVIDENCE_SHOWN]
    lines = [f"  {_painted(answer, point.answer, style)}  {point.number:>2} {style.bold(question)}"]
    for one in shown:
        lines += wrapped(_evidence(one), INDENT, INDENT + "  ")
    if len(point.evidence) > len(shown):
        lines.append(style.dim(f"{INDENT}and {len(point.evidence) - len(shown)} more with --all"))
    return lines + _way_out(point)


def _painted(text: str, answer: Answer, style: Style) -> str:
    if answer is Answer.PASS:
        return style.accent(text)
    return style.warm(text) if answer is Answer.FAIL else style.dim(text)


def _evidence(one: Evidence) -> str:
    return f"{one.text} ({one.where})" if one.where else one.text


def _way_out(point: Point) -> list[str]:
    if point.answer is Answer.PASS:
        return []
    verb = "try" if point.answer is Answer.FAIL else "to see it"
    lines = wrapped(f"{verb}: {point.way_out}", INDENT, INDENT + "  ")
    return [*lines, *([f"{INDENT}megatron-lite explain {point.code}"] if point.code else [])]
