"""From the data flags to the three data sets."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_lite.config.data_paths import SPLIT, parse_blend
from megatron_lite.data.blend_order import BlendedDataset, normalized, sizes_for_blend
from megatron_lite.data.gpt_dataset import GPTDataset, MockDataset, split_bounds, split_weights
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

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
