"""Several data sets mixed in fixed proportions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.index_files import Arrays, Entry
from megatron_lite.data.mixing import mix
from megatron_lite.errors import DataError
from megatron_lite.units import count

SURPLUS = 0.005  # each data set is built a little larger than its share, as the greedy mixing may overdraw it
MOST_DATASETS = 32_766  # the data set's number is an int16
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
        if len(datasets) > MOST_DATASETS:
            raise DataError(f"--data-path: {len(datasets)} data sets are more than {MOST_DATASETS}; merge some files")
        self.datasets = list(datasets)
        shares = tuple(normalized(weights))
        order = _Order(shares, sum(weights), tuple(weights)) if size is None else _Order(shares, size, None)
        folder = cache and cache.folder_for("BlendedDataset", None, order.size)
        indices = cache.get(folder, order.entry(split), order.build) if folder else order.build()
        self.dataset_index = indices["dataset_index"]
        self.dataset_sample_index = indices["dataset_sample_index"]
        self._require_enough()

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[int(self.dataset_index[i])][int(self.dataset_sample_index[i])]

    def _require_enough(self) -> None:
        taken = np.zeros(len(self.datasets), np.int64)
        for start in range(0, len(self), BLOCK):  # bincount makes int64 of all that it is given
            taken += np.bincount(self.dataset_index[start : start + BLOCK], minlength=len(taken))
        for number, (samples, dataset) in enumerate(zip(taken.tolist(), self.datasets), start=1):
            if samples > len(dataset):
                raise DataError(
                    f"--data-path: the blend takes {count(samples)} samples of data set {number}, which has only "
                    f"{count(len(dataset))}; lower its weight"
                )


@dataclass(frozen=True)
class _Order:
    """All that the order of a blend depends on."""

    shares: tuple[float, ...]
    size: int
    limits: tuple[int, ...] | None  # None: no data set comes to its end

    def entry(self, split: str) -> Entry:
        key = {"shares": list(self.shares), "size": self.size, "limits": self.limits and list(self.limits)}
        shapes = {"dataset_index": np.int16, "dataset_sample_index": np.int64}
        return Entry("BlendedDataset", split, key, {name: ((self.size,), np.dtype(t)) for name, t in shapes.items()})

    def build(self) -> Arrays:
        dataset_index, dataset_sample_index = mix(list(self.shares), self.size, self.limits and list(self.limits))
        return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}
