"""Splits, the three indices and the samples that they cut out of the stream."""

import numpy as np
import pytest

from megatron_lite.data.gpt_dataset import MOCK_ALPHABET, GPTDataset, MockDataset, split_bounds
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.errors import DataError


def corpus(tmp_path, lengths):
    """Tokens count up through the file, so that a token tells where it stands."""
    prefix, first = str(tmp_path / "corpus"), 0
    with IndexedWriter(prefix, 1_000_000) as writer:
        for length in lengths:
            writer.add_document(range(first, first + length))
            first += length
    return IndexedDataset(prefix)


class InMemory:
    """What GPTDataset needs of an IndexedDataset; unlike a file that we write, it can have empty sequences."""

    prefix = "memory"

    def __init__(self, lengths):
        self.sequence_lengths = np.array(lengths, np.int32)
        self.ends = np.cumsum(self.sequence_lengths)

    def tokens(self, sequence, offset=0, length=None):
        start, end = self.ends[sequence] - self.sequence_lengths[sequence] + offset, self.ends[sequence]
        return np.arange(start, end if length is None else start + length)


def random_cases(number):
    random = np.random.default_rng(7)
    for case in range(number):
        lengths = random.integers(0, 30, size=random.integers(1, 30)).tolist()
        lengths[random.integers(len(lengths))] += 5
        start = int(random.integers(len(lengths)))
        sequences = range(start, int(random.integers(start, len(lengths))) + 1)
        if sum(lengths[sequence] for sequence in sequences):
            seq_length, size = int(random.integers(1, 25)), int(random.integers(1, 120))
            yield lengths, sequences, size, seq_length, case


