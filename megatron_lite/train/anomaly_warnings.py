"""What an interval's figures of all ranks have that a reader of the console should hear of."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import median_low

from megatron_lite.phases import Phase
from megatron_lite.thresholds import MIN_STEPS, is_by_chance, is_mostly, rank_without_core, slowest_rank, steady_growth
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.units import size

# where a rank's own time is known: it waits for no other, or the waiting can be taken off
INDEPENDENT = (Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value)
SLOW_INTERVALS = 8  # at most: those in which a rank must mostly be the slow one
MIN_INTERVALS = 3  # at least: one or two may be a busy machine
WAIT_SHARE, WAIT_MS = 0.10, 1.0  # of a step spent waiting for data
# after the first, whose steps fill caches: as many as the report asks of steps, and at most
GROWING_INTERVALS, REMEMBERED = 12, 60


class AnomalyWarnings:
    """Says each thing when it begins, and again only if it has stopped in between."""

    def __init__(self):
        self._said: set[str] = set()
        self._slow = SlowRanks()
        self._gpu, self._host = Growth("GPU memory"), Growth("host memory")

    def of(self, figures: RankFigures, disturbed: bool = False) -> Iterator[str]:
        """Lines about one interval. To be called for every interval, since slowness and growth take several.

        Args:
            figures: Of the interval's steps.
            disturbed: All of them were profiled or compiled: their memory says nothing of the others'.
        """
        found = dict([*waits_for_a_core(figures), *self._slow.of(figures), *waits_for_data(figures)])
        yield from (text for what, text in found.items() if what not in self._said)
        self._said = set(found)
        if not disturbed:
            yield from self._gpu.of(figures.last, figures.peak_memory_bytes)
            yield from self._host.of(figures.last, figures.host_memory_bytes)


class SlowRanks:
    """Which rank was notably slower in each phase, over the last intervals."""

    def __init__(self):
        self._history: dict[str, deque[int | None]] = {name: deque(maxlen=SLOW_INTERVALS) for name in INDEPENDENT}

    def of(self, f: RankFigures) -> Iterator[tuple[str, str]]:
        """(what, line) for the rank that is slow now and mostly was in the last intervals, in each phase."""
        if len(f.steps) < 2 or not min(f.steps) >= MIN_STEPS:  # NaN: a rank without steps
            return
        without_core = _without_core(f)
        for name in (name for name in INDEPENDENT if name in f.host_ms):
            times, history = f.own_ms(name), self._history[name]
            found = slowest_rank(times, f.step_ms)
            found = None if found and is_by_chance(found[0], without_core) else found
            history.append(found and found[1])
            if found and len(history) >= MIN_INTERVALS and is_mostly(found[1], history):
                rank, usual = found[1], median_low(times)
                line = (
                    f"   rank {rank} is {100 * (times[rank] / usual - 1):.0f}% slower than the median rank in {name} "
                    f"({times[rank]:.1f} against {usual:.1f} ms per step, iterations {f.first}-{f.last}); "
                    "the others wait for it in backward"
                )
                yield f"{rank} {name}", line


def _without_core(f: RankFigures) -> tuple[int, float | None] | None:
    named = [f.cores.get(name, ()) for name in ("core_wait_ms", "involuntary_switches", "cpu_ms")]
    return rank_without_core(*named, f.step_ms)


def waits_for_a_core(f: RankFigures) -> Iterator[tuple[str, str]]:
    """(what, line) if a rank is not given its cores: then nothing is to be learned from who is slower."""
    found = _without_core(f) if min(f.steps) >= MIN_STEPS else None
    if found:
        rank, ms = found
        how_long = f" for {ms:.1f} of {f.step_ms[rank]:.1f} ms per step" if ms is not None else ", time and again,"
        line = (
            f"   rank {rank} is ready and has no core{how_long} (iterations {f.first}-{f.last}); "
            "other programs or too many threads share the machine, and times tell of them too"
        )
        yield "core", line


def waits_for_data(f: RankFigures) -> Iterator[tuple[str, str]]:
    """(what, line) if a rank spends a notable part of its steps waiting for the loader: of the one that waits most."""
    waits = f.host_ms.get(Phase.DATA.value)
    if waits is None or min(f.steps) < MIN_STEPS or any(map(math.isnan, waits)):
        return
    ms = max(waits)
    rank = waits.index(ms)
    if ms > max(WAIT_SHARE * f.step_ms[rank], WAIT_MS):
        line = (
            f"   rank {rank} waits {ms:.1f} of {f.step_ms[rank]:.1f} ms per step for data (iterations "
            f"{f.first}-{f.last}); more --num-workers or a faster disk would help"
        )
        yield Phase.DATA.value, line


class Growth:
    """One kind of memory on all ranks, by the report's own measure of growth."""

    def __init__(self, what: str):
        self._what = what
        self._history: deque[tuple[int, list[float]]] = deque(maxlen=REMEMBERED)
        self._first = True

    def of(self, iteration: int, by_rank: list[float]) -> Iterator[str]:
        """A line for each rank whose memory grows over all intervals seen; then it counts anew."""
        if self._first:
            self._first = False
            return
        self._history.append((iteration, by_rank))
        if len(self._history) < GROWING_INTERVALS:
            return
        since, grown = self._history[0][0], []
        for rank, last in enumerate(by_rank):
            rows = [(at, values[rank]) for at, values in self._history]
            found = None if any(math.isnan(value) for _, value in rows) else steady_growth(rows)
            if found:
                grown.append(
                    f"   {self._what} of rank {rank} grows steadily: by {size(found[1])} per step since iteration "
                    f"{since}, to {size(last)}"
                )
        if grown:
            self._history.clear()
        yield from grown
