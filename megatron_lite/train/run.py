"""Runs a plan: builds everything, trains, evaluates, saves."""

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
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.context_parallel import attend_across, share_out_positions
from megatron_lite.parallel.data_parallel import replicate
from megatron_lite.parallel.groups import Groups, make_groups
from megatron_lite.parallel.layers import compile_layers, count_compilations, describe_compilation, recompute_layers
from megatron_lite.parallel.pipeline import cut_model
from megatron_lite.parallel.process_group import find_device
from megatron_lite.parallel.replica import describe_layout, find_parts
from megatron_lite.parallel.tensor_parallel import drop_own_heads, split_layers
from megatron_lite.parallel.weight_gradients import delay_weights
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.choose_kernels import (
    choose_kernels,
    choose_losses,
    choose_plan_attention,
    describe_precision,
    make_race,
)
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress, train
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_hooks import Evaluation, ExitConditions, GarbageCollectionHook, SaveHook
from megatron_lite.train.step_metrics import StepMetrics
from megatron_lite.units import count, short_count

logger = logging.getLogger(__name__)


def run(plan: Plan, streams: DataStreams, eod: int | None, instruments, make_log) -> str | None:
    """Train as planned inside a process group.

    Args:
        instruments: What watches the steps: step(number), phase(name), resume(iteration), gradients_computed().
        make_log: (StepMetrics, Progress) to what records the steps.

    Returns:
        Why training ended before its last iteration, or None.
    """
    device = find_device(plan.device, plan.world)
    groups = make_groups(plan, device)
    groups.pipeline.tell = instruments.wait_for_stage
    model = build_model(plan, device, groups)
    logger.info(f"  {describe_layout(plan)}")
    replica = replicate(plan, model, groups)
    optimizer = Optimizer(plan, replica.parameters, device, replica.sum_over_ranks, replica.counted)
    formats = describe_precision(plan.precision, plan.fp32_gradients, plan.args.precision)
    logger.info(f"  {plan.args.optimizer.optimizer}: fused, {formats}")
    # from here on each rank draws its own dropout, but for hidden states that tensor parallel ranks all have
    alike = plan.layout.tensor > 1 and not plan.layout.sequence_parallel
    own = plan.layout.replica + plan.layout.replicas * plan.layout.pipeline_rank if alike else plan.world.rank
    _set_seed(plan.args.training.seed + 1 + own)
    progress, checkpoints = Progress(), Checkpoints(plan, replica, optimizer, device)
    checkpoints.load(progress)
    instruments.resume(progress.started_at)
    make = BatchMaker(plan.args.data, plan.layout, device, eod)
    metrics = StepMetrics(optimizer, device, plan.world.size, plan.args.precision.check_for_nan_in_loss_and_grad)
    with make_log(metrics, progress) as log, checkpoints:
        validation = None
        if streams.has("valid"):
            validation = Evaluation(plan, replica, streams.validation(progress), make, log)
        saving = SaveHook(plan.args.checkpoint, checkpoints, log, loaded=progress.iteration)
        reason = None
        if not plan.args.training.skip_train:
            computed = instruments.gradients_computed if plan.world.size > 1 else None
            step = TrainingStep(plan, replica, optimizer, make, computed)
            hooks = [
                hook for hook in (validation, saving, GarbageCollectionHook(plan.args.training)) if hook is not None
            ]
            exits = ExitConditions(plan.args.training, device, checkpoints, plan.args.checkpoint.async_save)
            batches = streams.training(progress)
            reason = train(plan.train_iters, progress, step, batches, log, hooks, exits, instruments)
            log.finish()
            saving.run(progress)
            exits.over()
        if reason is None and validation is not None:
            validation.report_at_the_end(progress)
        if reason is None and streams.has("test"):
            test = Evaluation(plan, replica, streams.test(), make, log)
            test.report(progress, f"iteration {progress.iteration} on test set", "test")
    return reason


@mark_memory(WEIGHTS)
def build_model(plan: Plan, device: torch.device, groups: Groups | None = None) -> nn.Module:
    """This rank's part of the initialized model, on the device, in the plan's precision, compiled and recomputed as the flags say.

    groups: of `make_groups`; None if no ranks share out the model. Where data parallel ranks share it out it has no memory yet:
    ShardedDataParallel makes and fills each rank's rows, as no rank may have room for the whole.
    """
    t, dtype = plan.args.training, DTYPES[plan.precision]
    if plan.args.model.model is not None:
        _set_seed(t.seed)
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
    _set_seed(t.seed)  # here: torch's own layers draw where they have memory
    if plan.sharding is None:
        initialize(dict(model.named_parameters()), plan.shape, parts, dtype)
        model.to(device=device, dtype=dtype)
    if plan.device == "cpu":
        install_kernels(model, kernels)
    later = groups.pipeline.weights if groups else None
    if among is not None:
        split_layers(model, among, kernels.products, later)
    elif later is not None:
        delay_weights(model, kernels.products, later)
    if context is not None:
        share_out_positions(model, plan.layout, plan.shape.seq_length)
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


def _set_seed(seed: int):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
