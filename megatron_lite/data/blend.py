"""Several data sets mixed in fixed proportions."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.units import count

SURPLUS = 0.005  # each data set is built a little larger than its share, as the greedy mixing may overdraw it
MOST_DATASETS = 32_766  # the data set's number is an int16


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. DataError unless all are above 0."""
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(f"--data-path: weights {list(weights)} must all be above 0; leave out a data set that is unused")
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
    Raises DataError for weights that are not positive and for a data set that is too small for its share.
    """

    def __init__(self, datasets: Sequence, weights: Sequence[float], size: int | None):
        if len(datasets) > MOST_DATASETS:
            raise DataError(f"--data-path: {len(datasets)} data sets are more than {MOST_DATASETS}; merge some files")
        self.datasets = list(datasets)
        shares = normalized(weights)
        if size is None:
            self.dataset_index = _mix(shares, sum(weights), list(weights))
        else:
            self.dataset_index = _mix(shares, size, None)
        self.dataset_sample_index = _running_numbers(self.dataset_index, len(datasets))
        self._require_enough()

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[int(self.dataset_index[i])][int(self.dataset_sample_index[i])]

    def _require_enough(self) -> None:
        taken = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        for number, (samples, dataset) in enumerate(zip(taken, self.datasets), start=1):
            if samples > len(dataset):
                raise DataError(
                    f"--data-path: the blend takes {count(samples)} samples of data set {number}, which has only "
                    f"{count(len(dataset))}; lower its weight"
                )


def _mix(shares: list[float], size: int, limits: list[int] | None) -> np.ndarray:
    """Greedy mixing: at step s the data set with the largest share * max(s, 1) - taken; the first one on a tie."""
    chosen = np.empty(size, np.int16)
    taken = [0] * len(shares)
    open_datasets = list(range(len(shares)))
    for step in range(size):
        steps = step or 1
        best, largest = -1, -math.inf
        for number in open_datasets:
            behind = shares[number] * steps - taken[number]
            if behind > largest:
                best, largest = number, behind
        chosen[step] = best
        taken[best] += 1
        if limits is not None and taken[best] == limits[best]:
            open_datasets.remove(best)
    return chosen


def _running_numbers(dataset_index: np.ndarray, num_datasets: int) -> np.ndarray:
    """For each entry how many equal ones come before it."""
    numbers = np.empty(len(dataset_index), np.int64)
    for dataset in range(num_datasets):
        mine = dataset_index == dataset
        numbers[mine] = np.arange(np.count_nonzero(mine))
    return numbers
