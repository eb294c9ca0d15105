"""Samples read and stacked by worker processes, ahead of the training loop.

Shapes: B samples of a micro-batch, T1 = T + 1 tokens of a sample.
"""

import signal
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lite.config.data_defaults import BATCHES_AHEAD
from megatron_lite.errors import DataError


def batches(dataset, index_batches: Iterable[list[int]], *, num_workers: int, pin: bool) -> Iterator[Tensor]:
    """raw_BT1, int64 on the CPU, one for each list of indices, in their order.

    num_workers: 0 reads in this process. pin: page-locked memory, for copies that overlap with computing.
    The workers start at the call and end with the iterator: when it is used up, closed or no longer referred to.
    DataError if a worker dies.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=index_batches,
        num_workers=num_workers,
        collate_fn=_stack,
        pin_memory=pin,
        prefetch_factor=BATCHES_AHEAD if num_workers else None,
        # The loader draws a seed for its workers. From its own generator: the global one belongs to the model, and
        # whether and when data is loaded must not change a dropout mask.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    return _each(iter(loader))


def _each(loaded: Iterator[Tensor]) -> Iterator[Tensor]:
    try:
        yield from loaded
    except DataError as error:  # torch puts the worker's traceback into the message of an error raised in it
        raise DataError(str(error).strip().splitlines()[-1].rpartition("DataError: ")[2]) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(". ")
        raise DataError(f"--num-workers: {reason}; check memory and /dev/shm, or try --num-workers 0") from error
    finally:
        # An error's traceback makes a cycle with the loader. When the collector finds it, the queues are closed before
        # the loader can tell its workers to go, and they stay for ever.
        shut_down = getattr(loaded, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def _leave_signals_to_the_trainer(worker: int) -> None:
    # Ctrl-C and a launcher's SIGTERM reach the whole process group. The trainer may want to save first; a worker that
    # died of the signal would stop it with an error.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stack(samples: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(samples))
