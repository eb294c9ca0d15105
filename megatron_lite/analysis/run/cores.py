"""Use of the machine's cores by the training thread: inside the profiled window, before it and in typical steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.core_use import ORDINARY, PROFILED, CoreShortage, CoreUse
from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.run.run_results import RankMedians, Run
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.thresholds import MAX_BEFORE, MIN_BEFORE

MIN_PER_BLOCK = 8  # steps: other programs get a core for several ms, which may be every few steps
MAX_CORE_BLOCKS = 8
MIN_SHARE_OF_CORES = 0.5  # of what the window's steps take longer
NEARLY_EVERY = 0.9  # of the steps around the window


def measure_core_use(run: Run, chosen: Flags) -> CoreUse | None:
    """Means over the chosen steps; of many steps the median of consecutive blocks,
    so that a single hiccup decides nothing."""
    has_time = run.training_ms > 0
    steps = np.flatnonzero(chosen & has_time)
    if not len(steps):
        return None
    number = min(MAX_CORE_BLOCKS, len(steps) // MIN_PER_BLOCK)
    blocks = np.array_split(steps, max(1, number))

    def take_mean(column: Numbers) -> float | None:
        """The median of the blocks' means, as far as they are known."""
        means = [float(column[block].mean()) for block in blocks]
        known = [mean for mean in means if not math.isnan(mean)]
        return float(np.median(known)) if known else None

    return CoreUse(
        steps=len(steps),
        step_ms=float(np.median([run.training_ms[block].mean() for block in blocks])),
        cpu_ms=take_mean(run.cpu_ms),
        wait_ms=take_mean(_measure_waits(run)),
        switches=take_mean(run.involuntary_switches),
    )


def _measure_waits(run: Run) -> Numbers:
    """Time that each step waited for a core, float64 [steps], ms; waits of evaluating and saving are no part of it."""
    return np.minimum(run.core_wait_ms, run.training_ms)


def find_core_shortage(run: Run | None, kind: str = "", traces: Sequence[Trace] = ()) -> CoreShortage | None:
    """The rank and the kind of steps that lack a core for the largest part of a step; None where all have their cores.

    Args:
        run: the run's record; None without one.
        kind: "ordinary" or "profiled", to look at those steps only.
        traces: of its ranks, whose headers may tell of the recorded steps.
    """
    shortages = list(_list_shortages_in(traces))
    if run is not None:
        shortages = [*_list_shortages(run), *shortages]
    found = [shortage for shortage in shortages if kind in ("", shortage.kind)]
    return max(found, key=lambda shortage: shortage.share or 0.0, default=None)


def _list_shortages(run: Run) -> Iterator[CoreShortage]:
    """Shortages that the run's record tells of."""
    ranks = run.ranks
    if ranks is not None and ranks.without_core is not None:
        rank, wait_ms = ranks.without_core
        cpu_ms = ranks.cpu_ms[rank] if ranks.cpu_ms else None
        switches = ranks.involuntary_switches[rank] if ranks.involuntary_switches else None
        yield CoreShortage(rank, ORDINARY, ranks.step_ms[rank], wait_ms, cpu_ms, switches)
    kinds = {ORDINARY: run.ordinary, PROFILED: run.profiled}
    if ranks is not None and (ranks.core_wait_ms or ranks.involuntary_switches):
        del kinds[ORDINARY]  # all ranks have told of those
    for kind, chosen in kinds.items():
        use = measure_core_use(run, chosen)
        if use is not None and use.is_short:
            yield CoreShortage(run.writing_rank or 0, kind, use.step_ms, use.wait_ms, use.cpu_ms, use.switches)


def _list_shortages_in(traces: Sequence[Trace]) -> Iterator[CoreShortage]:
    """Shortages that the headers of traces tell of."""
    for trace in traces:
        use = trace.cores
        if use is not None and use.is_short:
            rank = trace.rank or 0
            yield CoreShortage(rank, PROFILED, use.step_ms, use.wait_ms, use.cpu_ms, use.switches, trace.source)


def find_core_use(rank: int | None, run: Run | None, traces: Sequence[Trace]) -> CoreUse | None:
    """Find what a rank got of the cores: in the recorded steps by its trace, else by the run's record.

    None where nothing tells.

    Args:
        rank: the rank; None for a trace that names none, which is taken for the one that writes the run's record.
        run: the run's record; None without one.
        traces: of all ranks.
    """
    of_rank = [trace.cores for trace in traces if trace.rank == rank]
    for use in reversed(of_rank):
        if use is not None and use.is_known:
            return use
    if run is None:
        return None
    if rank is not None and run.ranks is not None and rank < len(run.ranks.step_ms):
        use = _read_core_use(run.ranks, rank)
        if use.is_known:
            return use
    if rank is not None and rank != (run.writing_rank or 0):
        return None
    chosen = run.profiled if run.profiled.any() else run.ordinary
    own = measure_core_use(run, chosen)
    return own if own is not None and own.is_known else None


