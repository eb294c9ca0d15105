"""Search for the rank that others wait for, and the one quantity that explains its lateness, if one does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.imbalance import MIN_CAUSE_SHARE, find_imbalance
from megatron_lite.analysis.ranks.rank_results import Imbalance, RankRow, Straggler
from megatron_lite.analysis.ranks.waits import Waits
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.phases import Phase
from megatron_lite.thresholds import SHARE_OF_STEP

NEARLY = 0.2  # of the lag, that a rank which comes nearly as late waits at most
BEYOND_CHANCE = 4 / 3  # times the share of all waiting that a rank would cause if all were alike
MIN_WAITING_SHARE = 0.5  # of all waiting that the rank must cause, however many ranks there are
MAX_WAITING_SHARE = 0.9  # and that suffices, however few
STANDARD_ERRORS = 2.0  # that the mean over steps must be above nothing

CAUSES = {  # rows of a step
    "data_wait": ("data_wait",),
    "compute": ("compute",),
    "copy": ("exposed_copy",),
    "host": (
        "host",
        "sync",
        "garbage_collector",
        "allocator",
        "launch",
        "cpu_optimizer",
        "clip_grad",
        "log",
        "compile",
        "startup",
        "graph_capture",
    ),
}
# no rank waits for another in these, so that their time is the rank's own
INDEPENDENT = (
    Phase.DATA.value,
    Phase.DATA_TO_DEVICE.value,
    Phase.FORWARD.value,
    Phase.OPTIMIZER_STEP.value,
)


def find_straggler(rows: Sequence[RankRow], times: Sequence[RankTime], lateness_ms: Numbers) -> Straggler | None:
    """Find the rank for which the others wait.

    Args:
        rows: all ranks with their waits.
        times: the same ranks' times.
        lateness_ms: [R ranks, S shared steps], how much later than the others each rank comes.

    Returns:
        The rank; None where none stands out, where it does by one odd step only, or where waits are not known.
    """
    caused_ms = [row.caused_wait_ms for row in rows if row.caused_wait_ms is not None]
    if len(rows) < 2 or len(caused_ms) < len(rows):
        return None
    lag_ms = max(caused_ms)
    late = caused_ms.index(lag_ms)
    least_ms = SHARE_OF_STEP * median(row.step_ms for row in rows)
    least_share = min(max(MIN_WAITING_SHARE, BEYOND_CHANCE / len(rows)), MAX_WAITING_SHARE)
    if lag_ms < least_ms or lag_ms < least_share * sum(caused_ms):
        return None
    if not _is_usually_above(lateness_ms[late], least_ms):
        return None
    cause, cause_ms = _find_excess([_sum_causes(time) for time in times], late, lag_ms)
    phase, _ = _find_excess([_measure_own_phases(time) for time in times], late, lag_ms)
    row = rows[late]
    return Straggler(
        rank=row.rank,
        caused_wait_ms=lag_ms,
        share_last=row.last_in,
        cause=cause,
        cause_ms=cause_ms,
        phase=phase,
        alike=_find_alike(rows, row.rank, lag_ms),
    )


def _is_usually_above(lateness_ms: Numbers, least_ms: float) -> bool:
    """Tell whether a rank is late in the usual step, and by more than steps differ among each other.

    Args:
        lateness_ms: [S], how much later than the others it comes in each step.
        least_ms: the lag that matters, ms.
    """
    if np.median(lateness_ms) <= least_ms:
        return False
    # one of two ranks that take turns is late in more than half of an odd number of steps
    if np.quantile(lateness_ms, 0.25) <= least_ms / 2:
        return False
    steps = len(lateness_ms)
    error_ms = lateness_ms.std(ddof=1) / np.sqrt(steps) if steps > 1 else 0.0
    return bool(lateness_ms.mean() > STANDARD_ERRORS * error_ms)


def _sum_causes(time: RankTime) -> dict[str, float]:
    """Add up a step's rows by the cause that each belongs to, ms per step."""
    causes_ms = {}
    for cause, rows in CAUSES.items():
        causes_ms[cause] = sum(time.rows.get(row, 0.0) for row in rows)
    return causes_ms


