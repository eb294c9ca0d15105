"""distrib_optim.pt, where Megatron's distributed optimizer keeps masters and moments in one flat buffer each.

Source of the layout: get_parameter_state_dp_zero in megatron/core/optimizer/distrib_optimizer.py and _ParamAndGradBuffer in
megatron/core/distributed/param_and_grad_buffer.py of Megatron-Core 0.16.1. The padding at the end of a bucket, which
depends on the number of ranks, is not in the file; that at the start of a parameter is.
"""

from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint import megatron_unpickle
from megatron_lite.checkpoint.megatron_args import MegatronArgs
from megatron_lite.checkpoint.megatron_optimizer import Unmapped, read_settings
from megatron_lite.errors import CheckpointError

FILE = "distrib_optim.pt"
ALIGNMENT = 64  # elements, of a parameter's start
KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def read_buffers(path: Path, optimizer: dict, weights: dict[str, Tensor], args: MegatronArgs) -> dict[str, Tensor]:
    """The flat tensors of masters and moments. weights: by our names, in the file's order. Raises Unmapped.

    That the layout is understood is proved by the weights: each must be its master, rounded.
    """
    if not path.exists():
        raise Unmapped(f"lies in {FILE} (--use-distributed-optimizer), which is not there")
    try:
        state = megatron_unpickle.load(path)
    except CheckpointError:
        raise Unmapped(f"in {FILE} cannot be read; it is damaged, or names classes that are not known") from None
    buffers = [value for key, value in state.items() if isinstance(value, dict)]
    if len(buffers) != 1 or len(buffers[0]) != 1 or not state.get("buckets_coalesced"):
        raise Unmapped(f"in {FILE} is of several kinds of parameters, or from before February 2024")
    (flat,) = buffers[0].values()
    for bucket_size in bucket_sizes(args):
        starts, total = layout({name: weight.numel() for name, weight in weights.items()}, bucket_size)
        if total == flat["param"].numel() and _are_masters(flat["param"], starts, weights):
            return _named(flat, starts, weights) | read_settings(optimizer, weights, f"in {FILE} ")
    raise Unmapped(f"in {FILE} is laid out in a way that does not fit these weights")


def layout(sizes: dict[str, int], bucket_size: int | None) -> tuple[dict[str, int], int]:
    """({name: its first element}, elements in all): from the last parameter to the first, bucket after bucket."""
    starts, bucket, end = {}, 0, 0
    for name in reversed(sizes):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts[name] = bucket + start
        end = start + sizes[name]
        if bucket_size is not None and end >= bucket_size:
            bucket, end = bucket + end, 0
    return starts, bucket + end


def bucket_sizes(args: MegatronArgs) -> list[int | None]:
    """One bucket, or those of --overlap-grad-reduce."""
    ranks = args.given("data_parallel_size", 1) * args.given("context_parallel_size", 1)
    return [None, args.given("ddp_bucket_size", max(40_000_000, 1_000_000 * ranks))]


def _slice(flat: Tensor, start: int, like: Tensor) -> Tensor:
    return flat[start : start + like.numel()].view(like.shape)


def _are_masters(flat: Tensor, starts: dict[str, int], weights: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(_slice(flat, starts[name], weight).to(weight.dtype), weight) for name, weight in weights.items()
    )


def _named(flat: dict[str, Tensor], starts: dict[str, int], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{ours}": _slice(flat[theirs], starts[name], weight)
        for name, weight in weights.items()
        for theirs, ours in KEYS.items()
        if ours != "master" or weight.dtype != torch.float32
    }
