"""Blends keep their proportions at every moment; their lanes are the plain rule, whatever the estimates were worth."""

import numpy as np
import pytest

from megatron_lite.data import blend_order
from megatron_lite.data.blend_order import BlendedDataset, mix, normalized, sizes_for_blend
from megatron_lite.errors import DataError

KINDS = ("even", "any", "whole numbers", "skewed", "one tiny")


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


def assert_the_rule(shares, size):
    """mix() gives what going through all steps one by one does; returns its choices."""
    taken, expected = [0] * len(shares), []
    for step in range(size):
        behind = [share * max(step, 1) - taken[number] for number, share in enumerate(shares)]
        best = behind.index(max(behind))  # the first one on a tie
        expected.append((best, taken[best]))
        taken[best] += 1
    chosen, earlier = mix(shares, size)
    assert list(zip(chosen.tolist(), earlier.tolist())) == expected
    return chosen


def weights_of(kind, random):
    number = int(random.integers(1, 12))
    return {
        "even": np.ones(number),
        "any": random.random(number) + 0.01,
        "whole numbers": random.integers(1, 6, size=number).astype(float),
        "skewed": np.exp(random.normal(0, 4, size=number)),
        "one tiny": np.array([1e-4] + [1.0] * number),
    }[kind]


@pytest.fixture
def short_lanes(monkeypatch):
    for name, value in {"MIN_VECTOR_STEPS": 1, "LANE_STEPS": 64, "APPROACH_STEPS": 16, "LANES": 5}.items():
        monkeypatch.setattr(blend_order, name, value)


@pytest.fixture
def redone(monkeypatch):
    """How many steps were gone through by the plain loop."""
    plainly, steps = blend_order._mix_plainly, []

    def counted(weights, begin, taken, chosen, earlier):
        steps.append(len(chosen))
        return plainly(weights, begin, taken, chosen, earlier)

    monkeypatch.setattr(blend_order, "_mix_plainly", counted)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_are_the_rule_and_stay_within_one_sample_of_the_proportions(short_lanes, redone, kind):
    random = np.random.default_rng(KINDS.index(kind))
    for _ in range(10):
        shares, size = normalized(weights_of(kind, random)), int(random.integers(1, 1500))
        chosen = assert_the_rule(shares, size)
        for number, share in enumerate(shares):
            assert np.abs(np.cumsum(chosen == number) - share * np.arange(1, size + 1)).max() < 2
    assert kind == "skewed" or sum(redone) < 1500  # mostly the last lane of each, which is not whole


def test_a_wrong_estimate_costs_time_only(short_lanes, redone, monkeypatch):
    estimate = blend_order._estimate
    monkeypatch.setattr(blend_order, "_estimate", lambda *known: np.roll(estimate(*known), 1, axis=1))
    assert_the_rule([0.7, 0.2, 0.1], 640)
    assert sum(redone) > 320


def test_usual_blends_hardly_use_the_plain_loop(redone):
    random = np.random.default_rng(2)
    for number in (2, 10, 50):
        redone.clear()
        mix((shares := random.random(number) + 0.02) / shares.sum(), 1_000_000)
        assert sum(redone) < blend_order.LANE_STEPS


def test_samples_come_in_their_order():
    mixed = BlendedDataset(numbered(50, 50), [3, 1], 40)
    drawn = [mixed[i] for i in range(len(mixed))]
    for number in (0, 1):
        own = [i for n, i in drawn if n == number]
        assert own == list(range(len(own)))
    assert (mixed.dataset_index.dtype, mixed.dataset_sample_index.dtype) == (np.int16, np.int64)
    assert BlendedDataset(numbered(9, 9), [1, 1], 4).dataset_index.tolist() == [0, 1, 0, 1]


def test_sizes_round_up_build_a_surplus_and_are_always_enough_for_the_mixing():
    assert sizes_for_blend(1000, normalized([1, 2])) == ([334, 667], [336, 671])
    random = np.random.default_rng(4)
    for _ in range(50):
        shares = normalized(random.random(random.integers(1, 6)) + 0.01)
        given, built = sizes_for_blend(int(random.integers(1, 500)), shares)
        assert len(BlendedDataset(numbered(*built), shares, sum(given))) == sum(given)


def test_what_cannot_be_mixed_is_one_line(monkeypatch):
    monkeypatch.setattr(blend_order, "MAX_DATASETS", 2)
    not_positive = r"--data-path: weights \[.*\] must all be above 0; .*"
    too_small = "--data-path: the blend takes 5 samples of data set 2, which has only 3; .*"
    for lengths, weights, size, message in (
        ((9, 3), [1, 1], 10, too_small),
        ((9, 9, 9), [1, 1, 1], 4, "--data-path: 3 data sets are more than 2; merge some files"),
        *(((9, 9), [weight, 1.0], 4, not_positive) for weight in (0.0, -1.0, float("nan"), float("inf"))),
    ):
        with pytest.raises(DataError, match=rf"^{message}$"):
            BlendedDataset(numbered(*lengths), weights, size)
