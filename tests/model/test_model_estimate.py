"""The formulas for parameters and FLOPs against the real module."""

from dataclasses import replace

import pytest
import torch
from support.latent_variants import LATENT_VARIANTS, WITH_QUERIES, make_latent
from support.model_variants import VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config.model_size import count_parameters, step_flops
from megatron_lite.config.shape import ExpertShape, LatentShape, ModelShape
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


@pytest.mark.parametrize("name", LATENT_VARIANTS)
def test_parameters_of_latent_attention_are_those_of_the_real_module(name):
    shape = LATENT_VARIANTS[name]
    assert count_parameters(shape) == sum(p.numel() for p in on_meta(shape).parameters())


def test_flops_of_latent_attention_are_megatrons_without_its_norms():
    """num_floating_point_operations of Megatron-LM's training.py, which counts a norm as one product of its width."""
    sizes = LatentShape(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    shape = make_latent(sizes, of=MEDIUM)
    heads, hidden, length = shape.num_attention_heads, shape.hidden_size, shape.seq_length
    queries = 1536 * (hidden + heads * (128 + 64))
    keys_and_values = 512 * (hidden + heads * (128 + 128)) + hidden * 64
    output = heads * 128 * hidden
    scores = length * heads * (128 + 64) / 2 + length * heads * 128 / 2
    attention = 6 * shape.num_layers * (queries + keys_and_values + output + scores)
    others = 6 * (shape.num_layers * 2 * hidden * shape.ffn_hidden_size + hidden * shape.padded_vocab_size)
    assert step_flops(shape, 16, causal=True) == 16 * length * (attention + others)


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh"])
def test_flops_of_experts_are_megatrons(activation):
    """num_floating_point_operations of Megatron-LM's training.py: of a token's experts and the shared one, not of routers."""
    e = ExpertShape(
        number=64, layers=tuple(layer % 2 == 1 for layer in range(24)), topk=6, ffn_hidden_size=512, shared_ffn_hidden_size=1024
    )  # fmt: skip
    shape = replace(MEDIUM, experts=e, activation=activation)
    hidden, length = shape.hidden_size, shape.seq_length
    matrices = 3 if activation == "swiglu" else 2
    dense = 12 * matrices * shape.ffn_hidden_size
    mixed = 12 * matrices * (512 * 6 + 1024)
    attention = 24 * (4 * hidden + length)
    per_token = 6 * hidden * (dense + mixed + attention + shape.padded_vocab_size)
    assert step_flops(shape, 16, causal=True) == 16 * length * per_token


@pytest.mark.parametrize("name", [*VARIANTS, "of latent vectors"])
def test_full_attention_flops_are_those_of_the_matrix_products(name):
    # heads of one width: none is filled up
    shape = VARIANTS.get(name) or make_latent(replace(WITH_QUERIES, v_head_dim=WITH_QUERIES.query_width))
    model = on_meta(shape)
    tokens = torch.zeros(3, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).mean().backward()
    assert step_flops(shape, 3, causal=False) == counter.get_total_flops()


def test_causal_flops_as_megatron_reports_them():
    assert step_flops(MEDIUM, 16, causal=True) == 79_396_765_433_856
    halved = 6 * 16 * MEDIUM.seq_length * MEDIUM.num_layers * MEDIUM.attention_width * MEDIUM.seq_length
    assert step_flops(MEDIUM, 16, causal=False) - step_flops(MEDIUM, 16, causal=True) == halved
