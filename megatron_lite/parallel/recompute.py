"""Layers whose activations are computed again in backward instead of kept."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.args import ModelArgs
from megatron_lite.config.recompute import recomputed_layers


def recompute_layers(args: ModelArgs, layers: nn.ModuleList) -> int:
    """Make layers forget their activations, as the flags say; returns how many. With --recompute-granularity selective none:
    core attention alone is recomputed, which the fused kernels do by themselves.
    """
    number = recomputed_layers(
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers, len(layers)
    )
    for layer in layers[:number]:
        layer.forward = recomputed(layer.forward)
    return number


def recomputed(function):
    """`function`, keeping its inputs only. Random states are restored, so that dropout masks repeat."""
    return partial(checkpoint, function, use_reentrant=False)
