"""The sections of a report in their order, and what could not be seen; findings, ranks and the whole run among them."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.rules import MIN_COST_MS
from megatron_lite.analysis.ranks.rank_results import RankComparison, RankRow, Straggler
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.analysis.run.pipeline_times import PipelineTimes
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.hardware_record import name_limits
from megatron_lite.report.postmortem_terminal import describe_certainty, list_postmortem_sections
from megatron_lite.report.section import Block, Card, Lines, Section, Table, limit_rows
from megatron_lite.report.sections.checked import checked_section
from megatron_lite.report.sections.every_step import every_step_section
from megatron_lite.report.sections.memory import memory_section, prediction_section
from megatron_lite.report.sections.step import (
    kernels_section,
    operators_section,
    phases_section,
    roofline_section,
    step_section,
)
from megatron_lite.report.text import calls, flops, milliseconds, percent, write_evidence
from megatron_lite.units import count, counted, significant, size

# --- findings, those that save most first: what, cost, evidence, what to try, what it can bring at most

MAX_FULL_FINDINGS = 3  # findings with evidence and advice
MAX_NAMED_PARTS = 7
MAX_EVIDENCE = 2  # of the first finding; the others have one


def findings_section(report: Report, everything: bool) -> Section | None:
    """Build the cards of the findings: the first ones in full, some more in a line each."""
    if not report.facts.ranks_seen and not report.findings:
        return None
    if not report.findings:
        return Section("findings", "Findings", "", [Lines(["none: no rule found a cause worth naming"])])
    shown, hidden = limit_rows(report.findings, MAX_NAMED_PARTS, everything)
    blocks: list[Block] = []
    for number, finding in enumerate(shown, 1):
        blocks.append(_build_card(number, finding, report, everything))
    gains = report.gains
    subtitle = "cost per step or at peak memory"
    if gains is None:
        subtitle += "; savings are maximums, do not add them up"
    elif gains.why_not:
        why_not = report.facts.in_words(gains.why_not)
        blocks.append(Lines([f"savings are maximums that do not add up: {why_not}"], quiet=True))
    else:
        subtitle += "; first what saves most"
    more = f"and {hidden} more with --all; " if hidden else ""
    note = f"{more}megatron-lite explain CODE describes a finding and its false alarms"
    blocks.append(Lines([note], quiet=True, is_hint=True))
    return Section("findings", "Findings", subtitle, blocks)


# --- what to change first: the changes that were replayed, each on top of those before it

MAX_CHANGES = 4  # rows


def gains_section(report: Report, everything: bool) -> Section | None:
    """Build the table of the changes that are worth making, in their order, with the step after each."""
    gains = report.gains
    if gains is None or gains.why_not:
        return None
    texts = [report.facts.in_words(doubt) for doubt in gains.doubts]
    if not gains.order:
        texts.insert(0, "no change that could be replayed makes a step notably shorter by itself")
        return Section("gains", "What to change first", "", [Lines(texts)])
    write = partial(milliseconds, largest=gains.step_ms)
    shown, hidden = limit_rows(gains.order, MAX_CHANGES, everything)
    rows = []
    for number, one in enumerate(shown, 1):
        change = report.facts.in_words(one.change)
        rows.append([str(number), change, one.code, write(one.alone_ms), write(one.ms), write(one.step_ms)])
    table = Table(rows, "rllrrr", ["", "change", "finding", "alone", "saves", "a step"], hidden=hidden)
    if gains.is_without_profiler:
        texts.insert(0, f"as without the profiler, which takes {write(gains.recording_ms)} ms of a profiled step")
    if gains.stalls_ms:
        texts.insert(0, f"saving and evaluating in some steps takes {write(gains.stalls_ms)} ms of the mean one")
    subtitle = f"ms per step of {write(gains.step_ms)}, by replay; each change on top of those before it"
    return Section("gains", "What to change first", subtitle, [table, Lines(texts, quiet=True)])


def _build_card(number: int, finding: Finding, report: Report, everything: bool) -> Card:
    """Build what is shown of a finding.

    Args:
        number: its place, from 1.
        finding: what a rule found.
        report: what the finding is of. A single rank of a job is not named.
        everything: show all evidence, and the advice of every finding.
    """
    has_one_rank = report.facts.has_one_rank
    title = finding.title if finding.certain else f"likely: {finding.title}"
    if finding.rank is not None and not has_one_rank:
        title += f" (rank {finding.rank})"
    evidence = [write_evidence(one.text, str(one.where), has_one_rank) for one in finding.evidence]
    if not everything:
        limit = MAX_EVIDENCE if number == 1 else 1
        evidence = evidence[:limit]
    page = report.find_page(finding)
    return Card(
        number=number,
        code=finding.code,
        title=title,
        cost=_format_cost(finding.cost_ms, finding.cost_bytes, finding.once_ms),
        evidence=evidence,
        advice=_describe_advice(finding),
        in_full=everything or number <= MAX_FULL_FINDINGS,
        shown_in=page.subjects if page else (),
    )


def _describe_advice(finding: Finding) -> str:
    """Describe what to try: the advice, the flags that it does not name itself, and what it can bring."""
    advice = finding.advice
    flags = [flag for flag in finding.flags if flag not in advice]
    if flags:
        advice += f": {', '.join(flags)}"
    gain = _format_cost(finding.gain_ms, finding.gain_bytes)
    if not gain:
        return advice
    if finding.gain_is_bound:
        return f"{advice} (saves at most {gain})"
    if finding.gain_ms is not None and finding.gain_ms < MIN_COST_MS:
        return f"{advice} (saves nothing by itself: replayed, the step stays as long)"
    return f"{advice} (saves {gain} by itself)"


def _format_cost(cost_ms: float | None, cost_bytes: int | None, once_ms: float | None = None) -> str:
    """Write a cost: '12.1 ms', '3.20 GiB', both or nothing; '12.1 ms once' where no step pays it again.

    Args:
        cost_ms: milliseconds per step; None for none.
        cost_bytes: bytes at the peak; None for none.
        once_ms: milliseconds that the run pays once; None for none.
    """
    costs = []
    if cost_ms is not None:
        costs.append(f"{milliseconds(cost_ms)} ms")
    if once_ms is not None:
        costs.append(f"{milliseconds(once_ms)} ms once")
    if cost_bytes is not None:
        costs.append(size(cost_bytes))
    return ", ".join(costs)


# --- ranks beside each other: who waits for whom, and what communication costs

MAX_RANK_ROWS = 4  # rows
MAX_COLLECTIVE_ROWS = 2  # rows
MAX_MISSING = 8  # ranks that are named
MIN_GB_S = 0.001
CAUSES = {
    "compute": "computing",
    "data_wait": "waiting for data",
    "host": "a slow host",
    "copy": "copies",
}


def _describe_late_rank(facts: Facts, late: Straggler) -> list[str]:
    """Describe which rank the others wait for and why, and what is not known of it."""
    why = "no single quantity explains why"
    if late.cause:
        cause = CAUSES.get(late.cause, late.cause)
        why = f"it spends {milliseconds(late.cause_ms)} ms more than the others on {cause}"
    last = ""
    if late.share_last is not None:
        last = f", last in {percent(late.share_last)} of the collectives"
    where = f" in {late.phase}" if late.phase else ""
    cost = f"{milliseconds(late.caused_wait_ms)} ms per step"
    texts = [f"rank {late.rank} makes the others wait {cost}{where}{last}: {why}"]
    doubt = facts.doubt_straggler(late)
    if doubt:
        texts.append(doubt)
    return texts


def ranks_section(report: Report, everything: bool) -> Section | None:
    """Build a row per rank; of many ranks, those that others wait for most and least."""
    ranks = report.facts.ranks
    if ranks is None or len(ranks.rows) < 2:
        return None
    shown = ranks.rows if everything else _choose_ranks(ranks.rows)
    texts = []
    if ranks.straggler is not None:
        texts += _describe_late_rank(report.facts, ranks.straggler)
    if ranks.missing:
        texts.append(_describe_missing_ranks(ranks.missing))
    table = _build_rank_table(shown, hidden=len(ranks.rows) - len(shown))
    subtitle = "ms per step; waits: in collectives, for others; awaited: how long others wait for it"
    return Section("ranks", "Ranks", subtitle, [Lines(texts), table])


def _choose_ranks(rows: Sequence[RankRow]) -> Sequence[RankRow]:
    """Choose the ranks that are shown, in their order: of many those that others wait for most and least."""
    if len(rows) <= MAX_RANK_ROWS:
        return rows
    awaited_first = sorted(rows, key=lambda row: -(row.caused_wait_ms or 0.0))
    half = MAX_RANK_ROWS // 2
    kept = [*awaited_first[:half], *awaited_first[-half:]]
    return [row for row in rows if row in kept]


def _describe_missing_ranks(missing: Sequence[int]) -> str:
    """Name the ranks without a trace, the first ones of many."""
    named = ", ".join(map(str, missing[:MAX_MISSING]))
    if len(missing) > MAX_MISSING:
        named += f" and {len(missing) - MAX_MISSING} more"
    plural = "s" if len(missing) > 1 else ""
    return f"no trace of rank{plural} {named}"


def _build_rank_table(rows: Sequence[RankRow], hidden: int) -> Table:
    """Build a row per rank, ms per step. hidden: how many ranks are not shown."""
    longest_ms = max((row.step_ms for row in rows if not math.isnan(row.step_ms)), default=0.0)
    write = partial(milliseconds, largest=longest_ms)
    table_rows = []
    for row in rows:
        table_rows.append(
            [
                str(row.rank),
                row.host,
                write(row.step_ms),
                write(row.compute_ms),
                write(row.communication_ms),
                write(row.exposed_communication_ms),
                write(row.wait_ms),
                write(row.data_wait_ms),
                write(row.host_idle_ms),
                percent(row.last_in),
                write(row.caused_wait_ms),
            ]
        )
    head = [
        "rank", "host", "step", "compute", "comm.", "exposed", "waits", "data wait", "host idle", "last in", "awaited",
    ]  # fmt: skip
    return Table(table_rows, "rl" + "r" * 9, head, hidden=hidden)


def hardware_section(report: Report, everything: bool) -> Section | None:
    """Build a row per GPU that was sampled, lowest clock first, and say what the samples cost."""
    gpus = report.facts.gpu_clocks
    if not gpus:
        return None
    shown, hidden = limit_rows(gpus, MAX_RANK_ROWS, everything)
    rows = []
    for one in shown:
        rows.append(
            [
                str(one.rank),
                _write_whole(one.mhz),
                _write_whole(one.highest_mhz),
                _write_whole(one.temperature_c),
                _write_whole(one.power_w),
                _write_whole(one.power_limit_w),
                percent(one.slowed),
                name_limits(one.limits),
            ]
        )
    head = ["rank", "MHz", "of", "deg C", "W", "of", "slowed", "held by"]
    table = Table(rows, "r" * 7 + "l", head, hidden=hidden)
    subtitle = "of each rank, while it worked: mean clock and power, highest temperature"
    return Section(
        "hardware", "GPUs", subtitle, [table, Lines(_describe_samples(report.facts.ranks_hardware), quiet=True)]
    )


def _write_whole(value: float | None) -> str:
    """Write a whole number; '' for one that is not known."""
    return "" if value is None else f"{value:,.0f}"


def _describe_samples(hardware: RanksHardware) -> list[str]:
    """Describe how many samples were taken, and the CPU time that one of them took."""
    samples = hardware.get("samples")
    cost_ms = hardware.get("sampling_ms")
    if np.isnan(samples).all() or np.isnan(cost_ms).all():
        return []
    most = counted(round(float(np.nanmax(samples))), "sample")
    return [f"{most} of a rank in a thread beside the steps, {np.nanmax(cost_ms):.2g} ms of CPU time each"]


def pipeline_section(report: Report, everything: bool) -> Section | None:
    """Build the table of each stage's own work and waiting, beside what the schedule makes of these times at best."""
    found = report.facts.pipeline
    if found is None:
        return None
    step_ms = max(stage.own_ms + stage.wait_ms for stage in found.stages)
    write = partial(milliseconds, largest=step_ms)
    shown, hidden = limit_rows(found.stages, MAX_RANK_ROWS, everything)
    rows = []
    for stage in shown:
        rows.append(
            [
                str(stage.stage + 1),
                str(stage.layers),
                write(stage.forward_ms),
                write(stage.backward_ms),
                write(stage.wait_ms),
                write(stage.ideal_wait_ms),
            ]
        )
    table = Table(
        rows,
        "rrrrrr",
        ["stage", "layers", "forward", "backward", "waits", "at best"],
        hidden=hidden,
    )
    subtitle = f"ms per step of {found.micro_batches} micro-batches; at best: waiting that the schedule requires"
    return Section("pipeline", "Pipeline", subtitle, [table, Lines(_describe_pipeline(found, step_ms))])


