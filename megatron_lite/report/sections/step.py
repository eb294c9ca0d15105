"""Where a step goes."""

import math
from collections.abc import Sequence

from megatron_lite.analysis.kernels.kernel_results import RankKernels, RooflineRow
from megatron_lite.analysis.predicted.predicted_results import Compared, ComparedMemory, ComparedTime
from megatron_lite.analysis.ranks.rank_results import CollectiveRow, RankRow, Ranks
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.report.section import Lines, Section, Table, first, with_some_value
from megatron_lite.report.text import GREY, ROW_COLORS, calls, fit, flops, milliseconds, percent, share
from megatron_lite.units import count, size

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
    of = f"{whose(time.rank)}{_explain_rank(report)}ms per step" + (
        f", mean of {steady} steady of {len(time.steps)}" if steady else ""
    )
    colors = [ROW_COLORS.get(row, GREY) for row, _ in step_rows(time)]
    whole = ("= a step", milliseconds(time.step_ms), "100%")
    table = Table([*rows, whole], "lrr", shares=[*shares, None], colors=colors)
    return Section("step", "Where a step goes", of, [table, Lines(_details(time, everything), quiet=True)])


def _explain_rank(report: Report) -> str:
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


# --- speed of light: how far from what the hardware can do, and where the most is lost


ROWS_SHOWN = 2
MIN_SHARE_OF_ROW = 0.01  # of a step
OPERATOR_WIDTH = 16  # of the terminal's columns: a shape that is cut says nothing


def roofline_section(report: Report, everything: bool) -> Section | None:
    """Arithmetic against the device's peak, tensor cores, then operators by what they lose, where limits are known."""
    rank = report.facts.critical
    if rank is None:
        return None
    told = [*_arithmetic(rank.kernels), *(_tensor_cores(rank.kernels) if rank.time.on_gpu else [])]
    least = 0.0 if everything else MIN_SHARE_OF_ROW * rank.time.step_ms
    rows = [row for row in rank.kernels.roofline if everything or row.ms >= least and row.bound_ms is not None]
    if not told and not rows:
        return None
    blocks = [Lines(told), *([_table(rows, everything)] if rows else [])]
    known = any(row.bound_ms is not None for row in rows)
    of = "operators that lose most against the hardware first" if known else "operators by shape" if rows else ""
    return Section("roofline", "Speed of light", whose(rank.time.rank) + of if of else "", blocks)


def _arithmetic(kernels: RankKernels) -> list[str]:
    if not kernels.achieved_tflops:
        return []
    of = "of products, attention and convolution per step"
    work = f"{flops(kernels.model_flops)} {of}: " if kernels.model_flops else ""
    if kernels.mfu is None or not kernels.peak_tflops:
        peak = f"{kernels.peak_dtype} peak" if kernels.peak_dtype else "peak"
        return [f"{work}{flops(kernels.achieved_tflops * 1e12)}/s; the {peak} of this device is not known"]
    peak = f"{percent(kernels.mfu)} of the device's {kernels.peak_tflops:,.4g} TFLOP/s in {kernels.peak_dtype}"
    return [f"{work}{flops(kernels.achieved_tflops * 1e12)}/s, {peak}"]


def _tensor_cores(kernels: RankKernels) -> list[str]:
    if not kernels.matrix_ms:
        return []
    maybe = kernels.maybe_tensor_core_ms / kernels.matrix_ms
    unsaid = f"; names of {percent(maybe)} do not say" if maybe > 0.005 else ""
    used = percent(kernels.tensor_core_ms / kernels.matrix_ms)
    of = f"{milliseconds(kernels.matrix_ms)} ms of products, attention and convolution"
    return [f"tensor cores: {used} of the {of}{unsaid}"]


def _table(rows: Sequence[RooflineRow], everything: bool) -> Table:
    shown, hidden = first(rows, ROWS_SHOWN, everything)
    largest = max(row.ms for row in shown)
    head = ["operator", "shape", "phase", "ms", "at best", "limit", "TFLOP/s", "GB/s", "reached"]
    body = [
        [
            row.operator if everything else fit(row.operator.removeprefix("aten::"), OPERATOR_WIDTH),
            row.shape,
            row.phase,
            milliseconds(row.ms, largest),
            milliseconds(row.bound_ms, largest),
            row.bound_by,
            f"{row.achieved_tflops:,.3g}" if row.flops else "",
            calls(row.achieved_gb_s) if row.num_bytes else "",
            percent(row.efficiency),
        ]
        for row in shown
    ]
    return with_some_value(Table(body, "lllrrlrrr", head, hidden=hidden))


