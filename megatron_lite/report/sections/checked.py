"""The last section of a report: every question of the list of checks, its answer and the reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.analysis.findings.base import CheckResult
from megatron_lite.analysis.findings.check_case import Check
from megatron_lite.analysis.report import Report
from megatron_lite.report.section import FAILED, NOT_VISIBLE, PASSED, CheckCard, Lines, Section
from megatron_lite.report.text import write_evidence

KEY = "checked"
MAX_ANSWER_REASONS = 3  # of an answer in full
WORDS = {CheckResult.PASSED: PASSED, CheckResult.FAILED: FAILED, CheckResult.NOT_VISIBLE: NOT_VISIBLE}
VERBS = {CheckResult.PASSED: "", CheckResult.FAILED: "try: ", CheckResult.NOT_VISIBLE: "to see it: "}


def checked_section(report: Report, everything: bool) -> Section | None:
    """Build a line per check; of everything, all evidence with it. None where the checks could not be made."""
    if not report.checks:
        return None
    has_one_rank = report.facts.has_one_rank
    section = build_checked_section(report.checks, has_one_rank, in_full=everything, everything=everything)
    if everything:
        return section
    hint = Lines(["megatron-lite audit PATH prints all questions with their evidence"], quiet=True, is_hint=True)
    return replace(section, blocks=[*section.blocks, hint])


def build_checked_section(
    checks: Sequence[Check], has_one_rank: bool, *, in_full: bool = True, everything: bool = False
) -> Section:
    """Build the section from answered checks.

    Args:
        checks: the questions and their answers.
        has_one_rank: whether the job has one rank, which then is not named.
        in_full: whether questions stand with evidence and remedy rather than in a line each.
        everything: show all evidence of all checks.
    """
    number_by_answer = Counter(check.answer for check in checks)
    counts = [f"{number_by_answer[answer]} {word}" for answer, word in WORDS.items()]
    cards = [_build_card(check, has_one_rank, in_full, everything) for check in checks]
    return Section(KEY, "Checked", ", ".join(counts), cards)


def _build_card(check: Check, has_one_rank: bool, in_full: bool, everything: bool) -> CheckCard:
    """Build what is shown of a check; for the arguments see build_checked_section."""
    shown = check.evidence if everything else check.evidence[:MAX_ANSWER_REASONS]
    reasons = []
    for one in shown:
        # a line has no room for the place
        where = str(one.where) if in_full else ""
        reasons.append(write_evidence(one.text, where, has_one_rank))
    return CheckCard(
        number=check.number,
        answer=WORDS[check.answer],
        question=check.question,
        name=check.name,
        reasons=reasons,
        hidden=len(check.evidence) - len(shown),
        remedy=f"{VERBS[check.answer]}{check.remedy}" if check.remedy else "",
        code=check.code,
        in_full=in_full,
    )
