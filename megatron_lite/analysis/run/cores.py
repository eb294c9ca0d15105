"""What the training thread got of the machine's cores: inside the profiled window, before it and in typical steps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.core_use import ORDINARY, PROFILED, CoreShortage, CoreUse
from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.thresholds import MIN_BEFORE

MAX_COMPARED = 50  # steps before a window, as many as the step times that they stand beside
MIN_PER_BLOCK = 8  # steps: other programs get a core for several ms, which may be every few steps
MAX_BLOCKS = 8
MOSTLY = 0.5  # of what the window's steps take longer
NEARLY_EVERY = 0.9  # of the steps around the window


def measure_core_use(run: Run, chosen: Flags) -> CoreUse | None:
    """Means over the chosen steps; of many steps the median of consecutive blocks,
    so that a single hiccup decides nothing."""
    at = np.flatnonzero(chosen & (run.training_ms > 0))
    if not len(at):
        return None
    blocks = np.array_split(at, max(1, min(MAX_BLOCKS, len(at) // MIN_PER_BLOCK)))
    step_ms = float(np.median([run.training_ms[block].mean() for block in blocks]))

    def take_mean(column: Numbers) -> float | None:
        means = [float(column[block].mean()) for block in blocks]
        known = [mean for mean in means if not math.isnan(mean)]
        return float(np.median(known)) if known else None

    # evaluating and saving wait for cores, too, and are no part of the step's time
    wait_ms = take_mean(np.minimum(run.core_wait_ms, run.training_ms))
    return CoreUse(len(at), step_ms, take_mean(run.cpu_ms), wait_ms, take_mean(run.involuntary_switches))


def find_core_shortage(run: Run | None, kind: str = "", traces: Sequence[Trace] = ()) -> CoreShortage | None:
    """The rank and the kind of steps that lack a core for the largest part of a step; None where all have their cores.

    Args:
        run: the run's record; None without one.
        kind: "ordinary" or "profiled", to look at those steps only.
        traces: of its ranks, whose headers may tell of the recorded steps.
    """
    of_run = _list_shortages(run) if run is not None else ()
    found = [one for one in (*of_run, *_list_shortages_in(traces)) if kind in ("", one.kind)]
    return max(found, key=lambda one: one.share or 0.0, default=None)


def _list_shortages(run: Run) -> Iterator[CoreShortage]:
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
    for trace in traces:
        use = trace.cores
        if use is not None and use.is_short:
            rank = trace.rank or 0
            yield CoreShortage(rank, PROFILED, use.step_ms, use.wait_ms, use.cpu_ms, use.switches, trace.source)


def find_core_use(rank: int | None, run: Run | None, traces: Sequence[Trace]) -> CoreUse | None:
    """What a rank got of the cores: in the recorded steps by its trace, else by the run's record. None where nothing
    tells.

    rank: None for a trace that names no rank, which is taken for the one that writes the run's record.
    """
    told = [trace.cores for trace in traces if trace.rank == rank and trace.cores is not None and trace.cores.is_known]
    if told:
        return told[-1]
    if run is None:
        return None
    ranks = run.ranks
    if ranks is not None and rank is not None and rank < len(ranks.step_ms):
        of_rank = {
            name: known[rank] if rank < len(known) and not math.isnan(known[rank]) else None
            for name, known in (
                ("cpu_ms", ranks.cpu_ms),
                ("wait_ms", ranks.core_wait_ms),
                ("switches", ranks.involuntary_switches),
            )
        }
        use = CoreUse(1, ranks.step_ms[rank], **of_rank)
        if use.is_known:
            return use
    is_writer = rank is None or rank == (run.writing_rank or 0)
    chosen = run.profiled if run.profiled.any() else run.ordinary
    own = measure_core_use(run, chosen) if is_writer else None
    return own if own is not None and own.is_known else None


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
        return self.profiled_ms - self.before_ms

    @property
    def by_profiler_ms(self) -> float | None:
        """The most that recording can have added: it works on the process' own threads. None without their CPU time."""
        if self.profiled_cpu_ms is None or self.before_cpu_ms is None:
            return None
        return min(max(self.profiled_cpu_ms - self.before_cpu_ms, 0.0), max(self.lag_ms, 0.0))

    @property
    def is_by_other_jobs(self) -> bool:
        """Most of what the window's steps take longer was spent waiting for a core."""
        return self.more_wait_ms is not None and self.lag_ms > 0 and self.more_wait_ms >= MOSTLY * self.lag_ms


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
    """None without a window, or with too few steps before it."""
    if run.profiled_step_ms is None or run.before_profile_ms is None:
        return None
    inside, quiet = np.flatnonzero(run.profiled), np.flatnonzero(run.undisturbed)
    before = quiet[quiet < inside[0]][-MAX_COMPARED:] if len(inside) else quiet[:0]

    def take_median(column: Numbers, steps: Integers) -> float | None:
        known = column[steps][~np.isnan(column[steps])]
        return float(np.median(known)) if len(known) else None

    waits_ms = np.minimum(run.core_wait_ms, run.training_ms)
    wait_ms = take_median(waits_ms, inside)
    wait_before_ms = take_median(waits_ms, before)
    more_wait_ms = None if wait_ms is None or wait_before_ms is None else wait_ms - wait_before_ms
    return Slowdown(
        run.profiled_step_ms,
        run.before_profile_ms,
        take_median(run.cpu_ms, inside),
        take_median(run.cpu_ms, before),
        more_wait_ms,
    )


def is_set_apart(run: Run) -> bool:
    """Does each profiled step take longer than nearly every step before and after the window?"""
    inside, quiet = np.flatnonzero(run.profiled), np.flatnonzero(run.undisturbed)
    around = quiet[(quiet < inside[0]) | (quiet > inside[-1])] if len(inside) else quiet[:0]
    if len(around) < 2 * MIN_BEFORE:
        return False
    usual_most = np.quantile(run.training_ms[around], NEARLY_EVERY)
    return bool(run.training_ms[inside].min() > usual_most)
