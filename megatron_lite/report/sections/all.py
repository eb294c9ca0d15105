"""The sections of a report in their order, and what could not be seen."""

from megatron_lite.analysis.report import Report
from megatron_lite.report.section import Section
from megatron_lite.report.sections.findings import findings_section
from megatron_lite.report.sections.kernels import kernels_section, operators_section
from megatron_lite.report.sections.memory import memory_section
from megatron_lite.report.sections.phases import phases_section
from megatron_lite.report.sections.prediction import prediction_section
from megatron_lite.report.sections.ranks import collectives_section, ranks_section
from megatron_lite.report.sections.roofline import roofline_section
from megatron_lite.report.sections.run import run_section
from megatron_lite.report.sections.step import step_section

SECTIONS = (
    step_section,
    findings_section,
    phases_section,
    kernels_section,
    operators_section,
    roofline_section,
    memory_section,
    prediction_section,
    ranks_section,
    collectives_section,
    run_section,
)


def sections_of(report: Report, everything: bool) -> list[Section]:
    """Those that have something to say."""
    made = (section(report, everything) for section in SECTIONS)
    return [section for section in made if section is not None]


def confidence_of(report: Report) -> str:
    """Why the verdict may be believed; '' for an inconclusive one, which says itself why not."""
    verdict = report.verdict
    return "" if verdict.bound == "inconclusive" else f"{verdict.confidence} confidence: {verdict.why}"


def gaps_of(report: Report) -> list[str]:
    """What could not be seen, of all parts, each sentence once; of other ranks only what the shown one does not say."""
    facts, critical = report.facts, report.facts.critical
    texts = list(facts.gaps)
    if critical:
        texts += [*critical.trace.notes, *critical.time.notes, *critical.kernels.notes]
    for other in facts.ranks_seen:
        if other is not critical:
            name = other.trace.source if other.time.rank is None else f"rank {other.time.rank}"
            texts += [f"{name}: {note}" for note in (*other.trace.notes, *other.time.notes) if note not in texts]
    texts += facts.ranks.notes if facts.ranks else ()
    texts += [note for snapshot in facts.snapshots for note in snapshot.notes]
    texts += facts.run.notes if facts.run else ()
    return list(dict.fromkeys(texts))
