"""Gradients of Megatron-Core's distributed optimizer are put together from the ranks' shards."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_lite.script_record.megatron_core import CLIP_PLACE, find_buffers, gather_sums, see_clipping

WHOLE = torch.arange(12.0)


def make_buffer(rank, parameter):
    """A bucket of 12 from the buffer's 20th element, with the parameter behind its fourth."""

    def allgather(outputs, inputs):
        (own,) = inputs
        assert torch.equal(own, WHOLE.chunk(2)[rank])
        for output, shard in zip(outputs[0], WHOLE.chunk(2), strict=True):
            output.copy_(shard)
        return SimpleNamespace(wait=lambda: None)

    # a rank's own shard is summed, the other is its own gradient
    local = torch.full((12,), -1.0)
    local.chunk(2)[rank].copy_(WHOLE.chunk(2)[rank])
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=True),
        param_index_map={parameter: (24, 30, 0)},
        buckets=[SimpleNamespace(grad_data=local, offset=20)],
        data_parallel_group=SimpleNamespace(size=lambda: 2, rank=lambda: rank, allgather=allgather),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_make_up_the_gradient(rank):
    parameter = nn.Parameter(torch.zeros(2, 3))
    gathered = gather_sums(parameter, make_buffer(rank, parameter))
    assert torch.equal(gathered, WHOLE[4:10].view(2, 3))


@pytest.mark.parametrize(("is_sharded", "found"), [(True, 1), (False, 0)])
def test_buffers_are_found_where_ranks_have_shards(is_sharded, found):
    parameter = nn.Parameter(torch.zeros(2, 3))
    wrapper = nn.Identity()
    assert not list(find_buffers(wrapper))
    wrapper.buffers = [make_buffer(0, parameter)]
    wrapper.buffers[0].ddp_config.use_distributed_optimizer = is_sharded
    assert [key for key, _ in find_buffers(wrapper)] == [id(parameter)] * found


def test_gradients_are_noted_before_they_are_clipped(monkeypatch):
    gradients = [4.0]

    def clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm):
        gradients[0] *= max_norm / total_norm

    module = SimpleNamespace(clip_grad_by_total_norm_fp32=clip_grad_by_total_norm_fp32)
    monkeypatch.setitem(sys.modules, CLIP_PLACE, module)
    noted = []
    assert see_clipping(lambda *norms: noted.append((*norms, *gradients)))
    module.clip_grad_by_total_norm_fp32([], 1.0, total_norm=4.0)
    assert noted == [(4.0, 1.0, 4.0)]
    assert gradients == [1.0]
