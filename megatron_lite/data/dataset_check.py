"""What is in an indexed data set, and whether it is sound."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.data.indexed import IndexedDataset, damaged
from megatron_lite.errors import DataError
from megatron_lite.units import count

BLOCK_TOKENS = 1 << 22
BLOCK_DOCUMENTS = 1 << 16
SAMPLE_TOKENS = 40
MAX_SAMPLES = 16


@dataclass(frozen=True)
class Inspection:
    """One sound data set. Lengths are tokens per document."""

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


def inspect(
    prefix: str,
    vocab_size: int | None = None,
    eod: int | None = None,
    flag: str = "megatron-lite inspect",
    report: Callable[[str, float], None] = lambda what, share: None,
) -> Inspection:
    """Checks the header, bounds, pointers, marks and all ids of a data set, and counts what it holds.

    eod: the token that documents should end with, if it is known.
    Memory: about 50 bytes per document; the tokens are streamed. report(what, share done) is called now and then.
    DataError for a file that is missing or damaged and for an id outside a vocabulary of vocab_size.
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


def _sample(dataset: IndexedDataset, bounds: np.ndarray, full: np.ndarray) -> Iterator[tuple[int, ...]]:
    """The first tokens of MAX_SAMPLES of the documents `full`, evenly spread, the first one among them."""
    step = -(-len(full) // MAX_SAMPLES)
    for document in full[::step]:
        start, end = int(bounds[document]), int(bounds[document + 1])
        yield tuple(dataset.all_tokens[start : min(end, start + SAMPLE_TOKENS)].tolist())


def _scan_ids(dataset: IndexedDataset, vocab_size: int | None, wanted: int, report) -> tuple[int, int, int]:
    """The smallest and the largest id and how often `wanted` occurs; DataError for an id outside the vocabulary."""
    lows, highs, occurrences = [], [], 0
    for start in range(0, dataset.num_tokens, BLOCK_TOKENS):
        block = dataset.all_tokens[start : start + BLOCK_TOKENS]
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        if lows[-1] < 0 or (vocab_size is not None and highs[-1] >= vocab_size):
            wrong = block < 0 if vocab_size is None else (block < 0) | (block >= vocab_size)
            at = int(wrong.argmax())
            document = int(np.searchsorted(dataset.document_bounds(), start + at, side="right")) - 1
            what = f"token {count(start + at)} (document {count(document)}) is the id {block[at]}"
            if block[at] < 0:
                raise damaged(f"{dataset.prefix}.bin", what)
            raise DataError(
                f"{dataset.prefix}.bin: {what}, outside the vocabulary of {count(vocab_size)}; "
                "give the tokenizer that it was made with, or preprocess the text again"
            )
        occurrences += int(np.count_nonzero(block == wanted))
        report("token ids", (start + len(block)) / dataset.num_tokens)
    return min(lows), max(highs), occurrences


def _find_duplicates(dataset: IndexedDataset, bounds: np.ndarray, full: np.ndarray, report) -> tuple[int, tuple | None]:
    """How many of the documents `full` equal an earlier one, by hashes of 64 bits, and one such pair."""
    hashes = np.empty(len(full), "<u8")
    tokens = memoryview(dataset.all_tokens).cast("B")
    for start in range(0, len(full), BLOCK_DOCUMENTS):
        block = full[start : start + BLOCK_DOCUMENTS]
        begins, ends = ((bounds[block + more] * dataset.dtype.itemsize).tolist() for more in (0, 1))
        digests = [hashlib.blake2b(tokens[b:e], digest_size=8).digest() for b, e in zip(begins, ends)]
        hashes[start : start + len(block)] = np.frombuffer(b"".join(digests), "<u8")
        report("duplicate documents", (start + len(block)) / len(full))
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return 0, None
    first, second = full[np.flatnonzero(hashes == again[0])[:2]]
    return len(again), (int(first), int(second))
