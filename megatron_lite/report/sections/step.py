"""Where the time of a step goes: its rows, phases, kernels, operators, and how far all that is from the hardware's
limits."""

from collections.abc import Sequence
from functools import partial

from megatron_lite.analysis.kernels.kernel_results import CounterUse, RankKernels, RooflineRow
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import ROW_TITLES, PhaseTime, RankTime, SyncSite
from megatron_lite.report import palette
from megatron_lite.report.section import READS_AS_ZERO, Lines, Section, Table, build_share_table, limit_rows
from megatron_lite.report.text import calls, fit, flops, milliseconds, percent, share
from megatron_lite.units import counted, significant

TITLES_ON_CPU = {
    "compute": "operators",
    "exposed_communication": "waiting for communication",
    "host": "Python between operators",
    "sync": "synchronization",
}
MAX_SITE_ROWS = 1
MIN_SHARE_OF_SITE = 0.02  # of a step


def row_title(row: str, on_gpu: bool) -> str:
    """Name a row of a step for readers; on a CPU there is no device that could wait."""
    title = ROW_TITLES.get(row, row)
    return title if on_gpu else TITLES_ON_CPU.get(row, title)


def name_rank(rank: int | None, facts: Facts) -> str:
    """Name a rank, 'rank 3, '; '' for a file that does not say its rank and for the only rank."""
    if rank is None or facts.has_one_rank:
        return ""
    return f"rank {rank}, "


def step_section(report: Report, everything: bool) -> Section | None:
    """Build the rows that sum to the step: compute first, then losses by size, the unexplained last."""
    facts = report.facts
    rank = facts.critical
    if rank is None or not rank.time.steps:
        return None
    time = rank.time
    which = ""
    if len(facts.ranks_seen) > 1:
        which = f"{rank.trace.source}, " if time.rank is None else "the one that waits least for others, "
    steady = len(time.steady_steps)
    mean = ""
    if steady:
        mean = f", mean of {steady} steady of {len(time.steps)}"
    subtitle = f"{name_rank(time.rank, facts)}{which}ms per step{mean}"
    details = [*_describe_device_work(time), *_describe_sites(time, everything)]
    return Section(
        "step",
        "Where a step goes",
        subtitle,
        [_build_row_table(time), Lines(details, quiet=True)],
    )


def _build_row_table(time: RankTime) -> Table:
    """Build the table of a step's rows with their sum in its last line, ms per step."""
    write = partial(milliseconds, largest=time.step_ms)
    parts = []
    colors = []
    for row in _order_rows(time):
        parts.append((row_title(row, time.on_gpu), time.rows.get(row, 0.0)))
        colors.append(palette.ROWS.get(row, palette.GREY))
    table = build_share_table(parts, time.step_ms, write)
    rows = [*table.rows, ("= a step", write(time.step_ms), "100%")]
    return Table(rows, "lrr", shares=[*table.shares, None], colors=colors)


def _order_rows(time: RankTime) -> list[str]:
    """Order the rows of a step: compute, losses by size, the unexplained; those of next to no time are left out."""
    least_ms = READS_AS_ZERO * time.step_ms
    losses = []
    for row, ms in time.rows.items():
        if ms > least_ms and row not in ("compute", "unexplained"):
            losses.append(row)
    losses.sort(key=lambda row: -time.rows[row])
    order = ["compute", *losses]
    # it is below zero where the other rows sum to more than the step
    if abs(time.rows.get("unexplained", 0.0)) > least_ms:
        order.append("unexplained")
    return order


def _describe_device_work(time: RankTime) -> list[str]:
    """Write how much communication is overlapped, and how fast the host launches kernels, where that is known."""
    details = []
    if time.overlap is not None:
        took = milliseconds(time.communication_ms, largest=time.step_ms)
        details.append(f"communication: {took} ms, {percent(time.overlap)} of it overlapped with compute")
    if time.on_gpu and time.launches:
        bound = ": the host is slow" if time.launch_bound else ""
        details.append(
            f"kernels: {time.launches:,.0f} per step; medians: {time.median_kernel_us:,.1f} us each, "
            f"a launch every {time.median_launch_interval_us:,.1f} us, "
            f"{time.median_queue_us:,.1f} us in the queue{bound}"
        )
    return details


