"""Builds one rank's replica of a plan's model: for a run, and for the walk of a plan without data."""

import logging
import math
import random

import numpy as np
import torch
from torch import nn

from megatron_lite.config.plan import Plan
from megatron_lite.cpu_kernels.install import install_kernels
from megatron_lite.marks import WEIGHTS, mark_memory
from megatron_lite.model.custom_model import build_custom_model
from megatron_lite.model.experts import list_mixtures
from megatron_lite.model.gpt import DTYPES, GPT, list_parameters
from megatron_lite.model.kernels import Kernels
from megatron_lite.parallel.backend import Backend
from megatron_lite.parallel.context_parallel import share_out_positions
from megatron_lite.parallel.data_parallel import replicate
from megatron_lite.parallel.expert_parallel import spread_experts
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.layers import describe_compilation, recompute_all, recompute_layers
from megatron_lite.parallel.pipeline import cut_model
from megatron_lite.parallel.replica import Replica
from megatron_lite.parallel.tensor_parallel import split_layers
from megatron_lite.parallel.weight_gradients import delay_weights
from megatron_lite.train.choose_kernels import choose_kernels
from megatron_lite.units import count, short_count

logger = logging.getLogger(__name__)


def build_replica(plan: Plan, groups: Groups, backend: Backend) -> Replica:
    """Build this rank's part of the initialized model, as it trains together with other ranks.

    Args:
        plan: This rank's plan.
        groups: The ranks that share the model, of make_groups.
        backend: What the replica stands on: RealBackend for a run, FakeBackend for a walk.
    """
    return replicate(plan, build_model(plan, groups, backend), groups, backend)


@mark_memory(WEIGHTS)
def build_model(plan: Plan, groups: Groups, backend: Backend) -> nn.Module:
    """Build this rank's part of the model, on the backend's device, in the plan's precision, with all that is put on
    it.

    Where data parallel ranks shard the model its parameters stay on the meta device: ShardedDataParallel makes and
    fills each rank's rows, as no rank may have room for the whole. The arguments are those of build_replica.
    """
    spelled = plan.args.model.model
    if spelled is not None:
        return _build_custom(spelled, plan, backend)
    kernels = choose_kernels(plan)
    attend = backend.choose_attention(plan, kernels, groups.tensor)
    losses = backend.choose_losses(plan, kernels, groups.tensor)
    with torch.device("meta"):
        model = GPT(plan.rank_shape, attend, losses)
    cut_model(model, groups.pipeline)
    for _, mixture in list_mixtures(model):
        mixture.read_routes_by(backend.choose_route_reader(plan))
    # here: the choice of a kernel may draw random numbers
    set_seed(plan.args.training.seed)
    if plan.sharding is None:
        backend.fill_parameters(model, plan)
    _put_on_layers(model, plan, kernels, groups)
    backend.compile_layers(model, plan)
    recompute_layers(model.decoder.layers, plan.stage.chunks, plan.count_recomputed)
    if model.mtp is not None and plan.recomputes_further_layers:
        recompute_all(model.mtp.list_layers())
    return model


def _build_custom(spelled: str, plan: Plan, backend: Backend) -> nn.Module:
    """Build the model that --model names. spelled: the flag's value."""
    set_seed(plan.args.training.seed)
    model = build_custom_model(spelled, plan.shape, DTYPES[plan.precision], backend.device)
    if plan.sharding is not None:  # ranks that share out weights keep them in fp32, rounded all the same
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    return model


def _put_on_layers(model: GPT, plan: Plan, kernels: Kernels, groups: Groups) -> None:
    """Put on a built model, from outside, the kernels of its device and what ranks split among them.

    Compilation and recomputation come after it.
    """
    if plan.device == "cpu":
        install_kernels(model, kernels)
    later = groups.pipeline.weights
    if groups.tensor is not None:
        split_layers(model, groups.tensor, kernels.products, later)
    elif later is not None:
        delay_weights(model, kernels.products, later)
    if groups.experts is not None:
        spread_experts(model, plan, groups.experts)
    if groups.context is not None:
        share_out_positions(model, plan, groups.context)


def log_model(plan: Plan) -> None:
    """Log the size of the plan's GPT, and which layers are compiled and recomputed.

    A model of the user's own logs its size.
    """
    if plan.args.model.model is not None:
        return
    number = sum(map(math.prod, list_parameters(plan.shape).values()))
    logger.info(f"  number of parameters: {count(number)} ({short_count(number)})")
    layers = plan.rank_shape.num_layers
    logger.info(f"  {describe_compilation(plan.compilation, plan.args.training.torch_compile_backend, layers)}")
    if plan.recomputed_layers:
        logger.info(f"  recomputing the activations of {plan.recomputed_layers} of {len(plan.stage.layers)} layers")


def set_seed(seed: int) -> None:
    """Seed all generators that a run draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