def _describe_pipeline(found: PipelineTimes, step_ms: float) -> list[str]:
    """Describe what the schedule costs with equal stages, and what it would take with these ones.

    Args:
        found: the stages' times.
        step_ms: a step of the stage that takes longest, waiting included.
    """
    write = partial(milliseconds, largest=step_ms)
    chunks = f" of {found.chunks} chunks" if found.chunks > 1 else ""
    slowest = max(found.stages, key=lambda stage: stage.own_ms)
    less = write(max(step_ms - found.ideal_ms, 0.0))
    ideal = f"with these times the schedule needs {write(found.ideal_ms)} ms, {less} ms less than measured"
    return [
        f"with equal stages{chunks}, the schedule leaves each idle for {percent(found.bubble)} of a step",
        f"stage {slowest.stage + 1} computes longest, {write(slowest.own_ms)} ms; {ideal}",
    ]


def collectives_section(report: Report, everything: bool) -> Section | None:
    """Build the table of collectives by kind and size: time in the kernel, transfer and waiting in it, time not
    overlapped with compute, bus bandwidth."""
    ranks = report.facts.ranks
    if ranks is None or not ranks.collectives:
        return None
    shown, hidden = limit_rows(ranks.collectives, MAX_COLLECTIVE_ROWS, everything)
    write = partial(milliseconds, largest=max(row.kernel_ms for row in shown))
    has_groups = len(ranks.groups) > 1
    table_rows = []
    for row in shown:
        name = row.name
        if row.algorithm and everything:
            name += f" ({row.algorithm})"
        table_rows.append(
            [
                name,
                row.group if has_groups else "",
                row.phase,
                str(row.group_size or ""),
                calls(row.per_step),
                "" if row.num_bytes is None else size(row.num_bytes),
                write(row.kernel_ms),
                write(row.transfer_ms),
                write(row.wait_ms),
                write(row.exposed_ms),
                _write_bandwidth(row.bus_gb_s),
            ]
        )
    head = [
        "collective", "group", "phase", "ranks", "calls", "each", "ms", "transfer", "waiting", "exposed", "bus GB/s",
    ]  # fmt: skip
    tables = [*_build_groups(ranks), Table(table_rows, "lllrrrrrrrr", head, hidden=hidden)]
    return Section("collectives", "Collectives", "ms per step, mean over ranks", tables)


