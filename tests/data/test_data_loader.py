"""The loader: right samples, right order, no trace left behind."""

import gc
import itertools
import multiprocessing
import os
import signal

import pytest
import torch
from support.waiting import wait_until
from support.wording import wording

from megatron_lite.data.gpt_dataset import MockDataset
from megatron_lite.data.loader import batches
from megatron_lite.errors import DataError

INDICES = [[0, 3], [2, 1], [5, 4]]


class Broken:
    """A data set whose sample 5 kills the process that reads it; the others are a mistake of the user."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        if i == 5:
            os._exit(3)
        raise DataError("x.bin: is damaged; make it again")


@pytest.fixture
def dataset():
    return MockDataset(10, 8, 100, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stacks_the_samples_in_order(dataset, num_workers):
    loaded = list(batches(dataset, INDICES, num_workers=num_workers, pin=False))
    assert [raw_BT1.tolist() for raw_BT1 in loaded] == [[dataset[i].tolist() for i in group] for group in INDICES]
    assert loaded[0].dtype == torch.int64
    wait_until(lambda: not multiprocessing.active_children())
    with pytest.raises(IndexError):  # other errors keep their type
        list(batches(dataset, [[10]], num_workers=0, pin=False))


@pytest.mark.parametrize("leave", ["close", "close-unstarted", "forget"])
def test_workers_of_an_endless_stream_end_with_the_iterator(dataset, leave):
    iterator = batches(dataset, itertools.cycle(INDICES), num_workers=2, pin=False)
    assert len(multiprocessing.active_children()) == 2
    if leave != "close-unstarted":
        next(iterator)
    if leave != "forget":
        iterator.close()
    del iterator
    gc.collect()
    wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_leaves_the_models_random_numbers_alone(dataset, num_workers):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(batches(dataset, INDICES, num_workers=num_workers, pin=False))
    assert torch.rand(1) == expected


def test_workers_survive_a_signal_to_the_process_group(dataset):
    iterator = batches(dataset, INDICES * 10, num_workers=1, pin=False)
    next(iterator)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(multiprocessing.active_children()[0].pid, number)
    assert len(list(iterator)) == 29


def test_worker_that_dies():
    iterator = batches(Broken(), [[5]], num_workers=1, pin=False)
    with pytest.raises(DataError, match=r"^--num-workers: DataLoader worker .*; .*try --num-workers 0$"):
        list(iterator)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mistake_found_by_a_worker_stays_one_line(num_workers):
    with pytest.raises(DataError) as caught:
        list(batches(Broken(), [[1]], num_workers=num_workers, pin=False))
    assert str(caught.value) == wording("data/x-bin-is-damaged")
    wait_until(lambda: not multiprocessing.active_children())