# --- ranks beside each other: who waits for whom, and what communication costs


RANKS_SHOWN, COLLECTIVES_SHOWN, MISSING_SHOWN = 4, 2, 8
HEAD = ["rank", "host", "step", "compute", "comm.", "exposed", "waits", "data wait", "host idle", "last in", "awaited"]
MIN_GB_S = 0.001
CAUSES = {"compute": "computing", "data_wait": "waiting for data", "host": "a slow host", "copy": "copies"}


def ranks_section(report: Report, everything: bool) -> Section | None:
    """One line per rank; of many, those that others wait for most and least."""
    ranks = report.facts.ranks
    if ranks is None or len(ranks.rows) < 2:
        return None
    rows = list(ranks.rows) if everything else _choose_ranks(ranks)
    largest = max((row.step_ms for row in rows if not math.isnan(row.step_ms)), default=0.0)
    body = [
        [
            str(row.rank),
            row.host,
            *(
                milliseconds(value, largest)
                for value in (
                    row.step_ms,
                    row.compute_ms,
                    row.communication_ms,
                    row.exposed_communication_ms,
                    row.wait_ms,
                    row.data_wait_ms,
                    row.host_idle_ms,
                )
            ),
            percent(row.last_in),
            milliseconds(row.caused_wait_ms, largest),
        ]
        for row in rows
    ]
    table = with_some_value(Table(body, "rl" + "r" * 9, HEAD, hidden=len(ranks.rows) - len(rows)))
    told = Lines([*_straggler(ranks), *_missing(ranks)])
    return Section("ranks", "Ranks", "ms per step; waits: in collectives for others; awaited: by others", [told, table])


def _straggler(ranks: Ranks) -> list[str]:
    late = ranks.straggler
    if late is None:
        return []
    why = (
        f"it spends {milliseconds(late.cause_ms)} ms more than the others on {CAUSES.get(late.cause, late.cause)}"
        if late.cause
        else "no single quantity explains why"
    )
    last = "" if late.share_last is None else f", last in {percent(late.share_last)} of the collectives"
    where = f" in {late.phase}" if late.phase else ""
    return [
        f"rank {late.rank} makes the others wait {milliseconds(late.caused_wait_ms)} ms per step{where}{last}: {why}"
    ]


def _missing(ranks: Ranks) -> list[str]:
    if not ranks.missing:
        return []
    named = ", ".join(map(str, ranks.missing[:MISSING_SHOWN]))
    more = f" and {len(ranks.missing) - MISSING_SHOWN} more" if len(ranks.missing) > MISSING_SHOWN else ""
    return [f"no trace of rank{'s' if len(ranks.missing) > 1 else ''} {named}{more}"]