def _write_bandwidth(gb_s: float | None) -> str:
    """Write a bandwidth; '' where it is not known, and '<0.001' for next to nothing."""
    if gb_s is None:
        return ""
    return significant(gb_s) if gb_s >= MIN_GB_S else f"<{MIN_GB_S}"


def _build_groups(ranks: RankComparison) -> list[Table]:
    """Build the table of what each dimension of the layout costs; nothing where there is only one."""
    if len(ranks.groups) < 2:
        return []
    write = partial(milliseconds, largest=max(row.busy_ms for row in ranks.groups))
    table_rows = []
    for row in ranks.groups:
        most = ""
        if row.most_exposed_rank is not None:
            most = f"{write(row.most_exposed_ms)} on rank {row.most_exposed_rank}"
        table_rows.append(
            [
                row.group or "unknown",
                calls(row.per_step),
                "" if row.num_bytes is None else size(row.num_bytes),
                write(row.busy_ms),
                write(row.exposed_ms),
                most,
            ]
        )
    return [Table(table_rows, "lrrrrr", ["group", "calls", "bytes", "ms", "exposed", "most exposed"])]


# --- what the run folder says of the whole run, of which a trace shows a few steps


def run_section(report: Report, everything: bool) -> Section | None:
    """Tell how the run ended, its speed without the profiler, the first step, skipped steps, losses."""
    run = report.facts.run
    learning = report.facts.learning
    if run is None or learning is None:
        return None
    texts = []
    if run.status.startswith(("failed:", "killed")):
        texts.append(run.status)
    if run.verdict_on_ranks not in run.status:
        texts.append(run.verdict_on_ranks)
    texts += _describe_speed(run)
    if learning.updates < learning.steps:
        skipped = learning.steps - learning.updates
        texts.append(f"{skipped:,} of {run.steps:,} steps skipped: a gradient was not finite")
    if learning.losses:
        texts.append(learning.losses)
    if learning.clipped:
        median = f"1/{learning.clipped:,.0f} of its norm (median)"
        cut = f"--clip-grad scales the gradient down in nearly every update, to {median}"
        texts.append(report.facts.in_words(cut))
    subtitle = f"{counted(run.steps, 'step')}, {run.status.partition(':')[0]}"
    return Section("run", "The whole run", subtitle, [Lines(texts)])


