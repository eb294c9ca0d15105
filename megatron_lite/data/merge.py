"""Several indexed data sets joined to one."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from megatron_lite.data.index_format import HEADER
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import PairWriter, Written
from megatron_lite.errors import DataError

BLOCK = 1 << 22  # tokens, sequences or documents copied at a time
NONE = np.empty(0, np.int64)


def merge(
    prefixes: Sequence[str], output_prefix: str, flag: str = "--inputs", report: Callable[[int], None] = lambda _: None
) -> Written:
    """Writes OUTPUT.bin and .idx: the sequences of all data sets in their order, and how much that was.

    As Megatron's add_index: the marks of a data set are moved by the sequences before it and its leading 0 is dropped.
    report(tokens) is called now and then. DataError for a damaged pair, for token types that differ, and for an output
    that is one of the inputs; nothing is written then.
    """
    datasets = [_opened(prefix, flag) for prefix in prefixes]
    _check(datasets, output_prefix, flag)
    pair = PairWriter(output_prefix, datasets[0].dtype, f".tmp{os.getpid()}")
    with ExitStack() as stack:
        pair.open()
        stack.callback(pair.discard)
        pair.cut(Written())
        for dataset in datasets:
            _append(pair, dataset, report)
        pair.complete()
        pair.place()
    return pair.written


def _opened(prefix: str, flag: str) -> IndexedDataset:
    dataset = IndexedDataset(prefix, flag)
    if os.path.getsize(f"{prefix}.idx") != HEADER.size + 12 * len(dataset) + 8 * len(dataset.document_marks):
        raise DataError(f"{flag} {prefix}: a multimodal data set, whose modes would be lost; merge text data sets only")
    return dataset


def _check(datasets: Sequence[IndexedDataset], output_prefix: str, flag: str) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{flag} {dataset.prefix}: its tokens are {dataset.dtype}, those of {first.prefix} {first.dtype}; "
                "preprocess both with the same vocabulary"
            )
        if os.path.realpath(f"{dataset.prefix}.bin") == os.path.realpath(f"{output_prefix}.bin"):
            raise DataError(f"--output-prefix {output_prefix}: is one of the data sets to merge; choose another name")


def _append(pair: PairWriter, dataset: IndexedDataset, report: Callable[[int], None]) -> None:
    # Marks first: they are moved by the sequences that the pair holds when they come.
    for start in range(1, len(dataset.document_marks), BLOCK):
        pair.append(b"", NONE, dataset.document_marks[start : start + BLOCK])
    for start in range(0, len(dataset), BLOCK):
        pair.append(b"", dataset.sequence_lengths[start : start + BLOCK], NONE)
    for block in dataset.token_blocks(BLOCK):
        pair.append(block.tobytes(), NONE, NONE)
        report(pair.written.tokens)