def _choose_ranks(ranks: Ranks) -> list[RankRow]:
    if len(ranks.rows) <= RANKS_SHOWN:
        return list(ranks.rows)
    awaited = sorted(ranks.rows, key=lambda row: -(row.caused_wait_ms or 0.0))
    kept = awaited[: RANKS_SHOWN // 2] + awaited[-(RANKS_SHOWN // 2) :]
    return [row for row in ranks.rows if row in kept]


def collectives_section(report: Report, everything: bool) -> Section | None:
    """By kind and size: time in the kernel, of it transfer and waiting, what is not hidden, bus bandwidth."""
    ranks = report.facts.ranks
    if ranks is None or not ranks.collectives:
        return None
    shown, hidden = first(ranks.collectives, COLLECTIVES_SHOWN, everything)
    largest = max(row.kernel_ms for row in shown)
    head = ["collective", "phase", "ranks", "calls", "each", "ms", "transfer", "waiting", "exposed", "bus GB/s"]
    body = [_collective(row, largest, everything) for row in shown]
    table = with_some_value(Table(body, "llrrrrrrrr", head, hidden=hidden))
    return Section("collectives", "Collectives", "ms per step, mean over ranks", [table])


def _collective(row: CollectiveRow, largest: float, everything: bool) -> list[str]:
    return [
        row.name + (f" ({row.algorithm})" if row.algorithm and everything else ""),
        row.phase,
        str(row.group_size or ""),
        calls(row.per_step),
        "" if row.num_bytes is None else size(row.num_bytes),
        *(milliseconds(value, largest) for value in (row.kernel_ms, row.transfer_ms, row.wait_ms, row.exposed_ms)),
        _bandwidth(row.bus_gb_s),
    ]


def _bandwidth(gb_s: float | None) -> str:
    if gb_s is None:
        return ""
    return f"{gb_s:,.3g}" if gb_s >= MIN_GB_S else f"<{MIN_GB_S}"


# --- what was predicted before the run, row by row beside what was measured


SMALL = 0.01  # of the peak: such categories stand together
OTHERS = "others"
MANIFOLD = 1.0  # difference from which on it is told as a factor


def prediction_section(report: Report, everything: bool) -> Section | None:
    """Memory with its categories; the step against the shortest possible one."""
    found = report.facts.predicted
    if found is None:
        return None
    blocks = [
        *_memory(found.memory, everything),
        *_time(found.time),
        *([Lines(found.notes, quiet=True)] if found.notes else []),
    ]
    return (
        Section("prediction", "Predicted against measured", _of(found.memory, found.time), blocks) if blocks else None
    )


def _of(memory: ComparedMemory | None, time: ComparedTime | None) -> str:
    rank = "" if memory is None or memory.rank is None else f"rank {memory.rank}, "
    return ", ".join(part for part in (f"{rank}{memory.source}" if memory else "", time.gpu if time else "") if part)


def _memory(memory: ComparedMemory | None, everything: bool) -> list:
    if memory is None:
        return []
    rows = [_bytes(row) for row in _merged(memory, everything)]
    table = Table([*rows, _bytes(memory.peak)], "lrrr", ["tensors at the peak", "predicted", "measured", "measured is"])
    measured = f", measured in {memory.measured_in}" if memory.measured_in else ""
    return [table, Lines([f"the peak was predicted at {memory.predicted_at}{measured}"], quiet=True)]


def _merged(memory: ComparedMemory, everything: bool) -> Sequence[Compared]:
    """Small categories as one row; all of them on demand."""
    least = 0 if everything else SMALL * memory.peak.measured
    large = [row for row in memory.categories if max(row.predicted, row.measured) >= least]
    small = [row for row in memory.categories if row not in large]
    rest = Compared(OTHERS, sum(row.predicted for row in small), sum(row.measured for row in small))
    return [*large, rest] if small else large


def _bytes(row: Compared) -> list[str]:
    return [row.name, size(row.predicted), size(row.measured), "" if row.name == OTHERS else _difference(row)]


def _difference(row: Compared) -> str:
    """'3.1% more', '2.4 x as much', 'as predicted', 'not predicted'."""
    if row.difference is None:
        return "not predicted" if row.measured else ""
    if abs(row.difference) < 0.0005:
        return "as predicted"
    if row.difference > MANIFOLD:
        return f"{1 + row.difference:,.1f} x as much"
    share = f"{abs(row.difference):.1%}" if abs(row.difference) < 0.0995 else percent(abs(row.difference))
    return f"{share} {'more' if row.difference > 0 else 'less'}"


def _time(time: ComparedTime | None) -> list:
    if time is None:
        return []
    rows = [_ms(row, time.step) for row in (*time.parts, time.step)]
    if time.tokens:
        rows.append(
            [
                time.tokens.name,
                count(time.tokens.predicted),
                count(time.tokens.measured),
                f"{percent(time.tokens.measured / time.tokens.predicted)} of the bound",
            ]
        )
    table = Table(rows, "lrrr", ["ms per step", "at best", "measured", "measured is"])
    told = (
        ["at best: each part at the hardware's peak, nothing in between; real steps take longer"] if time.parts else []
    )
    return [table, Lines([*told, *(f"not in the bound: {text}" for text in time.not_predicted)], quiet=True)]


def _ms(row: Compared, step: Compared) -> list[str]:
    times = f"{row.measured / row.predicted:.2f} x the bound" if row.predicted else ""
    return [row.name, milliseconds(row.predicted, step.measured), milliseconds(row.measured, step.measured), times]
