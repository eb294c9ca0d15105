"""Checkpoint folders as Megatron-LM writes them, and changes to them."""

from pathlib import Path

import torch

from megatron_lite.checkpoint.megatron_file import write_megatron_file
from megatron_lite.checkpoint.training_state import CheckpointRecord
from support.launch import flags, plan_of
from support.megatron_core import Ours, gradients
from support.model_variants import VARIANTS

WORDS = "--train-iters 20 --lr-warmup-iters 3 --lr-decay-style cosine --min-lr 1e-4 --weight-decay 0.1"


PRECISION = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 512"}


def trained(precision: str, *words: str, variant: str = "gqa_swiglu_rmsnorm", steps: int = 3):
    """(plan, record, flat tensors) of a run of this trainer."""
    run = Ours(plan_of(flags(WORDS, PRECISION[precision], *words)), VARIANTS[variant])
    for step in range(steps):
        run.step(gradients(run.shape, step))
    return run.plan, run.record(steps, versions={"torch": "2"}), run.flat()


def written(path: Path, record: CheckpointRecord, tensors: dict, plan) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        write_megatron_file(file, record, tensors, plan.args)
    return path


def rewrite(path: Path, change=lambda state: None, foreign: bool = True) -> Path:
    """The file with `change` made to what it holds, and without this trainer's mark if it is to be `foreign`."""
    state = torch.load(path, weights_only=False)
    if foreign:
        del state["megatron_lite"]
    change(state)
    torch.save(state, path)
    return path
