"""Builds the three data sets that the data flags describe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from megatron_lite.config.args import DataArgs
from megatron_lite.config.data_paths import SPLIT, parse_blend, split_shares
from megatron_lite.data.blend_order import BlendedDataset, normalized, sizes_for_blend
from megatron_lite.data.gpt_dataset import GPTDataset, MockDataset, split_bounds
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.infilling import Infilling, InfillingDataset, make_infilling
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.units import count

Dataset = GPTDataset | InfillingDataset | BlendedDataset | ConcatDataset[NDArray[np.int64]] | MockDataset
Source = tuple[IndexedDataset, range]  # an opened file, and the sequences of it that are used
SPLITS = ("training", "validation", "test")
FILE_SPLITS = ("train", "valid", "test")  # Megatron's names, in those of cached files and of flags


@dataclass(frozen=True)
class DataSpec:
    """The data sets to build of `data`, where no files of words are left to read."""

    data: DataArgs
    # samples for training, validation, test; 0: not wanted, None: all of one epoch
    sizes: tuple[int | None, int | None, int | None]
    seq_length: int
    seed: int
    vocab_size: int  # the tokenizer's, before padding


class Datasets(NamedTuple):
    """The data sets of a run; None for a split that is not wanted or has no share of the data."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(spec: DataSpec) -> Datasets:
    """Opens the files, checks their token ids, finds or builds the indices.

    DataError for all that cannot be trained on.
    """
    d = spec.data
    if d.mock_data:
        return Datasets(*_build_mocks(spec))
    builder = _Builder(spec)
    own_paths = (d.train_data_path, d.valid_data_path, d.test_data_path)
    if any(own_paths):
        if spec.sizes[0] and not own_paths[0]:
            raise DataError("--train-data-path: missing beside --valid-data-path or --test-data-path; give it too")
        return Datasets(
            train=builder.build_split(0, "--train-data-path", d.train_data_path or ()),
            valid=builder.build_split(1, "--valid-data-path", d.valid_data_path or ()),
            test=builder.build_split(2, "--test-data-path", d.test_data_path or ()),
        )
    if not d.data_path:
        raise DataError("--data-path: missing; give the prefix of a .bin/.idx pair, or train on --mock-data")
    return Datasets(
        train=builder.build_split(0, "--data-path", d.data_path),
        valid=builder.build_split(1, "--data-path", d.data_path),
        test=builder.build_split(2, "--data-path", d.data_path),
    )


def _build_mocks(spec: DataSpec) -> list[MockDataset | None]:
    """The three data sets of --mock-data. DataError if the whole of one is wanted."""
    mocks: list[MockDataset | None] = []
    for part, size in enumerate(spec.sizes):
        if size is None:
            raise DataError("--mock-data: has no end, which --full-validation would come to; give --eval-iters instead")
        # Another seed for each split: with the same one, validation would repeat the training samples.
        seed = spec.seed + part
        mock = None
        if size:
            mock = MockDataset(size, spec.seq_length, spec.vocab_size, seed)
        mocks.append(mock)
    return mocks


