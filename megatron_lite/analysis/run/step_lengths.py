"""How the lengths of a run's typical steps differ: some that take far longer, and steps that get slower.

A trace of a few steps shows neither. Waiting for CPU cores is left out: it is other jobs' doing, and differs by chance.
With a GPU only its own clock tells: its host runs ahead for some steps, and waits for them all in one.
"""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.run.every_step import OTHER_TIME
from megatron_lite.analysis.run.run_results import Run

MIN_TYPICAL_STEPS = 12  # fewer show no pattern
SLOW = 1.5  # times the median step
ABOVE_SPREAD = 5.0  # interquartile ranges above the median, that a slow step must be
MIN_SLOW_STEPS = 2  # a single one is no pattern
MAX_SLOW_SHARE = 0.4  # of the steps: more are no exception
MIN_SLOW_PHASE_SHARE = 0.6  # of what slow steps take more, that a phase must be to be where it arises
MIN_LONGER = 0.10  # of the first quarter's median, by which the last one's must be longer
LONGER_SPREADS = 2.0  # medians of the quarters' interquartile ranges, that it must be longer by


@dataclass(frozen=True)
class SlowSteps:
    """Steps that take far longer than the typical one."""

    iterations: tuple[int, ...]
    steps: int  # all that were looked at
    slow_ms: float  # the median of them
    typical_ms: float
    limit_ms: float  # what takes longer is slow
    lost_ms: float  # beyond the typical step, mean over all steps
    every: int | None  # steps from one to the next, where it is always the same
    in_a_row: bool  # they follow each other
    # that takes most of what they take more; "other": outside of all phases; "": none is known to
    phase: str
    phase_ms: float  # how much longer it takes than in the typical step


@dataclass(frozen=True)
class SlowingSteps:
    """Steps that take longer from each quarter of the run to the next."""

    first_ms: float  # the median of the first quarter
    last_ms: float
    lost_ms: float  # beyond the first quarter's, mean over all steps
    steps: int
    phase: str  # as in SlowSteps
    phase_ms: float  # how much longer it takes in the last quarter than in the first


def find_slow_steps(run: Run, on_gpu: bool) -> SlowSteps | None:
    """Find steps that take far longer than the typical one; None where there are none, or a single one."""
    rows, own_ms = _measure_typical(run, on_gpu)
    if len(rows) < MIN_TYPICAL_STEPS:
        return None
    typical_ms = float(np.median(own_ms))
    low_ms, high_ms = np.quantile(own_ms, [0.25, 0.75])
    spread_ms = high_ms - low_ms
    limit_ms = max(SLOW * typical_ms, typical_ms + ABOVE_SPREAD * spread_ms)
    slow = own_ms > limit_ms
    # the run warms up
    warm = int(np.argmin(slow))
    rows = rows[warm:]
    own_ms = own_ms[warm:]
    slow = slow[warm:]
    if not MIN_SLOW_STEPS <= slow.sum() <= MAX_SLOW_SHARE * len(slow):
        return None
    beyond_ms = own_ms[slow] - typical_ms
    excess_ms = float(beyond_ms.mean())
    phase, phase_ms = _find_growing_phase(run, on_gpu, rows[~slow], rows[slow], excess_ms)
    at = np.flatnonzero(slow)
    iterations = run.iterations[rows]
    slow_iterations = iterations[slow]
    return SlowSteps(
        iterations=tuple(slow_iterations.tolist()),
        steps=len(rows),
        slow_ms=float(np.median(own_ms[slow])),
        typical_ms=typical_ms,
        limit_ms=limit_ms,
        lost_ms=float(beyond_ms.sum()) / len(rows),
        every=_find_period(iterations, slow_iterations),
        in_a_row=bool((np.diff(at) == 1).all()),
        phase=phase,
        phase_ms=phase_ms,
    )


def _find_period(iterations: Integers, slow: Integers) -> int | None:
    """Find how many steps apart slow ones are, where it is always the same number.

    Args:
        iterations: of all steps that were looked at; where one of the others is due, nothing is known of it.
        slow: those of the slow steps.

    Returns:
        The number; None for unequal distances, for steps in a row, and for fewer than three.
    """
    if len(slow) < 3:
        return None
    period = int(np.diff(slow).min())
    if period == 1:
        return None
    due = np.arange(slow[0], slow[-1] + 1, period)
    is_on_time = np.isin(slow, due).all()
    looked_at = due[np.isin(due, iterations)]
    return period if is_on_time and len(looked_at) == len(slow) else None


def has_slow_profiled_step(run: Run, on_gpu: bool, limit_ms: float) -> bool:
    """Tell whether a profiled step is long, other than by compiling.

    Args:
        run: the run's record.
        on_gpu: whether a GPU's clock timed its phases.
        limit_ms: the length beyond which a step is long.
    """
    own_ms = _measure_own(run, on_gpu)
    seen: Flags = run.profiled & ~run.compiling
    return bool((own_ms[seen] > limit_ms).any())


