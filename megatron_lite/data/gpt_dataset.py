"""Fixed-length samples cut out of one stream of shuffled sequences, in Megatron's order.

All sequences of a split are laid end to end, epoch after epoch, in a shuffled order (the document index). Sample k is
the `seq_length + 1` tokens from stream position k * seq_length on: neighbors share one token, the last label of the
one and the first input of the other. The samples are served in a shuffled order (the shuffle index).
"""

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_lite.config.data_paths import split_shares
from megatron_lite.data.index_cache import Arrays, CacheEntry, IndexCache, Shapes
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

EXTRA = 1  # a sample's labels reach one token further than its inputs
LAST_EPOCH_SHARE = 0.80  # a last epoch that is used less than this is shuffled apart from the others
BLOCK_SEQUENCES = 1 << 16  # as many as the processor's cache holds with what is computed from them
RANDOM_STREAM = "numpy.random.RandomState"  # numpy promises never to change it


def split_bounds(split: str, num_sequences: int) -> list[range]:
    """The sequences of training, validation and test; an empty range where the share is 0.

    Args:
        split: The value of --split, such as '949,50,1'.
        num_sequences: Sequences in the file.
    """
    shares = split_shares(split)
    normalized = np.array(shares) / np.sum(shares)
    ends = itertools.accumulate(normalized.tolist(), initial=0.0)
    marks = [round(end * float(num_sequences)) for end in ends]
    return [range(start, stop) for start, stop in itertools.pairwise(marks)]


@dataclass(frozen=True)
class Recipe:
    """All that the three indices depend on, but for the lengths of the sequences."""

    sequences: range
    tokens: int  # of one epoch
    epochs: int
    samples_shuffled_first: int | None  # None: all together
    samples: int
    seq_length: int
    seed: int

    def shapes(self) -> Shapes:
        """The shape and the type of each index by its name, known before it is built."""
        positions = self.epochs * len(self.sequences)
        # types as in Megatron: 64 bits only where 32 do not do
        place: np.dtype[np.integer] = np.dtype(np.int32)
        if positions > np.iinfo(np.int32).max:
            place = np.dtype(np.int64)
        order: np.dtype[np.integer] = np.dtype(np.uint32)
        if self.samples >= np.iinfo(np.uint32).max - 1:
            order = np.dtype(np.int64)
        return {
            "document_index": ((positions,), np.dtype(np.int32)),
            "sample_index": ((self.samples + 1, 2), place),
            "shuffle_index": ((self.samples,), order),
        }

    def entry(self, sequence_lengths: NDArray[np.int32], split: str) -> CacheEntry:
        """The cache's entry of these indices. Of the data, only the lengths matter, not the tokens or the path.

        Args:
            sequence_lengths: int32 [sequences], in tokens, of the whole file.
            split: train, valid or test.
        """
        part = slice(self.sequences.start, self.sequences.stop)
        mine = np.ascontiguousarray(sequence_lengths[part])
        key: dict[str, object] = {
            "random_stream": RANDOM_STREAM,
            "seed": self.seed,
            "first_sequence": self.sequences.start,
            "num_sequences": len(self.sequences),
            "sha256_of_their_lengths": hashlib.sha256(mine.data).hexdigest(),
            "extra_token": EXTRA,
            "seq_length": self.seq_length,
            "epochs": self.epochs,
            "samples": self.samples,
            "samples_shuffled_first": self.samples_shuffled_first,
        }
        return CacheEntry("GPTDataset", split, key, self.shapes())

    def build(self, sequence_lengths: NDArray[np.int32]) -> Arrays:
        """Compute the indices as Megatron does, in little memory.

        Args:
            sequence_lengths: int32 [sequences], in tokens, of the whole file.
        """
        random = np.random.RandomState(self.seed)
        first = self.samples_shuffled_first
        numbers = np.arange(self.sequences.start, self.sequences.stop, dtype=np.int32)
        index = np.empty((self.epochs, len(numbers)), np.int32)
        index[:] = numbers
        parts = [index]
        if first is not None:  # the last epoch apart
            parts = [index[:-1], index[-1:]]
        for part in parts:
            random.shuffle(part.reshape(-1))  # a view: the rows are contiguous
        document_index = index.reshape(-1)
        _, order_dtype = self.shapes()["shuffle_index"]
        order = np.arange(self.samples, dtype=order_dtype)
        random.shuffle(order[:first])
        if first is not None:
            random.shuffle(order[first:])
        sample_index = self._build_sample_index(sequence_lengths, document_index)
        return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": order}

    def _build_sample_index(
        self, sequence_lengths: NDArray[np.int32], document_index: NDArray[np.int32]
    ) -> NDArray[np.integer]:
        """Where each sample begins.

        Args:
            sequence_lengths: int32 [sequences], in tokens, of the whole file.
            document_index: int32 [epochs * sequences of the split], in the order of the stream.

        Returns:
            int [samples + 1, 2] of (position in the document index, offset in tokens).
        """
        shape, dtype = self.shapes()["sample_index"]
        index = np.empty(shape, dtype)
        before = 0  # tokens before the block
        done = 0  # rows written
        for first in range(0, len(document_index), BLOCK_SEQUENCES):
            lengths = sequence_lengths[document_index[first : first + BLOCK_SEQUENCES]]
            ends = np.cumsum(lengths, dtype=np.int64)
            block_tokens = int(ends[-1])
            # Not searchsorted: counting what begins up to each end takes the same time however short the samples are.
            # Sample k begins at token k * seq_length of the stream.
            begun = (before + ends - 1) // self.seq_length + 1
            rows = index[done : int(begun[-1])]
            begun = np.minimum(begun - done, len(rows))
            samples_of_sequence = np.diff(begun, prepend=0)
            within = np.repeat(np.arange(len(lengths)), samples_of_sequence)
            samples = np.arange(done, done + len(rows), dtype=np.int64)
            starts = samples * self.seq_length - before
            begins = ends - lengths
            rows[:, 0] = first + within
            rows[:, 1] = starts - begins[within]
            before += block_tokens
            done += len(rows)
        index[0] = 0  # the stream begins with its first sequence even if that is empty
        return index


