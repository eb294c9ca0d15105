"""Layouts of any sizes: each rank has a place of its own, and the ranks together hold everything once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.layout import Layout, Sharding, put_part, take_part, whole_part

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True, database=None)
SIZES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, tensor=SIZES, context=SIZES, data=SIZES, pipeline=SIZES, data_is_outermost=st.booleans())


@EXAMPLES
@given(LAYOUTS)
def test_a_ranks_place_leads_back_to_the_rank(layout):
    ranks = range(layout.stage_size * layout.pipeline)
    located = [layout.locate(rank) for rank in ranks]
    found = [one.find_rank(one.tensor_rank, one.context_rank, one.data_rank, one.pipeline_rank) for one in located]
    assert found == list(ranks)


@EXAMPLES
@given(LAYOUTS, st.integers(1, 5))
def test_ranks_that_share_out_a_sequence_have_each_position_once(layout, chunk):
    length = 2 * layout.context * chunk
    ranks = [layout.locate(layout.find_rank(0, number, 0, 0)) for number in range(layout.context)]
    positions = [position for rank in ranks for part in rank.find_chunks(length) for position in part]
    assert sorted(positions) == list(range(length))


@EXAMPLES
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 5))
def test_what_ranks_cut_off_a_tensor_joins_to_the_tensor(shape, ranks):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    joined = torch.full(shape, -1.0)
    for rank in range(ranks):
        part = Sharding(ranks, rank, False).find_rows(whole_part(tuple(shape)))
        own = torch.empty(part.shape)
        take_part(own, whole, part)
        put_part(joined, own, part)
    assert torch.equal(joined, whole)
