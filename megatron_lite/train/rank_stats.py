"""Compares the ranks' figures of an interval's steps, and warns of slow ranks and growing memory."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist

from megatron_lite.formats.hardware_record import SLOWDOWNS, ClockLimit, HardwareFigures, name_limits
from megatron_lite.formats.step_records import RankInterval, RankNumbers
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.phases import Phase
from megatron_lite.thresholds import (
    LOW_CLOCK,
    MIN_RANK_STEPS,
    is_by_chance,
    is_mostly,
    rank_without_core,
    slowest_rank,
    steady_growth,
)
from megatron_lite.units import counted, size

PHASES = tuple(phase.value for phase in Phase)
# a rank's medians over steps, beside its phases': by name, what of a StepTime, times what
MEDIANS = {
    "step_ms": ("training_seconds", 1000),
    "gpu_step_ms": ("gpu_seconds", 1000),
    "host_memory_bytes": ("host_bytes", 1),
    "cpu_ms": ("cpu_seconds", 1000),
    "core_wait_ms": ("core_wait_seconds", 1000),
    "involuntary_switches": ("involuntary_switches", 1),
}
OWN = ("steps", "own_backward_ms", "peak_memory_bytes", *MEDIANS)
HARDWARE = HardwareFigures.__struct_fields__
OF_PHASE = ("mean_ms", "host_ms", "gpu_ms")
NOT_KNOWN = math.nan
# where a rank's own time is known: it waits for no other, or the waiting can be taken off
INDEPENDENT = (Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value)
SLOW_INTERVALS = 8  # at most: those in which a rank must mostly be the slow one
MIN_INTERVALS = 3  # at least: one or two may be a busy machine
# time spent waiting for data that is notable: a share of a step, and milliseconds
WAIT_SHARE = 0.10
WAIT_MS = 1.0
WHOLE_FROM = 100  # MHz, watts, events: digits behind the point would take half of the line
MOSTLY_SLOWED = 0.5  # of an interval's samples
GPU_ERRORS = {"ecc_uncorrected": "uncorrected memory error", "xids": "Xid event"}
# intervals over which memory grows, after the first, whose steps fill caches: as many as the report asks of steps
GROWING_INTERVALS = 12
REMEMBERED = 60  # intervals at most


@dataclass(frozen=True)
class RankFigures:
    """The typical steps of an interval; every list has a number for each rank, NaN for what a rank has not.

    step_ms, host_ms and gpu_ms are medians over steps; mean_ms is over all of them, the GPU's own time where there is
    one.
    """

    first: int  # iterations
    last: int
    steps: list[float]
    step_ms: list[float]
    gpu_step_ms: list[float]
    own_backward_ms: list[float]  # of backward, without waiting for other ranks
    host_memory_bytes: list[float]
    peak_memory_bytes: list[float]
    mean_ms: dict[str, list[float]]  # by phase, in the order of a step
    host_ms: dict[str, list[float]]
    gpu_ms: dict[str, list[float]]
    cpu_ms: list[float] = field(default_factory=list)
    core_wait_ms: list[float] = field(default_factory=list)
    involuntary_switches: list[float] = field(default_factory=list)
    hardware: dict[str, list[float]] = field(default_factory=dict)  # figures of HardwareFigures that some rank has

    def own_ms(self, name: str) -> list[float]:
        """The ranks' own times of a phase, without waiting for others: the GPU's where it has one, else the host's."""
        if name == Phase.BACKWARD.value:
            return self.own_backward_ms
        return self.gpu_ms.get(name) or self.host_ms[name]

    def build_record(self) -> RankInterval:
        """The interval as steps.jsonl holds it."""
        return RankInterval(
            iterations=(self.first, self.last),
            steps=_round_known(self.steps, 0),
            step_ms=_round_known(self.step_ms),
            phases_ms={name: _round_known(ms) for name, ms in self.host_ms.items()},
            gpu_ms=_round_known(self.gpu_step_ms),
            gpu_phases_ms={name: _round_known(ms) for name, ms in self.gpu_ms.items()},
            own_backward_ms=_round_known(self.own_backward_ms),
            host_memory_bytes=_round_known(self.host_memory_bytes, 0),
            peak_memory_bytes=_round_known(self.peak_memory_bytes, 0),
            cpu_ms=_round_known(self.cpu_ms),
            core_wait_ms=_round_known(self.core_wait_ms),
            involuntary_switches=_round_known(self.involuntary_switches),
            hardware={name: _shorten(values) for name, values in self.hardware.items()},
        )


