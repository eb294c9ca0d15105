"""Tells a recorder of Megatron-Core what no module shows: gradients that its distributed optimizer has in shards, and
its own clipping."""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.instruments.replacing import get_function, put_in_place

CLIP_PLACE = "megatron.core.optimizer.optimizer"  # the module whose optimizers call it
CLIP_SHARDS = "clip_grad_by_total_norm_fp32"
BUFFERS = ("buffers", "expert_parallel_buffers")  # attributes of its data parallelism


def see_clipping(note: Callable[[float, float], object]) -> bool:
    """See where its optimizers clip, for the rest of the process.

    Args:
        note: Called before gradients are multiplied, with the norm of all of them and the one that it clips to.

    Returns:
        Whether the script has loaded it.
    """
    place = sys.modules.get(CLIP_PLACE)
    if not hasattr(place, CLIP_SHARDS):
        return False
    clip = get_function(place, CLIP_SHARDS)
    signature = inspect.signature(clip)

    def note_and_clip(*arguments: object, **named: object) -> object:
        given = signature.bind(*arguments, **named).arguments
        note(float(given["total_norm"]), float(given["max_norm"]))
        return clip(*arguments, **named)

    put_in_place(place, CLIP_SHARDS, note_and_clip)
    return True


def find_buffers(wrapper: nn.Module) -> Iterator[tuple[int, Any]]:
    """Find the buffers of which each rank has only a shard of the sums, by the ids of their parameters.

    Args:
        wrapper: What a script calls: its data parallelism, or any module.
    """
    for name in BUFFERS:
        buffers = getattr(wrapper, name, None)
        # a module of torch has a method of the first name
        if not isinstance(buffers, list):
            continue
        for buffer in buffers:
            if not buffer.ddp_config.use_distributed_optimizer:
                continue
            for parameter in buffer.param_index_map:
                yield id(parameter), buffer


def gather_sums(parameter: Tensor, buffer: Any) -> Tensor:
    """Gather the gradient of a parameter from the shards of its ranks, which all of them do together.

    Args:
        parameter: Of a model.
        buffer: That holds its gradient.
    """
    begin, end, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    group = buffer.data_parallel_group
    shards = bucket.grad_data.chunk(group.size())
    # a shard has the whole sum on the rank of its number alone
    gathered = [torch.empty_like(shard) for shard in shards]
    group.allgather([gathered], [shards[group.rank()].contiguous()]).wait()
    whole = torch.cat(gathered)
    own = whole[begin - bucket.offset : end - bucket.offset]
    return own.view(parameter.shape)
