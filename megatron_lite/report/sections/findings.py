"""Findings, most costly first: what, cost, evidence, what to try, what it can bring at most."""

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import milliseconds
from megatron_lite.report.section import Card, Hint, Lines, Section, first
from megatron_lite.units import size

IN_FULL, NAMED, EVIDENCE_SHOWN = 3, 7, 2


def cost_of(cost_ms: float | None, cost_bytes: int | None) -> str:
    """'12.1 ms', '3.20 GiB', both or nothing."""
    costs = [
        f"{milliseconds(cost_ms)} ms" if cost_ms is not None else "",
        size(cost_bytes) if cost_bytes is not None else "",
    ]
    return ", ".join(cost for cost in costs if cost)


def findings_section(report: Report, everything: bool) -> Section | None:
    """The most costly one in full, some more in a line each."""
    if not report.facts.ranks_seen and not report.findings:
        return None
    if not report.findings:
        return Section("findings", "Findings", "", [Lines(["none: no rule found a cause worth naming"])])
    shown, hidden = first(report.findings, NAMED, everything)
    cards = [_card(finding, number, everything) for number, finding in enumerate(shown, 1)]
    more = f"and {hidden} more with --all; " if hidden else ""
    hint = Hint(f"{more}megatron-lite explain CODE: what a finding means, its false alarms")
    of = "cost per step or at the memory peak; gains are upper bounds and do not add up"
    return Section("findings", "Findings", of, [*cards, hint, *_whose_flags(report)])


def _whose_flags(report: Report) -> list[Lines]:
    """A job without a run folder is mostly another program's."""
    foreign = not report.facts.run and any(finding.flags for finding in report.findings)
    return [Lines(["the flags are megatron_lite's"], quiet=True)] if foreign else []


def _card(finding: Finding, number: int, everything: bool) -> Card:
    rank = "" if finding.rank is None else f" (rank {finding.rank})"
    gain = cost_of(finding.gain_ms, finding.gain_bytes)
    evidence = [one.text + (f" ({one.where})" if one.where else "") for one in finding.evidence]
    flags = [flag for flag in finding.flags if flag not in finding.advice]
    return Card(
        number=number,
        code=finding.code,
        title=("" if finding.certain else "likely: ") + finding.title + rank,
        cost=cost_of(finding.cost_ms, finding.cost_bytes),
        evidence=evidence if everything else evidence[: EVIDENCE_SHOWN if number == 1 else 1],
        advice=": ".join([finding.advice, *([", ".join(flags)] if flags else [])])
        + (f" (saves at most {gain})" if gain else ""),
        in_full=everything or number <= IN_FULL,
    )
