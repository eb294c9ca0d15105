"""Real training steps on the CPU, recorded: what rehearsals are held against."""

import gc

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.train.step import BatchMaker, TrainingStep
from support.launch import ALONE, build, flags, plan_of

CPU = torch.device("cpu")
GPU = World(gpus=1)
EOD = 127
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# sizes at which no two kinds of tensors are alike
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4"
)
# the launch script that every GPU user starts with: examples/gpt3/train_gpt3_857m_distributed.sh
EXAMPLE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4 --global-batch-size 16 --fp16 --adam-beta2 0.95 --clip-grad 1.0 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --vocab-size 50256"
)


def planned(words: str = "", world: World = ALONE) -> Plan:
    return plan_of(flags(MODEL, words), world)


def recorded_steps(plan: Plan, steps: int = 2) -> dict:
    """The snapshot of real steps on this machine's CPU, inside a process group."""
    place = StepMarks()
    tracker, hooks = StorageTracker(place, 1_000_000), ModuleHooks(place, in_backward=False)
    gc.collect()
    tracker.start()
    hooks.attach()
    try:
        replica = build(plan)
        optimizer = Optimizer(plan, replica.parameters, CPU)
        step = TrainingStep(plan, replica, optimizer, BatchMaker(plan.args.data, plan.layout, CPU, EOD))
        watching = Instruments([place], print)
        for number in range(1, steps + 1):
            tracker.begin_step()
            with watching.step(number):
                step(batches(plan), 0, watching.phase)
    finally:
        hooks.detach()
        tracker.stop()
    assert tracker.failure is None
    return tracker.snapshot()


def batches(plan: Plan):
    """Micro-batches without end."""
    while True:
        yield torch.zeros(plan.args.training.micro_batch_size, plan.shape.seq_length + 1, dtype=torch.int64)


def attention_arguments(dtype: torch.dtype, width: int, groups: int, masked: bool, device: str) -> dict:
    """Of scaled_dot_product_attention: 4 heads of `width`, 64 positions, in the order of its parameters."""
    queries, keys = (
        torch.empty(2, 64, heads, width, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for heads in (4, groups)
    )
    mask = torch.empty(2, 1, 64, 64, dtype=torch.bool, device=device) if masked else None
    arguments = {"query": queries, "key": keys, "value": keys, "attn_mask": mask, "dropout_p": 0.0}
    return arguments | {"is_causal": not masked, "scale": None, "enable_gqa": groups != 4}
