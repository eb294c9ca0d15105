"""Blends keep their proportions at every moment."""

import numpy as np
import pytest

from megatron_lite.data import blend_order as blend
from megatron_lite.data.blend_order import BlendedDataset, normalized, sizes_for_blend
from megatron_lite.errors import DataError


class Numbered:
    """Sample i of data set n is (n, i)."""

    def __init__(self, number, length):
        self.number, self.length = number, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        assert 0 <= i < self.length
        return self.number, i


def numbered(*lengths):
    return [Numbered(number, length) for number, length in enumerate(lengths)]


def slow_mix(shares, size):
    taken, chosen = [0] * len(shares), []
    for step in range(size):
        behind = [share * max(step, 1) - count for share, count in zip(shares, taken)]
        chosen.append(behind.index(max(behind)))
        taken[chosen[-1]] += 1
    return chosen


def test_mixing_equals_the_slow_one_and_stays_within_one_sample_of_the_proportions():
    random = np.random.default_rng(3)
    for _ in range(30):
        weights = random.integers(1, 50, size=random.integers(1, 4)).astype(float).tolist()
        size = int(random.integers(1, 300))
        mixed = BlendedDataset(numbered(*[size] * len(weights)), weights, size)
        shares = normalized(weights)
        assert mixed.dataset_index.tolist() == slow_mix(shares, size)
        for number, share in enumerate(shares):
            taken = np.cumsum(mixed.dataset_index == number)
            assert np.abs(taken - share * np.arange(1, size + 1)).max() < 2


def test_samples_of_each_data_set_come_in_their_order():
    mixed = BlendedDataset(numbered(50, 50), [3, 1], 40)
    drawn = [mixed[i] for i in range(len(mixed))]
    for number in (0, 1):
        own = [i for n, i in drawn if n == number]
        assert own == list(range(len(own)))
    assert (mixed.dataset_index.dtype, mixed.dataset_sample_index.dtype) == (np.int16, np.int64)


def test_first_data_set_wins_a_tie():
    assert BlendedDataset(numbered(9, 9), [1, 1], 4).dataset_index.tolist() == [0, 1, 0, 1]


def test_without_a_size_each_data_set_is_used_up_exactly():
    lengths = [5, 17, 1]
    mixed = BlendedDataset(numbered(*lengths), lengths, None)
    assert sorted(mixed[i] for i in range(len(mixed))) == [(n, i) for n in range(3) for i in range(lengths[n])]


def test_sizes_round_up_and_build_a_surplus():
    given, built = sizes_for_blend(1000, normalized([1, 2]))
    assert given == [334, 667]
    assert built == [336, 671]


def test_sizes_are_always_enough_for_the_mixing():
    random = np.random.default_rng(4)
    for _ in range(50):
        shares = normalized(random.random(random.integers(1, 6)) + 0.01)
        given, built = sizes_for_blend(int(random.integers(1, 500)), shares)
        assert len(BlendedDataset(numbered(*built), shares, sum(given))) == sum(given)


def test_data_set_too_small_for_its_share():
    with pytest.raises(
        DataError, match=r"^--data-path: the blend takes 5 samples of data set 2, which has only 3; .*$"
    ):
        BlendedDataset(numbered(9, 3), [1, 1], 10)


@pytest.mark.parametrize("weights", [[0.0, 1.0], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_must_be_positive(weights):
    with pytest.raises(DataError, match=r"^--data-path: weights \[.*\] must all be above 0; .*$"):
        BlendedDataset(numbered(9, 9), weights, 4)


def test_too_many_data_sets(monkeypatch):
    monkeypatch.setattr(blend, "MAX_DATASETS", 2)
    with pytest.raises(DataError, match=r"^--data-path: 3 data sets are more than 2; merge some files$"):
        BlendedDataset(numbered(9, 9, 9), [1, 1, 1], 4)
