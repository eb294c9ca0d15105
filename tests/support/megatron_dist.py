"""Megatron-Core's dist_checkpointing on the CPU: torch_dist folders saved and loaded as Megatron-LM does."""

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.megatron_args import plain_arguments
from megatron_lite.checkpoint.megatron_dist import writer
from megatron_lite.checkpoint.random_states import get_random_state
from megatron_lite.checkpoint.training_state import CheckpointRecord
from support.lazy_module import LazyModule
from support.megatron_core import Ours

dist_checkpointing = LazyModule("megatron.core.dist_checkpointing")
mapping = LazyModule("megatron.core.dist_checkpointing.mapping")
validation = LazyModule("megatron.core.dist_checkpointing.validation")


def template(run, metadata: dict, is_loading: bool = False) -> dict:
    """Megatron-LM's generate_state_dict."""
    model = run.model.sharded_state_dict(metadata=metadata)
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save_theirs(run, folder: Path, iteration: int, metadata: dict, **others) -> Path:
    folder.mkdir(parents=True)
    namespace = run.namespace(iteration)
    namespace.transformer_impl = "local"
    state = (
        template(run, metadata)
        | others
        | {
            "args": namespace,
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "opt_param_scheduler": run.scheduler.state_dict(),
            "num_floating_point_operations_so_far": 0,
        }
    )
    dist_checkpointing.save(state, str(folder), content_metadata=dict(metadata))
    return folder


def load_theirs(run, folder: Path, random: bool = True):
    """As Megatron-LM's load_checkpoint: what to ask for is told by the folder."""
    known = pytest.importorskip("megatron.core.safe_globals").SAFE_GLOBALS
    with torch.serialization.safe_globals(known):  # Megatron's own list
        common = dist_checkpointing.load_common_state_dict(str(folder))
        asked = template(run, dist_checkpointing.load_content_metadata(preloaded_state_dict=common), is_loading=True)
        if random:
            asked["rng_state"] = mapping.ShardedObject("rng_state", [{}], (1, 1), (0, 0))
        state, _, absent = dist_checkpointing.load(asked, str(folder), strict=validation.StrictHandling.RETURN_ALL)
    assert not absent, absent
    run.model.load_state_dict(state["model"], strict=True)
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    return state


def save_ours(run: Ours, folder: Path, iteration: int) -> CheckpointRecord:
    folder.mkdir(parents=True)
    record = run.record(iteration, ranks=1)
    random = {f"random.0.{kind}": value for kind, value in get_random_state(torch.device("cpu")).items()}
    writer(plain_arguments(run.plan.args))(folder, record, run.flat() | random, None)
    return record
