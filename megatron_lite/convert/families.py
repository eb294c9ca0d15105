"""Finds the Hugging Face model that a shape is, or a config.json describes, and the flags that build it here."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from megatron_lite.checkpoint.megatron_args import (
    BALANCING_COEFF,
    BALANCING_TYPE,
    EXPERT_ARGUMENTS,
    SAME_NAME,
    name_experts,
    name_latent,
    name_rotary_scaling,
)
from megatron_lite.config.expert_layers import write_layer_pattern
from megatron_lite.config.flags import dashed
from megatron_lite.config.shape import ExpertShape, ModelShape
from megatron_lite.convert import gpt2, llama
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import Link
from megatron_lite.errors import ConfigError


class ModelFamily(Protocol):
    """The models of one kind, in both worlds: the modules gpt2 and llama."""

    def title(self, shape: ModelShape) -> str:
        """Name the models that a shape is nearest to, for messages."""
        ...

    def objections(self, shape: ModelShape) -> Iterator[tuple[str, str]]:
        """List what the models cannot be: a flag, and what they have instead."""
        ...

    def complete(self, shape: ModelShape) -> ModelShape:
        """The shape with all that each of the models has."""
        ...

    def notes(self, shape: ModelShape) -> Iterator[str]:
        """Note what the models say otherwise, with the same result."""
        ...

    def links(self, shape: ModelShape, vocab_size: int) -> Iterator[Link]:
        """All parameters of a complete shape, in the model's order."""
        ...

    def standard_name(self, name: str) -> str | None:
        """The name of a tensor as the whole model calls it; None for what is no parameter."""
        ...

    def build_config(self, shape: ModelShape, vocab_size: int) -> dict[str, object]:
        """The shape's part of config.json."""
        ...

    def read_shape(self, config: ConfigFile, padded_vocab_size: int) -> ModelShape:
        """The shape of a config.json. CheckpointError for what is missing there or does not exist here."""
        ...


# architectures that lack something here, and what
UNBUILT = {
    "GptOssForCausalLM": (
        "experts and routers have no biases here, their gate is SiLU instead of a clamped sigmoid GELU, and offsets of "
        "attention's softmax are not converted"
    ),
}
ARCHITECTURES: dict[str, ModelFamily] = {gpt2.ARCHITECTURE: gpt2}
for architecture in llama.ARCHITECTURES:
    ARCHITECTURES[architecture] = llama


def family_of_shape(shape: ModelShape) -> ModelFamily:
    """The models that a shape may be. ConfigError with a line for each flag that the nearest of them do not know."""
    family: ModelFamily = llama if shape.rotates else gpt2
    # Scores divided by a layer's number and multiplied back, and a softmax in fp32, are no other arithmetic.
    wrong = [
        f"{flag}: Hugging Face's {family.title(shape)} have {instead}; only a model trained with that can be converted."
        for flag, instead in family.objections(shape)
    ]
    if shape.softmax_type != "vanilla":
        wrong.append(f"--softmax-type {shape.softmax_type}: offsets are not converted; only a model without can be.")
    if shape.softmax_scale is not None:
        wrong.append("--use-mup: Hugging Face's models have no scales of its kind; only one without can be converted.")
    if wrong:
        raise ConfigError(wrong)
    return family


def family_of_config(config: ConfigFile) -> ModelFamily:
    """The models that a config.json tells of. CheckpointError for any other architecture."""
    named = config.values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else None
    if name in UNBUILT:
        raise config.wrong("architectures", named, UNBUILT[name])
    plain = "quantised weights cannot be trained here, those of a copy that transformers has dequantised can"
    config.refuse_unless("quantization_config", (None,), plain)
    if name is None or name not in ARCHITECTURES:
        raise config.wrong("architectures", named, f"known here are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def model_flags(shape: ModelShape) -> list[str]:
    """Words with which the trainer resolves to `shape`, with --padded-vocab-size for any smaller vocabulary."""
    words: list[str] = []
    for name, value in _choose_values(shape).items():
        if value is None or value is False:
            continue
        words.append(dashed(name))
        if value is not True:
            words += [_write_word(one) for one in (value if isinstance(value, list) else [value])]
    return words


def _write_word(value: object) -> str:
    """A flag's value; a whole number without decimals."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _choose_values(shape: ModelShape) -> dict[str, object]:
    """The flags of a shape by name. True is a switch that is given; False and None are left out."""
    s = shape
    grouped = s.num_query_groups != s.num_attention_heads
    values: dict[str, object] = {}
    for name in SAME_NAME:
        if s.rotates or not name.startswith("rotary_"):
            values[name] = getattr(s, name)
    scaling = name_rotary_scaling(s)
    # a switch that is on unless its other spelling is given
    rounds = scaling.pop("yarn_correction_range_round_to_int", True)
    values |= scaling
    values |= {
        "no_yarn_correction_range_round_to_int": not rounds,
        "group_query_attention": grouped,
        "num_query_groups": s.num_query_groups if grouped else None,
        # of latent attention it is that of other flags
        "kv_channels": s.kv_channels if s.latent is None and s.attention_width != s.hidden_size else None,
        "padded_vocab_size": s.padded_vocab_size,
        "window_size": None if s.window is None else f"{s.window},0",
        "window_attn_skip_freq": f"[{','.join(s.window_layers)}]" if s.window_layers else None,
        "apply_layernorm_1p": s.layernorm_1p,
        "swiglu": s.activation == "swiglu",
        "squared_relu": s.activation == "squared_relu",
        "disable_bias_linear": not s.linear_bias,
        # without biases GELU is that one anyway
        "no_bias_gelu_fusion": s.linear_bias and s.activation == "gelu_erf",
        "add_qkv_bias": s.qkv_bias and not s.linear_bias,
        "untie_embeddings_and_output_weights": not s.tied_embeddings,
        "apply_query_key_layer_scaling": s.query_key_layer_scaling,
        "attention_softmax_in_fp32": s.softmax_in_fp32,
        "mtp_num_layers": s.mtp_num_layers or None,
    }
    return values | name_latent(s) | _choose_expert_values(s.experts)


def _choose_expert_values(experts: ExpertShape | None) -> dict[str, object]:
    """The flags of experts by name, without those that are left out; a list for several words."""
    if experts is None:
        return {}
    values = name_experts(experts)
    for field in dataclasses.fields(ExpertShape):
        if field.name in EXPERT_ARGUMENTS and getattr(experts, field.name) == field.default:
            del values[EXPERT_ARGUMENTS[field.name]]
    values["moe_layer_freq"] = None if all(experts.layers) else write_layer_pattern(experts.layers)
    if not experts.balancing and not experts.sinkhorn:
        del values[BALANCING_TYPE], values[BALANCING_COEFF]
    return values
