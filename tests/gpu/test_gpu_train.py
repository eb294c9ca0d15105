"""What only a GPU can show: a step in which torch itself finds no synchronization."""

import contextlib
import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import build, plan_of

from megatron_lite.config.world import World
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics

SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 50 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0"
)
EAGER, COMPILED = "--torch-compile none", "--torch-compile layers"
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


pytestmark = pytest.mark.usefixtures("group")


STEADY = [
    *("--fp16", "--fp16 --initial-loss-scale 4096", "--bf16", "", "--bf16 --optimizer sgd", "--log-num-zeros-in-grad"),
    *("--fp16 --accumulate-allreduce-grads-in-fp32", "--bf16 --recompute-activations"),
    *("--bf16 --attention-backend unfused", "--bf16 --reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "--bf16 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear",
]
STEADY_COMPILED = [
    *(f"{words} {WITHOUT_DROPOUT}" for words in ("--fp16 --initial-loss-scale 4096", "--bf16", "")),
    "--fp16 --initial-loss-scale 4096",
]


@pytest.mark.parametrize(
    "words", [*(f"{words} {EAGER}" for words in STEADY), *(f"{words} {COMPILED}" for words in STEADY_COMPILED)]
)
def test_torch_finds_no_synchronization_in_a_steady_step(words):
    device = torch.device("cuda", 0)
    plan = plan_of([*SIZE.split(), *words.split()], World(gpus=torch.cuda.device_count()))
    replica = build(plan, device)
    optimizer = Optimizer(plan, replica.parameters, device)
    step = TrainingStep(plan, replica, optimizer, BatchMaker(plan.args.data, plan.layout, device, 127))
    meter, progress = StepMetrics(optimizer, device), Progress()
    raw_BT1 = torch.randint(127, (2, plan.shape.seq_length + 1)).pin_memory()
    batches = iter(lambda: raw_BT1, None)

    def go_on():
        result = step(batches, progress.consumed, lambda name: contextlib.nullcontext())
        progress.iteration += 1
        progress.consumed += result.samples
        meter.record(progress, result)

    for _ in range(5):
        go_on()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            go_on()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps = meter.take()
    assert len(steps) == 10 and (steps[-1].skipped or math.isfinite(steps[-1].loss))
