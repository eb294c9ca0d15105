"""The start of the parameters."""

import math
from dataclasses import replace

import pytest
import torch
from model_variants import PLAIN, VARIANTS

from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT, initialize


def started(shape, seed=0):
    attend = choose_attention("unfused", shape, batch=1, device="cpu", dtype=torch.float32, masked=False)
    model = GPT(shape, attend)
    torch.manual_seed(seed)
    initialize(dict(model.named_parameters()), shape)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_starts_as_megatron_starts_it(name):
    shape = replace(VARIANTS[name], hidden_size=256, num_layers=3, init_method_std=0.006)
    for key, parameter in started(shape).named_parameters():
        if parameter.dim() == 1:
            norm_weight = key.endswith("layernorm.weight") and not shape.layernorm_1p
            assert (parameter == (1.0 if norm_weight else 0.0)).all(), key
            continue
        expected = 0.006 / math.sqrt(6) if "linear_proj" in key or "linear_fc2" in key else 0.006
        # The standard deviation of a sample's standard deviation is sigma / sqrt(2n); six of them.
        tolerance = 6 / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(expected, rel=tolerance), key
        assert abs(parameter.mean().item()) < 6 * expected / math.sqrt(parameter.numel()), key


def test_the_seed_decides_the_numbers():
    one, again, other = (dict(started(PLAIN, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if one[name].dim() == 2)


def test_depth_does_not_depend_on_a_stage_of_the_model():
    """Initialising a part uses the whole model's depth, as a pipeline stage needs."""
    shape = replace(PLAIN, num_layers=8, hidden_size=256)
    layer = started(shape).decoder.layers[3]
    initialize({f"decoder.layers.3.{name}": p for name, p in layer.named_parameters()}, shape)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
