"""Ranks read disjoint samples that cover a block, and a resumed run reads what an uninterrupted one would."""

from itertools import islice, product
from random import Random

import pytest
import torch

from megatron_lite.data.loader import cyclic_batches, single_batches
from megatron_lite.errors import DataError

SIZES = [(100, 1, 1), (103, 4, 2), (64, 8, 4), (37, 3, 5), (10, 1, 4)]


def cyclic(data_sharding):
    def batches(*sizes):
        return cyclic_batches(*sizes, data_sharding)

    return batches


ENDLESS = [pytest.param(cyclic(True), id="sharded"), pytest.param(cyclic(False), id="dealt")]


@pytest.mark.parametrize(("samples", "micro", "ranks"), SIZES)
def test_single_reads_blocks_in_order(samples, micro, ranks):
    by_rank = [list(single_batches(samples, 0, micro, rank, ranks)) for rank in range(ranks)]
    read = [i for parts in zip(*by_rank) for part in parts for i in part]
    assert read == list(range(samples - samples % (micro * ranks)))
    assert {len(batches) for batches in by_rank} == {samples // (micro * ranks)}


def test_single_gives_each_rank_a_slice_resumes_at_any_sample_and_ends_with_the_data():
    assert list(single_batches(12, 4, 2, 1, 2)) == [[6, 7], [10, 11]]
    assert list(single_batches(11, 3, 2, 0, 2)) == [[3, 4], [7, 8]]
    assert list(single_batches(11, 11, 2, 0, 2)) == []


@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize(("samples", "micro", "ranks"), SIZES)
def test_cyclic_epoch_reads_each_sample_at_most_once_over_all_ranks(make, samples, micro, ranks):
    blocks = samples // (micro * ranks)
    for epoch in range(3):
        begin = epoch * blocks * micro * ranks
        by_rank = [list(islice(make(samples, begin, micro, rank, ranks), blocks)) for rank in range(ranks)]
        assert {len(batch) for batches in by_rank for batch in batches} == {micro}
        read = [i for batches in by_rank for batch in batches for i in batch]
        assert len(set(read)) == len(read) == blocks * micro * ranks
        assert set(read) <= set(range(samples))


def oracle(samples, micro, rank, ranks, step, data_sharding):
    """The step's batch of a rank, each index from its place in the epoch's permutation."""
    per_epoch = samples // (micro * ranks)
    epoch, block = divmod(step, per_epoch)
    size = per_epoch * micro if data_sharding else samples - samples % micro
    order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
    places = [block * micro + i for i in range(micro)]
    if data_sharding:
        return [rank * size + order[place] for place in places]
    return [order[place * ranks + rank] for place in places]


def test_cyclic_order_over_a_grid():
    """Megatron's permutation, from any step on: a run that resumes continues the same stream."""
    random = Random(4)
    for _ in range(150):
        micro, ranks = random.randint(1, 4), random.randint(1, 5)
        samples, done = random.randint(micro * ranks, 6 * micro * ranks + 5), random.randint(0, 9)
        for rank, data_sharding in product(range(ranks), (True, False)):
            drawn = islice(cyclic_batches(samples, done * micro * ranks, micro, rank, ranks, data_sharding), 8)
            for step, batch in enumerate(drawn, start=done):
                assert batch == oracle(samples, micro, rank, ranks, step, data_sharding)


def test_cyclic_leaves_the_models_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(islice(cyclic_batches(10, 0, 1, 0, 1, True), 3))
    assert torch.rand(1) == expected


def test_fewer_samples_than_a_block_and_a_place_inside_one_are_refused():
    few = r"^--micro-batch-size 4: 7 samples are too few .* of 2 data-parallel ranks; .*$"
    inside = r"^--dataloader-type cyclic: 6 consumed samples are no multiple of micro-batch size 4 x 2 .*; .*$"
    for make, sizes, message in (
        (single_batches, (7, 0, 4, 0, 2), few),
        (cyclic_batches, (7, 0, 4, 0, 2, True), few),
        (cyclic_batches, (7, 0, 4, 0, 2, False), few),
        (cyclic_batches, (100, 6, 4, 0, 2, True), inside),
    ):
        with pytest.raises(DataError, match=message):
            make(*sizes)
