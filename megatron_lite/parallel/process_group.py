"""The process group: made from the launcher's environment, torn down on every path."""

import contextlib
import multiprocessing
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError, first_line
from megatron_lite.parallel.rank_status import FlightRecorder
from megatron_lite.parallel.watchdog import NoWatchdog, Watchdog

# NCCL's watchdog aborts the process without a word that names a rank; the watchdog speaks first
NCCL_MARGIN = timedelta(minutes=1)
STORE_TIMEOUT = timedelta(seconds=5)


def device_of(plan: Plan) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", plan.world.gpu) if plan.device == "cuda" else torch.device("cpu")


def time_limit(plan: Plan) -> timedelta:
    """Of a collective."""
    return timedelta(minutes=plan.args.parallel.distributed_timeout_minutes)


def operation_limit(plan: Plan) -> timedelta:
    """After which torch ends a collective by itself."""
    return time_limit(plan) + (NCCL_MARGIN if plan.backend == "nccl" else timedelta(0))


@contextlib.contextmanager
def process_group(plan: Plan):
    """All ranks of the plan, as torch.distributed's default group; gives this rank's watchdog among them.

    Raises UserError where the ranks cannot meet, RanksError where they lose each other.
    """
    limit = time_limit(plan)
    store, nccl = _meet(plan, limit), plan.backend == "nccl"
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
                device_id=device_of(plan) if nccl else None,
            )
        try:
            with watchdog.explain_failures():
                yield watchdog
                dist.barrier()  # nobody leaves while another still needs it
        except BaseException as error:
            watchdog.leave(error)
            # The data loader's workers, forked from here, hold this rank's connections open. They do not listen to SIGTERM,
            # and Python would wait for them at its exit for as long as a traceback keeps the loader.
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


def _meet(plan: Plan, timeout: timedelta) -> dist.Store:
    if plan.world.size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", plan.world.rank, plan.world.size, timeout=timeout))
    except ValueError as error:
        raise UserError(
            f"WORLD_SIZE={plan.world.size} without MASTER_ADDR and MASTER_PORT: {error}; start with torchrun."
        )
    except (dist.DistError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise UserError(f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use on this machine; set another.")
        raise UserError(f"MASTER_ADDR:MASTER_PORT {where} cannot be reached ({first_line(error)}); check both.")
    # a restarted job meets the same store, whose old keys would send gloo to ranks that are dead
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
