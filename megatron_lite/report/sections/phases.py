"""Phases: host time beside device time. The labels of a CPU timeline say where the host waited, not what costs."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.figures import PhaseTime, RankTime
from megatron_lite.report.numbers import milliseconds
from megatron_lite.report.section import Section, Table, first
from megatron_lite.report.sections.step import whose

PHASES_SHOWN = 6
WORTH_A_ROW = 0.003  # of a step


def phases_section(report: Report, everything: bool) -> Section | None:
    """In the order in which they happen; the longest ones where there are many. None for a single one, the step."""
    rank = report.facts.critical
    if rank is None or len(rank.time.phases) < 2:
        return None
    time = rank.time
    least = 0.0 if everything else WORTH_A_ROW * time.step_ms
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
