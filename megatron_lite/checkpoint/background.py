"""Saving beside training: a copy of the state on the host, and a thread that writes it."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in host memory, page-locked beside a GPU. The memory is kept from one save to the next."""

    def __init__(self, tensors: dict[str, Tensor]):
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        # touched now: pages that the system hands out in the first save would make that one slow
        self._copies = {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu) for name, tensor in tensors.items()
        }
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

    def wait(self):
        """Until the last `take` is done."""
        if self._ready is not None:
            self._ready.synchronize()


class Background:
    """One piece of work at a time in a thread."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last piece of work is over and failed; `finish` will raise it."""
        return not self.busy and self._failure is not None

    def start(self, work: Callable[[], None]):
        """Begin `work`. `finish` must have been called since the last start."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def finish(self):
        """Wait for the work; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def give_up(self, seconds: float):
        """Wait for the work for so long at most, and forget how it ended: something else has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], None]):
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by finish
            self._failure = error
