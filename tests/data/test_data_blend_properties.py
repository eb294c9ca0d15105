"""Blends of any shares: each data set is taken as often as it has to be, its samples in their order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.data_paths import split_shares
from megatron_lite.data.blend_order import mix
from megatron_lite.data.gpt_dataset import split_bounds

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True, database=None)
WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


@EXAMPLES
@given(WEIGHTS, st.integers(1, 400))
def test_a_data_sets_samples_come_in_order_and_as_often_as_its_share_says(weights, size):
    shares = [weight / sum(weights) for weight in weights]
    chosen, earlier = mix(shares, size)
    for number, share in enumerate(shares):
        of_this = earlier[chosen == number]
        assert np.array_equal(of_this, np.arange(len(of_this)))
        assert len(of_this) <= share * size + 1  # never overdrawn by more than the sample that is being chosen


@EXAMPLES
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.sampled_from([",", ":", "/", " ; "]))
def test_shares_of_a_split_read_back_and_cut_all_sequences(shares, between):
    text = between.join(map(str, shares))
    assert split_shares(text) == [*map(float, shares), *[0.0] * (3 - len(shares))]
    bounds = split_bounds(text, 1000)
    assert [number for part in bounds for number in part] == list(range(1000))
