"""What an interval's figures of all ranks have that a reader of the console should hear of."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median_low

from megatron_lite.phases import Phase
from megatron_lite.train.rank_figures import RankFigures
from megatron_lite.units import size

# no rank waits for another in these, so that their times are the rank's own; in backward all wait for the slowest
INDEPENDENT = (Phase.FORWARD.value, Phase.OPTIMIZER_STEP.value)
FEWEST_STEPS = 3  # a median of fewer says little
SLOWER = 0.10  # than the median rank, in one phase
SHARE_OF_STEP = 0.02  # that a rank's delay must be, or it does not matter
WAIT_SHARE, WAIT_MS = 0.10, 1.0  # of a step spent waiting for data
GROWING_INTERVALS = 4
GROWN_SHARE, GROWN_BYTES = 0.02, 16 * 2**20


class WorthSaying:
    """Says each thing when it begins, and again only if it has stopped in between."""

    def __init__(self):
        self._said: set[str] = set()
        self._gpu, self._host = Growth("GPU memory"), Growth("host memory")

    def of(self, figures: RankFigures) -> Iterator[str]:
        """Lines about one interval. To be called for every interval, since growth takes several."""
        found = dict([*slow_ranks(figures), *waits_for_data(figures)])
        yield from (text for what, text in found.items() if what not in self._said)
        self._said = set(found)
        yield from self._gpu.of(figures.peak_memory_bytes)
        yield from self._host.of(figures.host_memory_bytes)


def slow_ranks(f: RankFigures) -> Iterator[tuple[str, str]]:
    """(what, line) for the rank whose own work takes clearly longer than the median rank's, in each phase."""
    if len(f.steps) < 2 or min(f.steps) < FEWEST_STEPS:
        return
    step_ms = median_low(f.step_ms)
    for name in (name for name in INDEPENDENT if name in f.host_ms):
        times = f.phase_ms(name)
        if any(map(math.isnan, times)):
            continue
        usual, slowest = median_low(times), max(times)
        if slowest - usual > max(SLOWER * usual, SHARE_OF_STEP * step_ms):
            rank = times.index(slowest)
            yield f"{rank} {name}", (
                f"   rank {rank} is {100 * (slowest / usual - 1):.0f}% slower than the median rank in {name} "
                f"({slowest:.1f} against {usual:.1f} ms per step, iterations {f.first}-{f.last}); "
                "the others wait for it in backward"
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
            if steadily and by > max(GROWN_SHARE * values[0], GROWN_BYTES):
                grown.append(f"   {self._what} of rank {rank} grew in each of the last {GROWING_INTERVALS} intervals, by "
                             f"{size(by)} to {size(values[-1])}")
        if grown:
            self._history = self._history[-1:]
        yield from grown
