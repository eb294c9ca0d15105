"""Gains: how much of a step the remedies of findings save, and in which order they are worth it.

Findings whose remedy a change of the dependency graph stands for carry it (Finding.edit); the measured steps are
replayed with these changes. All others keep the upper bound that their rule gives. Then findings stand in the order of
what they save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_lite.analysis.findings.base import Edit, Finding
from megatron_lite.analysis.findings.order import order_findings
from megatron_lite.analysis.graph.build import build_graph, explain_size
from megatron_lite.analysis.graph.edits.recording import leave_out_recording, measure_recording
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.graph.replay import check_replay, measure_step
from megatron_lite.analysis.graph.sequence import NamedEdit, OrderedGains, measure_gains
from megatron_lite.analysis.report import Gains, OrderedChange, Verdict
from megatron_lite.analysis.run.cores import measure_slowdown
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import significant

MAX_APART = 0.10  # of the step, by which the replayed steps may differ from all steady ones
NOTHING_CHANGED = "the replayed steps hold nothing that the remedies would change"
MAX_CHANGES_SAID = 3  # in one sentence


@dataclass(frozen=True)
class GainedFindings:
    """Findings with what their remedies save, and the order of the remedies."""

    findings: tuple[Finding, ...]  # the one that saves most first; most costly first where nothing is claimed
    gains: Gains | None  # None: no finding has a change that could be replayed


def find_gains(facts: Facts, findings: Sequence[Finding], verdict: Verdict) -> GainedFindings:
    """Replay the measured steps with the remedies of findings.

    Where the graph is not that of the measured steps, nothing is claimed, and findings stay as they are.

    Args:
        facts: the run.
        findings: what the rules found.
        verdict: of the run; without a conclusion nothing is claimed.
    """
    edits = {found.code: found.edit for found in findings if found.edit is not None}
    critical = facts.critical
    if critical is None or not edits:
        return GainedFindings(tuple(findings), None)
    why_not = _explain_before(facts, verdict)
    if why_not:
        return GainedFindings(tuple(findings), _claim_nothing(critical.time.step_ms, why_not))
    graph = build_graph([(one.trace, one.placing) for one in facts.graph_ranks])
    why_not = _explain_doubt(graph, critical.time.step_ms)
    if why_not:
        return GainedFindings(tuple(findings), _claim_nothing(critical.time.step_ms, why_not))
    # replayed steps differ a little from the mean of all steady ones, which is what the report shows
    scale = critical.time.step_ms / (measure_step(graph) / 1e6)
    graph = _prepare(graph, facts, list(edits.values()))
    named = [NamedEdit(code, edit.apply, edit.is_of_late_ranks) for code, edit in edits.items()]
    measured = measure_gains(graph, named)
    if not measured.alone_ms:
        return GainedFindings(tuple(findings), _claim_nothing(critical.time.step_ms, NOTHING_CHANGED))
    stalls_ms = graph.beside_ns / 1e6 * scale
    before_ms = measured.before_ms * scale
    gained = [_put_gain(found, measured, scale) for found in findings]
    order = _describe_order(edits, measured, scale)
    doubts = _list_doubts(facts, graph, findings, order, verdict)
    gains = Gains(
        step_ms=before_ms,
        order=order,
        confidence="low" if doubts else "high",
        doubts=tuple(doubts),
        stalls_ms=stalls_ms,
        recording_ms=critical.time.step_ms + stalls_ms - before_ms,
    )
    return GainedFindings(order_findings(gained, facts), gains)


def _prepare(graph: Graph, facts: Facts, edits: Sequence[Edit]) -> Graph:
    """Bring measured steps to what the changes start from: without the profiler's own work, with all that takes time.

    Args:
        graph: the measured steps.
        facts: the run.
        edits: the changes.
    """
    slowdown = measure_slowdown(facts.run) if facts.run is not None else None
    # steps that waited for cores were not made longer by the profiler
    is_by_other_jobs = slowdown is not None and slowdown.is_by_other_jobs
    if facts.run is not None and not is_by_other_jobs:
        graph = leave_out_recording(graph, measure_recording(facts.run))
    for edit in edits:
        if edit.prepare is not None:
            graph = edit.prepare(graph)
    return graph


def _claim_nothing(step_ms: float, why_not: str) -> Gains:
    """Build the gains of steps of which nothing is claimed."""
    return Gains(step_ms=step_ms, order=(), confidence="low", doubts=(), why_not=why_not)


def _explain_before(facts: Facts, verdict: Verdict) -> str:
    """Explain why no graph is built; '' where one is."""
    if verdict.bound == "inconclusive":
        return verdict.why
    if verdict.bound == "failure":
        return "the run failed"
    return explain_size([one.trace for one in facts.graph_ranks])


def _explain_doubt(graph: Graph, step_ms: float) -> str:
    """Explain why a graph is not that of the measured steps; '' where it is.

    Args:
        graph: the graph.
        step_ms: the mean of all steady steps.
    """
    trust = check_replay(graph)
    if trust.why_not:
        return trust.why_not
    apart = trust.measured_ms / step_ms - 1
    if abs(apart) <= MAX_APART:
        return ""
    return (
        f"consecutive steady steps of all ranks take {significant(trust.measured_ms)} ms in the mean, "
        f"the steps of this report {significant(step_ms)} ms"
    )


def _put_gain(found: Finding, measured: OrderedGains, scale: float) -> Finding:
    """Put what a replay says in the place of a finding's upper bound, where its remedy was replayed.

    Args:
        found: the finding.
        measured: what was replayed, by code.
        scale: ms of the report by ms of the replay.
    """
    if found.code not in measured.alone_ms:
        return found
    return replace(found, gain_ms=measured.alone_ms[found.code] * scale, gain_is_bound=False)


def _describe_order(edits: Mapping[str, Edit], measured: OrderedGains, scale: float) -> tuple[OrderedChange, ...]:
    """Describe the changes that are worth making, in their order.

    Args:
        edits: the remedies that were replayed, by the finding's code.
        measured: what was replayed.
        scale: ms of the report by ms of the replay.
    """
    order = []
    for gain in measured.order:
        order.append(
            OrderedChange(
                code=gain.name,
                change=edits[gain.name].change,
                alone_ms=gain.alone_ms * scale,
                ms=gain.ms * scale,
                step_ms=gain.step_ms * scale,
            )
        )
    return tuple(order)


def _list_doubts(
    facts: Facts,
    graph: Graph,
    findings: Sequence[Finding],
    order: Sequence[OrderedChange],
    verdict: Verdict,
) -> list[str]:
    """List what lowers the confidence in gains.

    Args:
        facts: the run.
        graph: the graph of its steps.
        findings: what the rules found.
        order: the changes that are worth making.
        verdict: of the run.
    """
    doubts = list(graph.limits)
    absent = facts.ranks.describe_missing() if facts.ranks else ""
    if absent and not doubts:
        doubts.append(f"{absent}: how long others wait for them is not known")
    if verdict.confidence == "low":
        # its reasons stand beside it
        doubts.append("the verdict's confidence is low")
    codes = {one.code for one in order}
    likely = [found.code for found in findings if found.code in codes and not found.certain]
    if likely:
        doubts.append(f"likely causes only: {', '.join(likely)}")
    return doubts


def describe_next_steps(gains: Gains | None) -> str:
    """Write "First load with 2 workers, then fuse the optimizer: 41 instead of 78 ms per step"; '' without a change.

    Args:
        gains: of the run; None: nothing was replayed.
    """
    if gains is None or not gains.order:
        return ""
    said = gains.order[:MAX_CHANGES_SAID]
    first, *later = (one.change for one in said)
    changes = ", then ".join([f"first {first}" if later else first, *later])
    if gains.confidence == "low":
        changes = f"likely: {changes}"
    after = significant(said[-1].step_ms)
    steps = f"{after} instead of {significant(gains.step_ms)} ms per step"
    if gains.is_without_profiler:
        steps += " without the profiler"
    if gains.stalls_ms:
        steps += ", with what saving and evaluating take"
    return f"{changes[:1].upper()}{changes[1:]}: {steps}"
