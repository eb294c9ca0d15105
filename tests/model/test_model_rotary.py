"""Scaled rotary frequencies are those of transformers and of Megatron-Core."""

from dataclasses import replace

import pytest
import torch
from support.launch import flags, plan_of
from support.megatron_core import reference
from support.model_variants import PLAIN, ROPE, VARIANTS

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.llama import build_config
from megatron_lite.errors import ConfigError
from megatron_lite.model.rotary import make_rotary_tables
from megatron_lite.model.rotary_frequencies import compute_rotary_frequencies, compute_rotary_scale

CPU = torch.device("cpu")
LARGE = replace(PLAIN, **ROPE, kv_channels=128, rotary_base=500000.0)
LLAMA_31 = replace(LARGE, rope_scaling_factor=8.0)
LLAMA_32 = replace(LARGE, kv_channels=64, rope_scaling_factor=32.0)
QWEN = replace(LARGE, rotary_base=1e6, yarn_scaling_factor=4.0, yarn_original_max_position_embeddings=32768)
FRACTIONS = replace(QWEN, yarn_round_to_int=False, yarn_mscale=0.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
CASES = {"llama_31": LLAMA_31, "llama_32": LLAMA_32, "qwen": QWEN, "fractions": FRACTIONS, "plain": LARGE}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name):
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    shape = CASES[name]
    config = transformers.LlamaConfig(**build_config(shape, 128))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        channels = torch.arange(0, shape.kv_channels, 2).float()
        frequencies, scale = 1 / shape.rotary_base ** (channels / shape.kv_channels), 1.0
    else:
        frequencies, scale = utilities.ROPE_INIT_FUNCTIONS[kind](config, CPU)
    torch.testing.assert_close(compute_rotary_frequencies(shape, CPU), frequencies, rtol=1e-6, atol=0)
    assert compute_rotary_scale(shape) == pytest.approx(scale, rel=1e-12)
    assert (name == "plain") == torch.equal(frequencies, compute_rotary_frequencies(LARGE, CPU))


@pytest.mark.parametrize("name", ["rope", "rope_scaled", "yarn"])
def test_tables_are_those_of_megatron_core(name, megatron_on_cpu):
    shape = VARIANTS[name]
    found = reference(shape).rotary_pos_emb(shape.seq_length)
    angles, scale = found if isinstance(found, tuple) else (found, 1.0)
    cos, sin = make_rotary_tables(torch.arange(shape.seq_length)[None], shape)
    torch.testing.assert_close(cos[0, 0], angles[:, 0, 0].cos() * scale, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin[0, 0], angles[:, 0, 0].sin() * scale, rtol=1e-6, atol=1e-6)


def test_frequencies_are_scaled_where_the_flags_ask_for_it():
    def shape_of(words: str) -> ModelShape:
        return plan_of(flags(words)).shape

    rope = shape_of("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4")
    assert (rope.position_embedding, rope.rope_scaling_factor, rope.yarn_scaling_factor) == ("rope", 4.0, None)
    assert shape_of("--position-embedding-type rope --rope-scaling-factor 4").rope_scaling_factor is None
    yarn = shape_of("--position-embedding-type yarn --rotary-scaling-factor 2 --yarn-beta-fast 20 --mscale 0.5")
    assert (yarn.position_embedding, yarn.rope_scaling_factor) == ("rope", None)
    assert (yarn.yarn_scaling_factor, yarn.yarn_beta_fast, yarn.yarn_beta_slow, yarn.yarn_mscale) == (2, 20, 1, 0.5)
    with pytest.raises(ConfigError, match="--rotary-interleaved: --position-embedding-type yarn"):
        plan_of(flags("--position-embedding-type yarn --rotary-interleaved"))
