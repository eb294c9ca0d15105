"""The way to the device, where there is no GPU: nothing happens to order, ends and errors. See tests/gpu for the rest."""

import pytest
import torch
from launch import flags, plan_of

from megatron_lite.data.batch import ToDevice
from megatron_lite.train.step import BatchMaker

CPU = torch.device("cpu")


def test_on_the_cpu_a_tensor_stays_what_it_is():
    tensor = torch.arange(6)
    assert ToDevice(CPU)(tensor) is tensor


def test_batches_come_in_their_order_and_no_further_than_asked_for():
    drawn = []

    def source():
        for number in range(3):
            drawn.append(number)
            yield torch.full((1, 17), number)
        raise RuntimeError("the loader's own")

    make = BatchMaker(plan_of(flags()), CPU, 127)
    stream = map(make, source())
    for number in range(3):
        assert next(stream).tokens_BT.unique().tolist() == [number]
        assert drawn == [*range(number + 1)]
    with pytest.raises(RuntimeError, match="^the loader's own$"):
        next(stream)
