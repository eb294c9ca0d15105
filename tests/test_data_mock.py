"""Made-up data is repeatable and can be learnt."""

import numpy as np
import pytest

from megatron_lite.data.gpt_dataset import ALPHABET, MockDataset


def test_sample_depends_on_index_and_seed_only():
    dataset = MockDataset(10, 64, 1000, 1)
    assert np.array_equal(dataset[3], MockDataset(99, 64, 1000, 1)[3])
    assert not np.array_equal(dataset[3], dataset[4])
    assert not np.array_equal(dataset[3], MockDataset(10, 64, 1000, 2)[3])
    assert dataset[0].dtype == np.int64 and dataset[0].shape == (65,)


@pytest.mark.parametrize("vocab_size", [2, 7, 50_257])
def test_ids_stay_inside_the_vocabulary(vocab_size):
    dataset = MockDataset(50, 32, vocab_size, 1)
    tokens = np.stack([dataset[i] for i in range(50)])
    assert tokens.min() >= 0 and tokens.max() < min(vocab_size, ALPHABET)


def test_next_token_mostly_follows_from_the_last_two():
    """The learnable part: the step between neighbours repeats wherever there is no noise (0.9 ** 3 of the places)."""
    dataset = MockDataset(100, 128, 50_257, 1)
    steps = np.diff(np.stack([dataset[i] for i in range(100)])) % ALPHABET
    assert 0.65 < (steps[:, 1:] == steps[:, :-1]).mean() < 0.80


@pytest.mark.parametrize("i", [-1, 10])
def test_index_outside(i):
    with pytest.raises(IndexError):
        MockDataset(10, 8, 100, 1)[i]
