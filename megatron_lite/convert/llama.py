"""Llama and its likes in both worlds: rotary positions, RMSNorm, SwiGLU.

LlamaForCausalLM has all biases or none; Qwen2ForCausalLM those of queries, keys and values only; Qwen3ForCausalLM
none, and normalizes queries and keys.
"""

import math
from collections.abc import Iterator
from typing import TypedDict

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import GATED_HALVES, SAME, Link, lay_out_norm, lay_out_qkv, lay_out_vocabulary
from megatron_lite.model.rotary_frequencies import (
    LLAMA_FAST_TURNS,
    LLAMA_LENGTH,
    LLAMA_SLOW_TURNS,
    compute_rotary_scale,
)

# config.json's keys for the numbers of Llama 3.1 that there is no flag for
LLAMA_3 = {
    "low_freq_factor": LLAMA_SLOW_TURNS,
    "high_freq_factor": LLAMA_FAST_TURNS,
    "original_max_position_embeddings": LLAMA_LENGTH,
}
TITLE = "Llama, Qwen2 and Qwen3"
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


class Defaults(TypedDict):
    """Values of keys that a config.json leaves out."""

    max_position_embeddings: int
    num_key_value_heads: int | None  # None: a key and a value for each head
    head_dim: int | None  # None: hidden size / heads