def gather(
    times: list[StepTime],
    started_at: int,
    device: torch.device,
    ranks: int,
    hardware: HardwareFigures | None = None,
) -> RankFigures:
    """Gather the figures of all ranks. Collective.

    Raises nothing for a rank that has no steps to tell of: all its numbers are NaN.

    Args:
        times: This rank's steps.
        started_at: The iteration that this run began from.
        device: Where ranks exchange numbers.
        ranks: All ranks.
        hardware: Samples of this rank's hardware; None without any.
    """
    mine = _describe_own(ordinary(times)) + _list_figures(hardware or HardwareFigures())
    columns = _exchange_columns(mine, device, ranks)
    own = dict(zip(OWN, columns))
    phases: dict[str, dict[str, list[float]]] = {what: {} for what in OF_PHASE}
    for at, (name, what) in enumerate(itertools.product(PHASES, OF_PHASE), start=len(OWN)):
        if not all(map(math.isnan, columns[at])):
            phases[what][name] = columns[at]
    of_hardware = dict(zip(HARDWARE, columns[-len(HARDWARE) :]))
    known = {}
    for name, column in of_hardware.items():
        if not all(map(math.isnan, column)):
            known[name] = column
    steps = [t.step for t in times] or [0]
    return RankFigures(
        first=started_at + min(steps),
        last=started_at + max(steps),
        steps=own["steps"],
        step_ms=own["step_ms"],
        gpu_step_ms=own["gpu_step_ms"],
        own_backward_ms=own["own_backward_ms"],
        host_memory_bytes=own["host_memory_bytes"],
        peak_memory_bytes=own["peak_memory_bytes"],
        mean_ms=phases["mean_ms"],
        host_ms=phases["host_ms"],
        gpu_ms=phases["gpu_ms"],
        cpu_ms=own["cpu_ms"],
        core_wait_ms=own["core_wait_ms"],
        involuntary_switches=own["involuntary_switches"],
        hardware=known,
    )


def _exchange_columns(mine: list[float], device: torch.device, ranks: int) -> list[list[float]]:
    """Exchange a row of figures among all ranks. Collective.

    Args:
        mine: This rank's figures.
        device: Where ranks exchange numbers.
        ranks: All ranks.

    Returns:
        Each figure of all ranks, by rank.
    """
    rows = [mine]
    if ranks > 1:
        own = torch.tensor(mine, dtype=torch.float64, device=device)
        of_ranks = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(of_ranks, own)
        rows = torch.stack(of_ranks).tolist()
    return [list(column) for column in zip(*rows)]


def ordinary(times: list[StepTime]) -> list[StepTime]:
    """Select the steps that neither profiling nor compilation slowed down; all steps if there are none."""
    return [t for t in times if not t.disturbed] or times


def _take_median(values: Iterable[float | None]) -> float:
    """The median of the values that are known, NaN if none is."""
    known = [value for value in values if value is not None]
    return float(median(known)) if known else NOT_KNOWN


def _describe_own(times: list[StepTime]) -> list[float]:
    """List this rank's numbers: OWN, then OF_PHASE of each phase; NaN for missing ones."""
    # on a GPU, one clock for all
    arrived = [t for t in times if t.gpu_reduce_wait is not None] or times
    peaks = [float(t.peak_bytes) for t in times if t.peak_bytes is not None]
    own = {
        "steps": float(len(times)),
        "own_backward_ms": _take_median(t.own_backward and 1000 * t.own_backward for t in arrived),
        "peak_memory_bytes": max(peaks, default=NOT_KNOWN),
    }
    for name, (field_name, factor) in MEDIANS.items():
        values: list[float | None] = [getattr(t, field_name) for t in times]
        own[name] = _take_median(None if value is None else factor * value for value in values)
    row = [own[name] for name in OWN]
    for name in PHASES:
        host = [1000 * t.phases[name] for t in times if name in t.phases]
        gpu = [1000 * t.gpu_phases[name] for t in times if name in t.gpu_phases]
        mean = NOT_KNOWN
        if host:
            mean = fmean(1000 * t.gpu_phases.get(name, t.phases.get(name, 0.0)) for t in times)
        row += [mean, _take_median(host), _take_median(gpu)]
    return row


