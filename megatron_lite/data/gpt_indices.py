"""The three indices of a GPT data set, computed as Megatron does, in little memory."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from megatron_lite.data.index_cache import Arrays, Entry

EXTRA = 1  # a sample's labels reach one token further than its inputs
LAST_EPOCH_SHARE = 0.80  # a last epoch that is used less than this is shuffled apart from the others
BLOCK_SEQUENCES = 1 << 16  # as many as the processor's cache holds with what is computed from them
RANDOM_STREAM = "numpy.random.RandomState"  # numpy promises never to change it


@dataclass(frozen=True)
class Recipe:
    """All that the indices depend on, but for the lengths of the sequences."""

    sequences: range
    tokens: int  # of one epoch
    epochs: int
    samples_shuffled_first: int | None  # None: all together
    samples: int
    seq_length: int
    seed: int

    @property
    def positions(self) -> int:
        """The length of the document index."""
        return self.epochs * len(self.sequences)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{name of the index: its shape and type}, known before it is built."""
        place = np.int32 if self.positions <= np.iinfo(np.int32).max else np.int64
        order = np.uint32 if self.samples < np.iinfo(np.uint32).max - 1 else np.int64
        return {
            "document_index": ((self.positions,), np.dtype(np.int32)),
            "sample_index": ((self.samples + 1, 2), np.dtype(place)),
            "shuffle_index": ((self.samples,), np.dtype(order)),
        }

    def entry(self, sequence_lengths: np.ndarray, split: str) -> Entry:
        """What the cache knows these indices by. Of the data, only the lengths matter, not the tokens or the path."""
        mine = np.ascontiguousarray(sequence_lengths[self.sequences.start : self.sequences.stop])
        key = {
            "random_stream": RANDOM_STREAM,
            "seed": self.seed,
            "first_sequence": self.sequences.start,
            "num_sequences": len(self.sequences),
            "sha256_of_their_lengths": hashlib.sha256(mine).hexdigest(),
            "extra_token": EXTRA,
            "seq_length": self.seq_length,
            "epochs": self.epochs,
            "samples": self.samples,
            "samples_shuffled_first": self.samples_shuffled_first,
        }
        return Entry("GPTDataset", split, key, self.shapes())

    def build(self, sequence_lengths: np.ndarray) -> Arrays:
        """{name: index}; sequence_lengths: int32, of the whole file."""
        random, first = np.random.RandomState(self.seed), self.samples_shuffled_first
        index = np.empty((self.epochs, len(self.sequences)), np.int32)
        index[:] = np.arange(self.sequences.start, self.sequences.stop, dtype=np.int32)
        for part in [index] if first is None else [index[:-1], index[-1:]]:
            random.shuffle(part.reshape(-1))  # a view: the rows are contiguous
        document_index = index.reshape(-1)
        order = np.arange(self.samples, dtype=self.shapes()["shuffle_index"][1])
        random.shuffle(order[:first])
        if first is not None:
            random.shuffle(order[first:])
        sample_index = self._sample_index(sequence_lengths, document_index)
        return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": order}

    def _sample_index(self, sequence_lengths: np.ndarray, document_index: np.ndarray) -> np.ndarray:
        """Where each sample begins: int [samples + 1, 2] of (position in the document index, offset)."""
        shape, dtype = self.shapes()["sample_index"]
        index = np.empty(shape, dtype)
        before, done = 0, 0  # tokens before the block, rows written
        last = (0, 0)  # where the last token stands
        for first in range(0, len(document_index), BLOCK_SEQUENCES):
            lengths = sequence_lengths[document_index[first : first + BLOCK_SEQUENCES]]
            ends = np.cumsum(lengths, dtype=np.int64)
            rows = index[done : _samples_begun(before + int(ends[-1]), self.seq_length)]
            # Not searchsorted: counting what begins up to each end takes the same time however short the samples are.
            begun = np.minimum(_samples_begun(before + ends, self.seq_length) - done, len(rows))
            within = np.repeat(np.arange(len(lengths)), np.diff(begun, prepend=0))
            starts = np.arange(done, done + len(rows), dtype=np.int64) * self.seq_length - before
            rows[:, 0] = first + within
            rows[:, 1] = starts - (ends - lengths)[within]
            if ends[-1]:
                final = int(np.searchsorted(ends, ends[-1]))
                last = (first + final, int(lengths[final]) - EXTRA)
            before += int(ends[-1])
            done += len(rows)
        index[done:] = last  # what would begin after the end: the last sample's end, if it is cut short
        index[0] = 0  # the stream begins with its first sequence even if that is empty
        return index


def sample_recipe(
    sequences: range, tokens: int, num_samples: int | None, seq_length: int, seed: int, drop_last: bool
) -> Recipe:
    """The recipe for at least num_samples (None: one epoch's) samples of these sequences, which hold `tokens`."""
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + EXTRA) // tokens))
    shuffled_first = None
    if epochs > 1:
        before_last = ((epochs - 1) * tokens - EXTRA) // seq_length
        per_epoch = (tokens - EXTRA) // seq_length
        if num_samples - before_last < int(LAST_EPOCH_SHARE * per_epoch):
            shuffled_first = before_last  # the last epoch is used too little to be mixed with the others
    in_all = epochs * tokens - EXTRA
    # A quotient in single precision, as in Megatron: above 2^24 tokens it can be a few samples off.
    samples = in_all // seq_length if drop_last else math.ceil(float(np.float32(in_all) / np.float32(seq_length)))
    return Recipe(sequences, tokens, epochs, shuffled_first, samples, seq_length, seed)


def _samples_begun(tokens, seq_length: int):
    """How many samples begin in the first `tokens` of the stream: sample k does at k * seq_length."""
    return (tokens - 1) // seq_length + 1
