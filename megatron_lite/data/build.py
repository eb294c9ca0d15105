"""From the data flags to the three data sets."""

from collections.abc import Callable
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
FILE_SPLITS = ("train", "valid", "test")  # Megatron's names, in those of cached files and of flags


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
        # Another seed for each split: with the same one, validation would repeat the training samples.
        return Datasets(
            *(
                MockDataset(size, spec.seq_length, spec.vocab_size, spec.seed + part) if size else None
                for part, size in enumerate(spec.sizes)
            )
        )
    builder = _Builder(spec, say)
    own_paths = (spec.train_data_path, spec.valid_data_path, spec.test_data_path)
    if not any(own_paths):
        return Datasets(*map(builder.build_share, range(3)))
    return Datasets(*map(builder.build_own, range(3), own_paths))


class _Builder:
    """Opens each prefix once, however many splits use it."""

    def __init__(self, spec: DataSpec, say: Callable[[str], None]):
        self._spec, self._cache = spec, IndexCache(spec.cache_path, say)
        self._opened: dict[str, IndexedDataset] = {}

    def build_share(self, part: int) -> Dataset | None:
        """The data set of a split that has a share of --data-path."""
        spec = self._spec
        if not spec.data_path:
            raise DataError("--data-path: missing; give the prefix of a .bin/.idx pair, or train on --mock-data")
        if not spec.sizes[part]:
            return None
        if split_weights(spec.split)[part] == 0:
            if part == 0:
                raise DataError(f"--split {spec.split}: no share is left for training; for example 969,30,1")
            return None
        prefixes, weights = parse_blend(spec.data_path, "--data-path")
        is_single = len(prefixes) == 1 and weights is None
        opened = []
        for prefix in prefixes:
            indexed = self._open(prefix, "--data-path")
            mine = split_bounds(spec.split, len(indexed))[part]
            if not mine and part and is_single:
                return None  # as in Megatron: too few documents for a small share are no mistake
            opened.append((indexed, mine))
        for indexed, mine in opened:
            if not mine:
                raise DataError(
                    f"--split {spec.split}: the {SPLITS[part]} share of {indexed.prefix} is none of its "
                    f"{count(len(indexed))} sequences; give it a larger share, or 0 for none"
                )
        return self._build(part, opened, weights, is_single)

    def build_own(self, part: int, words: tuple[str, ...]) -> Dataset | None:
        """The data set of a split that has files of its own."""
        if not words or not self._spec.sizes[part]:
            if part == 0 and self._spec.sizes[0]:
                raise DataError("--train-data-path: missing beside --valid-data-path or --test-data-path; give it too")
            return None
        flag = f"--{FILE_SPLITS[part]}-data-path"
        prefixes, weights = parse_blend(words, flag)
        opened = [self._open(prefix, flag) for prefix in prefixes]
        whole = [(indexed, range(len(indexed))) for indexed in opened]
        return self._build(part, whole, weights, is_single=len(whole) == 1)

    def _open(self, prefix: str, flag: str) -> IndexedDataset:
        if prefix not in self._opened:
            indexed = IndexedDataset(prefix, flag)
            smallest, largest = indexed.extreme_token_ids()
            if smallest < 0 or largest >= self._spec.vocab_size:
                raise DataError(
                    f"{prefix}.bin: token id {smallest if smallest < 0 else largest} is outside the vocabulary of "
                    f"{count(self._spec.vocab_size)}; use the tokenizer that the file was made with (--vocab-file, "
                    "--merge-file, --tokenizer-model, --vocab-size)"
                )
            self._opened[prefix] = indexed
        return self._opened[prefix]

    def _build(
        self, part: int, opened: list[tuple[IndexedDataset, range]], weights: list[float] | None, is_single: bool
    ) -> Dataset:
        spec, cache, split, size = self._spec, self._cache, FILE_SPLITS[part], self._spec.sizes[part]

        def build(indexed: IndexedDataset, sequences: range, size: int | None) -> GPTDataset:
            return GPTDataset(indexed, sequences, size, spec.seq_length, spec.seed, cache=cache, split=split)

        if is_single:
            return build(*opened[0], size)
        if weights is None:
            # Without weights each data set gives what one epoch of it holds, and counts by that.
            datasets = [build(indexed, sequences, None) for indexed, sequences in opened]
            lengths = [len(dataset) for dataset in datasets]
            return BlendedDataset(datasets, lengths, min(size, sum(lengths)), cache, split)
        shares = normalized(weights)
        given, wanted = sizes_for_blend(size, shares)
        datasets = [build(indexed, sequences, size) for (indexed, sequences), size in zip(opened, wanted)]
        return BlendedDataset(datasets, shares, sum(given), cache, split)
