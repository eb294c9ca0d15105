"""Errors of GPUs that were sampled beside the steps, as events of a job."""

from collections.abc import Iterator, Mapping

from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.run_record import MAX_RANKS
from megatron_lite.formats.step_records import HardwareRecord, RankInterval, RankNumbers
from megatron_lite.postmortem.evidence import EventKind, LogEvent

MAX_HARDWARE_EVENTS = 100  # of one file


def find_gpu_errors(source: str, interval: RankInterval) -> Iterator[LogEvent]:
    """Yield Xid events and uncorrected memory errors that a line of all ranks tells of.

    Args:
        source: file and line.
        interval: the line.
    """
    errors = [*interval.hardware.get("xids", []), *interval.hardware.get("ecc_uncorrected", [])]
    if not any(errors):
        return
    ranks = min(len(interval.step_ms), MAX_RANKS)
    span = _describe_span(interval.iterations)
    for rank in range(ranks):
        xids = _get_number(interval.hardware, "xids", rank, ranks)
        last_xid = _get_number(interval.hardware, "last_xid", rank, ranks)
        uncorrected = _get_number(interval.hardware, "ecc_uncorrected", rank, ranks)
        if xids or uncorrected:
            figures = HardwareFigures(xids=xids, last_xid=last_xid, ecc_uncorrected=uncorrected)
            yield from _describe_errors(source, rank, span, figures)


def find_own_gpu_errors(source: str, record: HardwareRecord) -> Iterator[LogEvent]:
    """Yield the same of a line of one rank.

    Args:
        source: file and line.
        record: the line.
    """
    if record.rank < MAX_RANKS:
        yield from _describe_errors(source, record.rank, _describe_span(record.iterations), record.figures)


def _describe_errors(source: str, rank: int, span: str, figures: HardwareFigures) -> Iterator[LogEvent]:
    """Yield what the figures of one rank tell of errors."""
    if figures.xids:
        last_xid = None if figures.last_xid is None else int(figures.last_xid)
        which = "" if last_xid is None else f", most telling {last_xid}"
        text = f"{span}: the driver told of {figures.xids:.0f} Xid events of the GPU of rank {rank}{which}"
        yield LogEvent(kind=EventKind.XID, source=source, text=text, rank=rank, code=last_xid, count=int(figures.xids))
    if figures.ecc_uncorrected:
        text = f"{span}: {figures.ecc_uncorrected:.0f} uncorrected memory errors of the GPU of rank {rank}"
        yield LogEvent(kind=EventKind.DEVICE_ERROR, source=source, text=text, rank=rank)


def _describe_span(iterations: tuple[int, int]) -> str:
    """Name the first and the last iteration."""
    first, last = iterations
    return f"iterations {first}-{last}"


def _get_number(figures: Mapping[str, RankNumbers], name: str, rank: int, ranks: int) -> float | None:
    """A rank's number of a list that has one for each rank, or one for all; None for anything else."""
    numbers = figures.get(name, [])
    if len(numbers) == 1:
        return numbers[0]
    return numbers[rank] if len(numbers) == ranks else None