def _measure_own_phases(time: RankTime) -> dict[str, float]:
    """Measure each phase's own time: compute, and where no rank waits for another the host's if that is longer; ms."""
    own_ms: dict[str, float] = {}
    for phase in time.phases:
        phase_ms = phase.compute_ms
        if phase.name in INDEPENDENT and not time.on_gpu:
            phase_ms = max(phase_ms, phase.host_ms)
        own_ms.setdefault(phase.name, phase_ms)
    return own_ms


def _find_alike(rows: Sequence[RankRow], late_rank: int, lag_ms: float) -> tuple[int, ...]:
    """Find the ranks that come nearly as late as the late one.

    Args:
        rows: all ranks with their waits.
        late_rank: the rank for which the others wait.
        lag_ms: how long they wait for it, ms per step.

    Returns:
        The ranks; () where most ranks hardly wait, as then nobody is late beside the late one.
    """
    others = [row for row in rows if row.rank != late_rank]
    alike = tuple(row.rank for row in others if (row.wait_ms or 0.0) <= NEARLY * lag_ms)
    late_ranks = len(alike) + 1
    return alike if 2 * late_ranks <= len(rows) else ()


def _find_excess(quantities: Sequence[Mapping[str, float]], late: int, lag_ms: float) -> tuple[str, float]:
    """Find the quantity that the late rank has most more of than the median of the others.

    Args:
        quantities: of each rank by name, ms per step.
        late: the place of the rank for which the others wait.
        lag_ms: how long they wait for it, ms per step.

    Returns:
        The name, and how much more of it the rank has, ms per step; ("", 0) where it does not explain the lag.
    """
    names = dict.fromkeys(name for of_rank in quantities for name in of_rank)
    excess_ms = {}
    for name in names:
        of_ranks_ms = [of_rank.get(name, 0.0) for of_rank in quantities]
        own_ms = of_ranks_ms.pop(late)
        excess_ms[name] = own_ms - median(of_ranks_ms)
    most = max(excess_ms, key=lambda name: excess_ms[name], default="")
    if not most or excess_ms[most] < MIN_CAUSE_SHARE * lag_ms:
        return "", 0.0
    return most, excess_ms[most]


def find_moving_imbalance(
    seen: Sequence[RankFacts],
    rows: Sequence[RankRow],
    waits: Waits,
    lateness_ms: Numbers,
    compute_ms: Numbers,
    straggler: Straggler | None,
) -> Imbalance | None:
    """Find imbalance that moves, beside a straggler among the other ranks.

    Args:
        seen: what is known of each trace.
        rows: the same ranks with their waits.
        waits: who waits for whom.
        lateness_ms: [R ranks, S shared steps], how much later than the others each rank comes.
        compute_ms: [R, S], what each rank computes.
        straggler: the rank that is late in the usual step, if one is.
    """
    ranks = [row.rank for row in rows]
    on_gpu = all(one.time.on_gpu for one in seen)
    step_ms = _measure_median_step(seen)
    caused_ms = waits.caused_ms
    if straggler is not None:
        # another rank costs by what it comes later than the straggler, which is what the straggler waits for it
        straggler_wait_ms = waits.wait_ms[ranks.index(straggler.rank)]
        caused_ms = np.minimum(caused_ms, straggler_wait_ms)
    found = find_imbalance(ranks, caused_ms - waits.wait_ms, compute_ms, step_ms, on_gpu)
    if found is None:
        return None
    usual_ms = {rank: float(np.median(late_ms)) for rank, late_ms in zip(ranks, lateness_ms)}
    if straggler is not None:
        return replace(found, usual=(straggler.rank, usual_ms[straggler.rank]))
    least_ms = SHARE_OF_STEP * step_ms
    usual = [rank for rank, late_ms in zip(ranks, lateness_ms) if _is_usually_above(late_ms, least_ms)]
    if not usual:
        return found
    latest = max(usual, key=lambda rank: usual_ms[rank])
    return replace(found, usual=(latest, usual_ms[latest]))


def _measure_median_step(seen: Sequence[RankFacts]) -> float:
    """Measure the median steady step of all ranks, ms: a few long ones do not move it."""
    lengths = [step.ms for one in seen for step in one.time.steady_steps]
    return median(lengths) if lengths else 0.0
