"""Several data sets mixed in fixed proportions: the one that is furthest behind its share comes next.

Legend: D data sets, K lanes. Step s takes the data set with the largest share * max(s, 1) - taken, the first one on a
tie, in double precision without fused multiply-add: bit for bit what Megatron's compiled helper gives on x86-64.

Each step needs the counts that the one before it left, so that the plain way is one long Python loop. But the counts
hardly depend on the past: two runs of the rule that differ by a few samples at some step soon agree, since what is
behind is taken first. So the steps are cut into lanes that go side by side, each from an estimate of its counts some
steps before its own beginning. That it had the true counts when it began is then not assumed but seen: they must equal
those that the lane before it ended with. A lane for which they do not is gone through once more, from the true ones.
"""

import math
from collections.abc import Sequence

import numpy as np

from megatron_lite.data.index_cache import Entry, IndexCache
from megatron_lite.errors import DataError
from megatron_lite.units import count

MIN_STEPS = 1 << 14  # below, the plain loop is as fast
LANE_STEPS = 1 << 13
APPROACH_STEPS = 1 << 11  # from the estimate to the lane's beginning
LANES = 1 << 10  # at once: bounds the memory
SURPLUS = 0.005  # each data set is built a little larger than its share, as the greedy mixing may overdraw it
MAX_DATASETS = 32_766  # the data set's number is an int16
BLOCK = 1 << 20


def mix(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """int16 [size], the data set of each step; int64 [size], how often it was taken before. shares sum to 1."""
    weights, chosen, earlier = np.array(shares), np.empty(size, np.int16), np.empty(size, np.int64)
    taken = np.zeros(len(shares))
    for begin in range(0, size, LANES * LANE_STEPS):
        part = slice(begin, min(size, begin + LANES * LANE_STEPS))
        go = _mix_plainly if part.stop - begin < MIN_STEPS else _mix_in_lanes
        taken = go(weights, begin, taken, chosen[part], earlier[part])
    return chosen, earlier


def _mix_plainly(
    weights: np.ndarray, begin: int, taken: np.ndarray, chosen: np.ndarray, earlier: np.ndarray
) -> np.ndarray:
    """Fills in the steps from `begin` on, one after the other; the counts after them."""
    shares, counts = weights.tolist(), taken.tolist()
    sets, before = [], []
    for step in range(len(chosen)):
        steps = max(begin + step, 1)
        best, largest = -1, -float("inf")
        for number, drawn in enumerate(counts):
            behind = shares[number] * steps - drawn
            if behind > largest:
                best, largest = number, behind
        sets.append(best)
        before.append(counts[best])
        counts[best] += 1
    chosen[:], earlier[:] = sets, before
    return np.array(counts)


def _mix_in_lanes(
    weights: np.ndarray, begin: int, taken: np.ndarray, chosen: np.ndarray, earlier: np.ndarray
) -> np.ndarray:
    """The same, side by side in lanes of LANE_STEPS."""
    begins = np.arange(begin, begin + len(chosen), LANE_STEPS)
    steps_K1 = (begins - APPROACH_STEPS).astype(np.float64)[:, None]
    taken_KD = _estimate(weights, np.maximum(steps_K1, 0))
    flat, rows, behind_KD = taken_KD.reshape(-1), np.arange(len(begins)) * len(weights), np.empty_like(taken_KD)
    sets, counts = np.empty((LANE_STEPS, len(begins)), np.int16), np.empty((LANE_STEPS, len(begins)))
    for step in range(-APPROACH_STEPS, LANE_STEPS):
        if step == 0:
            taken_KD[0] = taken
            started_KD = taken_KD.copy()
        np.multiply(weights, np.maximum(steps_K1, 1), out=behind_KD)
        np.subtract(behind_KD, taken_KD, out=behind_KD)
        best = behind_KD.argmax(1)
        before = flat[rows + best]
        flat[rows + best] = before + 1
        steps_K1 += 1
        if step >= 0:
            sets[step], counts[step] = best, before
    for lane, first in enumerate(range(0, len(chosen), LANE_STEPS)):
        part = slice(first, first + LANE_STEPS)
        is_whole = len(chosen[part]) == LANE_STEPS
        if is_whole and np.array_equal(started_KD[lane], taken):
            chosen[part], earlier[part] = sets[:, lane], counts[:, lane]
            taken = taken_KD[lane]
        else:
            taken = _mix_plainly(weights, begin + first, taken, chosen[part], earlier[part])
    return taken


def _estimate(weights: np.ndarray, steps_K1: np.ndarray) -> np.ndarray:
    """About how often each data set was taken before these steps: float64 [K, D], each row's sum is the step."""
    exact = weights * steps_K1
    taken = np.floor(exact)
    rank = np.argsort(np.argsort(taken - exact, axis=1, kind="stable"), axis=1)
    return taken + (rank < steps_K1 - taken.sum(1, keepdims=True))


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. DataError unless all are above 0."""
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(
            f"--data-path: weights {list(weights)} must all be above 0; leave out a data set that is unused"
        )
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def sizes_for_blend(size: int, weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """For `size` samples of normalized `weights`: how many each data set gives, and how many to build of it.

    The length of the blend is the sum of the first list, a little more than `size` because of rounding up.
    """
    given = [math.ceil(size * weight) for weight in weights]
    return given, [math.ceil(samples * (1 + SURPLUS)) for samples in given]


class BlendedDataset:
    """`size` samples of `datasets`; each one is taken from the data set that is furthest behind its weight.

    dataset_index: int16 [size], which data set; dataset_sample_index: int64 [size], which of its samples.
    split: train, valid or test, for the names of the cache's files.
    Raises DataError for weights that are not positive and for a data set that is too small for its share.
    """

    def __init__(
        self,
        datasets: Sequence,
        weights: Sequence[float],
        size: int,
        cache: IndexCache | None = None,
        split: str = "train",
    ):
        if len(datasets) > MAX_DATASETS:
            raise DataError(f"--data-path: {len(datasets)} data sets are more than {MAX_DATASETS}; merge some files")
        self.datasets, shares = list(datasets), normalized(weights)
        shapes = {"dataset_index": ((size,), np.dtype(np.int16)), "dataset_sample_index": ((size,), np.dtype(np.int64))}
        entry = Entry("BlendedDataset", split, {"shares": shares, "size": size}, shapes)
        cache = cache or IndexCache()
        folder = cache.folder_for("BlendedDataset", None, size)
        indices = cache.get(folder, entry, lambda: dict(zip(shapes, mix(shares, size))))
        self.dataset_index, self.dataset_sample_index = indices["dataset_index"], indices["dataset_sample_index"]
        taken = np.zeros(len(self.datasets), np.int64)
        for start in range(0, len(self), BLOCK):  # bincount makes int64 of all that it is given
            taken += np.bincount(self.dataset_index[start : start + BLOCK], minlength=len(taken))
        for number, (samples, dataset) in enumerate(zip(taken.tolist(), self.datasets), start=1):
            if samples > len(dataset):
                raise DataError(
                    f"--data-path: the blend takes {count(samples)} samples of data set {number}, which has only "
                    f"{count(len(dataset))}; lower its weight"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[int(self.dataset_index[i])][int(self.dataset_sample_index[i])]