def _read_core_use(ranks: RankMedians, rank: int) -> CoreUse:
    """Find what the medians say of a rank's cores."""

    def take(known: Sequence[float]) -> float | None:
        """The rank's number; None where it has none."""
        if rank >= len(known) or math.isnan(known[rank]):
            return None
        return known[rank]

    return CoreUse(
        steps=1,
        step_ms=ranks.step_ms[rank],
        cpu_ms=take(ranks.cpu_ms),
        wait_ms=take(ranks.core_wait_ms),
        switches=take(ranks.involuntary_switches),
    )


# --- what of the window's longer steps may be the profiler's


@dataclass(frozen=True)
class Slowdown:
    """Steps inside the profiled window against those before it, medians in ms per step."""

    profiled_ms: float
    before_ms: float
    profiled_cpu_ms: float | None  # of all threads of the process
    before_cpu_ms: float | None
    more_wait_ms: float | None  # for a core, beyond what the steps before it waited

    @property
    def lag_ms(self) -> float:
        """How much longer a profiled step takes."""
        return self.profiled_ms - self.before_ms

    @property
    def by_profiler_ms(self) -> float | None:
        """The most that recording can have added: it works on the process' own threads. None without their CPU time."""
        if self.profiled_cpu_ms is None or self.before_cpu_ms is None:
            return None
        more_cpu_ms = max(self.profiled_cpu_ms - self.before_cpu_ms, 0.0)
        return min(more_cpu_ms, max(self.lag_ms, 0.0))

    @property
    def is_by_other_jobs(self) -> bool:
        """Most of what the window's steps take longer was spent waiting for a core."""
        if self.more_wait_ms is None or self.lag_ms <= 0:
            return False
        return self.more_wait_ms >= MIN_SHARE_OF_CORES * self.lag_ms


def measure_recording_ms(run: Run | None, time: RankTime) -> float:
    """Milliseconds that recording may have added to the host's part of a profiled step; 0 where no run tells.

    A device works as without a profiler, so that what makes a window's steps longer than those before it is the host's.
    Without one, the operators inside of others make those longer, and the host's part is what was recorded between
    operators. Where the process' CPU times are known, no more than they grew by: waiting for a core is not recording.
    """
    slowdown = measure_slowdown(run) if run is not None else None
    if slowdown is None:
        return 0.0
    added_ms = slowdown.by_profiler_ms
    if added_ms is None:
        added_ms = max(0.0, slowdown.lag_ms)
    return added_ms * time.recorded_between


def measure_slowdown(run: Run) -> Slowdown | None:
    """Compare the profiled steps with those before; None without a window, or with too few steps before it."""
    if run.profiled_step_ms is None or run.before_profile_ms is None:
        return None
    inside = np.flatnonzero(run.profiled)
    before, _ = _find_around(run, inside)
    before = before[-MAX_BEFORE:]
    waits_ms = _measure_waits(run)
    wait_ms = _take_median(waits_ms[inside])
    wait_before_ms = _take_median(waits_ms[before])
    more_wait_ms = None
    if wait_ms is not None and wait_before_ms is not None:
        more_wait_ms = wait_ms - wait_before_ms
    return Slowdown(
        profiled_ms=run.profiled_step_ms,
        before_ms=run.before_profile_ms,
        profiled_cpu_ms=_take_median(run.cpu_ms[inside]),
        before_cpu_ms=_take_median(run.cpu_ms[before]),
        more_wait_ms=more_wait_ms,
    )


def _take_median(values: Numbers) -> float | None:
    """The median of the values that are known; None without any."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _find_around(run: Run, inside: Integers) -> tuple[Integers, Integers]:
    """Undisturbed steps before and after the profiled ones `inside`; none where nothing is profiled."""
    quiet = np.flatnonzero(run.undisturbed)
    if not len(inside):
        return quiet[:0], quiet[:0]
    return quiet[quiet < inside[0]], quiet[quiet > inside[-1]]


def is_set_apart(run: Run) -> bool:
    """Whether each profiled step takes longer than nearly every step before and after the window."""
    inside = np.flatnonzero(run.profiled)
    around = np.concatenate(_find_around(run, inside))
    if len(around) < 2 * MIN_BEFORE:
        return False
    usual_most = np.quantile(run.training_ms[around], NEARLY_EVERY)
    return bool(run.training_ms[inside].min() > usual_most)
