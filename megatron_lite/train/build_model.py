"""Builds one rank's part of a plan's model, and puts on it what stands outside of it."""

import gc
import logging
import math
import random

import numpy as np
import torch
from torch import nn

from megatron_lite.config.plan import Plan
from megatron_lite.cpu_kernels.install import install_kernels
from megatron_lite.cpu_kernels.products import describe_products
from megatron_lite.marks import WEIGHTS, mark_memory
from megatron_lite.model.custom_model import build_custom_model
from megatron_lite.model.gpt import DTYPES, GPT, initialize, list_parameters
from megatron_lite.model.kernels import Kernels
from megatron_lite.parallel.context_parallel import attend_across, share_out_positions
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.layers import compile_layers, count_compilations, describe_compilation, recompute_layers
from megatron_lite.parallel.pipeline import cut_model
from megatron_lite.parallel.replica import find_parts
from megatron_lite.parallel.tensor_parallel import drop_own_heads, split_layers
from megatron_lite.parallel.weight_gradients import delay_weights
from megatron_lite.train.choose_kernels import choose_kernels, choose_losses, choose_plan_attention, make_race
from megatron_lite.units import count, short_count

logger = logging.getLogger(__name__)


@mark_memory(WEIGHTS)
def build_model(plan: Plan, device: torch.device, groups: Groups | None = None) -> nn.Module:
    """This rank's part of the initialized model, on the device, in the plan's precision, compiled and recomputed as the flags say.

    groups: of `make_groups`; None if no ranks share out the model. Where data parallel ranks share it out it has no memory yet:
    ShardedDataParallel makes and fills each rank's rows, as no rank may have room for the whole.
    """
    t, dtype = plan.args.training, DTYPES[plan.precision]
    if plan.args.model.model is not None:
        set_seed(t.seed)
        model = build_custom_model(plan.args.model.model, plan.shape, dtype, device)
        if plan.sharding is not None:  # ranks that share out weights keep them in fp32, rounded all the same
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        return model
    race = make_race(device, t.deterministic_mode, plan.world.is_first)
    shape, kernels = plan.rank_shape, choose_kernels(plan)
    attend = choose_plan_attention(plan, device, kernels, race)
    timed = f" ({attend.timed})" if attend.timed else ""
    logger.info("\n    not ".join((f"  attention: {attend.name}{timed}", *attend.why_not)))
    if products := describe_products(dtype, plan.device):
        logger.info(f"  linear layers: {products}")
    among, context = (groups.tensor, groups.context) if groups else (None, None)
    if among is not None and not among.shares_tokens:
        attend = drop_own_heads(attend, among.rank)
    if context is not None:
        attend = attend_across(attend, plan.layout, context, plan.device)
    first = torch.device("cpu") if plan.args.parallel.use_cpu_initialization else device
    in_parts = plan.sharding is not None or plan.stage.stages > 1
    with torch.device("meta") if in_parts else first:
        model = GPT(shape, attend, choose_losses(plan, kernels, among))
    if groups:
        cut_model(model, groups.pipeline)
    if in_parts and plan.sharding is None:
        model.to_empty(device=first)
    parts = find_parts(model, plan.layout, plan.sharding, shape.activation == "swiglu")
    set_seed(t.seed)  # here: torch's own layers draw where they have memory
    if plan.sharding is None:
        initialize(dict(model.named_parameters()), plan.shape, parts, dtype)
        model.to(device=device, dtype=dtype)
    put_on_layers(model, plan, kernels, groups)
    number = sum(map(math.prod, list_parameters(plan.shape).values()))
    logger.info(f"  number of parameters: {count(number)} ({short_count(number)})")
    logger.info(f"  {describe_compilation(plan.compilation, t.torch_compile_backend, shape.num_layers)}")
    if plan.compilation.layers:
        graphs = count_compilations(plan.shape, plan.compilation)
        compile_layers(model.decoder.layers, t.torch_compile_backend, graphs)
    recompute_layers(model.decoder.layers, plan.stage.chunks, plan.recomputed_layers)
    if plan.recomputed_layers:
        number = plan.recomputed_layers * len(plan.stage.chunks)
        logger.info(f"  recomputing the activations of {number} of {len(model.decoder.layers)} layers")
    gc.collect()
    return model


def put_on_layers(model: GPT, plan: Plan, kernels: Kernels, groups: Groups | None):
    """Put on a built model, from outside, the kernels of its device and what ranks split among them.

    The trainer and the rehearsal of a plan do it here alike. Compilation and recomputation come after it.

    Args:
        model: With this rank's layers.
        kernels: Of choose_kernels.
        groups: Of make_groups; None if no ranks share out the model.
    """
    if plan.device == "cpu":
        install_kernels(model, kernels)
    if groups is None:
        return
    later = groups.pipeline.weights
    if groups.tensor is not None:
        split_layers(model, groups.tensor, kernels.products, later)
    elif later is not None:
        delay_weights(model, kernels.products, later)
    if groups.context is not None:
        share_out_positions(model, plan.layout, plan.shape.seq_length)


def set_seed(seed: int):
    """Seed all generators that a run draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
