"""A copy of the training state on the host, from which a thread writes a checkpoint while training goes on."""

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in host memory, page-locked beside a GPU. The memory is kept from one save to the next."""

    def __init__(self, tensors: dict[str, Tensor]):
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        # touched now: pages that the system hands out in the first save would make that one slow
        self._copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            self._copies[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._ready = torch.cuda.Event() if on_gpu else None

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy `tensors`, whose names and shapes are those given before.

        On a GPU the copies are only queued: later kernels cannot overtake them, so that training may go on. `wait`
        before reading.
        """
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor.detach(), non_blocking=True)
        if self._ready is not None:
            self._ready.record()
        return dict(self._copies)

    def wait(self) -> None:
        """Wait until the last `take` is done."""
        if self._ready is not None:
            self._ready.synchronize()
