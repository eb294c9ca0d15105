"""Layers whose activations are computed again in backward instead of kept."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.args import ModelArgs


def recompute_layers(args: ModelArgs, layers: nn.ModuleList) -> int:
    """Make layers forget their activations, as --recompute-method says; returns how many.

    uniform: every layer (Megatron keeps one activation per chunk of --recompute-num-layers; here one per layer, which
    costs a little more memory and the same time). block: the first --recompute-num-layers layers. Core attention alone
    (--recompute-granularity selective) needs nothing: the fused kernels never keep their scores.
    """
    if args.recompute_granularity != "full":
        return 0
    number = len(layers) if args.recompute_method == "uniform" else args.recompute_num_layers or 1
    for layer in layers[:number]:
        layer.forward = _Recomputed(layer.forward)
    return min(number, len(layers))


class _Recomputed:
    """A forward that keeps its inputs only. Random states are restored, so that dropout masks repeat."""

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, *inputs):
        return checkpoint(self.forward, *inputs, use_reentrant=False)
