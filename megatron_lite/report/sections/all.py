"""The sections of a report in their order, and what could not be seen."""

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.kernels.kernel_results import OperatorRow, RankKernels
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.time.time_results import PhaseTime, RankTime
from megatron_lite.report.section import Card, Hint, Lines, Section, Table, first, with_some_value
from megatron_lite.report.sections.memory import memory_section
from megatron_lite.report.sections.step import (
    collectives_section,
    prediction_section,
    ranks_section,
    roofline_section,
    step_section,
    whose,
)
from megatron_lite.report.text import GREY, ROLE_COLORS, calls, flops, milliseconds, percent, share
from megatron_lite.units import count, size

# --- what runs: kernels by role, the largest ones, operators

ROLES_SHOWN, KERNELS_SHOWN, OPERATORS_SHOWN = 3, 3, 3


def kernels_section(report: Report, everything: bool) -> Section | None:
    """Time by role, then the largest kernels."""
    rank = report.facts.critical
    if rank is None or not rank.time.on_gpu or not rank.kernels.device_ms:
        return None
    of = f"{whose(rank.time.rank)}{milliseconds(rank.kernels.device_ms)} ms per step, parallel streams added up"
    roles = _roles(rank.kernels, rank.kernels.device_ms, everything)
    return Section("kernels", "Kernels", of, [roles, _largest(rank.kernels, everything)])


def _roles(kernels: RankKernels, total: float, everything: bool) -> Table:
    """Time by role, as a share of `total` ms."""
    roles = sorted(((role, ms) for role, ms in kernels.roles.items() if ms > 0), key=lambda pair: -pair[1])
    shown, hidden = first(roles, ROLES_SHOWN, everything)
    pairs = [(str(role), ms) for role, ms in shown]
    if hidden:
        pairs.append((f"{hidden} other roles", sum(ms for _, ms in roles[len(shown) :])))
    return Table(
        [(name, milliseconds(ms, total), percent(share(ms, total))) for name, ms in pairs],
        "lrr",
        shares=[share(ms, total) for _, ms in pairs],
        colors=[*(ROLE_COLORS[role] for role, _ in shown), GREY],
    )


def _largest(kernels: RankKernels, everything: bool) -> Table:
    shown, hidden = first(kernels.rows, KERNELS_SHOWN, everything)
    rows = [
        [
            row.short or row.name,
            row.phase,
            calls(row.per_step),
            milliseconds(row.ms, kernels.device_ms),
            percent(row.share),
            row.precision,
            row.tensor_cores.value,
        ]
        for row in shown
    ]
    return with_some_value(
        Table(rows, "llrrrll", ["kernel", "phase", "calls", "ms", "share", "type", "tensor cores"], hidden=hidden)
    )


def operators_section(report: Report, everything: bool) -> Section | None:
    """Host operators by their own time: what counts where there is no GPU; beside a GPU only where all is wanted."""
    rank = report.facts.critical
    if rank is None or not rank.kernels.operators or (rank.time.on_gpu and not everything):
        return None
    shown, hidden = first(rank.kernels.operators, OPERATORS_SHOWN, everything)
    largest = max(row.self_ms for row in shown)
    last = "on device" if rank.time.on_gpu else "of step"
    rows = [
        [
            row.name,
            str(row.role),
            row.phase,
            calls(row.per_step),
            milliseconds(row.self_ms, largest),
            _last(row, rank, largest),
        ]
        for row in shown
    ]
    of = f"{whose(rank.time.rank)}ms per step on the host, without what they call"
    table = with_some_value(
        Table(rows, "lllrrr", ["operator", "role", "phase", "calls", "own time", last], hidden=hidden)
    )
    roles = [] if rank.time.on_gpu else [_roles(rank.kernels, sum(rank.kernels.roles.values()), everything)]
    return Section("operators", "Operators", of, [*roles, table])


def _last(row: OperatorRow, rank: RankFacts, largest: float) -> str:
    return milliseconds(row.device_ms, largest) if rank.time.on_gpu else percent(share(row.self_ms, rank.time.step_ms))


# --- what the run folder says of the whole run, of which a trace shows a few steps


def run_section(report: Report, everything: bool) -> Section | None:
    """Speed without the profiler, the first step, skipped steps, how it ended."""
    run = report.facts.run
    if run is None:
        return None
    return Section(
        "run",
        "The whole run",
        f"{run.steps:,} steps, {run.status.partition(':')[0]}",
        [Lines([*_failure(run), *_speed(run), *_profiled(run), *_first(run), *_learned(run)])],
    )


def _failure(run: Run) -> list[str]:
    ended = [run.status] if run.status.startswith(("failed:", "killed")) else []
    return [*ended, run.verdict_on_ranks] if run.verdict_on_ranks not in run.status else ended


