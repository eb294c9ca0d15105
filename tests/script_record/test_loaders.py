"""What loaders draw is seen and can be chosen; what they yield is otherwise their own."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.data import dataloader as loader_module

from megatron_lite.script_record.loaders import Loaders

DATA = TensorDataset(torch.arange(12))


@pytest.fixture
def watch(monkeypatch):
    """Watches loaders until the test ends."""
    base = loader_module._BaseDataLoaderIter
    for name in ("__init__", "_next_index", "__next__"):
        monkeypatch.setattr(base, name, getattr(base, name))

    def start(batches=()):
        loaders = Loaders(list(batches))
        loaders.attach()
        return loaders

    return start


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_seen_when_the_script_has_them(watch, workers):
    loaders = watch()
    loader = DataLoader(DATA, batch_size=3, num_workers=workers)
    seen = []
    for (values,) in loader:
        assert tuple(values.tolist()) == loaders.get_current()
        seen.append(values.tolist())
        if len(seen) == 2:
            break
    (record,) = loaders.describe()
    # workers fetch ahead; what has not arrived is no batch
    assert record.batches == seen == [[0, 1, 2], [3, 4, 5]]
    assert record.samples == len(DATA)


def test_other_samples_can_be_drawn(watch):
    loaders = watch([[[5, 7, 9, 11], [0]]])
    drawn = [values.tolist() for (values,) in DataLoader(DATA, batch_size=3)]
    assert drawn[:2] == [[5, 7, 9, 11], [0]]
    assert drawn[2] == [6, 7, 8]
    (record,) = loaders.describe()
    assert record.batches == drawn


def test_single_samples_can_be_drawn(watch):
    watch([[[5], [7]]])
    drawn = [int(value) for (value,) in DataLoader(DATA, batch_size=None)]
    assert drawn[:3] == [5, 7, 2]


def test_a_distributed_sampler_tells_the_whole_epoch(watch):
    loaders = watch()
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    loader = DataLoader(DATA, batch_size=3, sampler=sampler)
    (first,) = next(iter(loader))
    (record,) = loaders.describe()
    assert record.epoch[:3] == first.tolist()
    assert len(record.epoch) == 6
    assert record.sampler == "DistributedSampler"


def test_loaders_are_numbered_by_first_use(watch):
    loaders = watch([[], [[3]]])
    first = DataLoader(DATA, batch_size=2)
    second = DataLoader(DATA, batch_size=2)
    next(iter(first))
    (chosen,) = next(iter(second))
    assert chosen.tolist() == [3]
    assert [record.batches for record in loaders.describe()] == [[[0, 1]], [[3]]]
