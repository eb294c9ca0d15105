"""What an audit says: an answer to each of its questions, with what it rests on."""

import enum
from dataclasses import dataclass

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.run_facts import Facts

AUDIT_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong


class Answer(str, enum.Enum):
    PASS = "pass"  # the run shows it
    FAIL = "fail"  # the run shows the opposite
    NOT_SEEN = "not seen"  # the run shows neither

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Point:
    """One question to the run."""

    number: int
    question: str
    answer: Answer
    evidence: tuple[Evidence, ...]  # never empty for pass and fail
    code: str = ""  # of the finding that explains a fail; "" where no rule does
    way_out: str = ""  # fail: what to change; not seen: what to record; "" for pass


@dataclass(frozen=True)
class Outcome:
    """A Point before it has its number and question."""

    answer: Answer
    evidence: tuple[Evidence, ...]
    code: str = ""
    way_out: str = ""


@dataclass(frozen=True)
class Case:
    """What is audited."""

    facts: Facts
    findings: tuple[Finding, ...]  # most costly first
    other: Facts | None  # the run to compare with
    doubts: tuple[str, ...] = ()  # what speaks against the facts' traces and snapshots

    def found(self, *codes: str) -> tuple[Finding, ...]:
        """Those of the findings that have one of the codes, most costly first."""
        return tuple(one for one in self.findings if one.code in codes)


def passed(*evidence: Evidence) -> Outcome:
    return Outcome(Answer.PASS, evidence)


def not_seen(way_out: str, *evidence: Evidence) -> Outcome:
    """`way_out`: what to record to see it."""
    return Outcome(Answer.NOT_SEEN, evidence, way_out=way_out)


def failed(way_out: str, *evidence: Evidence, code: str = "") -> Outcome:
    return Outcome(Answer.FAIL, evidence, code, way_out)


def blamed(findings: tuple[Finding, ...]) -> Outcome:
    """A fail that findings explain: the most costly one in full, a line of each other one."""
    first, *more = findings
    also = (Evidence(f"also {one.code}: {one.evidence[0].text}", one.evidence[0].where) for one in more)
    return Outcome(Answer.FAIL, (*first.evidence, *also), first.code, first.advice)
