"""What the training thread got of the machine's cores: inside the profiled window, before it and in typical steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.thresholds import MIN_BEFORE, SWITCHES_PER_CPU_SECOND, WITHOUT_CORE

MAX_COMPARED = 50  # steps before a window, as many as the step times that they stand beside
MIN_PER_BLOCK = 8  # steps: other programs get a core for several ms, which may be every few steps
MAX_BLOCKS = 8
MOSTLY = 0.5  # of what the window's steps take longer
NEARLY_EVERY = 0.9  # of the steps around the window
ORDINARY = "ordinary"
PROFILED = "profiled"


@dataclass(frozen=True)
class CoreUse:
    """Means per step over some steps of the rank that writes; None for what the system did not tell."""

    steps: int
    step_ms: float
    cpu_ms: float | None  # of all threads of the process
    wait_ms: float | None  # the training thread was ready and had no core
    switches: float | None  # involuntary, of all threads

    @property
    def wait_share(self) -> float | None:
        """Part of a step in which the training thread was ready and had no core."""
        return None if self.wait_ms is None else self.wait_ms / self.step_ms

    @property
    def is_short(self) -> bool:
        """The training thread, or where only switches are counted any thread, lacks a core for a notable part of the time."""
        if self.wait_share is not None:
            return self.wait_share >= WITHOUT_CORE
        if self.switches is None or not self.cpu_ms:
            return False
        return 1000 * self.switches / self.cpu_ms >= SWITCHES_PER_CPU_SECOND


@dataclass(frozen=True)
class CoreShortage:
    """A rank that was ready to compute and had no core."""

    rank: int
    kind: str  # of the steps: "ordinary" or "profiled"
    step_ms: float
    wait_ms: float | None  # per step; None where the system counts involuntary switches only
    cpu_ms: float | None
    switches: float | None

    @property
    def share(self) -> float | None:
        """Part of a step without a core; None for unknown."""
        return None if self.wait_ms is None else self.wait_ms / self.step_ms


def measure_core_use(run: Run, chosen: Flags) -> CoreUse | None:
    """Means over the chosen steps; of many steps the median of consecutive blocks, so that a single hiccup decides nothing."""
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


def measure_window_cores(run: Run) -> CoreUse | None:
    """Of the profiled steps."""
    return measure_core_use(run, run.profiled)


def find_core_shortage(run: Run, kind: str = "") -> CoreShortage | None:
    """The rank and the kind of steps that lack a core for the largest part of a step; None where all have their cores.

    kind: "ordinary" or "profiled", to look at those steps only.
    """
    found = [one for one in _list_shortages(run) if kind in ("", one.kind)]
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