def _describe_speed(run: Run) -> list[str]:
    """Write the typical step with its rates, and how profiled steps and the first step compare with it."""
    texts = []
    if run.steady_step_ms is not None:
        speed = [f"typical step {milliseconds(run.steady_step_ms)} ms"]
        if run.tokens_per_second:
            speed.append(f"{count(run.tokens_per_second)} tokens/s")
        if run.model_tflops:
            speed.append(f"{flops(run.model_tflops * 1e12)}/s per rank")
        if run.mfu_causal and run.mfu_full:
            speed.append(f"MFU {percent(run.mfu_causal)} (all of attention counted: {percent(run.mfu_full)})")
        texts.append(", ".join(speed))
    if run.profiler_slowdown:
        slower = f"{run.profiler_slowdown:.2f} x the time of the steps before them"
        texts.append(f"profiled steps{run.on_rank} took {slower}")
    if run.first_step_ms is not None and run.steady_step_ms:
        times = run.first_step_ms / run.steady_step_ms
        texts.append(f"first step: {milliseconds(run.first_step_ms)} ms ({times:,.1f} x a typical step)")
    return texts


# --- the sections of a report in their order, and what could not be seen


def failure_section(report: Report, everything: bool) -> Section | None:
    """Build the section on why the job failed."""
    if report.failure is None:
        return None
    blocks: list[Block] = []
    for section in list_postmortem_sections(report.failure, everything):
        blocks.append(Lines([f"{section.title}:"], quiet=True))
        blocks.extend(section.blocks)
    return Section("failure", "The failure", describe_certainty(report.failure), blocks)


