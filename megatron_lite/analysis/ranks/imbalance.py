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
MIN_TURN_STEPS, MIN_TAIL_STEPS = 4, 6
MIN_LATE_STEPS = 2  # of a tail: a single odd step is no pattern
MIN_PERIODIC_STEPS = 3  # that are late: any two are at one distance
MOSTLY_ONE = 0.8  # of the waiting that a rank must cause to be the one of a tail
MIN_TURN = 0.25  # of an equal share of the waiting that a rank must cause to take part in turns
ABOVE_USUAL = 3.0  # times the waiting of other steps that late ones must have
EXPLAINED = 0.8  # of the lateness that longer computing must be to be its cause
# Without a GPU, other work on the cores delays ranks by chance: late steps must be alike, and cost more
ON_HOST_SHARE, ON_HOST_SPREAD = 0.10, 0.75


def find_imbalance(
    ranks: Sequence[int], net_ms: Numbers, compute_ms: Numbers | None, step_ms: float, on_gpu: bool
) -> Imbalance | None:
    """What waiting for ranks costs that come late in turns, or in some steps only; None where it is little, or shows no
    pattern.

    Args: net_ms: [R, S], what others wait for a rank beyond its own waits; compute_ms: [R, S], what each computes, None
    for unknown; step_ms: of the median step.
    """
    steps = net_ms.shape[1]
    if len(ranks) < 2 or steps < MIN_TURN_STEPS or step_ms <= 0:
        return None
    lost = np.maximum(net_ms.max(axis=0), 0.0)
    last = net_ms.argmax(axis=0)
    late = lost >= LATE * step_ms
    if late.sum() < MIN_LATE_STEPS or not _stand_out(lost, late, step_ms, on_gpu):
        return None
    shares = np.bincount(last[late], lost[late], len(ranks)) / lost[late].sum()
    most = int(shares.argmax())
    is_tail = bool(shares[most] >= MOSTLY_ONE)
    if is_tail:
        late &= last == most
    if not (_is_tail(late) if is_tail else _takes_turns(late, shares)):
        return None
    by_share = sorted(((float(share), rank) for share, rank in zip(shares, ranks) if share > 0), reverse=True)
    return Imbalance(
        rank=ranks[most] if is_tail else None,
        lost_ms=float(lost[late].sum()) / steps,
        late_ms=float(np.median(lost[late])),
        late_steps=int(late.sum()),
        steps=steps,
        every=_find_period(np.flatnonzero(late)),
        ranks=tuple((rank, share) for share, rank in by_share),
        computes=None if compute_ms is None else _is_computing(compute_ms, lost, last, late),
    )


def _stand_out(lost: Numbers, late: Flags, step_ms: float, on_gpu: bool) -> bool:
    """Are late steps more than the noise of the others, and without a GPU more than the noise of a busy machine?"""
    if not late.all() and np.median(lost[late]) < ABOVE_USUAL * np.median(lost[~late]):
        return False
    if on_gpu:
        return True
    spread = lost[late].std() / lost[late].mean()
    return bool(lost[late].sum() >= ON_HOST_SHARE * step_ms * len(lost) and spread <= ON_HOST_SPREAD)


def _is_tail(late: Flags) -> bool:
    """Is one rank late again and again, and not in the usual step, which makes it a straggler?"""
    return bool(len(late) >= MIN_TAIL_STEPS and MIN_LATE_STEPS <= late.sum() and late.mean() <= OFTEN)


def _takes_turns(late: Flags, shares: Numbers) -> bool:
    """Is some rank late in most steps, or in some again and again, and not always the same one?

    Args:
        late: [S], the steps in which a rank is late.
        shares: by rank, of the waiting that it causes.
    """
    is_often = late.mean() >= OFTEN or late.sum() >= MIN_TURN_STEPS
    return bool(is_often and (shares >= MIN_TURN / len(shares)).sum() >= 2)


def _find_period(late: Integers) -> int | None:
    """Steps from one late step to the next; None if they are not the same each time, or late steps are too few."""
    if len(late) < MIN_PERIODIC_STEPS:
        return None
    apart = np.unique(np.diff(late))
    return int(apart[0]) if len(apart) == 1 else None


def _is_computing(compute_ms: Numbers, lost: Numbers, last: Integers, late: Flags) -> bool:
    """Does the late rank compute longer than the others in its late steps, by nearly all of what they wait?"""
    longer = 0.0
    for step in np.flatnonzero(late).tolist():
        others = np.delete(compute_ms[:, step], last[step])
        longer += float(compute_ms[last[step], step] - np.median(others))
    return bool(longer >= EXPLAINED * lost[late].sum())


def measure_compute(
    ranks: Sequence[Calls], placings: Sequence[Placing], slots: Sequence[Integers], steps: int
) -> Numbers:
    """[R, S]: ms that each rank computes in each shared step. slots: by rank and step of its window, -1 for none."""
    compute_ms = np.zeros((len(ranks), steps))
    for at, (calls, placing, slot) in enumerate(zip(ranks, placings, slots)):
        for index, step in enumerate(placing.steps):
            if slot[index] >= 0:
                compute_ms[at, slot[index]] = calls.compute.within(step.start_ns, step.end_ns) / 1e6
    return compute_ms
