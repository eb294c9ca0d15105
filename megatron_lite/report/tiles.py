"""The few numbers that stand beside the verdict."""

from dataclasses import dataclass

from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import milliseconds, percent
from megatron_lite.units import count, size


@dataclass(frozen=True)
class Tile:
    """A number and what it is."""

    value: str
    name: str


def tiles_of(report: Report) -> list[Tile]:
    """Only what was measured."""
    return [*_of_trace(report), *_of_run(report), *_of_memory(report)]


def _of_trace(report: Report) -> list[Tile]:
    """Times are those of the rank that waits least; shares of a step are of all ranks."""
    rank = report.facts.critical
    if rank is None or rank.time.step_ms <= 0:
        return []
    ranks = [one for one in report.facts.ranks_seen if one.time.step_ms > 0]
    kernels = rank.kernels
    whose = f", rank {rank.time.rank}" if len(ranks) > 1 and rank.time.rank is not None else ""
    tiles = [Tile(f"{milliseconds(rank.time.step_ms)} ms", f"a step in the trace{whose}")]
    if rank.time.on_gpu:
        tiles.append(_by_rank([one.time.busy_ms / one.time.step_ms for one in ranks], "of it the device is busy"))
    if any(one.time.communication_ms > 0 for one in ranks):
        exposed = [one.time.rows.get("exposed_communication", 0.0) / one.time.step_ms for one in ranks]
        tiles.append(_by_rank(exposed, "communication not hidden"))
    if kernels.mfu is not None:
        tiles.append(Tile(percent(kernels.mfu), f"of {kernels.peak_tflops:,.4g} TFLOP/s {kernels.peak_dtype}"))
    return tiles


def _by_rank(shares: list[float], name: str) -> Tile:
    """One number where it is every rank's, else the least and the most."""
    least, most = percent(min(shares)), percent(max(shares))
    return Tile(least, name) if least == most else Tile(f"{least} to {most}", f"{name}, by rank")


def _of_run(report: Report) -> list[Tile]:
    run = report.facts.run
    tiles = (
        [Tile(f"{milliseconds(run.steady_step_ms)} ms", "a step without the profiler")]
        if run and run.steady_step_ms
        else []
    )
    return [*tiles, Tile(count(run.tokens_per_second), "tokens/s")] if run and run.tokens_per_second else tiles


def _of_memory(report: Report) -> list[Tile]:
    snapshot = report.facts.highest_snapshot
    return (
        [
            Tile(
                size(snapshot.peak_bytes),
                f"memory at its peak{' in ' + snapshot.peak_phase if snapshot.peak_phase else ''}",
            )
        ]
        if snapshot
        else []
    )
