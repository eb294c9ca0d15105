"""Fixed-length samples cut out of one stream of shuffled sequences, in Megatron's order.

All sequences of a split are laid end to end, epoch after epoch, in a shuffled order (the document index). Sample k is
the `seq_length + 1` tokens from stream position k * seq_length on: neighbours share one token, the last label of the
one and the first input of the other. The samples are served in a shuffled order (the shuffle index).
"""

import itertools

import numpy as np

from megatron_lite.config.data_paths import split_shares
from megatron_lite.data.gpt_indices import EXTRA, sample_recipe
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

NO_TOKEN = -1  # fills up a last sample that is cut short (drop_last=False)


def split_weights(split: str) -> list[float]:
    """'949,50,1' -> three shares that sum to 1; missing ones are 0. DataError if that is not what it says."""
    shares = split_shares(split)
    return (np.array(shares) / np.sum(shares)).tolist()


def split_bounds(split: str, num_sequences: int) -> list[range]:
    """The sequences of the training, validation and test split; an empty range where the share is 0."""
    ends = [0.0]
    for weight in split_weights(split):
        ends.append(ends[-1] + weight)
    marks = [round(end * float(num_sequences)) for end in ends]
    return [range(start, stop) for start, stop in itertools.pairwise(marks)]


class GPTDataset:
    """`[i]` is int64 [seq_length + 1]: inputs are all tokens but the last, labels all but the first.

    num_samples: at least so many are served, from as many epochs as that takes; None means one epoch.
    document_index: int32 [epochs * sequences]; sample_index: int32 [samples + 1, 2] of (position in document_index,
    offset in that sequence); shuffle_index: uint32 [samples]. All three come from the cache, if it keeps so many.
    drop_last=False keeps a last sample that is cut short and fills it up with NO_TOKEN, which the caller must mask.
    split: train, valid or test, for the names of the cache's files.
    Raises DataError if the split holds too few tokens for a sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        drop_last: bool = True,
        cache: IndexCache | None = None,
        split: str = "train",
    ):
        self.indexed, self.seq_length = indexed, seq_length
        lengths = indexed.sequence_lengths
        tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        # With a number of samples to reach, even one token can be repeated over many epochs; one epoch must hold a sample.
        if tokens < (seq_length + EXTRA if num_samples is None else 1):
            raise DataError(
                f"{indexed.prefix}: sequences {count(sequences.start)} to {count(sequences.stop)} hold {count(tokens)} "
                f"tokens, too few for a sample of {count(seq_length + EXTRA)}; give the split a larger share (--split) "
                "or more data"
            )
        recipe = sample_recipe(sequences, tokens, num_samples, seq_length, seed, drop_last)
        self._stream_tokens = recipe.epochs * tokens
        entries = recipe.positions + recipe.samples
        self._folder = cache and cache.folder_for("GPTDataset", indexed.prefix, entries)
        if self._folder:
            indices = cache.get(self._folder, recipe.entry(lengths, split), lambda: recipe.build(lengths))
        else:
            indices = recipe.build(lengths)
        self.document_index = indices["document_index"]
        self.sample_index = indices["sample_index"]
        self.shuffle_index = indices["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> np.ndarray:
        sample = int(self.shuffle_index[i])
        tokens = np.full(self.seq_length + EXTRA, NO_TOKEN, np.int64)
        try:
            filled = self._fill(tokens, sample)
        except (IndexError, ValueError):
            filled = None
        # The cache checks no more than a GiB of an entry at the start; what slipped through is met here.
        left = self._stream_tokens - sample * self.seq_length
        if filled != min(max(left, EXTRA), len(tokens)):
            remedy = f"delete {self._folder}" if self._folder else "report this with the command line"
            raise DataError(f"{self.indexed.prefix}: the indices of sample {count(i)} do not fit the data; {remedy}")
        return tokens

    def _fill(self, tokens: np.ndarray, sample: int) -> int:
        """Writes the tokens of a sample and returns how many; IndexError or ValueError if it does not lie in the data."""
        (position, offset), (last_position, last_offset) = self.sample_index[sample : sample + 2].tolist()
        filled = 0
        for sequence in self.document_index[position : last_position + 1].tolist():
            at_end = position == last_position
            piece = self.indexed.tokens(sequence, offset, last_offset + EXTRA - offset if at_end else None)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            position, offset = position + 1, 0
        return filled


# --- made-up data

ALPHABET = 512  # ids in use at most: with all of a large vocabulary, a short run would learn nothing
LARGEST_STEP = 4
NOISE = 0.1  # share of the tokens that are random


class MockDataset:
    """Sample i counts up from a random id in steps of 1 to 4, a tenth of its tokens replaced by random ones.

    `[i]` is int64 [seq_length + 1] and depends on nothing but i, seed, seq_length and vocab_size.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int):
        self.num_samples, self.seq_length, self.seed = num_samples, seq_length, seed
        self.alphabet = min(vocab_size, ALPHABET)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        random = np.random.default_rng((self.seed, i))
        length = self.seq_length + 1
        first, step = random.integers(self.alphabet), random.integers(1, LARGEST_STEP + 1)
        tokens = (first + step * np.arange(length, dtype=np.int64)) % self.alphabet
        noise = random.integers(self.alphabet, size=length)
        return np.where(random.random(length) < NOISE, noise, tokens)
