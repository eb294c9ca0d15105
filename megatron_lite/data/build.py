"""From the data flags to the three data sets."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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

Dataset = GPTDataset | InfillingDataset | BlendedDataset | ConcatDataset | MockDataset
SPLITS = ("training", "validation", "test")
FILE_SPLITS = ("train", "valid", "test")  # Megatron's names, in those of cached files and of flags


@dataclass(frozen=True)
class DataSpec:
    """What to build of `data`, where no files of words are left to read."""

    data: DataArgs
    # samples for training, validation, test; 0: not wanted, None: all of one epoch
    sizes: tuple[int | None, int | None, int | None]
    seq_length: int
    seed: int
    vocab_size: int  # the tokenizer's, before padding


class Datasets(NamedTuple):
    """None: not wanted, or no share of the data."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(spec: DataSpec) -> Datasets:
    """Opens the files, checks their token ids, finds or builds the indices.

    DataError for all that cannot be trained on.
    """
    d = spec.data
    if d.mock_data and None in spec.sizes:
        raise DataError("--mock-data: has no end, which --full-validation would come to; give --eval-iters instead")
    if d.mock_data:
        # Another seed for each split: with the same one, validation would repeat the training samples.
        mocks = [
            MockDataset(size, spec.seq_length, spec.vocab_size, spec.seed + part)
            for part, size in enumerate(spec.sizes)
        ]
        return Datasets(*(mock if len(mock) else None for mock in mocks))
    cache, opened = IndexCache(d.data_cache_path), {}
    infilling = make_infilling(d, build_tokenizer(d)) if d.fim_data else None
    build_split = partial(_build_split, spec, cache, opened, infilling)
    own_paths = (d.train_data_path, d.valid_data_path, d.test_data_path)
    if any(own_paths):
        if spec.sizes[0] and not own_paths[0]:
            raise DataError("--train-data-path: missing beside --valid-data-path or --test-data-path; give it too")
        flags = [f"--{name}-data-path" for name in FILE_SPLITS]
        return Datasets(*(build_split(part, flags[part], own_paths[part]) for part in range(3)))
    if not d.data_path:
        raise DataError("--data-path: missing; give the prefix of a .bin/.idx pair, or train on --mock-data")
    return Datasets(*(build_split(part, "--data-path", d.data_path) for part in range(3)))


def _build_split(
    spec: DataSpec,
    cache: IndexCache,
    opened: dict[str, IndexedDataset],
    infilling: Infilling | None,
    part: int,
    flag: str,
    words: tuple[str, ...],
) -> Dataset | None:
    """The data set of one split, of a share of --data-path or of files of its own.

    opened: each prefix, once for all splits.
    """
    size, shared, shares_given = spec.sizes[part], flag == "--data-path", spec.data.split or SPLIT
    if not words or size == 0:
        return None
    if shared and split_shares(shares_given)[part] == 0:
        if part == 0:
            raise DataError(f"--split {shares_given}: no share is left for training; for example 969,30,1")
        return None
    prefixes, weights = parse_blend(words, flag)
    is_single = len(prefixes) == 1 and (weights is None or not shared)
    sources = []
    for prefix in prefixes:
        if prefix not in opened:
            opened[prefix] = _open(prefix, flag, spec.vocab_size)
        indexed = opened[prefix]
        mine = split_bounds(shares_given, len(indexed))[part] if shared else range(len(indexed))
        if not mine and part and is_single:
            return None  # as in Megatron: too few documents for a small share are no mistake
        sources.append((indexed, mine))
    for indexed, mine in sources:
        if not mine:
            raise DataError(
                f"--split {shares_given}: the {SPLITS[part]} share of {indexed.prefix} is none of its "
                f"{count(len(indexed))} sequences; give it a larger share, or 0 for none"
            )
    split, given = FILE_SPLITS[part], None
    shares, wanted = None, [size if is_single else None] * len(sources)
    if weights is not None and not is_single and size is None:
        raise DataError(f"{flag}: weights leave --full-validation no epoch to take; give the files without weights")
    if weights is not None and not is_single:
        shares = normalized(weights)
        given, wanted = sizes_for_blend(size, shares)
    datasets: list[GPTDataset | InfillingDataset] = [
        GPTDataset(indexed, mine, samples, spec.seq_length, spec.seed, cache=cache, split=split)
        for (indexed, mine), samples in zip(sources, wanted)
    ]
    if infilling is not None:
        datasets = [InfillingDataset(dataset, infilling, spec.seed) for dataset in datasets]
    if is_single:
        return datasets[0]
    if shares is None:
        # Without weights each data set gives what one epoch of it holds, and counts by that.
        if size is None:
            return ConcatDataset(datasets)
        lengths = [len(dataset) for dataset in datasets]
        return BlendedDataset(datasets, lengths, min(size, sum(lengths)), cache, split)
    return BlendedDataset(datasets, shares, sum(given), cache, split)


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