def _list_figures(hardware: HardwareFigures) -> list[float]:
    """List figures in the order of HARDWARE, NaN for unknown."""
    values = [getattr(hardware, name) for name in HARDWARE]
    return [NOT_KNOWN if value is None else float(value) for value in values]


def _shorten(values: list[float]) -> RankNumbers:
    """Round figures; of limits and counters that stand still, which all ranks have alike, keep one number."""
    rounded: RankNumbers = []
    for value in values:
        if math.isnan(value):
            rounded.append(None)
        elif value >= WHOLE_FROM or value == int(value):
            rounded.append(round(value))
        else:
            rounded.append(round(value, 3))
    return rounded[:1] if len(set(rounded)) == 1 else rounded


def _round_known(values: list[float], digits: int = 3) -> RankNumbers:
    """Round values, with None for NaN, which JSON lacks; [] if all are NaN."""
    if all(map(math.isnan, values)):
        return []
    return [None if math.isnan(value) else _round(value, digits) for value in values]


def _round(value: float, digits: int) -> float:
    """Round a value, to an integer where no digits are wanted."""
    return round(value, digits) if digits else round(value)


# --- what a reader of the console should hear of


class AnomalyWarnings:
    """Warns of each anomaly when it begins, and again only after it has stopped."""

    def __init__(self, stages: Sequence[int] = ()):
        """
        Args:
            stages: The pipeline stage of each rank.
        """
        self._said: set[str] = set()
        self._slow = SlowRanks(stages)
        self._gpu = GrowthWatch("GPU memory")
        self._host = GrowthWatch("host memory")

    def of(self, figures: RankFigures, disturbed: bool = False) -> Iterator[str]:
        """Yield warnings about one interval. Call it for every interval: slowness and growth are judged over several.

        Args:
            figures: Figures of the interval's steps.
            disturbed: All of them were profiled or compiled: their memory says nothing of the others'.
        """
        found = dict(
            [
                *find_gpu_troubles(figures),
                *find_core_wait(figures),
                *self._slow.of(figures),
                *find_data_wait(figures),
            ]
        )
        yield from (text for what, text in found.items() if what not in self._said)
        self._said = set(found)
        if not disturbed:
            yield from self._gpu.of(figures.last, figures.peak_memory_bytes)
            yield from self._host.of(figures.last, figures.host_memory_bytes)


class SlowRanks:
    """Remembers which rank was notably slower in each phase, over the last intervals."""

    def __init__(self, stages: Sequence[int] = ()):
        """
        Args:
            stages: The pipeline stage of each rank.
        """
        self._stages = stages
        self._history: dict[str, deque[int | None]] = {name: deque(maxlen=SLOW_INTERVALS) for name in INDEPENDENT}

    def of(self, f: RankFigures) -> Iterator[tuple[str, str]]:
        """Yield (what, line) for the rank that is slow now and mostly was in the last intervals, in each phase."""
        # NaN: a rank without steps
        if len(f.steps) < 2 or not min(f.steps) >= MIN_RANK_STEPS:
            return
        without_core = _find_rank_without_core(f)
        for name in INDEPENDENT:
            if name not in f.host_ms:
                continue
            times = f.own_ms(name)
            history = self._history[name]
            found = slowest_rank(times, f.step_ms, self._stages)
            if found is None or is_by_chance(found[0], without_core):
                history.append(None)
                continue
            lag, rank = found
            history.append(rank)
            if len(history) >= MIN_INTERVALS and is_mostly(rank, history):
                usual = times[rank] - lag
                slower = 100 * (times[rank] / usual - 1)
                line = (
                    f"   rank {rank} is {slower:.0f}% slower than the median rank in {name} "
                    f"({times[rank]:.1f} against {usual:.1f} ms per step, iterations {f.first}-{f.last}); "
                    "the others wait for it in backward"
                )
                yield f"{rank} {name}", line


def _find_rank_without_core(f: RankFigures) -> tuple[int, float | None] | None:
    """Find the rank that waits most for a CPU core, and for how many milliseconds per step, if that is known."""
    return rank_without_core(f.core_wait_ms, f.involuntary_switches, f.cpu_ms, f.step_ms)


