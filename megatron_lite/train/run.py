"""One run from a plan: build everything, train, evaluate, save."""

import gc
import logging
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megatron_lite.config.plan import Plan
from megatron_lite.marks import WEIGHTS, mark_memory
from megatron_lite.model.gpt import GPT
from megatron_lite.model.init import initialize
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.data_parallel import DataParallel
from megatron_lite.parallel.layers import compile_layers, describe_compilation, recompute_layers
from megatron_lite.parallel.process_group import device_of
from megatron_lite.phases import Phase
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.choose_kernels import DTYPES, choose_losses, choose_plan_attention, make_race
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.evaluate import Evaluation
from megatron_lite.train.exit_conditions import ExitConditions
from megatron_lite.train.loop import Progress, train
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics
from megatron_lite.units import count, short_count

# --- step hooks: saving, and Python's garbage collector on a schedule, so that all ranks pause in the same step


class SaveHook:
    """Saves at --save-interval, and at the end what has not been saved yet."""

    phase = Phase.SAVE

    def __init__(self, plan: Plan, checkpoints: Checkpoints, log, loaded: int):
        self.plan, self.checkpoints, self.log = plan, checkpoints, log
        c = plan.args.checkpoint
        here = c.save is not None and c.load is not None and Path(c.save).resolve() == Path(c.load).resolve()
        self.saved = loaded if here and loaded else None  # the newest iteration that the folder holds

    def due(self, progress: Progress) -> bool:
        interval = self.plan.args.checkpoint.save_interval
        return interval is not None and progress.iteration % interval == 0

    def run(self, progress: Progress):
        """Save, unless this iteration is saved already."""
        if self.plan.args.checkpoint.save is None or self.saved == progress.iteration:
            return
        self.log.metrics.settle()  # weights of a run that diverged must not be called a checkpoint
        self.checkpoints.save(progress)
        self.saved = progress.iteration


class GarbageCollectionHook:
    """--manual-gc: collection is off, but for every --manual-gc-interval iterations."""

    phase = Phase.LOG

    def __init__(self, plan: Plan):
        t = plan.args.training
        self._interval = t.manual_gc_interval if t.manual_gc else 0
        if t.manual_gc:
            gc.collect()
            gc.disable()

    def due(self, progress: Progress) -> bool:
        return self._interval > 0 and progress.iteration % self._interval == 0

    def run(self, progress: Progress):
        gc.collect()


# --- one run from a plan: build everything, train, evaluate, save

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
    model = build_model(plan, device)
    replica = DataParallel(plan, model)
    optimizer = Optimizer(plan, replica.parameters, device)
    logger.info(f"  {plan.args.optimizer.optimizer}: fused, {describe_precision(plan)}")
    _seed(plan.args.training.seed + 1 + plan.world.rank)  # from here on each rank draws its own dropout
    progress, checkpoints = Progress(), Checkpoints(plan, model, optimizer, device)
    checkpoints.load(progress)
    instruments.resume(progress.started_at)
    make = BatchMaker(plan, device, eod)
    log = make_log(StepMetrics(plan, optimizer, device), progress)
    with log, checkpoints:
        validation = (
            Evaluation(plan, model, streams.validation(progress), make, log) if streams.has_validation else None
        )
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
        if reason is None:
            _evaluate_at_the_end(plan, streams, model, make, log, validation, progress)
    return reason


@mark_memory(WEIGHTS)
def build_model(plan: Plan, device: torch.device) -> nn.Module:
    """The initialised model on the device, in the plan's precision, with recomputation as the flags say."""
    shape, attend = plan.shape, choose_plan_attention(plan, device, make_race(plan, device))
    timed = f" ({attend.timed})" if attend.timed else ""
    logger.info("\n    not ".join((f"  attention: {attend.name}{timed}", *attend.why_not)))
    _seed(plan.args.training.seed)
    with torch.device("cpu" if plan.args.parallel.use_cpu_initialization else device):
        model = GPT(shape, attend, choose_losses(plan))
        initialize(model, shape)
    model.to(device=device, dtype=DTYPES[plan.precision])
    number = sum(parameter.numel() for parameter in model.parameters())
    logger.info(f"  number of parameters: {count(number)} ({short_count(number)})")
    logger.info(f"  {describe_compilation(plan)}")
    if plan.compiles_layers:
        compile_layers(plan, model.decoder.layers)
    recomputing = recompute_layers(plan.args.model, model.decoder.layers)
    if recomputing:
        logger.info(f"  recomputing the activations of {recomputing} of {shape.num_layers} layers")
    gc.collect()
    return model


def describe_precision(plan: Plan) -> str:
    """'fp16 weights, fp32 masters, gradients summed in fp16, dynamic loss scale from 4294967296'."""
    if plan.precision == "fp32":
        return "fp32 weights and gradients"
    sums = "fp32" if plan.fp32_gradients else plan.precision
    p = plan.args.precision
    scale = (
        f", loss scale {p.loss_scale:g}"
        if p.loss_scale
        else (f", dynamic loss scale from {p.initial_loss_scale:.0f}" if plan.precision == "fp16" else "")
    )
    return f"{plan.precision} weights, fp32 masters and moments, gradients summed in {sums}{scale}"


def _evaluate_at_the_end(plan: Plan, streams: DataStreams, model, make: BatchMaker, log, validation, progress):
    if validation is not None:
        validation.report_at_the_end(progress)
    if streams.has_test:
        Evaluation(plan, model, streams.test(), make, log).report(
            progress, f"iteration {progress.iteration} on test set", "test"
        )


def _seed(seed: int):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
