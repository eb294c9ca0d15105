"""Several data sets mixed in fixed proportions: the one that is furthest behind its share comes next.

Legend: D data sets, K lanes, S steps of a lane. Step s takes the data set with the largest share * max(s, 1) - taken,
the first one on a tie, in double precision without fused multiply-add: bit for bit what Megatron's compiled helper
gives on x86-64.

Each step needs the counts that the one before it left, so that the plain way is one long Python loop. But the counts
hardly depend on the past: two runs of the rule that differ by a few samples at some step soon agree, since what is
behind is taken first. So the steps are cut into lanes that go side by side, each from an estimate of its counts some
steps before its own beginning. That it had the true counts when it began is then not assumed but seen: they must equal
those that the lane before it ended with. A lane for which they do not is gone through once more, from the true ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_lite.data.index_cache import Arrays, CacheEntry, IndexCache, Shapes
from megatron_lite.errors import DataError
from megatron_lite.units import count

MIN_VECTOR_STEPS = 1 << 14  # below, the plain loop is as fast
LANE_STEPS = 1 << 13
APPROACH_STEPS = 1 << 11  # from the estimate to the lane's beginning
LANES = 1 << 10  # at once: bounds the memory
SURPLUS = 0.005  # each data set is built a little larger than its share, as the greedy mixing may overdraw it
MAX_DATASETS = 32_766  # the data set's number is an int16
ORDER_BLOCK = 1 << 20


class Samples(Protocol):
    """A data set: samples in a fixed order."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> NDArray[np.int64]:
        """Sample number `i`: int64 [seq_length + 1]."""
        ...