def _describe_sites(time: RankTime, everything: bool) -> list[str]:
    """Write where the host waits and works, with the device's idle time that it costs; without a device the host's."""
    least_ms = -1.0 if everything else MIN_SHARE_OF_SITE * time.step_ms
    limit = None if everything else MAX_SITE_ROWS
    syncs = []
    for site in time.syncs:
        ms = site.idle_ms if time.on_gpu else site.host_ms
        if ms > least_ms:
            syncs.append(_describe_sync(site, time))
    hosts = []
    for host in time.hosts if time.on_gpu else ():
        if host.idle_ms > least_ms:
            idle = milliseconds(host.idle_ms, time.step_ms)
            where = f" in {host.phase}" if host.phase else ""
            hosts.append(f"device idle {idle} ms while the host was busy with {host.what or 'Python'}{where}")
    return [*syncs[:limit], *hosts[:limit]]


def _describe_sync(site: SyncSite, time: RankTime) -> str:
    """Describe a call that waits for the device: by whom, where, how often, and what it costs."""
    text = site.call
    callers = [part for part in (site.operator, site.frame) if part]
    if callers:
        text += f" by {', '.join(callers)}"
    if site.phase:
        text += f" in {site.phase}"
    cost = f"{milliseconds(site.host_ms, time.step_ms)} ms on the host"
    if time.on_gpu:
        cost = f"{milliseconds(site.idle_ms, time.step_ms)} ms device idle"
    return f"{text}: {significant(site.per_step)} per step, {cost}"


# --- phases: host time beside device time. The labels of a CPU timeline say where the host waited, not what costs

MAX_PHASE_ROWS = 6
MIN_SHARE_OF_PHASE = 0.003  # of a step


def phases_section(report: Report, everything: bool) -> Section | None:
    """Build a row per phase, in the order in which they happen; the longest ones where there are many. None for a
    single phase, the step."""
    rank = report.facts.critical
    if rank is None or len(rank.time.phases) < 2:
        return None
    time = rank.time
    least_ms = 0.0 if everything else MIN_SHARE_OF_PHASE * time.step_ms
    long_enough = [phase for phase in time.phases if _measure_longer(phase) >= least_ms]
    longest = sorted(long_enough, key=lambda phase: -_measure_longer(phase))
    shown, hidden = limit_rows(longest, MAX_PHASE_ROWS, everything)
    hidden += len(time.phases) - len(long_enough)
    head = ["phase", "time", "operators", "communication"]
    unit = "ms per step"
    if time.on_gpu:
        head = [
            "phase",
            "on host",
            "on device",
            "compute",
            "communication",
            "copies",
            "kernels",
            "queue lag",
        ]
        unit += "; device time belongs to the phase that launched it"
    rows = [_build_phase_row(phase, time) for phase in time.phases if phase in shown]
    table = Table(rows, "l" + "r" * (len(head) - 1), head, hidden=hidden)
    return Section("phases", "Phases", name_rank(time.rank, report.facts) + unit, [table])


def _measure_longer(phase: PhaseTime) -> float:
    """Measure the longer of a phase's times, on the device and on the host, in ms per step."""
    return max(phase.device_ms, phase.host_ms)


def _build_phase_row(phase: PhaseTime, time: RankTime) -> list[str]:
    """Write a phase's times, ms per step; a column of which the step has nothing stays empty."""
    write = partial(milliseconds, largest=time.step_ms)
    cells = [phase.name, write(phase.host_ms)]
    if time.on_gpu:
        cells.append(write(phase.device_ms))
    cells.append(write(phase.compute_ms))
    cells.append(write(phase.communication_ms) if time.communication_ms else "")
    if time.on_gpu:
        cells.append(write(phase.copy_ms) if time.copy_ms else "")
        cells.append(f"{phase.kernels:,.0f}")
        cells.append(write(phase.lag_ms))
    return cells


