"""Keeps copies of the tensors that a rank records, until they are written."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_lite.formats.prove_record import TENSORS_FILE, TensorPart
from megatron_lite.script_record.tensor_places import HeldBlock, widen

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
MAX_KEPT_BYTES = 4 << 30  # of a rank; what comes after it is not compared, and is named


class KeptTensors:
    """Copies of tensors, by the keys of the file that they go to.

    Attributes:
        left_out: How many tensors came when there was no room any more.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._arrays: dict[str, Array] = {}
        self._bytes = 0

    def keep(self, kind: str, name: str, blocks: Iterable[HeldBlock], dtype: torch.dtype) -> list[TensorPart]:
        """Copy the parts of a tensor that this rank holds.

        Args:
            kind: What it is, such as weights: keys begin with it.
            name: Of the tensor in a model on one rank.
            blocks: Its parts.
            dtype: That the script has it in.

        Returns:
            The parts as they are named in a record; [] where there is no room.
        """
        parts: list[TensorPart] = []
        for block in blocks:
            bytes_more = block.local.numel() * 8
            if self._bytes + bytes_more > MAX_KEPT_BYTES:
                self.left_out += 1
                return parts
            self._bytes += bytes_more
            key = f"{kind}/{len(self._arrays)}"
            self._arrays[key] = widen(block.local).numpy()
            part = TensorPart(
                name=name,
                key=key,
                dtype=str(dtype).removeprefix("torch."),
                whole=block.whole,
                starts=block.starts,
                is_placed=block.is_placed,
                is_partial=block.is_partial,
            )
            parts.append(part)
        return parts

    def keep_array(self, key: str, tensor: Tensor) -> None:
        """Copy a tensor as it is, under a key of its own.

        Args:
            key: Of the file.
            tensor: Of any type that numpy has; others are widened.
        """
        host = tensor.detach().cpu()
        self._arrays[key] = widen(host).numpy() if host.is_floating_point() else host.numpy().copy()

    def write(self, folder: Path, rank: int) -> None:
        """Write the file of a rank.

        Args:
            folder: Where it goes.
            rank: Of this process.
        """
        np.savez(str(folder / TENSORS_FILE.format(rank)), allow_pickle=False, **self._arrays)
