"""Layers whose activations are computed again in backward instead of kept."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.args import ModelArgs


def recompute_layers(args: ModelArgs, layers: nn.ModuleList) -> int:
    """Make layers forget their activations, as --recompute-method says; returns how many.

    uniform: every layer (Megatron keeps one activation per chunk of --recompute-num-layers; here one per layer, which
    costs a little more memory and the same time). block: the first --recompute-num-layers layers. With
    --recompute-granularity selective none: core attention alone is recomputed, which the fused kernels do by themselves.
    """
    if args.recompute_granularity != "full":
        return 0
    number = len(layers) if args.recompute_method == "uniform" else args.recompute_num_layers or 1
    for layer in layers[:number]:
        layer.forward = recomputed(layer.forward)
    return min(number, len(layers))


def recomputed(function):
    """`function`, keeping its inputs only. Random states are restored, so that dropout masks repeat."""
    return partial(checkpoint, function, use_reentrant=False)
