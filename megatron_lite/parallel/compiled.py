"""--torch-compile layers: transformer layers, and on GPUs the loss, through torch.compile, put on from outside.

One layer at a time: layers are alike, so that one compilation serves all; and gradients of a layer are there for
DistributedDataParallel to reduce as soon as its backward is through, which a graph of the whole model would keep until
its end.
"""

import os
from collections.abc import Callable
from subprocess import CalledProcessError

import torch
from torch import nn

from megatron_lite.config.machine import missing_compiler
from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.errors import first_line

TRAINING_AND_EVALUATION = 2  # the variants of a layer that a run needs
LOSS_PIECES = 2  # forward and backward, in evaluation the same
OLDEST = (7, 0)  # compute capability of the first GPUs that Triton compiles for


def no_compiler(world: World) -> str:
    """Why inductor can make no kernels for this rank's GPU, with the remedy; empty: it can, or there is no GPU."""
    if not world.gpus:
        return ""
    capability = torch.cuda.get_device_capability(world.gpu)
    if capability < OLDEST:
        return f"Triton compiles for GPUs of compute capability 7.0 and later, and this one has {'.'.join(map(str, capability))}"
    return missing_compiler(on_gpu=True, environ=os.environ) or _refusal()


def _refusal() -> str:
    """Why Triton does not start; empty: it does. The first thing it does is to build and load a helper that launches its
    kernels, which fails without libcuda, the C library's headers or a folder whose files may be run."""
    try:
        from triton.runtime.driver import driver

        driver.active  # noqa: B018  made here
    except CalledProcessError as error:
        return f"Triton does not start here ({error.cmd[0]} failed to build what launches its kernels, see above)"
    except (ImportError, AssertionError, RuntimeError) as error:
        return f"Triton does not start here ({first_line(error)})"
    return ""


def expected_compilations(plan: Plan) -> int:
    """At most, if nothing about the layers' inputs changes while training."""
    # a layer that scales by its number is a variant of its own
    layers = TRAINING_AND_EVALUATION * (plan.shape.num_layers if plan.shape.query_key_layer_scaling else 1)
    return layers + (LOSS_PIECES if plan.compilation.loss else 0)


def compile_layers(plan: Plan, layers: nn.ModuleList):
    """Compile each layer's forward, at its first call. To be done before recomputation is put on, which then repeats
    compiled layers. Parameters keep their names."""
    import torch._dynamo  # takes a second, which runs without the flag do not pay

    dynamo = torch._dynamo.config
    dynamo.optimize_ddp = (
        False  # would cut each layer at bucket edges, although buckets are reduced between layers anyway
    )
    # beyond its limit torch would go on eagerly, without a word
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * expected_compilations(plan))
    for layer in layers:
        layer.forward = compiled(plan, layer.forward)


def compiled(plan: Plan, function: Callable) -> Callable:
    """`function`, compiled for each shape at its first call."""
    return torch.compile(function, backend=plan.args.training.torch_compile_backend, dynamic=False)


def words_of(plan: Plan) -> str:
    """What is compiled, or why nothing is, and the way to the other."""
    why = plan.compilation.why
    if not plan.compiles_layers:
        return f"torch.compile: none{why and f' ({why})'}"
    backend = plan.args.training.torch_compile_backend
    what = f"each of {plan.shape.num_layers} layers" + " and the loss" * plan.compilation.loss
    return (
        f"compiling {what} with {backend}{why and f' ({why})'}: the steps in "
        "which that happens take longer and are left out of averages"
    )
