"""Fixed-length samples cut out of one stream of shuffled sequences, in Megatron's order.

All sequences of a split are laid end to end, epoch after epoch, in a shuffled order (the document index). Sample k is
the `seq_length + 1` tokens from stream position k * seq_length on: neighbours share one token, the last label of the
one and the first input of the other. The samples are served in a shuffled order (the shuffle index).
"""

import itertools
import math

import numpy as np

from megatron_lite.config.data_paths import split_shares
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

EXTRA = 1  # a sample's labels reach one token further than its inputs
LAST_EPOCH_SHARE = 0.80  # a last epoch that is used less than this is shuffled apart from the others
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
    offset in that sequence); shuffle_index: uint32 [samples].
    drop_last=False keeps a last sample that is cut short and fills it up with NO_TOKEN, which the caller must mask.
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
    ):
        self.indexed = indexed
        self.seq_length = seq_length
        tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        _require_tokens(indexed.prefix, sequences, tokens, num_samples, seq_length)
        epochs = _num_epochs(tokens, num_samples, seq_length)
        first_part = _samples_shuffled_first(tokens, epochs, num_samples, seq_length)
        random = np.random.RandomState(seed)
        self.document_index = _document_index(sequences, epochs, first_part is not None, random)
        lengths = indexed.sequence_lengths[self.document_index]
        self.sample_index = _sample_index(lengths, epochs * tokens, seq_length, drop_last)
        self.shuffle_index = _shuffle_index(len(self.sample_index) - 1, first_part, random)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> np.ndarray:
        sample = int(self.shuffle_index[i])
        (position, offset), (last_position, last_offset) = self.sample_index[sample : sample + 2].tolist()
        tokens = np.full(self.seq_length + EXTRA, NO_TOKEN, np.int64)
        filled = 0
        for sequence in self.document_index[position : last_position + 1].tolist():
            at_end = position == last_position
            piece = self.indexed.tokens(sequence, offset, last_offset + EXTRA - offset if at_end else None)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            position, offset = position + 1, 0
        return tokens


def _require_tokens(prefix: str, sequences: range, tokens: int, num_samples: int | None, seq_length: int) -> None:
    # With a number of samples to reach, even one token can be repeated over many epochs; one epoch must hold a sample.
    needed = seq_length + EXTRA if num_samples is None else 1
    if tokens < needed:
        raise DataError(
            f"{prefix}: sequences {count(sequences.start)} to {count(sequences.stop)} hold {count(tokens)} tokens, too "
            f"few for a sample of {count(seq_length + EXTRA)}; give the split a larger share (--split) or more data"
        )


def _num_epochs(tokens: int, num_samples: int | None, seq_length: int) -> int:
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + EXTRA) // tokens))


def _samples_shuffled_first(tokens: int, epochs: int, num_samples: int | None, seq_length: int) -> int | None:
    """The samples of all epochs but the last, if the last is used too little to be mixed with them; else None."""
    if epochs == 1:
        return None
    before_last = ((epochs - 1) * tokens - EXTRA) // seq_length
    per_epoch = (tokens - EXTRA) // seq_length
    return before_last if num_samples - before_last < int(LAST_EPOCH_SHARE * per_epoch) else None


def _document_index(sequences: range, epochs: int, last_apart: bool, random: np.random.RandomState) -> np.ndarray:
    once = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    parts = [np.tile(once, epochs - 1), once] if last_apart else [np.tile(once, epochs)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def _sample_index(lengths: np.ndarray, tokens: int, seq_length: int, drop_last: bool) -> np.ndarray:
    """Where each sample begins; lengths: tokens of the sequences in the order of the document index."""
    num_samples = (tokens - EXTRA) // seq_length
    if not drop_last:
        # A quotient in single precision, as in Megatron: above 2^24 tokens it can be a few samples off.
        num_samples = math.ceil(float(np.float32(tokens - EXTRA) / np.float32(seq_length)))
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = np.minimum(np.arange(num_samples + 1, dtype=np.int64) * seq_length, tokens - EXTRA)
    positions = np.searchsorted(ends, starts, side="right")
    starts -= ends[positions] - lengths[positions]
    dtype = np.int32 if len(lengths) <= np.iinfo(np.int32).max else np.int64
    sample_index = np.stack([positions, starts], axis=1).astype(dtype)
    sample_index[0] = 0  # the stream begins with its first sequence even if that is empty
    return sample_index


def _shuffle_index(num_samples: int, first_part: int | None, random: np.random.RandomState) -> np.ndarray:
    order = np.arange(num_samples, dtype=np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(order[:first_part])
    if first_part is not None:
        random.shuffle(order[first_part:])
    return order
