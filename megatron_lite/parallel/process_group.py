"""The process group: made from the launcher's environment, torn down on every path."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError


def device_of(plan: Plan) -> torch.device:
    """This rank's device."""
    return torch.device("cuda", plan.world.gpu) if plan.device == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def process_group(plan: Plan):
    """All ranks of the plan, as torch.distributed's default group. Raises UserError where the ranks cannot meet."""
    timeout = timedelta(minutes=plan.args.parallel.distributed_timeout_minutes)
    dist.init_process_group(
        plan.backend, store=_store(plan, timeout), rank=plan.world.rank, world_size=plan.world.size, timeout=timeout,
        device_id=device_of(plan) if plan.backend == "nccl" else None,
    )
    try:
        yield
        dist.barrier()  # nobody leaves while another still needs it
    except BaseException:
        _leave_without_the_others(plan)
        raise
    dist.destroy_process_group()


def _leave_without_the_others(plan: Plan):
    """After an error. NCCL's orderly way out waits for all ranks, and the error would be told only at the time-out."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if plan.backend == "nccl" and abort is not None:
        abort()
    else:
        dist.destroy_process_group()


def _store(plan: Plan, timeout: timedelta) -> dist.Store:
    if plan.world.size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", plan.world.rank, plan.world.size, timeout=timeout))
    except ValueError as error:
        raise UserError(f"WORLD_SIZE={plan.world.size} without MASTER_ADDR and MASTER_PORT: {error}; start with torchrun.")
    except (dist.DistError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise UserError(f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use on this machine; set another.")
        raise UserError(f"MASTER_ADDR:MASTER_PORT {where} cannot be reached ({_first_line(error)}); check both.")
    # a restarted job meets the same store, whose old keys would send gloo to ranks that are dead
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
