"""What only a GPU can show: a step in which torch itself finds no synchronisation."""

import contextlib
import math

import pytest
import torch
from torch import distributed as dist

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.data_parallel import DataParallel
from megatron_lite.train.loop import Progress
from megatron_lite.train.run import build_model
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics

SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 50 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0"
)
EAGER, COMPILED = "--torch-compile none", "--torch-compile layers"
WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"{words} {EAGER}"
            for words in (
                "--fp16",
                "--fp16 --initial-loss-scale 4096",
                "--bf16",
                "",
                "--bf16 --optimizer sgd",
                "--fp16 --accumulate-allreduce-grads-in-fp32",
                "--bf16 --recompute-activations",
                "--log-num-zeros-in-grad",
                "--bf16 --attention-backend unfused",
                "--bf16 --reset-attention-mask --reset-position-ids --eod-mask-loss",
                "--bf16 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear",
            )
        ),
        *(f"{words} {COMPILED} {WITHOUT_DROPOUT}" for words in ("--fp16 --initial-loss-scale 4096", "--bf16", "")),
        f"--fp16 --initial-loss-scale 4096 {COMPILED}",
    ],
)
def test_torch_finds_no_synchronisation_in_a_steady_step(words):
    device, world = torch.device("cuda", 0), World(gpus=torch.cuda.device_count())
    line = read_command_line([*SIZE.split(), *words.split()])
    check(line, world)
    plan = resolve(line.args, world, 128)
    replica = DataParallel(plan, build_model(plan, device))
    optimizer = Optimizer(plan, replica.parameters, device)
    step = TrainingStep(plan, replica, optimizer, BatchMaker(plan, device, 127))
    meter, progress = StepMetrics(plan, optimizer, device), Progress()
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