def test_samples_tile_the_stream_with_one_token_overlap():
    """Whatever the lengths, empty ones among them. That orders are Megatron's: test_data_megatron."""
    for lengths, sequences, num_samples, seq_length, seed in random_cases(300):
        indexed = InMemory(lengths)
        dataset = GPTDataset(indexed, sequences, num_samples, seq_length, seed)
        epochs, rest = divmod(len(dataset.document_index), len(sequences))
        assert rest == 0 and sorted(dataset.document_index) == sorted([*sequences] * epochs)
        stream = np.concatenate([indexed.tokens(sequence) for sequence in dataset.document_index])
        for i, place in enumerate(dataset.shuffle_index.tolist()):
            assert dataset[i].tolist() == stream[place * seq_length : (place + 1) * seq_length + 1].tolist()
        assert sorted(dataset.shuffle_index) == list(range((len(stream) - 1) // seq_length))
        assert len(dataset) >= num_samples and (
            epochs == 1 or len(stream) * (epochs - 1) / epochs < num_samples * seq_length + 1
        )


def test_begins_of_sequences_are_marked():
    """From sequences' lengths alone, whatever the tokens are; empty ones have no begin."""
    for lengths, sequences, num_samples, seq_length, seed in random_cases(100):
        indexed = InMemory(lengths)
        plain = GPTDataset(indexed, sequences, num_samples, seq_length, seed)
        marked = GPTDataset(indexed, sequences, num_samples, seq_length, seed, marks_begins=True)
        ends = np.cumsum([lengths[sequence] for sequence in plain.document_index])
        begins = {0, *ends.tolist()}
        for i, place in enumerate(plain.shuffle_index.tolist()):
            sample = marked[i]
            first = place * seq_length
            assert np.where(sample < 0, ~sample, sample).tolist() == plain[i].tolist()
            # the part of a sequence that a sample begins with begins in it
            expected = [number == 0 or first + number in begins for number in range(seq_length + 1)]
            assert (sample < 0).tolist() == expected


def test_one_epoch_without_a_size():
    dataset = GPTDataset(InMemory([10, 3, 8]), range(3), None, 5, 1)
    types = [index.dtype for index in (dataset.document_index, dataset.sample_index, dataset.shuffle_index)]
    assert (len(dataset), len(dataset.document_index)) == (4, 3) and types == [np.int32, np.int32, np.uint32]


def test_last_epoch_that_is_hardly_used_comes_last():
    dataset = GPTDataset(InMemory([40, 40, 40]), range(3), 25, 10, 0)
    first = (2 * 120 - 1) // 10  # samples of the first two of three epochs
    assert len(dataset.document_index) == 9
    assert sorted(dataset.shuffle_index[:first].tolist()) == list(range(first))


def test_indices_that_do_not_fit_the_data_are_met(tmp_path):
    indexed = corpus(tmp_path, [7, 3, 20])
    for index, place, value in (
        ("document_index", 0, 99),
        ("document_index", 1, -7),
        ("sample_index", (1, 1), 90),
        ("sample_index", (1, 0), 80),
        ("sample_index", (1, 1), -1),
        ("shuffle_index", 0, 77),
    ):
        dataset = GPTDataset(indexed, range(3), 5, 5, 0)
        getattr(dataset, index)[place] = value
        message = r"^\S+corpus: the indices of sample \d do not fit the data; report this .*$"
        with pytest.raises(DataError, match=message):
            [dataset[i] for i in range(5)]
    with pytest.raises(IndexError):
        GPTDataset(indexed, range(3), 5, 5, 0)[99]


def test_a_short_split_is_repeated_and_too_few_tokens_are_refused(tmp_path):
    dataset = GPTDataset(corpus(tmp_path, [3]), range(1), 4, 16, 0)
    assert dataset[0].tolist() == [0, 1, 2] * 5 + [0, 1]
    for lengths, num_samples, tokens in (([0, 0], 10, 0), ([3, 4], None, 7)):
        message = rf"^memory: sequences 0 to 2 hold {tokens} tokens, too few for a sample of 9; .*--split.*$"
        with pytest.raises(DataError, match=message):
            GPTDataset(InMemory(lengths), range(2), num_samples, 8, 0)


def test_splits_round_halves_to_even_and_are_a_partition_or_refused():
    assert [len(part) for part in split_bounds("949,50,1", 7222)] == [6854, 361, 7]
    assert split_bounds("1,1", 5) == [range(2), range(2, 5), range(5, 5)]
    assert split_bounds("1,1", 7) == [range(4), range(4, 7), range(7, 7)]
    for split in ("969,30,1", "100,0,0", "0.8,0.1,0.1", "7", "0,1,1", "1,2", "98/2/0", "1 1 1"):
        for num_sequences in (*range(30), 7222):
            parts = split_bounds(split, num_sequences)
            assert [i for part in parts for i in part] == list(range(num_sequences))
    for split in ("", "0,0,0", "1,2,3,4", "-1,2", "a,b,c", "nan,1,1", "inf,1,1"):
        with pytest.raises(DataError, match=rf"^--split {split}: .*; for example 969,30,1$"):
            split_bounds(split, 10)


def test_mock_samples_depend_on_index_and_seed_and_stay_inside_the_vocabulary():
    dataset = MockDataset(10, 64, 1000, 1)
    assert np.array_equal(dataset[3], MockDataset(99, 64, 1000, 1)[3])
    assert not np.array_equal(dataset[3], dataset[4])
    assert not np.array_equal(dataset[3], MockDataset(10, 64, 1000, 2)[3])
    assert dataset[0].dtype == np.int64 and dataset[0].shape == (65,)
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            dataset[outside]
    for vocab_size in (2, 7, 50_257):
        dataset = MockDataset(50, 32, vocab_size, 1)
        tokens = np.stack([dataset[i] for i in range(50)])
        assert tokens.min() >= 0 and tokens.max() < min(vocab_size, MOCK_ALPHABET)


def test_next_token_mostly_follows_from_the_last_two():
    """The learnable part: the step between neighbors repeats wherever there is no noise (0.9 ** 3 of the places)."""
    dataset = MockDataset(100, 128, 50_257, 1)
    steps = np.diff(np.stack([dataset[i] for i in range(100)])) % MOCK_ALPHABET
    assert 0.65 < (steps[:, 1:] == steps[:, :-1]).mean() < 0.80
