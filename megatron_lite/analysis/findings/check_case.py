"""A check of a run, and what may answer it."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.analysis.findings.base import CheckResult, Evidence, Finding, Observation
from megatron_lite.analysis.run_facts import Facts


@dataclass(frozen=True)
class Check:
    """A question to a run and its answer."""

    number: int  # place in the list, from 1
    question: str
    answer: CheckResult
    evidence: tuple[Evidence, ...]  # never empty for passed and failed
    code: str = ""  # failed: the rule whose page explains it; "" where none does
    remedy: str = ""  # failed: what to change; not visible: what to record; "" for passed
    name: str = ""  # what is asked about, in a few words


@dataclass(frozen=True)
class CheckCase:
    """Everything that may answer the checks of a run."""

    facts: Facts
    findings: tuple[Finding, ...] = ()  # most costly first
    looks: Mapping[str, Observation] | None = None  # by code: what each rule saw
    other: Facts | None = None  # the run to compare with

    def find(self, *codes: str) -> tuple[Finding, ...]:
        """Choose the findings that have one of the codes, most costly first."""
        return tuple(one for one in self.findings if one.code in codes)

    def get_look(self, code: str) -> Observation | None:
        """Get what the rule with this code saw; None where it was not asked."""
        return (self.looks or {}).get(code)


def fail_by_findings(findings: tuple[Finding, ...]) -> Observation:
    """Build the look that tells the most costly finding in full, and each other one in a line."""
    first, *others = findings
    also = [Evidence(f"also {one.code}: {one.evidence[0].text}", one.evidence[0].where) for one in others]
    return Observation(CheckResult.FAILED, (*first.evidence, *also), first.advice, first.code)
