"""The host never waits for the device in a step: nothing in it asks for a tensor's value."""

import contextlib

import pytest
import torch
from support.launch import EOD, build, flags, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.data.gpt_dataset import MockDataset
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics

pytestmark = pytest.mark.usefixtures("process_group")

WAITING = """
    _local_scalar_dense item nonzero is_nonzero equal masked_select unique_consecutive _unique2 allclose nonzero_static
    to_dense
"""
CPU = torch.device("cpu")


class Waits(TorchDispatchMode):
    """Counts operators that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found, self.operators = [], 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.operators += 1
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
        )
        if name in WAITING.split() or by_mask:
            self.found.append(name)
        return function(*arguments, **(named or {}))


class Trainer:
    """A TrainingStep and a StepMetrics, as a run builds them."""

    def __init__(self, *words):
        plan = plan_of(flags("--train-iters 50", *words))
        replica = build(plan)
        self.optimizer = Optimizer(plan, replica.parameters, CPU)
        self.step = TrainingStep(plan, replica, self.optimizer, BatchMaker(plan.args.data, plan.layout, CPU, EOD))
        self.meter, self.progress = StepMetrics(self.optimizer, CPU), Progress()
        samples = MockDataset(1000, plan.shape.seq_length, plan.vocab_size, 1)
        size = plan.args.training.micro_batch_size
        self.batches = (torch.stack([torch.from_numpy(samples[size * i + j]) for j in range(size)]) for i in range(400))

    def __call__(self):
        result = self.step(self.batches, self.progress.consumed, lambda name: contextlib.nullcontext())
        self.progress.iteration += 1
        self.progress.consumed += result.samples
        self.meter.record(self.progress, result)
        return result


@pytest.mark.parametrize(
    "words",
    [
        "--fp16 --initial-loss-scale 4096",
        "--fp16 --loss-scale 128",
        "--fp16 --accumulate-allreduce-grads-in-fp32",
        "--bf16",
        "",
        "--optimizer sgd",
        "--log-num-zeros-in-grad",
        "--fp16 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--optimizer sgd --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--bf16 --eod-mask-loss --calculate-per-token-loss --clip-grad 0",
    ],
)
def test_no_operator_waits_in_a_steady_step(words):
    trainer = Trainer(words)
    for _ in range(4):
        trainer()
    with Waits() as waits:
        for _ in range(3):
            trainer()
    assert waits.operators > 100
    assert waits.found == []


def test_a_skipped_step_waits_for_nothing_either():
    trainer = Trainer("--fp16")  # the first scale, 2**32, overflows
    trainer()
    with Waits() as waits:
        assert_skipped = trainer()
    assert waits.found == [] and assert_skipped.update.skipped


def test_the_counter_sees_what_it_should():
    numbers = torch.arange(4.0)
    with Waits() as waits:
        numbers.sum().item()
        float(numbers[0])
        bool(numbers[0] > 0)
        numbers[numbers > 1]
        torch.equal(numbers, numbers)
        numbers.nonzero()
    assert sorted(waits.found) == ["_local_scalar_dense"] * 3 + ["equal", "index", "nonzero"]
