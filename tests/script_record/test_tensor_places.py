"""Blocks of a weight tell where they lie in the whole: laid together they make it up again."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lite.script_record.tensor_places import MEGATRON_STATE, find_blocks, widen


def lay_together(wholes: list[list], shape) -> torch.Tensor:
    whole = torch.full(shape, torch.nan)
    for blocks in wholes:
        for block in blocks:
            ranges = tuple(slice(s, s + n) for s, n in zip(block.starts, block.local.shape, strict=True))
            assert whole[ranges].isnan().all()
            whole[ranges] = block.local
    return whole


@pytest.mark.parametrize(("dimension", "stride"), [(0, 1), (1, 1), (0, 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_megatron_core_says_how_a_weight_is_split(monkeypatch, dimension, stride, size):
    """A gated layer's weight has a piece of each of two wholes, one behind the other."""
    whole = torch.arange(16 * 8).reshape(16, 8).float()
    pieces = [part.chunk(size, dimension) for part in whole.chunk(stride, dimension)]
    found = []
    for rank in range(size):
        state = SimpleNamespace(
            get_tensor_model_parallel_rank=lambda rank=rank: rank, get_tensor_model_parallel_world_size=lambda: size
        )
        monkeypatch.setitem(sys.modules, MEGATRON_STATE, state)
        local = torch.cat([piece[rank] for piece in pieces], dimension)
        local.tensor_model_parallel = True
        local.partition_dim = dimension
        local.partition_stride = stride
        found.append(list(find_blocks(local)))
    assert all(block.is_placed for blocks in found for block in blocks)
    assert torch.equal(lay_together(found, whole.shape), whole)


def test_a_plain_tensor_is_taken_for_the_whole():
    (block,) = find_blocks(torch.ones(3, 2))
    assert block.whole == (3, 2)
    assert block.starts == (0, 0)
    assert not block.is_placed


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_copies_lose_nothing(dtype, kept):
    value = torch.rand(5).to(dtype)
    copy = widen(value)
    assert copy.dtype == kept
    assert torch.equal(copy.to(dtype), value)
    copy.zero_()
    assert value.count_nonzero()


@pytest.fixture
def second_of_two_ranks():
    """A rank whose exchanges do nothing."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_an_embedding_split_by_its_vocabulary_counts_rows_that_a_rank_has(second_of_two_ranks):
    """Other tokens are looked up in vain, which only the exchange takes out."""
    table = nn.Embedding(8, 3)
    whole = table.weight.detach().clone()
    mesh = init_device_mesh("cpu", (2,))
    table.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    tokens = torch.tensor([1, 6, 3, 4])
    output = nn.functional.embedding(distribute_tensor(tokens, mesh, [Replicate()], src_data_rank=None), table.weight)
    (block,) = find_blocks(output)
    is_own = (tokens >= 4)[:, None]
    assert block.is_partial
    assert torch.equal(block.local, whole[tokens] * is_own)
    # the mask is still there for the exchange
    assert output.placements[0].mask_buffer.data is not None
