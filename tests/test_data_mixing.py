"""The lanes of a blend are the plain rule, step by step, whatever the estimates were worth."""

import numpy as np
import pytest

from megatron_lite.data import blend_order
from megatron_lite.data.blend_order import mix

KINDS = ("even", "any", "whole numbers", "skewed", "one tiny")


def slow(shares, size, limits):
    taken, chosen, earlier = [0] * len(shares), [], []
    for step in range(size):
        behind = [
            -float("inf") if limits and limits[number] == taken[number] else share * max(step, 1) - taken[number]
            for number, share in enumerate(shares)
        ]
        chosen.append(behind.index(max(behind)))
        earlier.append(taken[chosen[-1]])
        taken[chosen[-1]] += 1
    return chosen, earlier


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
    for name, value in {"MIN_STEPS": 1, "LANE_STEPS": 64, "APPROACH_STEPS": 16, "LANES": 5}.items():
        monkeypatch.setattr(blend_order, name, value)


@pytest.fixture
def redone(monkeypatch):
    """How many steps were gone through by the plain loop."""
    plainly, steps = blend_order._plainly, []

    def counted(rule, begin, taken, chosen, earlier):
        steps.append(len(chosen))
        return plainly(rule, begin, taken, chosen, earlier)

    monkeypatch.setattr(blend_order, "_plainly", counted)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_are_the_rule(short_lanes, redone, kind):
    random = np.random.default_rng(KINDS.index(kind))
    for _ in range(10):
        weights = weights_of(kind, random)
        shares = (weights / weights.sum()).tolist()
        size = int(random.integers(1, 1500))
        chosen, earlier = mix(shares, size, None)
        assert (chosen.tolist(), earlier.tolist()) == slow(shares, size, None)
    assert kind == "skewed" or sum(redone) < 1500  # mostly the last lane of each, which is not whole


def test_lanes_with_an_end_are_the_rule(short_lanes):
    random = np.random.default_rng(9)
    for _ in range(25):
        limits = random.integers(1, random.choice([5, 400]), size=random.integers(1, 9)).tolist()
        shares = (np.array(limits) / sum(limits)).tolist()
        chosen, earlier = mix(shares, sum(limits), limits)
        assert (chosen.tolist(), earlier.tolist()) == slow(shares, sum(limits), limits)
        assert np.bincount(chosen, minlength=len(limits)).tolist() == limits


@pytest.mark.parametrize("fewest", [1, 10_000])
def test_a_data_set_that_is_used_up_is_left_alone_however_large_its_share(short_lanes, monkeypatch, fewest):
    monkeypatch.setattr(blend_order, "MIN_STEPS", fewest)
    for limits in ([3, 700, 10], [300, 1, 250]):
        chosen, earlier = mix([0.6, 0.1, 0.3], sum(limits), limits)
        assert (chosen.tolist(), earlier.tolist()) == slow([0.6, 0.1, 0.3], sum(limits), limits)


def test_a_wrong_estimate_costs_time_only(short_lanes, redone, monkeypatch):
    estimate = blend_order._estimate
    monkeypatch.setattr(blend_order, "_estimate", lambda rule, steps: np.roll(estimate(rule, steps), 1, axis=1))
    shares = [0.7, 0.2, 0.1]
    chosen, earlier = mix(shares, 640, None)
    assert (chosen.tolist(), earlier.tolist()) == slow(shares, 640, None)
    assert sum(redone) > 320


def test_usual_blends_hardly_use_the_plain_loop(redone):
    random = np.random.default_rng(2)
    for number in (2, 10, 50):
        redone.clear()
        mix((shares := random.random(number) + 0.02) / shares.sum(), 1_000_000, None)
        assert sum(redone) < blend_order.LANE_STEPS
