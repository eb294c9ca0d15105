"""Draws what `megatron-lite fit` found."""

from collections.abc import Iterator
from itertools import islice

from megatron_lite.formats.fit_record import ChangeName
from megatron_lite.planner.fit_results import FitReport, GpuRoom
from megatron_lite.planner.what_if import MARGIN
from megatron_lite.report.section import Block, Lines, Section, Table, build_share_table, section_lines
from megatron_lite.report.text import Style, percent, wrapped
from megatron_lite.units import counted, size

MAX_LINES_NAMED = 5
ADVICE = {
    ChangeName.RECOMPUTE: "torch.utils.checkpoint around each block",
    ChangeName.BF16: 'torch.autocast("cuda", torch.bfloat16) around forward and loss',
    ChangeName.FUSED: "fused=True of the optimizer",
    ChangeName.ONE_BY_ONE: "foreach=False of the optimizer",
    ChangeName.SHARED_STATE: "ZeroRedundancyOptimizer around the optimizer",
}


def fit_lines(report: FitReport, style: Style) -> list[str]:
    """Draw the whole answer: the verdict first, then what it rests on.

    Args:
        report: What was found.
        style: How the terminal may be written to.
    """
    lines = []
    for verdict in judge_rooms(report):
        lines += wrapped(style.bold(verdict))
    for section in list_sections(report):
        lines += ["", *section_lines(section, style)]
    return lines


def judge_rooms(report: FitReport) -> list[str]:
    """Say for each GPU whether the script fits."""
    if not report.rooms:
        return [f"PEAK {size(report.record.allocated_peak_bytes)} of tensors on the CPU"]
    return [_judge_room(room) for room in report.rooms]


def _judge_room(room: GpuRoom) -> str:
    name = room.processor.name
    peak = f"{size(room.peak_bytes)} of {size(room.processor.memory_bytes)}"
    if not room.fits:
        excess = size(-room.free_bytes)
        return f"DOES NOT FIT in one {name}: {peak}, {excess} too much"
    free = f"{size(room.free_bytes)} stay free"
    if room.is_tight:
        less = f"less than the {percent(MARGIN)} that CUDA, NCCL and the allocator may need"
        return f"MAY FIT in one {name}: {peak}; {free}, {less}"
    return f"FITS in one {name}: {peak}; {free}"


def list_sections(report: FitReport) -> Iterator[Section]:
    """List the sections below the verdict: the peak by category, changes that were walked, and what was not seen."""
    record = report.record
    parts = [(name, held) for name, held in record.categories.items() if held]
    table = build_share_table(parts, record.allocated_peak_bytes, size)
    allocated = f"tensors {size(record.allocated_peak_bytes)}"
    reserved = f"reserved by the caching allocator {size(record.reserved_peak_bytes)}"
    where = [f"peak in {record.where}", f"{allocated}, {reserved}", *_describe_ranks(report)]
    subtitle = f"the script, without data, in {report.seconds:.0f} s"
    yield Section("memory", "Memory at the peak", subtitle, [table, Lines(where)])
    yield from _list_ways(report)
    doubts = _list_doubts(report)
    if doubts:
        yield Section("doubts", "What the walk could not see", "", [Lines(doubts)])


def _describe_ranks(report: FitReport) -> list[str]:
    """Say which ranks of several were walked, and which one this is."""
    if report.ranks == 1:
        return []
    peaks = report.rank_peaks
    walked = ", ".join(f"{rank}: {size(peak_bytes)}" for rank, peak_bytes in sorted(peaks.items()))
    worst = max(peaks, key=lambda rank: peaks[rank])
    return [f"rank {worst} of {report.ranks}, the most of those walked ({walked})"]


def _list_ways(report: FitReport) -> Iterator[Section]:
    """List the batch and the changes that were walked."""
    blocks: list[Block] = []
    if report.largest is not None:
        largest = report.largest
        text = (
            f"batches of {largest.size} fit with {percent(MARGIN)} left free ({size(largest.peak_bytes)}); "
            f"the script's have {report.record.batch}"
        )
        blocks.append(Lines([text]))
    elif report.why_no_batch:
        blocks.append(Lines([f"the largest batch is not known: {report.why_no_batch}"], quiet=True))
    before_bytes = report.record.reserved_peak_bytes
    rows = []
    for change in report.changes:
        saved = percent((before_bytes - change.peak_bytes) / before_bytes)
        rows.append((ADVICE[change.name], size(change.peak_bytes), f"-{saved}"))
    if rows:
        blocks.append(Table(rows, "lrr"))
    if blocks:
        yield Section("changes", "With one change", "walked, each alone", blocks)


def _list_doubts(report: FitReport) -> list[str]:
    """List what was left out, and where a value decided."""
    record = report.record
    doubts = list(record.notes)
    doubts += _list_lines(record.branches, "decided by a value that only data has")
    doubts += _list_lines(record.copies, "copied values to the host that only data has; decisions by them are not seen")
    return doubts


def _list_lines(lines: dict[str, int], what: str) -> list[str]:
    """List lines of the script and what they did, and how many more did so."""
    shown = []
    for line, times in islice(lines.items(), MAX_LINES_NAMED):
        shown.append(f"{line} {what} ({counted(times, 'time')})")
    hidden = len(lines) - MAX_LINES_NAMED
    if hidden > 0:
        shown.append(f"{counted(hidden, 'more line')} {what}")
    return shown
