"""Kernels that the last bits depend on: kept in checkpoints, and said where a resumed run takes others."""

import re

import pytest
import torch
from support.launch import alone, checkpoint, flags, quietly

from megatron_lite.cpu_kernels.products import describe_products
from megatron_lite.train.checkpoint_checks import compare_kernels

SAVED = {"attention": "sdpa flash", "torch_compile": "none"}
CUDNN_NOW = (
    "attention was sdpa flash and is sdpa cudnn: losses may differ in their last digits from those of an uninterrupted "
    "run; --attention-backend flash goes on as before."
)


@pytest.mark.parametrize(
    ("saved", "now", "lines"),
    [
        (SAVED, SAVED, []),
        ({}, SAVED, []),  # from before, or Megatron-LM's
        (SAVED, SAVED | {"attention": "sdpa cudnn"}, [CUDNN_NOW]),
        (SAVED | {"attention": "sdpa cudnn"}, SAVED, ["--attention-backend fused goes"]),
        (SAVED | {"attention": "explicit"}, SAVED, ["--attention-backend unfused goes"]),
        (SAVED, SAVED | {"torch_compile": "layers"}, ["torch.compile was none and is layers"]),
        (SAVED | {"torch_compile": "layers"}, SAVED, ["--torch-compile layers goes on as before."]),
        (SAVED | {"products": "A"}, SAVED | {"products": "B"}, ["the product of linear layers was A and is B"]),
    ],
)
def test_other_kernels_than_the_checkpoints_are_said(saved, now, lines):
    found = list(compare_kernels(saved, now))
    assert len(found) == len(lines) and all(line in text for line, text in zip(lines, found))


def test_a_resumed_run_says_what_computes_differently(tmp_path):
    argv = flags("--train-iters 3 --exit-interval 2 --save", tmp_path / "save")
    more = flags("--train-iters 3 --load", tmp_path / "save")
    with alone():
        quietly(argv, tmp_path / "one")
        kernels = checkpoint(tmp_path / "save", 2)["record"].kernels
        told = describe_products(torch.float32, "cpu") or "torch's own products"
        assert kernels == SAVED | {"attention": "explicit", "products": told}
        _, same = quietly(more, tmp_path / "two")
        _, other = quietly([*more, "--attention-backend", "flash"], tmp_path / "three")
    assert "note: --load" not in same
    told = r"note: --load \S+: attention was explicit and is sdpa flash: .*; --attention-backend unfused goes on"
    assert re.search(told, other)