def find_slowing_steps(run: Run, on_gpu: bool) -> SlowingSteps | None:
    """Find steps that take longer from quarter to quarter of the run; None where they do not, or batches grow."""
    rows, own_ms = _measure_typical(run, on_gpu)
    if len(rows) < MIN_TYPICAL_STEPS:
        return None
    batch_sizes = np.unique(run.batch_sizes[rows])
    if len(batch_sizes) > 1:
        return None
    quarters = np.array_split(np.arange(len(rows)), 4)
    lengths_ms = [own_ms[quarter] for quarter in quarters]
    medians = np.array([np.median(of_quarter) for of_quarter in lengths_ms])
    first_ms = float(medians[0])
    last_ms = float(medians[-1])
    spreads_ms = [np.subtract(*np.quantile(of_quarter, [0.75, 0.25])) for of_quarter in lengths_ms]
    spread_ms = float(np.median(spreads_ms))
    # steady growth spreads each quarter by a quarter of it
    least_ms = max(MIN_LONGER * first_ms, LONGER_SPREADS * spread_ms)
    excess_ms = last_ms - first_ms
    grows_always = (np.diff(medians) > 0).all()
    if not grows_always or excess_ms < least_ms:
        return None
    early = rows[quarters[0]]
    late = rows[quarters[-1]]
    phase, phase_ms = _find_growing_phase(run, on_gpu, early, late, excess_ms)
    return SlowingSteps(
        first_ms=first_ms,
        last_ms=last_ms,
        lost_ms=float(np.maximum(medians - first_ms, 0).mean()),
        steps=len(rows),
        phase=phase,
        phase_ms=phase_ms,
    )


def _measure_typical(run: Run, on_gpu: bool) -> tuple[Integers, Numbers]:
    """Rows of the typical steps whose length is known, and how long each takes by itself, ms."""
    own_ms = _measure_own(run, on_gpu)
    known: Flags = run.ordinary & ~np.isnan(own_ms)
    rows = np.flatnonzero(known)
    return rows, own_ms[rows]


def _measure_own(run: Run, on_gpu: bool) -> Numbers:
    """How long each step takes on the GPU, or on the host without waiting for a core, ms; NaN for unknown."""
    lengths_ms = run.gpu_ms if on_gpu else run.training_ms
    return lengths_ms - _measure_waits(run, on_gpu)


def _measure_waits(run: Run, on_gpu: bool) -> Numbers:
    """Find how long each step waited for a core, ms; 0 by the GPU's clock and for unknown."""
    if on_gpu:
        return np.zeros(len(run.iterations))
    waits_ms: Numbers = np.minimum(np.nan_to_num(run.core_wait_ms), run.training_ms)
    return waits_ms


def _find_growing_phase(
    run: Run, on_gpu: bool, usual: Integers, longer: Integers, excess_ms: float
) -> tuple[str, float]:
    """Find the phase that takes most of what some steps take more than the usual ones.

    Args:
        run: the run.
        on_gpu: by the GPU's clock, where it has timed a phase.
        usual: rows of the usual steps.
        longer: rows of the steps that take longer.
        excess_ms: how much longer they take.

    Returns:
        Its name, OTHER_TIME for what is in no phase, and how much longer it takes, ms; ("", 0) where no one
        explains it, or only if it does not hold what these steps wait longer for a core.
    """
    names = list(run.phases_ms)
    if not names:
        return "", 0.0
    gpu_ms = run.gpu_phases_ms if on_gpu else {}
    by_phase = {}
    for name in names:
        clock = gpu_ms if name in gpu_ms else run.phases_ms
        by_phase[name] = np.nan_to_num(clock[name])
    whole_ms = run.gpu_ms if on_gpu else run.training_ms
    in_phases_ms = np.sum(list(by_phase.values()), axis=0)
    by_phase[OTHER_TIME] = np.maximum(whole_ms - in_phases_ms, 0.0)
    grown = {name: _measure_growth(ms, usual, longer) for name, ms in by_phase.items()}
    most = max(grown, key=lambda name: grown[name])
    waits_ms = _measure_growth(_measure_waits(run, on_gpu), usual, longer)
    # no step says in which phase it waited: all of it may be in this one
    at_least_ms = grown[most] - max(waits_ms, 0.0)
    if at_least_ms < MIN_SLOW_PHASE_SHARE * excess_ms:
        return "", 0.0
    return most, grown[most]


def _measure_growth(ms: Numbers, usual: Integers, longer: Integers) -> float:
    """How much more of `ms` the longer steps have than the usual one."""
    return float(ms[longer].mean() - np.median(ms[usual]))