# --- what runs: kernels by role, the largest ones, operators

MAX_ROLES = 3  # rows
MAX_KERNEL_ROWS = 3  # rows
MAX_OPERATORS = 3  # rows


def kernels_section(report: Report, everything: bool) -> Section | None:
    """Build the table of the device's time by role, then that of the largest kernels. None without kernels."""
    rank = report.facts.critical
    if rank is None or not rank.time.on_gpu or not rank.kernels.device_ms:
        return None
    kernels = rank.kernels
    shown, hidden = limit_rows(kernels.rows, MAX_KERNEL_ROWS, everything)
    rows = []
    for row in shown:
        rows.append(
            [
                row.short or row.name,
                row.phase,
                calls(row.per_step),
                milliseconds(row.ms, kernels.device_ms),
                percent(row.share),
                row.precision,
                row.tensor_cores.value,
            ]
        )
    head = ["kernel", "phase", "calls", "ms", "share", "type", "tensor cores"]
    largest = Table(rows, "llrrrll", head, hidden=hidden)
    total = f"{milliseconds(kernels.device_ms)} ms per step, sum over parallel streams"
    subtitle = name_rank(rank.time.rank, report.facts) + total
    return Section(
        "kernels",
        "Kernels",
        subtitle,
        [_build_role_table(kernels, kernels.device_ms, everything), largest],
    )


def _build_role_table(kernels: RankKernels, total_ms: float, everything: bool) -> Table:
    """Build the table of time by role.

    Args:
        kernels: the roles and their times.
        total_ms: the time that is 100%.
        everything: show all roles.
    """
    ms_by_role = {role: ms for role, ms in kernels.roles.items() if ms > 0}
    longest_first = sorted(ms_by_role, key=lambda role: -ms_by_role[role])
    shown, hidden = limit_rows(longest_first, MAX_ROLES, everything)
    parts = []
    colors = []
    for role in shown:
        parts.append((str(role), ms_by_role[role]))
        colors.append(palette.ROLES[role])
    if hidden:
        other_ms = sum(ms_by_role[role] for role in longest_first[len(shown) :])
        parts.append((f"{hidden} other roles", other_ms))
        colors.append(palette.GREY)
    write = partial(milliseconds, largest=total_ms)
    return build_share_table(parts, total_ms, write, colors)


def operators_section(report: Report, everything: bool) -> Section | None:
    """Build the table of host operators by their own time: what counts where there is no GPU; beside a GPU only where
    all is wanted."""
    rank = report.facts.critical
    if rank is None or not rank.kernels.operators:
        return None
    on_gpu = rank.time.on_gpu
    if on_gpu and not everything:
        return None
    shown, hidden = limit_rows(rank.kernels.operators, MAX_OPERATORS, everything)
    largest_ms = max(row.self_ms for row in shown)
    rows = []
    for row in shown:
        own = milliseconds(row.self_ms, largest_ms)
        last = percent(share(row.self_ms, rank.time.step_ms))
        if on_gpu:
            last = milliseconds(row.device_ms, largest_ms)
        rows.append([row.name, str(row.role), row.phase, calls(row.per_step), own, last])
    head = [
        "operator",
        "role",
        "phase",
        "calls",
        "own time",
        "on device" if on_gpu else "of step",
    ]
    tables = [Table(rows, "lllrrr", head, hidden=hidden)]
    if not on_gpu:
        host_ms = sum(rank.kernels.roles.values())
        tables.insert(0, _build_role_table(rank.kernels, host_ms, everything))
    subtitle = f"{name_rank(rank.time.rank, report.facts)}self time on the host, ms per step"
    return Section("operators", "Operators", subtitle, tables)


# --- speed of light: how far from what the hardware can do, and where the most is lost

MAX_SHAPE_ROWS = 2
MIN_SHARE_OF_SHAPE = 0.01  # of a step
OPERATOR_WIDTH = 16  # of the terminal's columns: a shape that is cut says nothing


