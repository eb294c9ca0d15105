"""Micro-batches on their way to the GPU, beside its computing."""

import torch
from torch import Tensor

from megatron_lite.marks import INPUT, mark_memory


@mark_memory(INPUT)
class ToDevice:
    """Copies tensors to the device; to a GPU on a stream of its own.

    The host runs ahead of the GPU: on the stream that computes, the copy of a micro-batch would queue behind all
    kernels of the one before. On its own stream it runs while they do, and the computing stream waits for it only when it gets
    there. The host waits for nothing, provided that the tensor lies in pinned memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; itself if it lies there already. To be used on the stream that is current now."""
        if self._copying is None or tensor.device == self.device:
            return tensor.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copying):
            copied = tensor.to(self.device, non_blocking=True)
        computing.wait_stream(self._copying)
        # Its memory belongs to the copying stream, which must not fill it again before computing is done with it.
        copied.record_stream(computing)
        return copied
