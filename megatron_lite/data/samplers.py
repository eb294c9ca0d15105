"""Which samples a data-parallel rank reads, in Megatron's order.

A block is `micro_batch_size * num_ranks` samples: one micro-batch on every rank. Gradient accumulation draws further
blocks. Both functions check their numbers at the call, before the first batch is drawn.
"""

from collections.abc import Iterator

from megatron_lite.errors import DataError
from megatron_lite.units import count


def single_batches(
    num_samples: int, consumed: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """In order, one pass, from sample `consumed` on; ends when less than a block is left. DataError: too few samples."""
    require_block(num_samples, micro_batch_size, num_ranks)
    block = micro_batch_size * num_ranks
    mine = range(rank * micro_batch_size, (rank + 1) * micro_batch_size)
    return ([start + i for i in mine] for start in range(consumed, num_samples - block + 1, block))


def cyclic_batches(
    num_samples: int, consumed: int, micro_batch_size: int, rank: int, num_ranks: int, data_sharding: bool
) -> Iterator[list[int]]:
    """Shuffled, endless; the permutation is seeded with the number of the epoch.

    data_sharding: every rank keeps to its own stretch of the data, all with the same permutation; without it, one
    permutation of everything is dealt out over the ranks.
    DataError: too few samples, or a `consumed` in the middle of a block.
    """
    require_block(num_samples, micro_batch_size, num_ranks)
    block = micro_batch_size * num_ranks
    if consumed % block:
        raise DataError(
            f"--dataloader-type cyclic: {count(consumed)} consumed samples are no multiple of micro-batch size "
            f"{micro_batch_size} x {num_ranks} data-parallel ranks; resume with the old sizes"
        )
    order = _bucket_order if data_sharding else _dealt_order
    return _epochs(order, num_samples, consumed, micro_batch_size, rank, num_ranks)


def require_block(num_samples: int, micro_batch_size: int, num_ranks: int) -> None:
    """DataError unless there is one micro-batch for every rank."""
    if num_samples < micro_batch_size * num_ranks:
        raise DataError(
            f"--micro-batch-size {micro_batch_size}: {count(num_samples)} samples are too few for one micro-batch on "
            f"each of {num_ranks} data-parallel ranks; give more data or a smaller micro-batch"
        )


def _epochs(order, num_samples, consumed, micro_batch_size, rank, num_ranks) -> Iterator[list[int]]:
    blocks_per_epoch = num_samples // (micro_batch_size * num_ranks)
    blocks_done = consumed // (micro_batch_size * num_ranks)
    while True:
        epoch, first = divmod(blocks_done, blocks_per_epoch)
        indices = order(epoch, num_samples, micro_batch_size, rank, num_ranks)
        # The end is cut to whole blocks. Without sharding Megatron gives a batch more to the ranks for which the deal
        # leaves one, in place of their first of the next epoch; a run resumed there does not see it. Here both agree.
        for i in range(first, blocks_per_epoch):
            yield indices[i * micro_batch_size : (i + 1) * micro_batch_size].tolist()
        blocks_done = (epoch + 1) * blocks_per_epoch


def _bucket_order(epoch, num_samples, micro_batch_size, rank, num_ranks):
    bucket = num_samples // (micro_batch_size * num_ranks) * micro_batch_size
    return _permutation(epoch, bucket) + rank * bucket


def _dealt_order(epoch, num_samples, micro_batch_size, rank, num_ranks):
    return _permutation(epoch, num_samples // micro_batch_size * micro_batch_size)[rank::num_ranks]


def _permutation(epoch: int, size: int):
    import torch  # here, so that the other sampler and its users do without it

    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
