"""Samples read and stacked by worker processes, ahead of the training loop, and which samples a rank draws.

Shapes: B samples of a micro-batch, T1 = T + 1 tokens of a sample.
"""

import itertools
import signal
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lite.config.data_paths import BATCHES_AHEAD
from megatron_lite.data.build import Dataset
from megatron_lite.errors import DataError
from megatron_lite.units import count


def batches(dataset: Dataset, index_batches: Iterable[list[int]], *, num_workers: int, pin: bool) -> Iterator[Tensor]:
    """Read micro-batches ahead of the training loop.

    The workers start at the call and end with the iterator: when it is used up, closed or no longer referred to.

    Args:
        dataset: Samples, int64 [T + 1] each.
        index_batches: The numbers of the samples of each micro-batch.
        num_workers: Processes that read; 0 reads in this one.
        pin: Whether to use page-locked memory, for copies that overlap with computing.

    Yields:
        raw_BT1, int64 on the CPU, one for each list of indices, in their order.

    Raises:
        DataError: A worker has died.
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
    """Pass on what the loader gives, and errors of its workers as DataError. Workers end with this iterator."""
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
    # They reach the whole process group. The trainer may want to save first; a worker that died would stop it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stack(samples: list[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.stack(samples))


def require_block(num_samples: int, micro_batch_size: int, num_ranks: int) -> None:
    """Require one micro-batch for every rank.

    Args:
        num_samples: Samples of the data set.
        micro_batch_size: Samples of a micro-batch.
        num_ranks: Ranks that share the data.

    Raises:
        DataError: There are fewer samples.
    """
    if num_samples < micro_batch_size * num_ranks:
        raise DataError(
            f"--micro-batch-size {micro_batch_size}: {count(num_samples)} samples are too few for one micro-batch on "
            f"each of {num_ranks} data-parallel ranks; give more data or a smaller micro-batch"
        )


def single_batches(
    num_samples: int, consumed: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Samples in their order, in one pass, which ends when less than a block is left.

    Args:
        num_samples: Number of samples of the data set.
        consumed: Samples that all ranks together have used.
        micro_batch_size: Samples of a micro-batch.
        rank: Number of this rank among those that share the data.
        num_ranks: Number of ranks that share the data.

    Raises:
        DataError: There are too few samples.
    """
    require_block(num_samples, micro_batch_size, num_ranks)
    block = micro_batch_size * num_ranks
    first = rank * micro_batch_size
    starts = range(consumed + first, num_samples - block + 1 + first, block)
    return (list(range(start, start + micro_batch_size)) for start in starts)


def epoch_batches(num_samples: int, micro_batch_size: int, rank: int, num_ranks: int) -> Iterator[list[int]]:
    """All samples, epoch after epoch, dealt out over the ranks one by one.

    As in Megatron-LM, ranks that have a sample less, or a last batch that is not full, begin with their first again.

    Args:
        num_samples: Number of samples of the data set.
        micro_batch_size: Samples of a micro-batch.
        rank: Number of this rank among those that share the data.
        num_ranks: Number of ranks that share the data.
    """
    mine = range(rank, num_samples, num_ranks) or range(rank % num_samples, num_samples)
    of_a_rank = -(-num_samples // num_ranks)
    for _ in itertools.count():
        for start in range(0, of_a_rank, micro_batch_size):
            yield [mine[place % len(mine)] for place in range(start, start + micro_batch_size)]


def cyclic_batches(
    num_samples: int, consumed: int, micro_batch_size: int, rank: int, num_ranks: int, data_sharding: bool
) -> Iterator[list[int]]:
    """Samples in a shuffled order, without end; the permutation is seeded with the number of the epoch.

    Args:
        num_samples: Number of samples of the data set.
        consumed: Samples that all ranks together have used.
        micro_batch_size: Samples of a micro-batch.
        rank: Number of this rank among those that share the data.
        num_ranks: Number of ranks that share the data.
        data_sharding: Whether every rank keeps to its own stretch of the data, all with the same permutation; without
            it, one permutation of everything is dealt out over the ranks.

    Raises:
        DataError: There are too few samples, or `consumed` is in the middle of a block.
    """
    require_block(num_samples, micro_batch_size, num_ranks)
    block = micro_batch_size * num_ranks
    if consumed % block:
        raise DataError(
            f"--dataloader-type cyclic: {count(consumed)} consumed samples are no multiple of micro-batch size "
            f"{micro_batch_size} x {num_ranks} data-parallel ranks; resume with the old sizes"
        )
    blocks_per_epoch = num_samples // block
    bucket = blocks_per_epoch * micro_batch_size

    def draw() -> Iterator[list[int]]:
        epoch, first = divmod(consumed // block, blocks_per_epoch)
        while True:
            random = torch.Generator().manual_seed(epoch)
            if data_sharding:
                indices = torch.randperm(bucket, generator=random) + rank * bucket
            else:
                size = num_samples // micro_batch_size * micro_batch_size
                indices = torch.randperm(size, generator=random)[rank::num_ranks]
            # The end is cut to whole blocks. Without sharding Megatron gives a batch more to the ranks for which the
            # deal leaves one, in place of their first of the next epoch; a run resumed there does not see it. Here
            # both agree.
            for start in range(first * micro_batch_size, bucket, micro_batch_size):
                yield indices[start : start + micro_batch_size].tolist()
            epoch += 1
            first = 0

    return draw()
