"""Runs a plan: builds everything, trains, evaluates, saves."""

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.groups import make_groups
from megatron_lite.parallel.process_group import find_device
from megatron_lite.parallel.replica import Replica, describe_layout
from megatron_lite.train.build_replica import build_replica, log_model, set_seed
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.choose_kernels import describe_precision
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.error_injection import InjectingStep
from megatron_lite.train.loop import Progress, StepHook, StepLog, StepObserver, train
from megatron_lite.train.real_backend import RealBackend
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_hooks import Evaluation, ExitConditions, GarbageCollectionHook, HookLog, SaveHook
from megatron_lite.train.step_metrics import StepMetrics

logger = logging.getLogger(__name__)


class RunLog(StepLog, HookLog, Protocol):
    """The log of a whole run."""

    def finish(self) -> None:
        """Called once, after the last step."""


class RunObserver(StepObserver, Protocol):
    """An observer of a whole run, which changes nothing."""

    def resume(self, iteration: int) -> None:
        """Called once, before the first step, with the iteration that training goes on from: 0 for a new run."""

    def gradients_computed(self) -> None:
        """Called within backward, on autograd's thread, when this rank has its gradients and begins to wait for those
        of other ranks."""

    def wait_for_stage(self, rank: int, what: str) -> None:
        """Called when this rank begins to wait for another stage of the pipeline, and with an empty `what` when it goes
        on."""


MakeLog = Callable[[StepMetrics, Progress], AbstractContextManager[RunLog]]


def run(plan: Plan, streams: DataStreams, eod: int | None, instruments: RunObserver, make_log: MakeLog) -> str | None:
    """Train as planned inside a process group.

    Args:
        plan: This rank's plan.
        streams: Batches for training, validation and test.
        eod: The tokenizer's id of the end of a document; None if it has none.
        instruments: Observes the run.
        make_log: Makes the log. Called once, when the checkpoint has been loaded.

    Returns:
        Why training ended before its last iteration, or None.
    """
    device = find_device(plan.device, plan.world)
    replica, optimizer = build_training(plan, device, instruments)
    progress = Progress()
    checkpoints = Checkpoints(plan, replica, optimizer, device)
    checkpoints.load(progress)
    instruments.resume(progress.started_at)
    make_batch = BatchMaker(plan.args.data, plan.layout, device, eod)
    metrics = _make_metrics(plan, optimizer, device)
    with make_log(metrics, progress) as log, checkpoints:
        evaluate_on = partial(Evaluation, plan, replica, make=make_batch, log=log)
        validation = None
        if streams.has("valid"):
            validation = evaluate_on(streams.validation(progress), streams.validation_samples)
        saving = SaveHook(plan.args.checkpoint, checkpoints, log, loaded=progress.iteration)
        reason = None
        if not plan.args.training.skip_train:
            training_step = TrainingStep(plan, replica, optimizer, make_batch, _find_listener(plan, instruments))
            step = InjectingStep(training_step, plan, saving, progress)
            hooks = _list_hooks(plan, validation, saving)
            exits = ExitConditions(plan.args.training, device, checkpoints, plan.args.checkpoint.async_save)
            batches = streams.training(progress)
            reason = train(plan.train_iters, progress, step, batches, log, hooks, exits, instruments)
            log.finish()
            saving.run(progress)
            exits.over()
        if reason is not None:
            return reason
        if validation is not None:
            validation.report_at_the_end(progress)
        if streams.has("test"):
            _report_test(evaluate_on(streams.test(), plan.evaluation_samples), progress)
    return None


def _report_test(test: Evaluation, progress: Progress) -> None:
    """Evaluate on the test set, at the end of training."""
    test.report(progress, f"iteration {progress.iteration} on test set", "test")


def _make_metrics(plan: Plan, optimizer: Optimizer, device: torch.device) -> StepMetrics:
    """Make what reads the figures of steps."""
    checks_for_nan = plan.args.precision.check_for_nan_in_loss_and_grad
    return StepMetrics(optimizer, device, plan.world.size, checks_for_nan)


def _find_listener(plan: Plan, instruments: RunObserver) -> Callable[[], None] | None:
    """The function to call when this rank's gradients wait for those of others; None where there are no others."""
    return instruments.gradients_computed if plan.world.size > 1 else None


def _list_hooks(plan: Plan, validation: Evaluation | None, saving: SaveHook) -> list[StepHook]:
    """List what runs between steps, in its order."""
    hooks: list[StepHook] = []
    if validation is not None:
        hooks.append(validation)
    return [*hooks, saving, GarbageCollectionHook(plan.args.training)]


def build_training(plan: Plan, device: torch.device, instruments: RunObserver) -> tuple[Replica, Optimizer]:
    """Build this rank's replica and its optimizer, log what they are, and seed what training draws. Collective.

    Args:
        plan: This rank's plan.
        device: This rank's device.
        instruments: Told where this rank waits for another stage.
    """
    groups = make_groups(plan, device)
    groups.pipeline.tell = instruments.wait_for_stage
    replica = build_replica(plan, groups, RealBackend(device))
    gc.collect()
    log_model(plan)
    logger.info(f"  {describe_layout(plan)}")
    optimizer = Optimizer(
        plan,
        replica.parameters,
        device,
        replica.sum_over_ranks,
        replica.counted,
        replica.names,
        replica.shares,
    )
    formats = describe_precision(plan.precision, plan.fp32_gradients, plan.args.precision)
    logger.info(f"  {plan.args.optimizer.optimizer}: fused, {formats}")
    set_seed(plan.args.training.seed + 1 + _number_dropout_stream(plan))
    return replica, optimizer


def _number_dropout_stream(plan: Plan) -> int:
    """Number the stream of random numbers that this rank draws its dropout from.

    Each rank has its own. Tensor parallel ranks without sequence parallelism share one: all of them hold the same
    hidden states, which must lose the same elements.
    """
    layout = plan.layout
    shares_hidden_states = layout.tensor > 1 and not layout.sequence_parallel
    if shares_hidden_states:
        return layout.replica + layout.replicas * layout.pipeline_rank
    return plan.world.rank
