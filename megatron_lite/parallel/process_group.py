"""The process group: made from the launcher's environment, torn down on every path."""

import contextlib
import multiprocessing
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.config.args import ParallelArgs
from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.errors import UserError, first_line
from megatron_lite.parallel.rank_status import FlightRecorder
from megatron_lite.parallel.watchdog import NoWatchdog, Watchdog
from megatron_lite.rank_errors import describe_failed_meeting

# NCCL's watchdog aborts the process without a word that names a rank; the watchdog speaks first
NCCL_MARGIN = timedelta(minutes=1)
STORE_TIMEOUT = timedelta(seconds=5)


def find_device(kind: str, world: World) -> torch.device:
    """This rank's device. kind: cuda or cpu."""
    return torch.device("cuda", world.gpu) if kind == "cuda" else torch.device("cpu")


def get_time_limit(parallel: ParallelArgs) -> timedelta:
    """How long a collective may take."""
    return timedelta(minutes=parallel.distributed_timeout_minutes)


def operation_limit(plan: Plan) -> timedelta:
    """After which torch ends a collective by itself."""
    return get_time_limit(plan.args.parallel) + (NCCL_MARGIN if plan.backend == "nccl" else timedelta(0))


@contextlib.contextmanager
def process_group(plan: Plan):
    """All ranks of the plan, as torch.distributed's default group; gives this rank's watchdog among them.

    Raises UserError where the ranks cannot meet, RanksError where they lose each other.
    """
    limit = get_time_limit(plan.args.parallel)
    store, nccl = _meet(plan.world, limit), plan.backend == "nccl"
    with contextlib.ExitStack() as ends:
        watchdog = NoWatchdog()
        if plan.world.size > 1:
            own = store.clone()
            own.set_timeout(STORE_TIMEOUT)
            recorder = FlightRecorder(plan.backend)
            watchdog = Watchdog(plan.world, own, recorder, limit.total_seconds(), backstop=nccl, layout=plan.layout)
            watchdog.start()
            ends.callback(watchdog.stop)
        with watchdog.explain_failures():
            dist.init_process_group(
                plan.backend,
                store=store,
                rank=plan.world.rank,
                world_size=plan.world.size,
                timeout=operation_limit(plan),
                device_id=find_device(plan.device, plan.world) if nccl else None,
            )
        try:
            with watchdog.explain_failures():
                yield watchdog
                dist.barrier()  # nobody leaves while another still needs it
        except BaseException as error:
            watchdog.leave(error)
            # The data loader's workers, forked from here, hold this rank's connections open. They do not listen to
            # SIGTERM, and Python would wait for them at its exit for as long as a traceback keeps the loader.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's handler would raise
            for child in multiprocessing.active_children():
                if child.daemon:
                    child.kill()
            # NCCL's orderly way out waits for all ranks, and the error would be told only at the time-out
            abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
            leave = abort if nccl and abort is not None else dist.destroy_process_group
            leave()
            raise
        watchdog.leave(None)
        dist.destroy_process_group()


def _meet(world: World, timeout: timedelta) -> dist.Store:
    if world.size == 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        return dist.HashStore()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE={world.size} without MASTER_ADDR and MASTER_PORT: {error}; start with torchrun.")
    except (dist.DistError, RuntimeError) as error:
        raise UserError(describe_failed_meeting(first_line(error), world, where, timeout.total_seconds()))
    # a restarted job meets the same store, whose old keys would send gloo to ranks that are dead
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
