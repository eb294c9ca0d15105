"""Runs a plan: builds everything, trains, evaluates, saves."""

import logging

from megatron_lite.config.plan import Plan
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.data_parallel import replicate
from megatron_lite.parallel.groups import make_groups
from megatron_lite.parallel.process_group import find_device
from megatron_lite.parallel.replica import describe_layout
from megatron_lite.train.build_model import build_model, set_seed
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.choose_kernels import describe_precision
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress, train
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_hooks import Evaluation, ExitConditions, GarbageCollectionHook, SaveHook
from megatron_lite.train.step_metrics import StepMetrics

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
    set_seed(plan.args.training.seed + 1 + own)
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
