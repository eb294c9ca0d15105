"""A checkpoint goes through six layouts of experts and back, and keeps its bits."""

import pytest
from expert_ring import ALONE, PRECISIONS, RING, go_round


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_ring_of_expert_layouts_keeps_all_bits(tmp_path, precision):
    saved = list(go_round(tmp_path, precision))
    assert [one.layout for one in saved] == [ALONE, *RING] and len(set(RING)) == 6
    assert all(one.different == () for one in saved)
    # weights, and both moments; in bf16 masters, too
    assert saved[0].of_experts == (30 if precision == "bf16" else 24) and len({one.digest for one in saved}) == 1
