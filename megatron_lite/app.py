"""From a command line to a finished run."""

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.find import chosen
from megatron_lite.config.check import check, remarks
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.compilation import AUTO
from megatron_lite.config.environment import hints
from megatron_lite.config.machine import Machine, read_machine
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World, read_world
from megatron_lite.data.tokenizers import tokenizer_of
from megatron_lite.errors import CheckpointError, ConfigError, UserError, describe_memory_error
from megatron_lite.estimate.hardware import peak_tflops
from megatron_lite.estimate.run_prediction import Forecast, as_record, forecast, lines_of
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.build_instruments import choose
from megatron_lite.instruments.memory_oom import is_out_of_memory, unrecorded
from megatron_lite.instruments.rank_position import WhereaboutsKeeper
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.live_line import say
from megatron_lite.parallel.compile_cache import keep_compiled
from megatron_lite.parallel.compiled import no_compiler
from megatron_lite.parallel.host_memory import keep_freed_memory
from megatron_lite.parallel.launcher_watch import LauncherWatch
from megatron_lite.parallel.process_group import device_of, process_group
from megatron_lite.rank_errors import end_with_error, tell_error, write_error_file
from megatron_lite.run_folder import default_run_dir
from megatron_lite.train.checkpoint import require_checkpoint, save_reserved
from megatron_lite.train.data_streams import Feed
from megatron_lite.train.post_run_report import end_with_report, wants_report
from megatron_lite.train.run import run
from megatron_lite.train.run_record import RunRecord

KEPT = "the C library keeps freed blocks for the next step (mallopt)"
GIVEN_BACK = "this C library may give freed blocks back, which slows steps down; LD_PRELOAD=libtcmalloc.so.4 keeps them"
NO_LOADERS = (
    "read by the training process, since on a CPU loaders would take its cores; --num-workers N starts N per rank"
)


def main(argv: list[str]) -> int:
    """Train as `argv` says; returns the exit code."""
    world = read_world(torch.cuda.device_count(), torch.get_num_threads())
    launcher = LauncherWatch(world)
    launcher.start()
    try:
        _run(argv, world, launcher)
    except UserError as error:
        end_with_error(error, world)
        return error.exit_code
    except KeyboardInterrupt:
        return _leave(130, world)
    except (MemoryError, RuntimeError) as error:
        if hasattr(error, "explained"):  # an instrument has said on this rank why memory ran out
            write_error_file(ConfigError(error.explained))
        elif isinstance(error, MemoryError):
            tell_error(UserError(describe_memory_error()), world)
        else:
            raise
        return _leave(1, world)
    return 0


def _leave(code: int, world: World) -> int:
    """With other ranks, end here: in the middle of a step there may be a reduction on its way, and taking DistributedDataParallel
    apart waits for gloo's threads, which may in turn wait for the interpreter's lock, for ever."""
    if world.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: list[str], world: World, launcher: LauncherWatch):
    line = read_command_line(argv)
    check(line, world)
    tokenizer = tokenizer_of(line.args.data)
    if line.args.training.torch_compile == AUTO:
        world = replace(world, no_compiler=no_compiler(world))
    plan = resolve(line.args, world, tokenizer.vocab_size)
    say_once = say if world.is_first else _say_nothing
    machine = read_machine()
    for remark in (*remarks(line, world), *hints(plan, os.environ, machine)):
        say_once(f"  note: {remark}")
    allocator = _prepare_torch(plan)
    say_once(_headline(plan) + allocator)
    expected = _forecast(plan, machine)
    for text in lines_of(expected):
        say_once(text)
    feed = Feed(plan, say_once)  # damaged or unfitting data is said before ranks meet and files are made
    require_checkpoint(plan)
    with (
        _early_end_told(plan, say_once),
        process_group(plan, lambda error: tell_error(error, world)) as ranks,
        save_reserved(plan, say_once),
    ):
        run_dir = _agreed_run_dir(plan)
        ranks.report_to(run_dir)
        launcher.run_dir = run_dir
        timeline = Timeline()
        watchers = [WhereaboutsKeeper(ranks.where), *choose(plan, run_dir, timeline, say)]
        with (
            RunRecord(plan, run_dir, as_record(expected)) as record,
            Instruments(watchers, say) as watching,
            ranks.explained(),
        ):
            record.left_early = run(plan, feed, tokenizer.eod, timeline, watching, run_dir, say_once)
    say_once(f"[{record.left_early}]" if record.left_early else f"  done: {run_dir}")
    if world.is_first and wants_report(plan, timeline.window.traced_on_demand):
        end_with_report(run_dir, say)


@contextmanager
def _early_end_told(plan: Plan, say_once):
    """What no traceback says of Ctrl-C, and of memory that ran out where no instrument watches it."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not hasattr(error, "explained"):
            error.explained = unrecorded(plan, error)
            for line in error.explained:
                say(line)
        raise
    except KeyboardInterrupt:
        save, slot = plan.args.checkpoint.save, None
        with suppress(CheckpointError):  # the next --load says it
            slot = chosen(Path(save), None, "--save") if save and Path(save).is_dir() else None
        say_once(
            "interrupted; "
            + (f"--load {save} goes on from {slot.name}" if slot else "there is no checkpoint to go on from")
        )
        raise


def _headline(plan: Plan) -> str:
    ranks = f"{plan.world.size} rank{'s' if plan.world.size > 1 else ''}"
    where = torch.cuda.get_device_name() if plan.device == "cuda" else f"CPU, {torch.get_num_threads()} threads each"
    passes = plan.micro_batches(plan.train_samples)
    peak = peak_tflops(where, plan.precision) if plan.device == "cuda" else None
    mfu = f"MFU against {peak:g} TFLOP/s" if peak else "MFU unknown: no peak for this processor in the table"
    return (
        f"  {ranks} on {where} ({plan.backend}) | global batch {plan.batch.final} = micro-batch "
        f"{plan.args.training.micro_batch_size} x {plan.world.size} x {passes} | {plan.train_iters} iterations\n  {mfu}{_loaders(plan)}"
    )


def _loaders(plan: Plan) -> str:
    """A line where their number was chosen, and is not Megatron's."""
    d = plan.args.data
    chosen = plan.device == "cpu" and d.num_workers is None and d.dataloader_type != "external"
    return f"\n  data: {NO_LOADERS}" if chosen else ""


def _forecast(plan: Plan, machine: Machine) -> Forecast:
    if plan.device == "cpu":
        return forecast(plan, None, machine.memory_bytes)
    gpu = torch.cuda.get_device_properties(plan.world.gpu)
    return forecast(plan, gpu.name, gpu.total_memory)


def _prepare_torch(plan: Plan) -> str:
    """Returns a line on the CPU's allocator."""
    allocator = ""
    if plan.device == "cpu":
        allocator = f"\n  host memory: {KEPT if keep_freed_memory() else GIVEN_BACK}"
    else:
        torch.cuda.set_device(device_of(plan))  # before anything asks for "the" GPU: that would be the first one
    if plan.compiles_layers:
        keep_compiled(os.environ)
    if plan.args.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return allocator


def _agreed_run_dir(plan: Plan):
    """The same on all ranks, though it may be named by the time."""
    w = plan.args.watch
    agreed = [default_run_dir(w.run_dir, w.tensorboard_dir, plan.args.checkpoint.save)]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def _say_nothing(text: str):
    pass