def _speed(run: Run) -> list[str]:
    if run.steady_step_ms is None:
        return []
    parts = [
        f"ordinary step {milliseconds(run.steady_step_ms)} ms",
        f"{count(run.tokens_per_second)} tokens/s" if run.tokens_per_second else "",
        f"{flops(run.model_tflops * 1e12)}/s per rank" if run.model_tflops else "",
        f"MFU {percent(run.mfu_causal)} (all of attention counted: {percent(run.mfu_full)})"
        if run.mfu_causal and run.mfu_full
        else "",
    ]
    return [", ".join(part for part in parts if part)]


def _profiled(run: Run) -> list[str]:
    slower = run.profiler_slowdown
    return (
        [f"inside the profiled window a step{run.on_rank} took {slower:.2f} times as long as before it"]
        if slower
        else []
    )


def _first(run: Run) -> list[str]:
    if run.first_step_ms is None or not run.steady_step_ms:
        return []
    times = run.first_step_ms / run.steady_step_ms
    return [f"first step {milliseconds(run.first_step_ms)} ms, as long as {times:,.1f} ordinary ones"]


def _learned(run: Run) -> list[str]:
    learning = measure_learning(run)
    skipped = learning.steps - learning.updates
    told = (
        f"{skipped:,} of {run.steps:,} steps skipped: a gradient was not finite" if skipped else "",
        learning.losses,
        f"the gradient norm is cut in every update, to 1/{learning.clipped:,.0f} in the median (--clip-grad)"
        if learning.clipped
        else "",
    )
    return [one for one in told if one]


# --- phases: host time beside device time. The labels of a CPU timeline say where the host waited, not what costs

PHASES_SHOWN = 6
MIN_SHARE_OF_ROW = 0.003  # of a step


def phases_section(report: Report, everything: bool) -> Section | None:
    """In the order in which they happen; the longest ones where there are many. None for a single one, the step."""
    rank = report.facts.critical
    if rank is None or len(rank.time.phases) < 2:
        return None
    time = rank.time
    least = 0.0 if everything else MIN_SHARE_OF_ROW * time.step_ms
    long_enough = [phase for phase in time.phases if max(phase.device_ms, phase.host_ms) >= least]
    longest = sorted(long_enough, key=lambda phase: -max(phase.device_ms, phase.host_ms))
    shown, hidden = first(longest, PHASES_SHOWN, everything)
    phases = [phase for phase in time.phases if phase in shown]
    table = _on_gpu(time, phases) if time.on_gpu else _on_cpu(time, phases)
    of = "ms per step; device time by what each phase launched" if time.on_gpu else "ms per step"
    return Section(
        "phases",
        "Phases",
        whose(time.rank) + of,
        [Table(table.rows, table.align, table.head, hidden=hidden + len(time.phases) - len(long_enough))],
    )


def _on_gpu(time: RankTime, phases: list[PhaseTime]) -> Table:
    head = ["phase", "on host", "on device", "compute", "communication", "copies", "kernels", "queue lag"]
    rows = [
        [
            phase.name,
            *(
                milliseconds(value, time.step_ms)
                for value in (phase.host_ms, phase.device_ms, phase.compute_ms, phase.communication_ms, phase.copy_ms)
            ),
            f"{phase.kernels:,.0f}",
            milliseconds(phase.lag_ms, time.step_ms),
        ]
        for phase in phases
    ]
    return Table(rows, "lrrrrrrr", head)


def _on_cpu(time: RankTime, phases: list[PhaseTime]) -> Table:
    rows = [
        [
            phase.name,
            *(milliseconds(value, time.step_ms) for value in (phase.host_ms, phase.compute_ms, phase.communication_ms)),
        ]
        for phase in phases
    ]
    return Table(rows, "lrrr", ["phase", "time", "operators", "communication"])


# --- findings, most costly first: what, cost, evidence, what to try, what it can bring at most

IN_FULL, NAMED, EVIDENCE_SHOWN = 3, 7, 2


def format_cost(cost_ms: float | None, cost_bytes: int | None) -> str:
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
    gain = format_cost(finding.gain_ms, finding.gain_bytes)
    evidence = [one.text + (f" ({one.where})" if one.where else "") for one in finding.evidence]
    flags = [flag for flag in finding.flags if flag not in finding.advice]
    return Card(
        number=number,
        code=finding.code,
        title=("" if finding.certain else "likely: ") + finding.title + rank,
        cost=format_cost(finding.cost_ms, finding.cost_bytes),
        evidence=evidence if everything else evidence[: EVIDENCE_SHOWN if number == 1 else 1],
        advice=": ".join([finding.advice, *([", ".join(flags)] if flags else [])])
        + (f" (saves at most {gain})" if gain else ""),
        in_full=everything or number <= IN_FULL,
    )


# --- the sections of a report in their order, and what could not be seen

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


def build_sections(report: Report, everything: bool) -> list[Section]:
    """Those that have something to say."""
    made = (section(report, everything) for section in SECTIONS)
    return [section for section in made if section is not None]


def describe_confidence(report: Report) -> str:
    """Why the verdict may be believed; '' for an inconclusive one, which says itself why not."""
    verdict = report.verdict
    return "" if verdict.bound == "inconclusive" else f"{verdict.confidence} confidence: {verdict.why}"


def build_limitations(report: Report) -> list[str]:
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
