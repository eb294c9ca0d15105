"""The process group: made from the launcher's environment, torn down on every path."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store  # mypy does not find them in dist
from torch.distributed.rendezvous import rendezvous

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


@runtime_checkable
class _Cloneable(Protocol):
    """A store's method that torch's types leave out."""

    def clone(self) -> Store:
        """Open another connection to the same store."""


def find_device(kind: str, world: World) -> torch.device:
    """Find this rank's device. kind: cuda or cpu."""
    return torch.device("cuda", world.gpu) if kind == "cuda" else torch.device("cpu")


def get_time_limit(parallel: ParallelArgs) -> timedelta:
    """How long a collective may take before the watchdog looks for the rank to blame."""
    return timedelta(minutes=parallel.distributed_timeout_minutes)


def operation_limit(plan: Plan) -> timedelta:
    """The time after which torch ends a collective by itself."""
    limit = get_time_limit(plan.args.parallel)
    return limit + NCCL_MARGIN if plan.backend == "nccl" else limit


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[Watchdog | NoWatchdog]:
    """Make torch.distributed's default group of all ranks of the plan, which is there inside the block.

    Yields:
        This rank's watchdog among them.

    Raises:
        UserError: The ranks cannot meet.
        RanksError: They lose each other.
    """
    limit = get_time_limit(plan.args.parallel)
    store = _meet(plan.world, limit)
    nccl = plan.backend == "nccl"
    with contextlib.ExitStack() as ends:
        watchdog: Watchdog | NoWatchdog = NoWatchdog()
        if plan.world.size > 1:
            assert isinstance(store, _Cloneable)
            own = store.clone()
            own.set_timeout(STORE_TIMEOUT)
            recorder = FlightRecorder(plan.backend)
            listening = Watchdog(plan.world, own, recorder, limit.total_seconds(), backstop=nccl, layout=plan.layout)
            listening.start()
            ends.callback(listening.stop)
            watchdog = listening
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
            abort: Callable[[], None] | None = getattr(dist.distributed_c10d, "_abort_process_group", None)
            if nccl and abort is not None:
                abort()
            else:
                dist.destroy_process_group()
            raise
        watchdog.leave(None)
        dist.destroy_process_group()


def _meet(world: World, timeout: timedelta) -> Store:
    """Meet the other ranks. Returns the store over which they make their connections.

    Raises:
        UserError: They do not come in time, or the environment does not say where to meet.
    """
    if world.size == 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        return HashStore()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE={world.size} without MASTER_ADDR and MASTER_PORT: {error}; start with torchrun.")
    except (dist.DistError, RuntimeError) as error:
        raise UserError(describe_failed_meeting(first_line(error), world, where, timeout.total_seconds()))
    # a restarted job meets the same store, whose old keys would send gloo to ranks that are dead
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt_{attempt}", store)
