"""Numbers on their way from the device to the host, without making either wait."""

from array import array
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

LAG = 2  # steps that the host may be ahead of what it reads: enough that reading never keeps the device waiting


class Readback:
    """A queue of rows of numbers. What is read is old enough to have arrived, or read at a moment that may wait."""

    def __init__(self):
        self._waiting: deque[tuple[object, Tensor | array, torch.cuda.Event | None]] = deque()

    def push(self, key, values: Sequence[Tensor]):
        """Start copying `values`, scalars of any type on one device, to the host under `key`, in double precision."""
        if values[0].device.type != "cuda":
            self._waiting.append((key, array("d", [value.tolist() for value in values]), None))
            return
        row = torch.stack([value.detach().double() for value in values])
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        host.copy_(row, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((key, host, event))

    def forget(self):
        """Read no more of what is on its way."""
        self._waiting.clear()

    def arrived(self):
        """Yield (key, list of numbers) of what has arrived; waits for nothing, since after a failure nothing may come.

        RuntimeError where the device itself has failed and answers no more.
        """
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].query()):
            key, host, _ = self._waiting.popleft()
            yield key, host.tolist()

    def pop(self, lag: int):
        """Yield (key, list of numbers) of all but the newest `lag` rows, waiting for each to arrive.

        With a lag of 2 the device still has a whole step queued, so that the wait costs it nothing.
        """
        while len(self._waiting) > lag:
            key, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, host.tolist()
