"""What is said of gradients that are not finite."""

import pytest

from megatron_lite.config.layout import Layout
from megatron_lite.train.nonfinite_gradients import NonfiniteGradients, describe_nonfinite

EXPERT = "decoder.layers.1.mlp.experts.linear_fc2.weight0"
DENSE = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("name", "expert", "where"),
    [
        (DENSE, 2, "averaged over 4 ranks"),
        (EXPERT, 2, "averaged over 2 ranks"),
        # each rank has experts of its own
        (EXPERT, 4, "rank 3"),
    ],
)
def test_experts_are_averaged_over_fewer_ranks(name, expert, where):
    gradients = NonfiniteGradients({name: 3}, 10)
    assert f"({where})" in describe_nonfinite(gradients, Layout(data=4, expert=expert))
