"""Imbalance that moves: ranks that take turns being late, and one rank that comes late in some steps only.

A rank that is late in the usual step is a straggler (ranks.py). What moves leaves every rank's mean and median alike,
and costs the same: in each step all wait for whichever rank is last.
"""

from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.ranks.rank_results import OFTEN, Imbalance
from megatron_lite.analysis.time.time_results import Placing

LATE = 0.05  # of the median step, by which a rank is late in a step
# fewer do not show a pattern; so many late ones must be where ranks take turns and are on time in most steps
MIN_TURN_STEPS = 4
MIN_TAIL_STEPS = 6  # with fewer, late steps must be alike, and nothing is certain
MIN_LATE_STEPS = 2  # of a tail: a single odd step is no pattern
MAX_TAIL_SHARE = 0.75  # of the steps that a tail has at most: who is late in more is a straggler (straggler.py)
EQUALLY_LATE = 1.5  # times the shortest lateness that the longest of a short window may be
MIN_PERIODIC_STEPS = 3  # that are late: any two are at one distance
MOSTLY_ONE = 0.8  # of the waiting that a rank must cause to be the one of a tail
MIN_TURN = 0.25  # of an equal share of the waiting that a rank must cause to take part in turns
ABOVE_USUAL = 3.0  # times the waiting of other steps that late ones must have
MIN_CAUSE_SHARE = 0.8  # of the time by which a rank is late, that something must take longer to be the cause
# Without a GPU, other work on the cores delays ranks by chance: late steps must be alike, and cost more
ON_HOST_SHARE = 0.10  # of the step that late steps must cost
ON_HOST_SPREAD = 0.75  # standard deviation / mean of late steps, at most


def find_imbalance(
    ranks: Sequence[int], net_ms: Numbers, compute_ms: Numbers | None, step_ms: float, on_gpu: bool
) -> Imbalance | None:
    """Find ranks that come late in turns, or one that does in some steps only, and what waiting for them costs.

    Args:
        ranks: the R ranks.
        net_ms: [R, S steps], what others wait for a rank beyond its own waits.
        compute_ms: [R, S], what each computes; None for unknown.
        step_ms: the length of the median step.
        on_gpu: the ranks compute on GPUs, which other work on the machine does not delay.

    Returns:
        The imbalance; None where it is little, or shows no pattern.
    """
    steps = net_ms.shape[1]
    if len(ranks) < 2 or steps < MIN_TURN_STEPS or step_ms <= 0:
        return None
    lost_ms = np.maximum(net_ms.max(axis=0), 0.0)
    last = net_ms.argmax(axis=0)
    late = lost_ms >= LATE * step_ms
    if late.sum() < MIN_LATE_STEPS:
        return None
    if not _stand_out(lost_ms, late, step_ms, on_gpu):
        return None
    late_ms = lost_ms[late]
    by_rank_ms = np.bincount(last[late], late_ms, len(ranks))
    shares = by_rank_ms / late_ms.sum()
    most = int(shares.argmax())
    is_tail = bool(shares[most] >= MOSTLY_ONE)
    if is_tail:
        late &= last == most
    has_pattern = _is_tail(late, lost_ms, on_gpu) if is_tail else _takes_turns(late, shares)
    if not has_pattern:
        return None
    by_share = [(float(share), rank) for share, rank in zip(shares, ranks) if share > 0]
    by_share.sort(reverse=True)
    computes = None
    if compute_ms is not None:
        computes = _is_computing(compute_ms, lost_ms, last, late)
    return Imbalance(
        rank=ranks[most] if is_tail else None,
        lost_ms=float(lost_ms[late].sum()) / steps,
        late_ms=float(np.median(lost_ms[late])),
        late_steps=int(late.sum()),
        steps=steps,
        every=_find_period(np.flatnonzero(late)),
        ranks=tuple((rank, share) for share, rank in by_share),
        computes=computes,
    )


