"""A run, from its command line to its end."""

import gc
import logging
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.checkpoint_args import take_checkpoint_args
from megatron_lite.config.check import check, remarks
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.environment import hints
from megatron_lite.config.launchers import find_launch
from megatron_lite.config.plan import AUTO, Plan, resolve
from megatron_lite.config.world import World, read_world
from megatron_lite.data.tokenizers import build_tokenizer
from megatron_lite.errors import ConfigError, UserError, describe_memory_error, get_explanation, is_memory_error
from megatron_lite.machine import read_machine
from megatron_lite.model.custom_model import find_custom_model
from megatron_lite.observers import Observers, Planner
from megatron_lite.parallel.layers import no_compiler
from megatron_lite.parallel.process_group import process_group
from megatron_lite.parallel.watchdog import LauncherWatch
from megatron_lite.rank_errors import end_with_error, tell_error, write_error_file
from megatron_lite.run_folder import default_run_dir
from megatron_lite.train.checkpoint_checks import require_checkpoint, reserve_save
from megatron_lite.train.console import set_up_logging
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.log import Log
from megatron_lite.train.loop import Progress
from megatron_lite.train.prepare_torch import prepare_torch
from megatron_lite.train.run import run
from megatron_lite.train.step_metrics import StepMetrics
from megatron_lite.units import counted

KEPT = "the C library keeps freed blocks for the next step (mallopt)"
GIVEN_BACK = "this C library may give freed blocks back, which slows steps down; LD_PRELOAD=libtcmalloc.so.4 keeps them"
NO_LOADERS = (
    "read by the training process, since on a CPU loaders would take its cores; --num-workers N starts N per rank"
)
logger = logging.getLogger(__name__)


def main(argv: list[str], planner: Planner) -> int:
    """Train as `argv` says, with the predictions of `planner`; returns the exit code."""
    world = World()
    # what ended the run, kept until its process ends: with other ranks there may be a reduction on its way in the
    # middle of a step, and taking apart what the error's frames hold, DistributedDataParallel, waits for gloo's
    # threads, which may in turn wait for the interpreter's lock, for ever
    ended_by: BaseException | None = None
    try:
        launch = find_launch(os.environ)
        os.environ.update(launch.variables if launch else {})
        world = read_world(torch.cuda.device_count(), torch.get_num_threads())
        set_up_logging(world.is_first)
        if launch:
            logger.info(f"  note: {launch.remark}")
        launcher = LauncherWatch(world)
        launcher.start()
        _run(argv, planner, world, launcher)
        return 0
    except UserError as error:
        ended_by = error
        code = error.exit_code
        end_with_error(error, world)
    except KeyboardInterrupt as error:
        ended_by = error
        code = 130
    except Exception as error:
        ended_by = error
        code = 1
        explanation = get_explanation(error)
        if explanation is not None:  # an observer has said on this rank why memory ran out
            write_error_file(ConfigError(explanation))
        elif is_memory_error(error):
            tell_error(UserError(describe_memory_error()), world)
        else:
            raise
    if world.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    del ended_by
    return code


def _run(argv: list[str], planner: Planner, world: World, launcher: LauncherWatch) -> None:
    def make_log(metrics: StepMetrics, progress: Progress) -> Log:
        # garbage collections of the steps need not walk what there is before them: 0.2 s each time
        gc.freeze()
        return observers.make_log(metrics, progress)

    line = take_checkpoint_args(read_command_line(argv), logger.info)
    check(line, world)
    tokenizer = build_tokenizer(line.args.data)
    if line.args.training.torch_compile == AUTO:
        world = replace(world, no_compiler=no_compiler(world))
    plan = resolve(line.args, world, tokenizer.vocab_size)
    machine = read_machine()
    for remark in (*remarks(line, world), *hints(plan, os.environ, machine)):
        logger.info(f"  note: {remark}")
    keeps_memory = prepare_torch(plan)
    observers = Observers(plan, machine, planner)
    _log_choices(plan, observers, keeps_memory)
    streams = DataStreams(plan)  # damaged or unfitting data is told before ranks meet and files are made
    if plan.args.model.model is not None:
        find_custom_model(plan.args.model.model)
    require_checkpoint(plan.args.checkpoint)
    with observers.explain_early_end():
        with process_group(plan) as ranks, reserve_save(plan):
            agreed = [
                default_run_dir(plan.args.watch.run_dir, plan.args.watch.tensorboard_dir, plan.args.checkpoint.save)
            ]
            dist.broadcast_object_list(agreed, src=0)  # the same on all ranks, though it may be named by the time
            run_dir = agreed[0]
            ranks.report_to(run_dir)
            launcher.run_dir = run_dir
            with observers.watch(run_dir, ranks.where), ranks.explain_failures():
                exit_reason = run(plan, streams, tokenizer.eod, observers.instruments, make_log)
                observers.record.exit_reason = exit_reason
        logger.info(f"[{exit_reason}]" if exit_reason else f"  done: {run_dir}")
        observers.report()


def _log_choices(plan: Plan, observers: Observers, keeps_memory: bool) -> None:
    ranks = f"{plan.world.size} rank{'s' if plan.world.size > 1 else ''}"
    where = (
        torch.cuda.get_device_name()
        if plan.device == "cuda"
        else f"CPU, {counted(torch.get_num_threads(), 'thread')} each"
    )
    passes = plan.micro_batches(plan.train_samples)
    logger.info(
        f"  {ranks} on {where} ({plan.backend}) | global batch {plan.batch.final} = micro-batch "
        f"{plan.args.training.micro_batch_size} x {plan.layout.data} x {passes} | {plan.train_iters} iterations\n"
        f"  {observers.peak_words}"
    )
    d = plan.args.data
    if plan.device == "cpu" and d.num_workers is None and d.dataloader_type != "external":  # not Megatron's number
        logger.info(f"  data: {NO_LOADERS}")
    if plan.device == "cpu":
        logger.info(f"  host memory: {KEPT if keeps_memory else GIVEN_BACK}")
    for text in observers.prediction_lines:
        logger.info(text)
