"""Few launches and bytes make up a step, and gradients added at once are those that autograd adds."""

import contextlib

import pytest
import torch
from count_launches import ADDING, count_launches
from support.launch import alone, build, same
from support.rehearsal_cases import CPU, EOD, GPU, batches, planned

from megatron_lite.config.model_size import count_parameters
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.phases import Phase
from megatron_lite.train.step import BatchMaker, TrainingStep


@pytest.mark.parametrize(
    "words, bytes_per_parameter",
    [
        ("--fp16", 46),  # 6 of them widen the gradients, whose norm takes 2
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 42),
        ("--bf16", 42),
    ],
)
def test_few_launches_add_gradients_and_update_weights(words, bytes_per_parameter):
    # large enough that scalars do not count
    counted, number = count_launches(planned(f"--clip-grad 1.0 --hidden-size 256 {words}", GPU))
    added = 1 if words == "--fp16" else 2  # of two micro-batches; the first one's stay as they are, or are copied
    assert 0 < counted.launches[ADDING] <= 12 * added
    update = sum(counted.bytes[p.value] for p in (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP))
    assert update / number == pytest.approx(bytes_per_parameter, abs=0.1)


@pytest.mark.parametrize("words", ["--fp16 --initial-loss-scale 4096", "--bf16"])
def test_gradients_added_at_once_are_those_added_one_by_one(words):
    def train(at_once: bool):
        plan = planned(f"--seed 3 --hidden-dropout 0 --attention-dropout 0 {words}")
        torch.manual_seed(1)
        replica = build(plan)
        replica._adds_at_once = at_once and replica.fp32 is None
        if at_once and replica.fp32 is not None:
            replica.fp32._bundle = count_parameters(plan.shape) // 8
        step = TrainingStep(
            plan, replica, Optimizer(plan, replica.parameters, CPU), BatchMaker(plan.args.data, plan.layout, CPU, EOD)
        )
        for _ in range(3):
            step(batches(plan), 0, lambda phase: contextlib.nullcontext())
        return [p.detach().clone() for p in replica.parameters]

    with alone():
        assert same(train(False), train(True))