SECTIONS = (
    failure_section,
    step_section,
    findings_section,
    gains_section,
    every_step_section,
    phases_section,
    kernels_section,
    operators_section,
    roofline_section,
    memory_section,
    prediction_section,
    pipeline_section,
    ranks_section,
    hardware_section,
    collectives_section,
    run_section,
    checked_section,
)


def build_sections(report: Report, everything: bool) -> list[Section]:
    """Build all sections that have something to say."""
    made = (section(report, everything) for section in SECTIONS)
    return [section for section in made if section is not None]


def describe_confidence(report: Report) -> str:
    """Describe why the verdict may be believed; '' for an inconclusive one, which says itself why not."""
    verdict = report.verdict
    if verdict.bound == "inconclusive":
        return ""
    return f"{verdict.confidence} confidence: {verdict.why}"


def build_limitations(report: Report) -> list[str]:
    """List what could not be seen in any part, each sentence once; of other ranks only what the shown one does not
    say."""
    facts = report.facts
    critical = facts.critical
    texts = list(facts.gaps)
    if critical:
        texts += [*critical.trace.notes, *critical.time.notes, *critical.kernels.notes]
    for other in facts.ranks_seen:
        if other is critical:
            continue
        name = other.trace.source if other.time.rank is None else f"rank {other.time.rank}"
        notes = [*other.trace.notes, *other.time.notes]
        texts += [f"{name}: {note}" for note in notes if note not in texts]
    if facts.ranks:
        texts += facts.ranks.notes
    for snapshot in facts.snapshots:
        texts += snapshot.notes
    if facts.run:
        texts += facts.run.notes
    return list(dict.fromkeys(map(facts.in_words, texts)))
