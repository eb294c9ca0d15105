"""What an interval's figures of all ranks have that a reader of the console should hear of."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from statistics import median_low

from megatron_lite.notable import FEWEST_STEPS, has_grown, is_by_chance, is_mostly, rank_without_core, slowest_rank
from megatron_lite.phases import Phase
from megatron_lite.train.rank_figures import RankFigures
from megatron_lite.units import size

# where a rank's own time is known: it waits for no other, or the waiting can be taken off
INDEPENDENT = (Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value)
SLOW_INTERVALS = 8  # at most: those in which a rank must mostly be the slow one
FEWEST_INTERVALS = 3  # at least: one or two may be a busy machine
WAIT_SHARE, WAIT_MS = 0.10, 1.0  # of a step spent waiting for data
GROWING_INTERVALS = 4


class WorthSaying:
    """Says each thing when it begins, and again only if it has stopped in between."""

    def __init__(self):
        self._said: set[str] = set()
        self._slow = SlowRanks()
        self._gpu, self._host = Growth("GPU memory"), Growth("host memory")

    def of(self, figures: RankFigures) -> Iterator[str]:
        """Lines about one interval. To be called for every interval, since slowness and growth take several."""
        found = dict([*waits_for_a_core(figures), *self._slow.of(figures), *waits_for_data(figures)])
        yield from (text for what, text in found.items() if what not in self._said)
        self._said = set(found)
        yield from self._gpu.of(figures.peak_memory_bytes)
        yield from self._host.of(figures.host_memory_bytes)


class SlowRanks:
    """Which rank was notably slower in each phase, over the last intervals."""

    def __init__(self):
        self._history: dict[str, deque[int | None]] = {name: deque(maxlen=SLOW_INTERVALS) for name in INDEPENDENT}

    def of(self, f: RankFigures) -> Iterator[tuple[str, str]]:
        """(what, line) for the rank that is slow now and mostly was in the last intervals, in each phase."""
        if len(f.steps) < 2 or not min(f.steps) >= FEWEST_STEPS:  # NaN: a rank without steps
            return
        without_core = _without_core(f)
        for name in (name for name in INDEPENDENT if name in f.host_ms):
            times, history = f.own_ms(name), self._history[name]
            found = slowest_rank(times, f.step_ms)
            found = None if found and is_by_chance(found[0], without_core) else found
            history.append(found and found[1])
            if found and len(history) >= FEWEST_INTERVALS and is_mostly(found[1], history):
                yield f"{found[1]} {name}", _slower(found[1], times, name, f)


def _slower(rank: int, times: list[float], name: str, f: RankFigures) -> str:
    usual = median_low(times)
    return (
        f"   rank {rank} is {100 * (times[rank] / usual - 1):.0f}% slower than the median rank in {name} "
        f"({times[rank]:.1f} against {usual:.1f} ms per step, iterations {f.first}-{f.last}); "
        "the others wait for it in backward"
    )


def _without_core(f: RankFigures) -> tuple[int, float | None] | None:
    named = [f.cores.get(name, ()) for name in ("core_wait_ms", "involuntary_switches", "cpu_ms")]
    return rank_without_core(*named, f.step_ms)


def waits_for_a_core(f: RankFigures) -> Iterator[tuple[str, str]]:
    """(what, line) if a rank is not given its cores: then nothing is to be learned from who is slower."""
    found = _without_core(f) if min(f.steps) >= FEWEST_STEPS else None
    if found:
        rank, ms = found
        how_long = f" for {ms:.1f} of {f.step_ms[rank]:.1f} ms per step" if ms is not None else ", time and again,"
        yield "core", (
            f"   rank {rank} is ready and has no core{how_long} (iterations {f.first}-{f.last}); "
            "other programs or too many threads share the machine, and times tell of them too"
        )


def waits_for_data(f: RankFigures) -> Iterator[tuple[str, str]]:
    """(what, line) if a rank spends a notable part of its steps waiting for the loader: of the one that waits most."""
    waits = f.host_ms.get(Phase.DATA.value)
    if waits is None or min(f.steps) < FEWEST_STEPS or any(map(math.isnan, waits)):
        return
    ms = max(waits)
    rank = waits.index(ms)
    if ms > max(WAIT_SHARE * f.step_ms[rank], WAIT_MS):
        yield Phase.DATA.value, (
            f"   rank {rank} waits {ms:.1f} of {f.step_ms[rank]:.1f} ms per step for data (iterations "
            f"{f.first}-{f.last}); more --num-workers or a faster disk would help"
        )


class Growth:
    """One kind of memory on all ranks, over the last intervals."""

    def __init__(self, what: str):
        self._what = what
        self._history: list[list[float]] = []

    def of(self, by_rank: list[float]) -> Iterator[str]:
        """A line for each rank whose memory has grown in every one of the last intervals; then it counts anew."""
        self._history = [*self._history[-GROWING_INTERVALS:], by_rank]
        if len(self._history) <= GROWING_INTERVALS:
            return
        grown = []
        for rank, values in enumerate(zip(*self._history)):
            by = values[-1] - values[0]
            steadily = all(earlier < later for earlier, later in pairwise(values))  # never with NaN
            if steadily and has_grown(by, values[0]):
                grown.append(f"   {self._what} of rank {rank} grew in each of the last {GROWING_INTERVALS} intervals, by "
                             f"{size(by)} to {size(values[-1])}")
        if grown:
            self._history = self._history[-1:]
        yield from grown
