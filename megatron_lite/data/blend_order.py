"""In which order a blend takes its data sets: the one that is furthest behind its share comes next.

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
from dataclasses import dataclass

import numpy as np

from megatron_lite.data.index_cache import Arrays, Entry, IndexCache
from megatron_lite.errors import DataError
from megatron_lite.units import count

MIN_STEPS = 1 << 14  # below, the plain loop is as fast
LANE_STEPS = 1 << 13
APPROACH_STEPS = 1 << 11  # from the estimate to the lane's beginning
LANES = 1 << 10  # at once: bounds the memory


@dataclass(frozen=True)
class Shares:
    """weights: float64 [D], their sum is 1; limits: how many samples each data set has at most; None: no end."""

    weights: np.ndarray
    limits: np.ndarray | None = None


def mix(shares: list[float], size: int, limits: list[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """int16 [size], the data set of each step; int64 [size], how often it was taken before."""
    rule = Shares(np.array(shares), None if limits is None else np.array(limits, np.float64))
    chosen, earlier = np.empty(size, np.int16), np.empty(size, np.int64)
    taken = np.zeros(len(shares))
    for begin in range(0, size, LANES * LANE_STEPS):
        end = min(size, begin + LANES * LANE_STEPS)
        go = _plainly if end - begin < MIN_STEPS else _side_by_side
        taken = go(rule, begin, taken, chosen[begin:end], earlier[begin:end])
    return chosen, earlier


def _plainly(rule: Shares, begin: int, taken: np.ndarray, chosen: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Fills in the steps from `begin` on, one after the other; the counts after them."""
    weights, counts = rule.weights.tolist(), taken.tolist()
    limits = [float("inf")] * len(counts) if rule.limits is None else rule.limits.tolist()
    sets, before = [], []
    for step in range(len(chosen)):
        steps = max(begin + step, 1)
        best, largest = -1, -float("inf")
        for number, drawn in enumerate(counts):
            behind = weights[number] * steps - drawn
            if behind > largest and drawn < limits[number]:
                best, largest = number, behind
        sets.append(best)
        before.append(counts[best])
        counts[best] += 1
    chosen[:], earlier[:] = sets, before
    return np.array(counts)


def _side_by_side(rule: Shares, begin: int, taken: np.ndarray, chosen: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """The same in lanes."""
    begins = np.arange(begin, begin + len(chosen), LANE_STEPS)
    lanes = _Lanes(rule, begins - APPROACH_STEPS)
    for _ in range(APPROACH_STEPS):
        lanes.step()
    lanes.taken[0] = taken
    started = lanes.taken.copy()
    sets, counts = np.empty((LANE_STEPS, len(begins)), np.int16), np.empty((LANE_STEPS, len(begins)))
    for step in range(LANE_STEPS):
        sets[step], counts[step] = lanes.step()
    for lane, first in enumerate(range(0, len(chosen), LANE_STEPS)):
        part = slice(first, first + LANE_STEPS)
        whole = len(chosen[part]) == LANE_STEPS
        if whole and np.array_equal(started[lane], taken):
            chosen[part], earlier[part] = sets[:, lane], counts[:, lane]
            taken = lanes.taken[lane]
        else:
            taken = _plainly(rule, begin + first, taken, chosen[part], earlier[part])
    return taken


class _Lanes:
    """The rule at K steps at once. taken: float64 [K, D], exact up to 2^53."""

    def __init__(self, rule: Shares, steps: np.ndarray):
        self.rule = rule
        self.taken = _estimate(rule, np.maximum(steps, 0))
        self._flat = self.taken.reshape(-1)
        self._first = np.arange(len(steps)) * len(rule.weights)
        self._steps = steps.astype(np.float64)[:, None]
        self._behind = np.empty_like(self.taken)

    def step(self) -> tuple[np.ndarray, np.ndarray]:
        """The data set of each lane and how often it was taken before; goes on by one step."""
        np.multiply(self.rule.weights, np.maximum(self._steps, 1), out=self._behind)
        np.subtract(self._behind, self.taken, out=self._behind)
        if self.rule.limits is not None:
            self._behind[self.taken >= self.rule.limits] = -np.inf
        best = self._behind.argmax(1)
        at = self._first + best
        counts = self._flat[at]
        self._flat[at] = counts + 1
        self._steps += 1
        return best, counts


def _estimate(rule: Shares, steps: np.ndarray) -> np.ndarray:
    """About how often each data set was taken before these steps: float64 [K, D], each row's sum is the step."""
    exact = rule.weights * steps[:, None]
    taken = np.floor(exact)
    if rule.limits is not None:
        taken = np.minimum(taken, rule.limits)
    rank = np.argsort(np.argsort(taken - exact, axis=1, kind="stable"), axis=1)
    return taken + (rank < (steps - taken.sum(1))[:, None])


# --- several data sets mixed in fixed proportions

SURPLUS = 0.005  # each data set is built a little larger than its share, as the greedy mixing may overdraw it
MAX_DATASETS = 32_766  # the data set's number is an int16
BLOCK = 1 << 20


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. DataError unless all are above 0."""
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(
            f"--data-path: weights {list(weights)} must all be above 0; leave out a data set that is unused"
        )
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def sizes_for_blend(size: int, weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """For `size` samples of normalised `weights`: how many each data set gives, and how many to build of it.

    The length of the blend is the sum of the first list, a little more than `size` because of rounding up.
    """
    given = [math.ceil(size * weight) for weight in weights]
    return given, [math.ceil(samples * (1 + SURPLUS)) for samples in given]


class BlendedDataset:
    """`size` samples of `datasets`; each one is taken from the data set that is furthest behind its weight.

    dataset_index: int16 [size], which data set; dataset_sample_index: int64 [size], which of its samples.
    size=None uses every data set up exactly; the weights must then be their lengths.
    split: train, valid or test, for the names of the cache's files.
    Raises DataError for weights that are not positive and for a data set that is too small for its share.
    """

    def __init__(
        self,
        datasets: Sequence,
        weights: Sequence[float],
        size: int | None,
        cache: IndexCache | None = None,
        split: str = "train",
    ):
        if len(datasets) > MAX_DATASETS:
            raise DataError(f"--data-path: {len(datasets)} data sets are more than {MAX_DATASETS}; merge some files")
        self.datasets, shares = list(datasets), normalized(weights)
        limits = None if size is not None else list(weights)  # None: no data set comes to its end
        size = sum(weights) if size is None else size

        def build() -> Arrays:
            return dict(zip(("dataset_index", "dataset_sample_index"), mix(shares, size, limits)))

        folder = cache and cache.folder_for("BlendedDataset", None, size)
        if folder:
            key = {"shares": shares, "size": size, "limits": limits}
            shapes = {
                "dataset_index": ((size,), np.dtype(np.int16)),
                "dataset_sample_index": ((size,), np.dtype(np.int64)),
            }
            indices = cache.get(folder, Entry("BlendedDataset", split, key, shapes), build)
        else:
            indices = build()
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
