"""The few numbers that stand beside the verdict."""

from dataclasses import dataclass

from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import milliseconds, percent, share
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
    rank = report.facts.critical
    if rank is None or rank.time.step_ms <= 0:
        return []
    time, kernels = rank.time, rank.kernels
    tiles = [Tile(f"{milliseconds(time.step_ms)} ms", "a step in the trace")]
    if time.on_gpu:
        tiles.append(Tile(percent(share(time.busy_ms, time.step_ms)), "of it the device is busy"))
    if time.communication_ms > 0:
        exposed = time.rows.get("exposed_communication", 0.0)
        tiles.append(Tile(percent(share(exposed, time.step_ms)), "communication not hidden"))
    if kernels.mfu is not None:
        tiles.append(Tile(percent(kernels.mfu), f"of {kernels.peak_tflops:,.4g} TFLOP/s {kernels.peak_dtype}"))
    return tiles


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