def find_core_wait(f: RankFigures) -> Iterator[tuple[str, str]]:
    """Yield (what, line) if a rank is not given its cores: then nothing is to be learned from who is slower."""
    found = _find_rank_without_core(f) if min(f.steps) >= MIN_RANK_STEPS else None
    if found is None:
        return
    rank, ms = found
    how_long = ", time and again,"
    if ms is not None:
        how_long = f" for {ms:.1f} of {f.step_ms[rank]:.1f} ms per step"
    line = (
        f"   rank {rank} waits for a CPU core{how_long} (iterations {f.first}-{f.last}); "
        "other programs or too many threads use the machine, so times are not reliable"
    )
    yield "core", line


def find_gpu_troubles(f: RankFigures) -> Iterator[tuple[str, str]]:
    """Yield (what, line) on the GPU that is slowed down most, and on each with errors in this interval."""
    span = f"(iterations {f.first}-{f.last})"
    yield from _find_slowed_gpu(f.hardware, span)
    for name, what in GPU_ERRORS.items():
        for rank, number in enumerate(f.hardware.get(name, ())):
            if number > 0:
                which = f", the most telling one {f.hardware['last_xid'][rank]:.0f}" if name == "xids" else ""
                line = f"   the GPU of rank {rank} had {counted(round(number), what)}{which} {span}"
                yield f"{name} {rank}", line


def _find_slowed_gpu(hardware: dict[str, list[float]], span: str) -> Iterator[tuple[str, str]]:
    """Yield (what, line) on the slowed GPU with the lowest clock, where one is slowed in most samples.

    Args:
        hardware: figures of the ranks by name.
        span: words for the interval.
    """
    clocks = hardware.get("sm_clock_mhz", [])
    highest = hardware.get("max_sm_clock_mhz", [])
    slowed = hardware.get("slowed", [])
    all_limits = hardware.get("clock_limits", [])
    found = []
    for rank, (mhz, most_mhz, share) in enumerate(zip(clocks, highest, slowed)):
        # NaN is neither
        if share >= MOSTLY_SLOWED and mhz < LOW_CLOCK * most_mhz:
            found.append((mhz, rank))
    if not found:
        return
    mhz, rank = min(found)
    limits = ClockLimit(int(all_limits[rank])) & SLOWDOWNS
    line = f"   the GPU of rank {rank} runs at {mhz:,.0f} of {highest[rank]:,.0f} MHz: {name_limits(limits)} {span}"
    if len(found) > 1:
        line += f"; {counted(len(found) - 1, 'other GPU')} slowed down, too"
    yield f"slowed {rank}", line


def find_data_wait(f: RankFigures) -> Iterator[tuple[str, str]]:
    """Yield (what, line) if a rank spends a notable part of its steps waiting for the data loader: on the one that
    waits most."""
    waits = f.host_ms.get(Phase.DATA.value)
    if waits is None or min(f.steps) < MIN_RANK_STEPS or any(map(math.isnan, waits)):
        return
    ms = max(waits)
    rank = waits.index(ms)
    if ms > max(WAIT_SHARE * f.step_ms[rank], WAIT_MS):
        line = (
            f"   rank {rank} waits {ms:.1f} of {f.step_ms[rank]:.1f} ms per step for data (iterations "
            f"{f.first}-{f.last}); more --num-workers or a faster disk would help"
        )
        yield Phase.DATA.value, line


class GrowthWatch:
    """Watches a kind of memory on all ranks, by the report's own measure of growth. what: its name."""

    def __init__(self, what: str):
        self._what = what
        self._history: deque[tuple[int, list[float]]] = deque(maxlen=REMEMBERED)
        self._first = True

    def of(self, iteration: int, by_rank: list[float]) -> Iterator[str]:
        """Yield a line for each rank whose memory grows over all intervals seen; then count anew.

        Args:
            iteration: The interval's last.
            by_rank: Bytes of each rank, NaN where they are not known.
        """
        if self._first:
            self._first = False
            return
        self._history.append((iteration, by_rank))
        if len(self._history) < GROWING_INTERVALS:
            return
        iterations = [at for at, _ in self._history]
        grown = []
        for rank, last in enumerate(by_rank):
            values = [of_ranks[rank] for _, of_ranks in self._history]
            if any(map(math.isnan, values)):
                continue
            found = steady_growth(iterations, values)
            if found:
                pace = f"by {size(found[1])} per step since iteration {iterations[0]}, to {size(last)}"
                grown.append(f"   {self._what} of rank {rank} grows steadily: {pace}")
        if grown:
            self._history.clear()
        yield from grown