def roofline_section(report: Report, everything: bool) -> Section | None:
    """Build the lines of arithmetic against the device's peak and of tensor cores, then the table of operators by what
    they lose to the hardware's limits."""
    rank = report.facts.critical
    if rank is None:
        return None
    rates = _describe_rates(rank)
    least_ms = MIN_SHARE_OF_SHAPE * rank.time.step_ms
    rows = list(rank.kernels.roofline)
    if not everything:
        rows = [row for row in rows if row.ms >= least_ms and row.bound_ms is not None]
    if not rows:
        return Section("roofline", "Speed of light", "", [Lines(rates)]) if rates else None
    subtitle = "operators by shape"
    if any(row.bound_ms is not None for row in rows):
        subtitle = "operators with the most time above the hardware's limit first"
    subtitle = name_rank(rank.time.rank, report.facts) + subtitle
    return Section(
        "roofline",
        "Speed of light",
        subtitle,
        [Lines(rates), _build_shape_table(rows, everything)],
    )


def _describe_rates(rank: RankFacts) -> list[str]:
    """Write the arithmetic that was achieved beside the device's peak, and the use of tensor cores, where known."""
    kernels = rank.kernels
    products = "of products, attention and convolution"
    rates = []
    if kernels.achieved_tflops:
        work = ""
        if kernels.model_flops:
            work = f"{flops(kernels.model_flops)} {products} per step: "
        rates.append(f"{work}{flops(kernels.achieved_tflops * 1e12)}/s{_describe_peak(kernels)}")
    if rank.time.on_gpu and kernels.matrix_ms:
        used = percent(kernels.tensor_core_ms / kernels.matrix_ms)
        unknown = kernels.maybe_tensor_core_ms / kernels.matrix_ms
        doubt = f"; unknown for {percent(unknown)}" if unknown > 0.005 else ""
        rates.append(f"tensor cores: {used} of the {milliseconds(kernels.matrix_ms)} ms {products}{doubt}")
    measured = kernels.describe_counters()
    if measured:
        rates.append(measured)
    for counter in kernels.counters:
        rates.append(_describe_counter(counter))
    return rates


def _describe_counter(counter: CounterUse) -> str:
    """Write a counter's mean, and what it is while kernels of one role run."""
    parts = [f"{significant(counter.mean)} over {counted(counter.samples, 'sample')}"]
    if counter.working is not None:
        parts.append(f"{significant(counter.working)} while the device works")
    parts += [f"{significant(value)} in {role}" for role, value in counter.by_role.items()]
    return f"{counter.name}: {', '.join(parts)}"


def _describe_peak(kernels: RankKernels) -> str:
    """Write the share of the device's peak that was reached, as the end of a sentence."""
    if kernels.mfu is None or not kernels.peak_tflops:
        name = f"{kernels.peak_dtype} peak" if kernels.peak_dtype else "peak"
        return f"; the {name} of this device is not known"
    tflops = f"{significant(kernels.peak_tflops, 4)} TFLOP/s in {kernels.peak_dtype}"
    return f", {percent(kernels.mfu)} of the device's {tflops}"


def _build_shape_table(rows: Sequence[RooflineRow], everything: bool) -> Table:
    """Build a row per operator and shape: its time, the least time that the hardware allows, and its rates."""
    shown, hidden = limit_rows(rows, MAX_SHAPE_ROWS, everything)
    largest_ms = max(row.ms for row in shown)
    head = [
        "operator",
        "shape",
        "phase",
        "ms",
        "at best",
        "limit",
        "TFLOP/s",
        "GB/s",
        "reached",
    ]
    table_rows = []
    for row in shown:
        name = row.operator if everything else fit(row.operator.removeprefix("aten::"), OPERATOR_WIDTH)
        table_rows.append(
            [
                name,
                row.shape,
                row.phase,
                milliseconds(row.ms, largest_ms),
                milliseconds(row.bound_ms, largest_ms),
                row.bound_by,
                significant(row.achieved_tflops) if row.flops else "",
                calls(row.achieved_gb_s) if row.num_bytes else "",
                percent(row.efficiency),
            ]
        )
    return Table(table_rows, "lllrrlrrr", head, hidden=hidden)
