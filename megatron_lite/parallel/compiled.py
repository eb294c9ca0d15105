"""--torch-compile: transformer layers through torch.compile, put on from outside.

One layer at a time: layers are alike, so that one compilation serves all; and gradients of a layer are there for
DistributedDataParallel to reduce as soon as its backward is through, which a graph of the whole model would keep until
its end.
"""

from torch import nn

from megatron_lite.config.plan import Plan

TRAINING_AND_EVALUATION = 2  # the variants of a layer that a run needs


def expected_compilations(plan: Plan) -> int:
    """At most, if nothing about the layers' inputs changes while training."""
    # a layer that scales by its number is a variant of its own
    return TRAINING_AND_EVALUATION * (plan.shape.num_layers if plan.shape.query_key_layer_scaling else 1)


def compile_layers(plan: Plan, layers: nn.ModuleList) -> int:
    """Compile each layer's forward, at its first call. To be done before recomputation is put on, which then repeats
    compiled layers. Parameters keep their names. Returns how many."""
    import torch._dynamo  # takes a second, which runs without the flag do not pay

    backend = plan.args.training.torch_compile_backend
    dynamo = torch._dynamo.config
    dynamo.optimize_ddp = False  # would cut each layer at bucket edges, although buckets are reduced between layers anyway
    # beyond its limit torch would go on eagerly, without a word
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * expected_compilations(plan))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
    return len(layers)
