"""The formulas for parameters and FLOPs against the real module."""

from dataclasses import replace

import pytest
import torch
from support.model_variants import VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config.model_size import count_parameters, step_flops
from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT

MEDIUM = ModelShape(
    num_layers=24, hidden_size=1024, num_attention_heads=16, num_query_groups=16, kv_channels=64, ffn_hidden_size=4096,
    seq_length=2048, max_position_embeddings=2048, padded_vocab_size=50304,
)  # fmt: skip


def on_meta(shape):
    attend = choose_attention("unfused", shape, batch=1, device="meta", dtype=torch.float32, masked=False)
    with torch.device("meta"):
        return GPT(shape, attend)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_formula_counts_the_real_module(name):
    odd = replace(VARIANTS[name], hidden_size=40, ffn_hidden_size=72, num_layers=3)
    for shape in (VARIANTS[name], odd):
        assert count_parameters(shape) == sum(p.numel() for p in on_meta(shape).parameters())


@pytest.mark.parametrize(
    "switches, expected",
    [
        ({}, 355_919_872),
        ({"tied_embeddings": False}, 407_431_168),
        ({"linear_bias": False, "qkv_bias": False}, 355_698_688),
    ],
)
def test_parameters_as_megatron_reports_them(switches, expected):
    shape = replace(MEDIUM, **switches)
    assert count_parameters(shape) == expected == sum(p.numel() for p in on_meta(shape).parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_full_attention_flops_are_those_of_the_matrix_products(name):
    shape = VARIANTS[name]
    model = on_meta(shape)
    tokens = torch.zeros(3, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).mean().backward()
    assert step_flops(shape, 3, causal=False) == counter.get_total_flops()


def test_causal_flops_as_megatron_reports_them():
    assert step_flops(MEDIUM, 16, causal=True) == 79_396_765_433_856
    halved = 6 * 16 * MEDIUM.seq_length * MEDIUM.num_layers * MEDIUM.attention_width * MEDIUM.seq_length
    assert step_flops(MEDIUM, 16, causal=False) - step_flops(MEDIUM, 16, causal=True) == halved