DEFAULTS: dict[str, Defaults] = {  # transformers' own, where they differ
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
BUFFERS = (".rotary_emb.inv_freq",)  # in old files


def objections(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """List what none of these models can be: a flag, and what they have instead."""
    if shape.normalization != "RMSNorm":
        yield f"--normalization {shape.normalization}", "RMSNorm"
    if shape.activation != "swiglu":
        flag = "--squared-relu" if shape.activation == "squared_relu" else "GELU (no --swiglu)"
        yield flag, "--swiglu"
    if shape.rotary_percent != 1:
        yield f"--rotary-percent {shape.rotary_percent:g}", "heads that rotate as a whole"
    if shape.qk_layernorm and (shape.linear_bias or shape.qkv_bias):
        yield "--qk-layernorm with biases", "it without any bias"
    if shape.hidden_size % shape.num_attention_heads and not shape.qk_layernorm:
        yield f"--num-attention-heads {shape.num_attention_heads}", "a hidden size that is a multiple of the heads"


def complete(shape: ModelShape) -> ModelShape:
    """The shape with all that every one of them has, which is nothing more."""
    return shape


def notes(shape: ModelShape) -> Iterator[str]:
    """Note what these models do not know, or say otherwise, with the same result."""
    if shape.hidden_dropout:
        yield f"--hidden-dropout {shape.hidden_dropout:g}: they have none, and it matters in training only"
    if shape.rotary_interleaved:
        yield "--rotary-interleaved: the channels of queries and keys change places, so that halves rotate instead"


def links(shape: ModelShape, vocab_size: int) -> Iterator[Link]:
    """All parameters, in the model's order."""
    rows = lay_out_vocabulary(shape, vocab_size)
    norm = lay_out_norm(shape)
    rotated = lay_out_norm(shape, rotated=True)
    qkv = lay_out_qkv(shape)
    yield Link("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), rows)
    for layer in range(shape.num_layers):
        ours = f"decoder.layers.{layer}."
        theirs = f"model.layers.{layer}."
        yield Link(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), norm)
        yield Link(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",), norm)
        for kind in ("weight", "bias"):
            if kind == "weight" or shape.qkv_bias:
                apart = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
                yield Link(f"{ours}self_attention.linear_qkv.{kind}", apart, qkv)
            if kind == "weight" or shape.linear_bias:
                gated = tuple(f"{theirs}mlp.{part}_proj.{kind}" for part in ("gate", "up"))
                yield Link(f"{ours}self_attention.linear_proj.{kind}", (f"{theirs}self_attn.o_proj.{kind}",), SAME)
                yield Link(f"{ours}mlp.linear_fc1.{kind}", gated, GATED_HALVES)
                yield Link(f"{ours}mlp.linear_fc2.{kind}", (f"{theirs}mlp.down_proj.{kind}",), SAME)
        if shape.qk_layernorm:
            yield Link(f"{ours}self_attention.q_layernorm.weight", (f"{theirs}self_attn.q_norm.weight",), rotated)
            yield Link(f"{ours}self_attention.k_layernorm.weight", (f"{theirs}self_attn.k_norm.weight",), rotated)
    yield Link("decoder.final_layernorm.weight", ("model.norm.weight",), norm)
    if not shape.tied_embeddings:
        yield Link("output_layer.weight", ("lm_head.weight",), rows)


MAX_ROTARY_BASE = 2**53  # whole numbers above are not exact


def standard_name(name: str) -> str | None:
    """The name of a tensor; None for what is no parameter."""
    return None if name.endswith(BUFFERS) else name


def build_config(shape: ModelShape, vocab_size: int) -> dict[str, object]:
    """Make the shape's part of config.json. rope_scaling is the spelling that old and new versions understand."""
    name = "LlamaForCausalLM"
    if shape.qk_layernorm:
        name = "Qwen3ForCausalLM"
    elif shape.qkv_bias and not shape.linear_bias:
        name = "Qwen2ForCausalLM"
    return {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rotary_base,
        "rope_scaling": _build_rope_scaling(shape),
        "rms_norm_eps": shape.norm_epsilon,
        "attention_bias": shape.linear_bias,
        "mlp_bias": shape.linear_bias,
        "attention_dropout": shape.attention_dropout,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied_embeddings,
        "use_sliding_window": False,
    }


def _build_rope_scaling(shape: ModelShape) -> dict[str, object] | None:
    """Make config.json's part on scaled rotary frequencies; None where they are plain."""
    if shape.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": float(shape.rotary_seq_len_interpolation_factor)}
    if shape.rope_scaling_factor is not None:
        return {"rope_type": "llama3", "factor": float(shape.rope_scaling_factor), **LLAMA_3}
    if shape.yarn_scaling_factor is None:
        return None
    return {
        "rope_type": "yarn",
        "factor": float(shape.yarn_scaling_factor),
        "original_max_position_embeddings": shape.yarn_original_max_position_embeddings,
        "beta_fast": shape.yarn_beta_fast,
        "beta_slow": shape.yarn_beta_slow,
        "attention_factor": compute_rotary_scale(shape),
        "truncate": shape.yarn_round_to_int,
    }


class Rotation(TypedDict, total=False):
    """Fields of ModelShape on rotary frequencies."""

    rotary_base: float
    rotary_seq_len_interpolation_factor: float
    rope_scaling_factor: float
    yarn_scaling_factor: float
    yarn_original_max_position_embeddings: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float
    yarn_mscale_all_dim: float
    yarn_round_to_int: bool


def read_shape(config: ConfigFile, padded_vocab_size: int) -> ModelShape:
    """The shape of a config.json. CheckpointError for what is missing there or does not exist here."""
    kind = _find_kind(config)
    defaults = DEFAULTS[kind]
    attention_bias = _read_bias(config, kind)
    positions = config.whole("max_position_embeddings", defaults["max_position_embeddings"])
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
    groups = config.whole("num_key_value_heads", defaults["num_key_value_heads"]) or heads
    width = config.whole("head_dim", defaults["head_dim"]) or hidden // heads
    if heads % groups:
        raise config.wrong("num_key_value_heads", groups, f"must divide num_attention_heads, which is {heads}")
    rotation = _read_rotation(config, positions)
    linear_bias = attention_bias and kind == "llama"
    return ModelShape(
        num_layers=config.whole("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        ffn_hidden_size=config.whole("intermediate_size"),
        seq_length=positions,
        max_position_embeddings=positions,
        padded_vocab_size=padded_vocab_size,
        position_embedding="rope",
        **rotation,
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        activation="swiglu",
        linear_bias=linear_bias,
        qkv_bias=linear_bias or kind == "qwen2",
        qk_layernorm=kind == "qwen3",
        tied_embeddings=config.switch("tie_word_embeddings", False),
        hidden_dropout=0.0,
        attention_dropout=config.number("attention_dropout", 0.0),
        init_method_std=config.number("initializer_range", 0.02),
    )


def _find_kind(config: ConfigFile) -> str:
    """The model's type: a value of MODEL_TYPES. CheckpointError for any other architecture."""
    named = config.values.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in MODEL_TYPES:
        raise config.wrong("architectures", named, f"known here are {', '.join(MODEL_TYPES)}")
    return MODEL_TYPES[name]


def _read_bias(config: ConfigFile, kind: str) -> bool:
    """Whether linear layers of attention have biases.

    Args:
        config: Of the model.
        kind: Its type.

    Raises:
        CheckpointError: A switch does not exist here.
    """
    config.refuse_unless("hidden_act", ("silu", "swish"), "the gate is SiLU here")
    config.refuse_unless("use_sliding_window", (False, None), "attention always reaches back to the start here")
    layers = config.values.get("layer_types") or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise config.wrong("layer_types", layers, "attention always reaches back to the start here")
    attention_bias = config.switch("attention_bias", False)
    if kind == "llama" and config.switch("mlp_bias", False) != attention_bias:
        raise config.wrong("mlp_bias", not attention_bias, "attention and MLP both have biases here, or neither")
    if kind == "qwen3" and attention_bias:
        raise config.wrong("attention_bias", True, "attention and MLP both have biases here, or neither")
    return attention_bias


def _read_rotation(config: ConfigFile, positions: int) -> Rotation:
    """Read the rotation in either spelling: rope_parameters, or rope_theta and rope_scaling.

    Args:
        config: Of the model.
        positions: Its max_position_embeddings, which stand for the original ones where those are left out.

    Raises:
        CheckpointError: The rotation does not exist here.
    """
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    rope = config.values.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.wrong(key, rope, "all layers rotate alike here")
    inner = ConfigFile(config.path, {**config.values, **rope})
    inner.refuse_unless("partial_rotary_factor", (1.0, None), "heads of this architecture rotate as a whole")
    # whole numbers, as --rotary-base and its likes are
    base = float(inner.whole("rope_theta", 10000, MAX_ROTARY_BASE))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return {"rotary_base": base, "rotary_seq_len_interpolation_factor": float(inner.whole("factor"))}
    if kind == "llama3":
        for name, value in LLAMA_3.items():
            inner.refuse_unless(name, (value,), "only Llama 3.1's own numbers exist here")
        return {"rotary_base": base, "rope_scaling_factor": inner.number("factor")}
    if kind == "yarn":
        rotation = _read_yarn(inner, positions)
        rotation["rotary_base"] = base
        return rotation
    if kind != "default":
        raise config.wrong(key, rope, "only linear, llama3 and yarn exist here")
    return {"rotary_base": base}


def _read_yarn(rope: ConfigFile, positions: int) -> Rotation:
    """Read the numbers of YaRN.

    Args:
        rope: They are among its keys.
        positions: The original ones, where those are left out.
    """
    factor = rope.number("factor")
    # transformers takes both, or neither
    both = rope.values.get("mscale") and rope.values.get("mscale_all_dim")
    mscale = rope.number("mscale") if both else 1.0
    all_dim = rope.number("mscale_all_dim") if both else 0.0
    if rope.values.get("attention_factor") is not None:
        mscale = _find_mscale(rope, factor)
        all_dim = 0.0
    return {
        "yarn_scaling_factor": factor,
        "yarn_original_max_position_embeddings": rope.whole("original_max_position_embeddings", positions),
        "yarn_beta_fast": rope.number("beta_fast") if rope.values.get("beta_fast") else 32.0,
        "yarn_beta_slow": rope.number("beta_slow") if rope.values.get("beta_slow") else 1.0,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_round_to_int": rope.switch("truncate", True),
    }


def _find_mscale(rope: ConfigFile, factor: float) -> float:
    """The --mscale that gives the attention_factor of a config.json, which is 1 + mscale log(factor) / 10."""
    given = rope.number("attention_factor")
    if factor <= 1:
        rope.refuse_unless("attention_factor", (1.0,), "it is 1 here where factor is at most 1")
        return 1.0
    exact = (given - 1) / (0.1 * math.log(factor))
    if exact < 0:
        raise rope.wrong("attention_factor", given, "it is at least 1 here")
    # the usual ones are short
    short = round(exact, 6)
    return short if math.isclose(short, exact, rel_tol=1e-12) else exact
