"""--ckpt-format torch: all in one file of the first rank, in Megatron's layout."""

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint.megatron_file import write_megatron_file
from megatron_lite.checkpoint.training_state import Record
from megatron_lite.config.args import Args

TORCH_FILE = Path("mp_rank_00") / "model_optim_rng.pt"  # Megatron's name for rank 0 of tensor and pipeline


def writer(args: Args) -> Callable:
    """A write_tensors for checkpoint.write.Writer."""

    def write(folder: Path, record: Record, tensors: dict[str, Tensor], group):
        """The first rank writes; the others send it what they alone have, their random states."""
        parts: list = [{}] * dist.get_world_size(group)
        dist.all_gather_object(
            parts, {name: value for name, value in tensors.items() if name.startswith("random.")}, group
        )
        if dist.get_rank(group) != 0:
            return
        everything = tensors | {name: value for part in parts for name, value in part.items()}
        path = folder / TORCH_FILE
        path.parent.mkdir()
        with open(path, "wb") as file:
            write_megatron_file(file, record, everything, args)
            file.flush()
            os.fsync(file.fileno())

    return write