class _Builder:
    """Builds splits, which may share files: each is opened once."""

    def __init__(self, spec: DataSpec):
        self._spec = spec
        self._cache = IndexCache(spec.data.data_cache_path)
        self._shares = spec.data.split or SPLIT
        self._opened: dict[str, IndexedDataset] = {}  # by prefix
        self._infilling: Infilling | None = None
        if spec.data.fim_data:
            self._infilling = make_infilling(spec.data, build_tokenizer(spec.data))

    def build_split(self, part: int, flag: str, words: tuple[str, ...]) -> Dataset | None:
        """The data set of one split, of a share of --data-path or of files of its own.

        Args:
            part: 0 for training, 1 for validation, 2 for test.
            flag: The flag that names the files.
            words: The flag's values: prefixes, each with a weight before it or without.

        Returns:
            None if the split is not wanted, or has no share of the data.
        """
        size = self._spec.sizes[part]
        if not words or size == 0:
            return None
        is_shared = flag == "--data-path"
        if is_shared and split_shares(self._shares)[part] == 0:
            if part == 0:
                raise DataError(f"--split {self._shares}: no share is left for training; for example 969,30,1")
            return None
        prefixes, weights = parse_blend(words, flag)
        sources = [self._take_share(prefix, part, flag) for prefix in prefixes]
        split = FILE_SPLITS[part]
        if len(prefixes) == 1 and (weights is None or not is_shared):
            [(_, sequences)] = sources
            if not sequences and part > 0:
                return None  # as in Megatron: too few documents for a small share are no mistake
            self._require_sequences(sources, part)
            [dataset] = self._cut_samples(sources, [size], split)
            return dataset
        self._require_sequences(sources, part)
        if weights is None:
            return self._concatenate(sources, size, split)
        if size is None:
            raise DataError(f"{flag}: weights leave --full-validation no epoch to take; give the files without weights")
        return self._blend(sources, weights, size, split)

    def _take_share(self, prefix: str, part: int, flag: str) -> Source:
        """Open a file and find the sequences of it that a split has.

        Args:
            prefix: Path of the file, without .bin and .idx.
            part: 0 for training, 1 for validation, 2 for test.
            flag: The flag that names the file. Splits share the files of --data-path.
        """
        if prefix not in self._opened:
            self._opened[prefix] = _open(prefix, flag, self._spec.vocab_size)
        indexed = self._opened[prefix]
        if flag != "--data-path":
            return indexed, range(len(indexed))
        return indexed, split_bounds(self._shares, len(indexed))[part]

    def _require_sequences(self, sources: list[Source], part: int) -> None:
        """DataError unless a split has sequences of each of its files. part: as in _take_share."""
        for indexed, sequences in sources:
            if not sequences:
                raise DataError(
                    f"--split {self._shares}: the {SPLITS[part]} share of {indexed.prefix} is none of its "
                    f"{count(len(indexed))} sequences; give it a larger share, or 0 for none"
                )

    def _blend(self, sources: list[Source], weights: Sequence[float], size: int, split: str) -> Dataset:
        """Mix files by weight.

        Args:
            sources: Opened files, and their sequences.
            weights: One for each file; they need not sum to 1.
            size: Samples that are wanted.
            split: train, valid or test.
        """
        shares = normalized(weights)
        given, wanted = sizes_for_blend(size, shares)
        datasets = self._cut_samples(sources, wanted, split)
        return BlendedDataset(datasets, shares, sum(given), self._cache, split)

    def _concatenate(self, sources: list[Source], size: int | None, split: str) -> Dataset:
        """Files without weights: each gives what one epoch of it holds, and counts by that.

        Args:
            sources: Opened files, and their sequences.
            size: Samples that are wanted; None: all, one file after the other.
            split: train, valid or test.
        """
        datasets = self._cut_samples(sources, [None] * len(sources), split)
        if size is None:
            return ConcatDataset(datasets)
        lengths = [len(dataset) for dataset in datasets]
        return BlendedDataset(datasets, lengths, min(size, sum(lengths)), self._cache, split)

    def _cut_samples(
        self, sources: list[Source], wanted: Sequence[int | None], split: str
    ) -> list[GPTDataset | InfillingDataset]:
        """Cut each file into samples.

        Args:
            sources: Opened files, and their sequences.
            wanted: Samples of each; None: those of one epoch.
            split: train, valid or test.
        """
        spec = self._spec
        datasets: list[GPTDataset | InfillingDataset] = []
        for (indexed, mine), samples in zip(sources, wanted):
            plain = GPTDataset(
                indexed,
                mine,
                samples,
                spec.seq_length,
                spec.seed,
                cache=self._cache,
                split=split,
                marks_begins=spec.data.dataloader_inter_document_masking,
            )
            if self._infilling is None:
                datasets.append(plain)
            else:
                datasets.append(InfillingDataset(plain, self._infilling, spec.seed))
        return datasets


def _open(prefix: str, flag: str, vocab_size: int) -> IndexedDataset:
    """The files of a prefix. DataError if among many of their tokens there is one outside the vocabulary."""
    indexed = IndexedDataset(prefix, flag)
    smallest, largest = indexed.extreme_token_ids()
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{prefix}.bin: token id {smallest if smallest < 0 else largest} is outside the vocabulary of "
            f"{count(vocab_size)}; use the tokenizer that the file was made with (--vocab-file, "
            "--merge-file, --tokenizer-model, --vocab-size)"
        )
    return indexed