def _stand_out(lost_ms: Numbers, late: Flags, step_ms: float, on_gpu: bool) -> bool:
    """Tell whether late steps are more than the noise of the others, and without a GPU of a busy machine.

    Args:
        lost_ms: [S], what others wait for the last rank of each step.
        late: [S], the steps in which a rank is late.
        step_ms: the length of the median step.
        on_gpu: the ranks compute on GPUs.
    """
    late_ms = lost_ms[late]
    if not late.all():
        usual_ms = np.median(lost_ms[~late])
        if np.median(late_ms) < ABOVE_USUAL * usual_ms:
            return False
    if on_gpu:
        return True
    all_ms = step_ms * len(lost_ms)
    if late_ms.sum() < ON_HOST_SHARE * all_ms:
        return False
    spread = late_ms.std() / late_ms.mean()
    return bool(spread <= ON_HOST_SPREAD)


def _is_tail(late: Flags, lost_ms: Numbers, on_gpu: bool) -> bool:
    """Tell whether one rank is late again and again, and not in nearly all steps, which makes it a straggler.

    Args:
        late: [S], the steps in which it is late.
        lost_ms: [S], what others wait for the last rank of each step.
        on_gpu: the ranks compute on GPUs; on a CPU's cores two late steps of a few are chance.
    """
    if late.sum() < MIN_LATE_STEPS or late.mean() > MAX_TAIL_SHARE:
        return False
    if len(late) >= MIN_TAIL_STEPS:
        return True
    late_ms = lost_ms[late]
    return on_gpu and bool(late_ms.max() <= EQUALLY_LATE * late_ms.min())


def _takes_turns(late: Flags, shares: Numbers) -> bool:
    """Tell whether some rank is late in most steps, or in some again and again, and not always the same one.

    Args:
        late: [S], the steps in which a rank is late.
        shares: by rank, of the waiting that it causes.
    """
    is_often = late.mean() >= OFTEN or late.sum() >= MIN_TURN_STEPS
    takes_part = shares >= MIN_TURN / len(shares)
    return bool(is_often and takes_part.sum() >= 2)


def _find_period(late: Integers) -> int | None:
    """Count steps from one late step to the next; None where they differ, or late steps are too few."""
    if len(late) < MIN_PERIODIC_STEPS:
        return None
    apart = np.unique(np.diff(late))
    return int(apart[0]) if len(apart) == 1 else None


def _is_computing(compute_ms: Numbers, lost_ms: Numbers, last: Integers, late: Flags) -> bool:
    """Tell whether the late rank computes longer than the others in its late steps, by nearly all of what they wait.

    Args:
        compute_ms: [R, S], what each rank computes.
        lost_ms: [S], what others wait for the last rank of each step.
        last: [S], the last rank's place.
        late: [S], the steps in which a rank is late.
    """
    longer_ms = 0.0
    for step in np.flatnonzero(late).tolist():
        of_all_ms = compute_ms[:, step]
        own_ms = of_all_ms[last[step]]
        of_others_ms = np.delete(of_all_ms, last[step])
        longer_ms += float(own_ms - np.median(of_others_ms))
    return bool(longer_ms >= MIN_CAUSE_SHARE * lost_ms[late].sum())


def measure_compute(
    ranks: Sequence[Calls], placings: Sequence[Placing], slots: Sequence[Integers], steps: int
) -> Numbers:
    """Measure how long each rank computes in each shared step.

    Args:
        ranks: the collectives of each of R ranks.
        placings: the steps of each one's window.
        slots: by rank and step of its window, the shared step; -1 for none.
        steps: how many shared steps there are.

    Returns:
        [R, steps], ms.
    """
    compute_ms = np.zeros((len(ranks), steps))
    for at, (calls, placing, slots_of_rank) in enumerate(zip(ranks, placings, slots)):
        for step, slot in zip(placing.steps, slots_of_rank.tolist()):
            if slot >= 0:
                computed_ns = calls.compute.within(step.start_ns, step.end_ns)
                compute_ms[at, slot] = computed_ns / 1e6
    return compute_ms
