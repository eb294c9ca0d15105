"""Where a step goes."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.report.colors import GREY, ROW_COLORS
from megatron_lite.report.numbers import milliseconds, percent, share
from megatron_lite.report.section import Lines, Section, Table

NOTHING = 0.0005  # of a step: its number would read 0
TITLES_ON_CPU = {
    "compute": "operators",
    "exposed_communication": "waiting for communication",
    "host": "Python between operators",
    "sync": "synchronisation",
}
SITES_SHOWN = 1
MIN_SHARE_SHOWN = 0.02  # of a step


def row_title(row: str, on_gpu: bool) -> str:
    """A row's name; on a CPU there is no device that could wait."""
    return ROW_TITLES.get(row, row) if on_gpu else TITLES_ON_CPU.get(row, ROW_TITLES.get(row, row))


def whose(rank: int | None) -> str:
    """'rank 3, ', or nothing for a file that does not say."""
    return "" if rank is None else f"rank {rank}, "


def step_rows(time: RankTime) -> list[tuple[str, float]]:
    """(row, ms): compute first, then losses by size, the unexplained last. Together they are the step."""
    losses = [
        row for row, ms in time.rows.items() if ms > NOTHING * time.step_ms and row not in ("compute", "unexplained")
    ]
    order = ["compute", *sorted(losses, key=lambda row: -time.rows[row]), "unexplained"]
    return [(row, _shown(time.rows.get(row, 0.0), time.step_ms)) for row in order]


def _shown(ms: float, step_ms: float) -> float:
    return ms if abs(ms) > NOTHING * step_ms else 0.0


def step_section(report: Report, everything: bool) -> Section | None:
    """Rows that sum to the step."""
    rank = report.facts.critical
    if rank is None or not rank.time.steps:
        return None
    time = rank.time
    rows = [
        (row_title(row, time.on_gpu), milliseconds(ms, time.step_ms), percent(share(ms, time.step_ms)))
        for row, ms in step_rows(time)
    ]
    shares = [share(ms, time.step_ms) for _, ms in step_rows(time)]
    steady = len(time.steady_steps)
    of = f"{whose(time.rank)}{_chosen(report)}ms per step" + (
        f", mean of {steady} steady of {len(time.steps)}" if steady else ""
    )
    colors = [ROW_COLORS.get(row, GREY) for row, _ in step_rows(time)]
    whole = ("= a step", milliseconds(time.step_ms), "100%")
    table = Table([*rows, whole], "lrr", shares=[*shares, None], colors=colors)
    return Section("step", "Where a step goes", of, [table, Lines(_details(time, everything), quiet=True)])


def _chosen(report: Report) -> str:
    """Why this rank of several; the file's name where ranks are not known."""
    facts = report.facts
    if len(facts.ranks_seen) < 2:
        return ""
    return f"{facts.critical.trace.source}, " if facts.critical.time.rank is None else "the one that waits least, "


def _details(time: RankTime, everything: bool) -> list[str]:
    return [*_device(time), *_syncs(time, everything), *_hosts(time, everything)]


def _device(time: RankTime) -> list[str]:
    lines = []
    if time.overlap is not None:
        took = milliseconds(time.communication_ms, time.step_ms)
        lines.append(f"communication: {took} ms, {percent(time.overlap)} of it hidden by compute")
    if time.on_gpu and time.launches:
        bound = ": the host is slow" if time.launch_bound else ""
        lines.append(
            f"kernels: {time.launches:,.0f} per step; medians: {time.median_kernel_us:,.1f} us each, "
            f"a launch every {time.median_launch_interval_us:,.1f} us, "
            f"{time.median_queue_us:,.1f} us in the queue{bound}"
        )
    return lines


def _syncs(time: RankTime, everything: bool) -> list[str]:
    """With what they cost: the device's idle time; without a device the host's."""
    costs = [(site, site.idle_ms if time.on_gpu else site.host_ms) for site in time.syncs]
    shown = [(site, ms) for site, ms in costs if everything or ms > MIN_SHARE_SHOWN * time.step_ms]
    what = "device idle" if time.on_gpu else "on the host"
    return [
        f"{site.call}{_by(site.operator, site.frame)}{_in(site.phase)}: {site.per_step:,.3g} per step, "
        f"{milliseconds(ms, time.step_ms)} ms {what}"
        for site, ms in shown[: None if everything else SITES_SHOWN]
    ]


def _hosts(time: RankTime, everything: bool) -> list[str]:
    sites = [
        site for site in time.hosts if time.on_gpu and (everything or site.idle_ms > MIN_SHARE_SHOWN * time.step_ms)
    ]
    return [
        f"device idle {milliseconds(site.idle_ms, time.step_ms)} ms while the host was busy with "
        f"{site.what or 'Python'}{_in(site.phase)}"
        for site in sites[: None if everything else SITES_SHOWN]
    ]


def _by(operator: str, frame: str) -> str:
    named = ", ".join(part for part in (operator, frame) if part)
    return f" by {named}" if named else ""


def _in(phase: str) -> str:
    return f" in {phase}" if phase else ""
