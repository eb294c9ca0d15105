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
from megatron_lite.model.attention import Attend
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
    if plan.args.model.model is not None:
        return _build_custom(plan, device)
    kernels = choose_kernels(plan)
    attend = _choose_attention(plan, device, kernels, groups)
    model = _build_gpt(plan, device, attend, kernels, groups)
    put_on_layers(model, plan, kernels, groups)
    number = sum(map(math.prod, list_parameters(plan.shape).values()))
    logger.info(f"  number of parameters: {count(number)} ({short_count(number)})")
    backend = plan.args.training.torch_compile_backend
    logger.info(f"  {describe_compilation(plan.compilation, backend, plan.rank_shape.num_layers)}")
    layers = model.decoder.layers
    if plan.compilation.layers:
        compile_layers(layers, backend, count_compilations(plan.shape, plan.compilation))
    recompute_layers(layers, plan.stage.chunks, plan.recomputed_layers)
    if plan.recomputed_layers:
        number = plan.recomputed_layers * len(plan.stage.chunks)
        logger.info(f"  recomputing the activations of {number} of {len(layers)} layers")
    gc.collect()
    return model


def _build_custom(plan: Plan, device: torch.device) -> nn.Module:
    """The model that --model names."""
    set_seed(plan.args.training.seed)
    model = build_custom_model(plan.args.model.model, plan.shape, DTYPES[plan.precision], device)
    if plan.sharding is not None:  # ranks that share out weights keep them in fp32, rounded all the same
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    return model


def _choose_attention(plan: Plan, device: torch.device, kernels: Kernels, groups: Groups | None) -> Attend:
    """The attention kernel of this rank; prints which, and by what linear layers multiply."""
    race = make_race(device, plan.args.training.deterministic_mode, plan.world.is_first)
    attend = choose_plan_attention(plan, device, kernels, race)
    timed = f" ({attend.timed})" if attend.timed else ""
    logger.info("\n    not ".join((f"  attention: {attend.name}{timed}", *attend.why_not)))
    if products := describe_products(DTYPES[plan.precision], plan.device):
        logger.info(f"  linear layers: {products}")
    if groups is None:
        return attend
    if groups.tensor is not None and not groups.tensor.shares_tokens:
        attend = drop_own_heads(attend, groups.tensor.rank)
    if groups.context is not None:
        attend = attend_across(attend, plan.layout, groups.context, plan.device)
    return attend


def _build_gpt(plan: Plan, device: torch.device, attend: Attend, kernels: Kernels, groups: Groups | None) -> GPT:
    """This rank's part of the initialized GPT, on the device, in the plan's precision.

    Args:
        plan: Whose model it is.
        device: Where its memory is, unless data parallel ranks share it out.
        attend: The attention kernel.
        kernels: Of choose_kernels, for the loss.
        groups: Of make_groups; None if no ranks share out the model.
    """
    shape, dtype = plan.rank_shape, DTYPES[plan.precision]
    first = torch.device("cpu") if plan.args.parallel.use_cpu_initialization else device
    in_parts = plan.sharding is not None or plan.stage.stages > 1
    losses = choose_losses(plan, kernels, groups.tensor if groups else None)
    with torch.device("meta") if in_parts else first:
        model = GPT(shape, attend, losses)
    if groups:
        cut_model(model, groups.pipeline)
    if in_parts and plan.sharding is None:
        model.to_empty(device=first)
    parts = find_parts(model, plan.layout, plan.sharding, shape.activation == "swiglu")
    set_seed(plan.args.training.seed)  # here: torch's own layers draw where they have memory
    if plan.sharding is None:
        initialize(dict(model.named_parameters()), plan.shape, parts, dtype)
        model.to(device=device, dtype=dtype)
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
