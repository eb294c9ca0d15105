"""From the data flags to the three data sets."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.config.data_paths import SPLIT, parse_blend
from megatron_lite.data.blend_order import mix
from megatron_lite.data.gpt_dataset import GPTDataset, MockDataset, split_bounds, split_weights
from megatron_lite.data.index_cache import Arrays, Entry, IndexCache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

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


Dataset = GPTDataset | BlendedDataset | MockDataset
SPLITS = ("training", "validation", "test")
FILE_SPLITS = ("train", "valid", "test")  # Megatron's names, in those of cached files


@dataclass(frozen=True)
class DataSpec:
    """What to build. The paths are the words of the flag: one prefix, several, or weight prefix weight prefix ..."""

    sizes: tuple[int, int, int]  # samples for training, validation, test; 0: not wanted
    seq_length: int
    seed: int
    vocab_size: int  # the tokenizer's, before padding
    split: str = SPLIT  # shares of --data-path
    mock: bool = False
    data_path: tuple[str, ...] = ()
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    cache_path: str | None = None  # folder for the indices; None: large ones beside their data


@dataclass(frozen=True)
class Datasets:
    """None: not wanted, or no share of the data."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(spec: DataSpec, say: Callable[[str], None] = lambda text: None) -> Datasets:
    """Opens the files, checks their token ids, finds or builds the indices; `say` hears of a cache that fails.

    DataError for all that cannot be trained on.
    """
    if spec.mock:
        return Datasets(*(_mock(spec, part) for part in range(3)))
    files = _Files(spec.vocab_size, IndexCache(spec.cache_path, say))
    own_paths = (spec.train_data_path, spec.valid_data_path, spec.test_data_path)
    if not any(own_paths):
        return Datasets(*(_share_of_all(spec, part, files) for part in range(3)))
    flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
    return Datasets(*(_own(spec, part, own_paths[part], flags[part], files) for part in range(3)))


class _Files:
    """Opens each prefix once, however many splits use it; and the cache of the indices."""

    def __init__(self, vocab_size: int, cache: IndexCache):
        self.cache = cache
        self._vocab_size = vocab_size
        self._opened: dict[str, IndexedDataset] = {}

    def open(self, prefix: str, flag: str) -> IndexedDataset:
        if prefix not in self._opened:
            indexed = IndexedDataset(prefix, flag)
            self._check_ids(indexed)
            self._opened[prefix] = indexed
        return self._opened[prefix]

    def _check_ids(self, indexed: IndexedDataset) -> None:
        smallest, largest = indexed.extreme_token_ids()
        if smallest < 0 or largest >= self._vocab_size:
            raise DataError(
                f"{indexed.prefix}.bin: token id {smallest if smallest < 0 else largest} is outside the vocabulary of {count(self._vocab_size)}; use "
                "the tokenizer that the file was made with (--vocab-file, --merge-file, --tokenizer-model, --vocab-size)"
            )


def _mock(spec: DataSpec, part: int) -> MockDataset | None:
    size = spec.sizes[part]
    # Another seed for each split: with the same one, validation would repeat the training samples.
    return MockDataset(size, spec.seq_length, spec.vocab_size, spec.seed + part) if size else None


def _share_of_all(spec: DataSpec, part: int, files: _Files) -> Dataset | None:
    if not spec.data_path:
        raise DataError("--data-path: missing; give the prefix of a .bin/.idx pair, or train on --mock-data")
    if not spec.sizes[part]:
        return None
    if split_weights(spec.split)[part] == 0:
        if part == 0:
            raise DataError(f"--split {spec.split}: no share is left for training; for example 969,30,1")
        return None
    prefixes, weights = parse_blend(spec.data_path, "--data-path")

    def sequences(indexed: IndexedDataset) -> range:
        mine = split_bounds(spec.split, len(indexed))[part]
        if not mine:
            raise DataError(
                f"--split {spec.split}: the {SPLITS[part]} share of {indexed.prefix} is none of its "
                f"{count(len(indexed))} sequences; give it a larger share, or 0 for none"
            )
        return mine

    if len(prefixes) == 1 and weights is None:
        indexed = files.open(prefixes[0], "--data-path")
        if part and not split_bounds(spec.split, len(indexed))[part]:
            return None  # as in Megatron: too few documents for a small share are no mistake
        return _one(spec, part, indexed, sequences(indexed), spec.sizes[part], files.cache)
    opened = [files.open(prefix, "--data-path") for prefix in prefixes]
    return _blend(spec, part, opened, weights, sequences, files.cache)


def _own(spec: DataSpec, part: int, words: tuple[str, ...], flag: str, files: _Files) -> Dataset | None:
    if not words or not spec.sizes[part]:
        if part == 0 and spec.sizes[0]:
            raise DataError("--train-data-path: missing beside --valid-data-path or --test-data-path; give it too")
        return None
    prefixes, weights = parse_blend(words, flag)
    opened = [files.open(prefix, flag) for prefix in prefixes]
    if len(opened) == 1:
        return _one(spec, part, opened[0], _everything(opened[0]), spec.sizes[part], files.cache)
    return _blend(spec, part, opened, weights, _everything, files.cache)


def _everything(indexed: IndexedDataset) -> range:
    return range(len(indexed))


Sequences = Callable[[IndexedDataset], range]


def _one(spec: DataSpec, part: int, indexed: IndexedDataset, sequences: range, size: int | None, cache) -> GPTDataset:
    return GPTDataset(indexed, sequences, size, spec.seq_length, spec.seed, cache=cache, split=FILE_SPLITS[part])


def _blend(
    spec: DataSpec, part: int, opened: list[IndexedDataset], weights: list[float] | None, sequences: Sequences, cache
) -> BlendedDataset:
    def built(sizes: Iterable[int | None]) -> list[GPTDataset]:
        return [_one(spec, part, indexed, sequences(indexed), size, cache) for indexed, size in zip(opened, sizes)]

    size = spec.sizes[part]
    if weights is None:
        # Without weights each data set gives what one epoch of it holds, and counts by that.
        datasets = built(itertools.repeat(None))
        lengths = [len(dataset) for dataset in datasets]
        return BlendedDataset(datasets, lengths, min(size, sum(lengths)), cache, FILE_SPLITS[part])
    shares = normalized(weights)
    given, wanted = sizes_for_blend(size, shares)
    return BlendedDataset(built(wanted), shares, sum(given), cache, FILE_SPLITS[part])