def sample_recipe(sequences: range, tokens: int, num_samples: int | None, seq_length: int, seed: int) -> Recipe:
    """The recipe for samples of some sequences.

    Args:
        sequences: The sequences of the split.
        tokens: How many tokens they hold.
        num_samples: At least so many are served, from as many epochs as that takes; None: those of one epoch.
        seq_length: Tokens of a sample, without EXTRA.
        seed: Seed of all shuffling.
    """
    epochs = 1
    shuffled_first = None
    if num_samples is not None:
        needed = num_samples * seq_length + EXTRA
        epochs = max(1, -(-needed // tokens))
        tokens_before_last = (epochs - 1) * tokens
        before_last = (tokens_before_last - EXTRA) // seq_length
        per_epoch = (tokens - EXTRA) // seq_length
        of_last = num_samples - before_last
        if epochs > 1 and of_last < int(LAST_EPOCH_SHARE * per_epoch):
            shuffled_first = before_last  # the last epoch is used too little to be mixed with the others
    samples = (epochs * tokens - EXTRA) // seq_length
    return Recipe(sequences, tokens, epochs, shuffled_first, samples, seq_length, seed)


class GPTDataset(Dataset[NDArray[np.int64]]):
    """Samples of an indexed data set.

    `[i]` is int64 [seq_length + 1]: inputs are all tokens but the last, labels all but the first. With `marks_begins`,
    the first token that a sample has of each sequence is written as its complement, ~token, which is negative.

    document_index: int32 [epochs * sequences]; sample_index: int32 [samples + 1, 2] of (position in document_index,
    offset in that sequence); shuffle_index: uint32 [samples]. All three come from the cache, if it keeps so many.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache: IndexCache | None = None,
        split: str = "train",
        marks_begins: bool = False,
    ):
        """
        Args:
            indexed: The opened files.
            sequences: Numbers of the split's sequences.
            num_samples: At least so many are served, from as many epochs as that takes; None: those of one epoch.
            seq_length: Tokens of a sample, without EXTRA.
            seed: Seed of all shuffling.
            cache: Keeps the three indices.
            split: train, valid or test, for the names of the cache's files.
            marks_begins: Whether samples tell where sequences begin (--dataloader-inter-document-masking).

        Raises:
            DataError: The split holds too few tokens for a sample.
        """
        self.indexed = indexed
        self.seq_length = seq_length
        self._marks_begins = marks_begins
        lengths = indexed.sequence_lengths
        own_lengths = lengths[sequences.start : sequences.stop]
        tokens = int(own_lengths.sum(dtype=np.int64))
        # With a number of samples to reach, even one token can be repeated over many epochs;
        # one epoch must hold a sample.
        fewest = seq_length + EXTRA if num_samples is None else 1
        if tokens < fewest:
            raise DataError(
                f"{indexed.prefix}: sequences {count(sequences.start)} to {count(sequences.stop)} hold {count(tokens)} "
                f"tokens, too few for a sample of {count(seq_length + EXTRA)}; give the split a larger share (--split) "
                "or more data"
            )
        recipe = sample_recipe(sequences, tokens, num_samples, seq_length, seed)
        entries = recipe.epochs * len(sequences) + recipe.samples
        cache = cache or IndexCache()
        self._folder = cache.folder_for("GPTDataset", indexed.prefix, entries)
        indices = cache.get(
            self._folder,
            recipe.entry(lengths, split),
            build=lambda: recipe.build(lengths),
        )
        self.document_index = indices["document_index"]
        self.sample_index = indices["sample_index"]
        self.shuffle_index = indices["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        sample = int(self.shuffle_index[i])
        tokens = np.empty(self.seq_length + EXTRA, np.int64)
        filled = 0
        try:
            (position, offset), (last, last_offset) = self.sample_index[sample : sample + 2].tolist()
            for place, sequence in enumerate(self.document_index[position : last + 1].tolist(), start=position):
                length = last_offset + EXTRA - offset if place == last else None
                piece = self.indexed.tokens(sequence, offset, length)
                tokens[filled : filled + len(piece)] = piece
                if self._marks_begins and len(piece):
                    tokens[filled] = ~tokens[filled]
                filled += len(piece)
                offset = 0
        except (IndexError, ValueError):
            filled = -1
        # The cache checks no more than a GiB of an entry at the start; what slipped through is met here.
        if filled != len(tokens):
            remedy = f"delete {self._folder}" if self._folder else "report this with the command line"
            raise DataError(f"{self.indexed.prefix}: the indices of sample {count(i)} do not fit the data; {remedy}")
        return tokens


MOCK_ALPHABET = 512  # ids in use at most: with all of a large vocabulary, a short run would learn nothing
MOCK_MAX_STEP = 4
MOCK_NOISE = 0.1  # share of the tokens that are random


class MockDataset(Dataset[NDArray[np.int64]]):
    """Sample i counts up from a random id in steps of 1 to 4, a tenth of its tokens replaced by random ones.

    `[i]` is int64 [seq_length + 1] and depends on nothing but i, seed, seq_length and vocab_size.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int):
        """
        Args:
            num_samples: The data set's length.
            seq_length: Tokens of a sample, without EXTRA.
            vocab_size: Ids of tokens are below it.
            seed: Seed of all that is random.
        """
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self.alphabet = min(vocab_size, MOCK_ALPHABET)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        random = np.random.default_rng((self.seed, i))
        length = self.seq_length + 1
        first = random.integers(self.alphabet)
        step = random.integers(1, MOCK_MAX_STEP + 1)
        places = np.arange(length, dtype=np.int64)
        tokens = (first + step * places) % self.alphabet
        noise = random.integers(self.alphabet, size=length)
        is_noise = random.random(length) < MOCK_NOISE
        return np.where(is_noise, noise, tokens)
