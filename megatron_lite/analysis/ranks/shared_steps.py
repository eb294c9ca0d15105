"""The steady steps that all ranks' traces have: windows may begin and end apart, and ranks must be compared over the same."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.time.figures import Step
from megatron_lite.analysis.time.placing import Placing


def shared_steps(ranks: Sequence[Calls], placings: Sequence[Placing]) -> tuple[list[np.ndarray], int]:
    """(by rank: int [c], which of the S shared steps a call is in, -1: none; S, at least 1).

    By the steps' numbers where all ranks have some in common, else the k-th steady one is the same everywhere.
    """
    numbers = [{step.number for step in placing.steps if step.steady} for placing in placings]
    common = sorted(set.intersection(*numbers) - {None})
    if common:
        slot_of = [_by_number(placing.steps, common) for placing in placings]
    else:
        fewest = min(sum(step.steady for step in placing.steps) for placing in placings)
        slot_of = [_by_order(placing.steps, fewest) for placing in placings]
    slots = [table[calls.step] for table, calls in zip(slot_of, ranks)]  # the last entry is for -1
    return slots, max(1, len(common) or fewest)


def _by_number(steps: Sequence[Step], common: list[int]) -> np.ndarray:
    slot = {number: at for at, number in enumerate(common)}
    return np.array([slot.get(step.number, -1) if step.steady else -1 for step in steps] + [-1], np.int64)


def _by_order(steps: Sequence[Step], fewest: int) -> np.ndarray:
    steady = np.array([step.steady for step in steps] + [False], bool)
    order = np.cumsum(steady) - 1
    return np.where(steady & (order < fewest), order, -1)
