"""One run from a plan: build everything, train, evaluate, save."""

import gc
import logging
import math
import random

import numpy as np
import torch
from torch import nn

from megatron_lite.config.plan import Plan
from megatron_lite.marks import WEIGHTS, mark_memory
from megatron_lite.model.custom_model import build_custom_model
from megatron_lite.model.gpt import DTYPES, GPT, initialize, list_parameters
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.context_parallel import attend_across, share_out_positions
from megatron_lite.parallel.data_parallel import replicate
from megatron_lite.parallel.groups import Groups, make_groups
from megatron_lite.parallel.layers import compile_layers, describe_compilation, recompute_layers
from megatron_lite.parallel.pipeline import cut_model
from megatron_lite.parallel.process_group import device_of
from megatron_lite.parallel.replica import describe_layout, find_parts
from megatron_lite.parallel.tensor_parallel import drop_own_heads, split_layers
from megatron_lite.parallel.weight_gradients import delay_weights
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.choose_kernels import choose_losses, choose_plan_attention, describe_precision, make_race
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.exit_conditions import ExitConditions
from megatron_lite.train.loop import Progress, train
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_hooks import Evaluation, GarbageCollectionHook, SaveHook
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
    device = device_of(plan)
    groups = make_groups(plan, device)
    groups.pipeline.tell = instruments.wait_for_stage
    model = build_model(plan, device, groups)
    logger.info(f"  {describe_layout(plan)}")
    replica = replicate(plan, model, groups)
    optimizer = Optimizer(plan, replica.parameters, device, replica.sum_over_ranks, replica.counted)
    logger.info(f"  {plan.args.optimizer.optimizer}: fused, {describe_precision(plan)}")
    # from here on each rank draws its own dropout, but for hidden states that tensor parallel ranks all have
    alike = plan.layout.tensor > 1 and not plan.layout.sequence_parallel
    own = plan.layout.replica + plan.layout.replicas * plan.layout.pipeline_rank if alike else plan.world.rank
    _seed(plan.args.training.seed + 1 + own)
    progress, checkpoints = Progress(), Checkpoints(plan, replica, optimizer, device)
    checkpoints.load(progress)
    instruments.resume(progress.started_at)
    make = BatchMaker(plan, device, eod)
    with make_log(StepMetrics(plan, optimizer, device), progress) as log, checkpoints:
        validation = None
        if streams.has("valid"):
            validation = Evaluation(plan, replica, streams.validation(progress), make, log)
        saving = SaveHook(plan, checkpoints, log, loaded=progress.iteration)
        reason = None
        if not plan.args.training.skip_train:
            computed = instruments.gradients_computed if plan.world.size > 1 else None
            step = TrainingStep(plan, replica, optimizer, make, computed)
            hooks = [hook for hook in (validation, saving, GarbageCollectionHook(plan)) if hook is not None]
            exits = ExitConditions(plan, device, checkpoints)
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
    """What this rank has of the initialised model, on the device, in the plan's precision, with recomputation as the flags say.

    groups: of `make_groups`; None for a model that no ranks share out. Where they share it out by rows it has no memory yet: no rank may
    have room for the whole, and ShardedDataParallel fills its own.
    """
    if plan.args.model.model is not None:
        _seed(plan.args.training.seed)
        return build_custom_model(plan, device)
    shape, attend = plan.rank_shape, choose_plan_attention(plan, device, make_race(plan, device))
    timed = f" ({attend.timed})" if attend.timed else ""
    logger.info("\n    not ".join((f"  attention: {attend.name}{timed}", *attend.why_not)))
    among, context = (groups.tensor, groups.context) if groups else (None, None)
    if among is not None and not among.shares_tokens:
        attend = drop_own_heads(attend, among.rank)
    if context is not None:
        attend = attend_across(attend, plan.layout, context, plan.device)
    first = torch.device("cpu") if plan.args.parallel.use_cpu_initialization else device
    in_parts = plan.sharding is not None or plan.stage.stages > 1
    with torch.device("meta") if in_parts else first:
        model = GPT(shape, attend, choose_losses(plan, among))
    if groups:
        cut_model(model, groups.pipeline)
    if in_parts and plan.sharding is None:
        model.to_empty(device=first)
    parts = find_parts(plan, model)
    _seed(plan.args.training.seed)  # here: torch's own layers draw where they have memory
    if plan.sharding is None:
        dtype = DTYPES[plan.precision]
        initialize(dict(model.named_parameters()), plan.shape, parts, dtype)
        model.to(device=device, dtype=dtype)
    later = groups.pipeline.weights if groups else None
    if among is not None:
        split_layers(model, among, later)
    elif later is not None:
        delay_weights(model, later)
    if context is not None:
        share_out_positions(model, plan.layout, plan.shape.seq_length)
    number = sum(map(math.prod, list_parameters(plan.shape).values()))
    logger.info(f"  number of parameters: {count(number)} ({short_count(number)})")
    logger.info(f"  {describe_compilation(plan)}")
    if plan.compiles_layers:
        compile_layers(plan, model.decoder.layers)
    recompute_layers(plan, model.decoder.layers)
    if plan.recomputed_layers:
        number = plan.recomputed_layers * len(plan.stage.chunks)
        logger.info(f"  recomputing the activations of {number} of {len(model.decoder.layers)} layers")
    gc.collect()
    return model


def _seed(seed: int):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
