"""Means over the ranks of one machine's CPUs, in memory that all of them map: gloo sends the numbers through sockets."""

import logging
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.plan import Plan

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
MIN_ELEMENTS = 2**20  # of fewer gradients gloo's mean takes as long
MAX_ELEMENTS = 2**24  # of a rank's memory: longer tensors go through it in pieces
PIECE = 2**16  # elements that are added at a time and stay in the processor's cache


class SharedMean:
    """The mean of a tensor over a group's ranks: each copies its numbers in, adds up one share of those of all, and copies all shares out.

    Each share is added up by one rank, so that all ranks get the same bits.
    """

    def __init__(self, rows: Tensor, group: dist.ProcessGroup | None):
        """rows: as map_rows returns them."""
        self._group, self._rank = group, dist.get_rank(group)
        self._mine = rows[self._rank]
        self._rows = [self._mine, *(row for number, row in enumerate(rows) if number != self._rank)]

    def average(self, flat: Tensor):
        """Turn `flat`, in fp32, into the mean of all ranks' ones, which are as long. Collective."""
        for piece in flat.split(len(self._mine)):
            mine = self._mine[: len(piece)].copy_(piece)
            dist.barrier(self._group)
            shares = [row[: len(piece)].tensor_split(len(self._rows))[self._rank] for row in self._rows]
            for total, *others in zip(*(share.split(PIECE) for share in shares)):
                for other in others:
                    total.add_(other)
                total.div_(len(self._rows))
                for other in others:
                    other.copy_(total)
            dist.barrier(self._group)
            piece.copy_(mine)


def share_memory(plan: Plan, elements: int, group: dist.ProcessGroup | None) -> SharedMean | None:
    """What averages so many gradients in fp32 where all ranks are on the CPUs of one machine; None elsewhere. Collective."""
    on_one_machine = plan.device == "cpu" and plan.world.size == plan.world.local_size
    in_fp32 = plan.fp32_gradients or plan.precision == "fp32"
    if not (on_one_machine and in_fp32 and elements >= MIN_ELEMENTS):
        return None
    rows = map_rows(elements, group)
    how = f"through sockets, since {FOLDER} has no room for them" if rows is None else "in memory that the ranks share"
    logger.info(f"  gradients: averaged {how}")
    return None if rows is None else SharedMean(rows, group)


def map_rows(elements: int, group: dist.ProcessGroup | None) -> Tensor | None:
    """Memory for `elements` numbers in fp32 of each rank of a group on one machine, a row each; None: there is no room. Collective.

    Its file is deleted as soon as all have mapped it, so that nothing is left behind, however a run ends.
    """
    ranks, length = dist.get_world_size(group), min(elements, MAX_ELEMENTS)
    file = _reserve(4 * ranks * length) if dist.get_rank(group) == 0 else None
    paths = [None] * ranks
    dist.all_gather_object(paths, file and file.name, group=group)
    rows = torch.from_file(paths[0], shared=True, size=ranks * length).view(ranks, length) if paths[0] else None
    dist.barrier(group)
    if file:
        file.close()
    return rows


def _reserve(size: int):
    """A new file of `size` bytes whose memory is there: without it, the first write would end the process. None: no room."""
    try:
        file = tempfile.NamedTemporaryFile(dir=FOLDER)
        os.posix_fallocate(file.fileno(), 0, size)
        return file
    except OSError:
        return None
