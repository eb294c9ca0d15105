"""Checks whether an indexed data set is sound, and counts what it holds."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed import IndexedDataset, damaged
from megatron_lite.errors import DataError
from megatron_lite.units import count

BLOCK_TOKENS = 1 << 22
BLOCK_DOCUMENTS = 1 << 16
SAMPLE_TOKENS = 40
MAX_SAMPLED_DOCUMENTS = 16
Report = Callable[[str, float], None]  # what is being done, and the share of it that is done


@dataclass(frozen=True)
class Inspection:
    """The contents of a sound data set. Lengths are tokens per document."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    file_bytes: int
    shortest: int
    median: float
    mean: float
    longest: int
    empty: int
    duplicates: int  # documents that equal an earlier one; empty ones do not count
    duplicate_pair: tuple[int, int] | None  # two equal documents, counted from 0
    smallest_id: int
    largest_id: int
    end_id: int  # the end-of-document token, or what the first document that is not empty ends with
    ending_so: int  # documents that end with end_id
    end_id_inside: int  # how often end_id stands elsewhere
    samples: tuple[tuple[int, ...], ...]  # the first tokens of documents that are not empty, from the first to the last


def _be_silent(what: str, share: float) -> None:
    """The report of nobody who waits."""


def inspect(
    prefix: str,
    vocab_size: int | None = None,
    eod: int | None = None,
    flag: str = "megatron-lite inspect",
    report: Report = _be_silent,
) -> Inspection:
    """Checks the header, bounds, pointers, marks and all ids of a data set, and counts what it holds.

    Memory: about 50 bytes per document; the tokens are streamed.

    Args:
        prefix: Prefix of the two files.
        vocab_size: Ids are below it; None: unknown.
        eod: The token that documents should end with; None: unknown.
        flag: Flag that named the files, for messages.
        report: Is called now and then.

    Raises:
        DataError: A file is missing or damaged, or an id is outside the vocabulary.
    """
    dataset = IndexedDataset(prefix, flag)
    bounds = dataset.document_bounds()
    lengths = np.diff(bounds)
    full = np.flatnonzero(lengths)
    last_ids = dataset.all_tokens[bounds[full + 1] - 1]
    end_id = int(last_ids[0]) if eod is None else eod
    smallest, largest, occurrences = _scan_ids(dataset, vocab_size, end_id, report)
    ending_so = int((last_ids == end_id).sum())
    duplicates, pair = _find_duplicates(dataset, bounds, full, report)
    return Inspection(
        prefix=prefix,
        dtype=str(dataset.dtype),
        documents=len(lengths),
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        file_bytes=sum(os.path.getsize(dataset.prefix + ending) for ending in (".bin", ".idx")),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        empty=len(lengths) - len(full),
        duplicates=duplicates,
        duplicate_pair=pair,
        smallest_id=smallest,
        largest_id=largest,
        end_id=end_id,
        ending_so=ending_so,
        end_id_inside=occurrences - ending_so,
        samples=tuple(_sample(dataset, bounds, full)),
    )


def _sample(dataset: IndexedDataset, bounds: NDArray[np.int64], full: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
    """The first tokens of MAX_SAMPLED_DOCUMENTS documents, evenly spread, the first one among them.

    Args:
        dataset: The opened files.
        bounds: int64 [documents + 1], the tokens before each document.
        full: Numbers of the documents that are not empty.
    """
    step = -(-len(full) // MAX_SAMPLED_DOCUMENTS)
    for document in full[::step]:
        start = int(bounds[document])
        end = min(int(bounds[document + 1]), start + SAMPLE_TOKENS)
        tokens = dataset.all_tokens[start:end]
        yield tuple(tokens.tolist())


def _scan_ids(dataset: IndexedDataset, vocab_size: int | None, wanted: int, report: Report) -> tuple[int, int, int]:
    """Look at all token ids.

    Args:
        dataset: The opened files.
        vocab_size: Ids are below it; None: unknown.
        wanted: The id to count.
        report: Is called now and then.

    Returns:
        The smallest and the largest id, and how often `wanted` occurs.

    Raises:
        DataError: An id is outside the vocabulary.
    """
    lows: list[int] = []
    highs: list[int] = []
    occurrences = 0
    for start in range(0, dataset.num_tokens, BLOCK_TOKENS):
        block = dataset.all_tokens[start : start + BLOCK_TOKENS]
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        if lows[-1] < 0 or (vocab_size is not None and highs[-1] >= vocab_size):
            raise _describe_wrong_id(dataset, vocab_size, start)
        occurrences += int(np.count_nonzero(block == wanted))
        report("token ids", (start + len(block)) / dataset.num_tokens)
    return min(lows), max(highs), occurrences


def _describe_wrong_id(dataset: IndexedDataset, vocab_size: int | None, start: int) -> DataError:
    """The error for the first id of a block of tokens that is negative or outside the vocabulary.

    Args:
        dataset: The opened files.
        vocab_size: Ids are below it; None: unknown.
        start: The first token of the block.
    """
    block = dataset.all_tokens[start : start + BLOCK_TOKENS]
    wrong = block < 0
    if vocab_size is not None:
        wrong |= block >= vocab_size
    at = int(wrong.argmax())
    document = int(np.searchsorted(dataset.document_bounds(), start + at, side="right")) - 1
    what = f"token {count(start + at)} (document {count(document)}) is the id {block[at]}"
    if vocab_size is None or block[at] < 0:
        return damaged(f"{dataset.prefix}.bin", what)
    return DataError(
        f"{dataset.prefix}.bin: {what}, outside the vocabulary of {count(vocab_size)}; "
        "give the tokenizer that it was made with, or preprocess the text again"
    )


def _find_duplicates(
    dataset: IndexedDataset, bounds: NDArray[np.int64], full: NDArray[np.int64], report: Report
) -> tuple[int, tuple[int, int] | None]:
    """Find documents that equal an earlier one, by hashes of 64 bits.

    Args:
        dataset: The opened files.
        bounds: int64 [documents + 1], the tokens before each document.
        full: Numbers of the documents that are not empty.
        report: Is called now and then.

    Returns:
        How many there are, and the numbers of one such pair.
    """
    hashes = np.empty(len(full), "<u8")
    tokens = dataset.all_tokens.data.cast("B")
    itemsize = dataset.dtype.itemsize
    for start in range(0, len(full), BLOCK_DOCUMENTS):
        block = full[start : start + BLOCK_DOCUMENTS]
        begins = (bounds[block] * itemsize).tolist()
        ends = (bounds[block + 1] * itemsize).tolist()
        digests = []
        for begin, end in zip(begins, ends):
            digest = hashlib.blake2b(tokens[begin:end], digest_size=8)
            digests.append(digest.digest())
        hashes[start : start + len(block)] = np.frombuffer(b"".join(digests), "<u8")
        report("duplicate documents", (start + len(block)) / len(full))
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return 0, None
    first, second = full[np.flatnonzero(hashes == again[0])[:2]]
    return len(again), (int(first), int(second))