def mix(shares: list[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Decide which data set gives which sample of the blend.

    Args:
        shares: Shares of the data sets, which sum to 1.
        size: Samples of the blend; a step decides one.

    Returns:
        int16 [size], the data set of each step, and int64 [size], how often it was taken before.
    """
    weights = np.array(shares)
    chosen = np.empty(size, np.int16)
    earlier = np.empty(size, np.int64)
    taken = np.zeros(len(shares))
    steps_at_once = LANES * LANE_STEPS
    for begin in range(0, size, steps_at_once):
        part = slice(begin, min(size, begin + steps_at_once))
        is_short = part.stop - begin < MIN_VECTOR_STEPS
        go = _mix_plainly if is_short else _mix_in_lanes
        taken = go(weights, begin, taken, chosen[part], earlier[part])
    return chosen, earlier


def _mix_plainly(
    weights: NDArray[np.float64],
    begin: int,
    taken: NDArray[np.float64],
    chosen: NDArray[np.int16],
    earlier: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Fill in steps one after the other.

    Args:
        weights: float64 [D], the shares.
        begin: Number of the first step.
        taken: float64 [D], how often each data set was taken before it.
        chosen: Is filled with the data set of each step.
        earlier: Is filled with how often that data set was taken before.

    Returns:
        float64 [D], how often each data set was taken after the last step.
    """
    shares: list[float] = weights.tolist()
    counts: list[float] = taken.tolist()
    sets: list[int] = []
    before: list[float] = []
    for step in range(len(chosen)):
        steps = max(begin + step, 1)
        best = -1
        largest = -math.inf
        for number, drawn in enumerate(counts):
            behind = shares[number] * steps - drawn
            if behind > largest:
                best = number
                largest = behind
        sets.append(best)
        before.append(counts[best])
        counts[best] += 1
    chosen[:] = sets
    earlier[:] = before
    return np.array(counts)


def _mix_in_lanes(
    weights: NDArray[np.float64],
    begin: int,
    taken: NDArray[np.float64],
    chosen: NDArray[np.int16],
    earlier: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Fill in steps side by side, in lanes of LANE_STEPS. Arguments and result are those of _mix_plainly."""
    lanes = _go_through_lanes(weights, begin, taken, len(chosen))
    for lane, first in enumerate(range(0, len(chosen), LANE_STEPS)):
        part = slice(first, first + LANE_STEPS)
        is_whole = len(chosen[part]) == LANE_STEPS
        if is_whole and np.array_equal(lanes.started_KD[lane], taken):
            chosen[part] = lanes.chosen_SK[:, lane]
            earlier[part] = lanes.earlier_SK[:, lane]
            taken = lanes.ended_KD[lane]
        else:
            taken = _mix_plainly(weights, begin + first, taken, chosen[part], earlier[part])
    return taken


class _Lanes(NamedTuple):
    """Steps of lanes that have gone side by side."""

    chosen_SK: NDArray[np.int16]  # the data set of each step
    earlier_SK: NDArray[np.float64]  # how often that data set was taken before
    started_KD: NDArray[np.float64]  # how often each was taken before the first step, as far as the estimate holds
    ended_KD: NDArray[np.float64]  # how often each was taken after the last one


def _go_through_lanes(
    weights: NDArray[np.float64],
    begin: int,
    taken: NDArray[np.float64],
    num_steps: int,
) -> _Lanes:
    """Take all steps of all lanes, the last of which may reach beyond what is wanted.

    Args:
        weights: float64 [D], the shares.
        begin: Number of the first lane's first step.
        taken: float64 [D], how often each data set was taken before it.
        num_steps: Steps of all lanes.
    """
    begins = np.arange(begin, begin + num_steps, LANE_STEPS)
    num_lanes = len(begins)
    steps_K = (begins - APPROACH_STEPS).astype(np.float64)
    steps_K1 = steps_K[:, None]
    taken_KD = _estimate(weights, np.maximum(steps_K1, 0))
    started_KD = taken_KD
    behind_KD = np.empty_like(taken_KD)
    # the counts of all lanes one after another, and where each lane begins in them
    flat = taken_KD.reshape(-1)
    rows = np.arange(num_lanes) * len(weights)
    chosen_SK = np.empty((LANE_STEPS, num_lanes), np.int16)
    earlier_SK = np.empty((LANE_STEPS, num_lanes))
    for step in range(-APPROACH_STEPS, LANE_STEPS):
        if step == 0:
            taken_KD[0] = taken
            started_KD = taken_KD.copy()
        np.multiply(weights, np.maximum(steps_K1, 1), out=behind_KD)
        np.subtract(behind_KD, taken_KD, out=behind_KD)
        best = behind_KD.argmax(1)
        places = rows + best
        before = flat[places]
        flat[places] = before + 1
        steps_K1 += 1
        if step >= 0:
            chosen_SK[step] = best
            earlier_SK[step] = before
    return _Lanes(chosen_SK, earlier_SK, started_KD, taken_KD)


def _estimate(weights: NDArray[np.float64], steps_K1: NDArray[np.float64]) -> NDArray[np.float64]:
    """About how often each data set was taken before these steps: float64 [K, D], each row's sum is the step."""
    exact = weights * steps_K1
    taken: NDArray[np.float64] = np.floor(exact)
    order = np.argsort(taken - exact, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    # what rounding down left over goes to the data sets that lost most by it
    left_over = steps_K1 - taken.sum(1, keepdims=True)
    taken[rank < left_over] += 1
    return taken


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. DataError unless all are above 0."""
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(
            f"--data-path: weights {list(weights)} must all be above 0; leave out a data set that is unused"
        )
    values = np.array(weights, dtype=np.float64)
    normal = values / np.sum(values)
    shares: list[float] = normal.tolist()
    return shares


def sizes_for_blend(size: int, weights: Sequence[float]) -> tuple[list[int], list[int]]:
    """Decide how many samples each data set gives, and how many to build of it.

    Args:
        size: Samples that are wanted.
        weights: Shares of the data sets, which sum to 1.

    Returns:
        Both numbers of each data set. The length of the blend is the sum of the first ones, a little more than `size`
        because of rounding up.
    """
    given = [math.ceil(size * weight) for weight in weights]
    built = [math.ceil(samples * (1 + SURPLUS)) for samples in given]
    return given, built


class BlendedDataset(Dataset[NDArray[np.int64]]):
    """Samples of several data sets; each one is taken from the data set that is furthest behind its weight.

    dataset_index: int16 [size], which data set; dataset_sample_index: int64 [size], which of its samples.
    """

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[float],
        size: int,
        cache: IndexCache | None = None,
        split: str = "train",
    ):
        """
        Args:
            datasets: The data sets.
            weights: One for each; they need not sum to 1.
            size: Samples of the blend.
            cache: Keeps the two indices.
            split: train, valid or test, for the names of the cache's files.

        Raises:
            DataError: A weight is not positive, or a data set is too small for its share.
        """
        if len(datasets) > MAX_DATASETS:
            raise DataError(f"--data-path: {len(datasets)} data sets are more than {MAX_DATASETS}; merge some files")
        self.datasets = list(datasets)
        shares = normalized(weights)
        shapes: Shapes = {
            "dataset_index": ((size,), np.dtype(np.int16)),
            "dataset_sample_index": ((size,), np.dtype(np.int64)),
        }
        entry = CacheEntry("BlendedDataset", split, {"shares": shares, "size": size}, shapes)
        cache = cache or IndexCache()
        folder = cache.folder_for("BlendedDataset", None, size)

        def build() -> Arrays:
            dataset_index, dataset_sample_index = mix(shares, size)
            return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

        indices = cache.get(folder, entry, build)
        self.dataset_index = indices["dataset_index"]
        self.dataset_sample_index = indices["dataset_sample_index"]
        self._require_samples()

    def _require_samples(self) -> None:
        """DataError unless each data set has the samples that the blend takes of it."""
        taken = np.zeros(len(self.datasets), np.int64)
        for start in range(0, len(self), ORDER_BLOCK):  # bincount makes int64 of all that it is given
            block = self.dataset_index[start : start + ORDER_BLOCK]
            taken += np.bincount(block, minlength=len(taken))
        for number, (samples, dataset) in enumerate(zip(taken.tolist(), self.datasets), start=1):
            if samples > len(dataset):
                raise DataError(
                    f"--data-path: the blend takes {count(samples)} samples of data set {number}, which has only "
                    f"{count(len(dataset))}; lower its weight"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        dataset = self.datasets[int(self.dataset_index[i])]
        return dataset[int(self.dataset_sample_index[i])]
