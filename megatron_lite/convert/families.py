"""Which Hugging Face model a shape is, or a config.json describes, and the flags that build it here."""

from types import ModuleType

from megatron_lite.checkpoint.megatron_args import SAME_NAME, name_rotary_scaling
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert import gpt2, llama
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.errors import ConfigError

ARCHITECTURES = {gpt2.ARCHITECTURE: gpt2, **dict.fromkeys(llama.MODEL_TYPES, llama)}
TITLES = {gpt2: "GPT-2", llama: "Llama, Qwen2 and Qwen3"}


def family_of_shape(shape: ModelShape) -> ModuleType:
    """gpt2 or llama. ConfigError with a line for each flag that the nearer of the two does not know."""
    family = llama if shape.position_embedding == "rope" else gpt2
    # Scores divided by a layer's number and multiplied back, and a softmax in fp32, are no other arithmetic.
    wrong = [
        f"{flag}: Hugging Face's {TITLES[family]} have {instead}; only a model trained with that can be converted."
        for flag, instead in family.objections(shape)
    ]
    if shape.softmax_scale is not None:
        wrong.append("--use-mup: Hugging Face's models have no scales of its kind; only one without can be converted.")
    if wrong:
        raise ConfigError(wrong)
    return family


def family_of_config(config: ConfigFile) -> ModuleType:
    """gpt2 or llama. CheckpointError for any other architecture."""
    named = config.values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else None
    config.refuse_unless("quantization_config", (None,), "quantised weights cannot be trained here")
    if name not in ARCHITECTURES:
        raise config.wrong("architectures", named, f"known here are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def model_flags(shape: ModelShape) -> list[str]:
    """Words with which the trainer resolves to `shape`, with --padded-vocab-size for any smaller vocabulary."""
    s, rope = shape, shape.position_embedding == "rope"
    grouped = s.num_query_groups != s.num_attention_heads
    same = {name: getattr(s, name) for name in SAME_NAME if rope or not name.startswith("rotary_")}
    scaling = name_rotary_scaling(s)
    # a switch that is on unless its other spelling is given
    rounds = scaling.pop("yarn_correction_range_round_to_int", True)
    # True: a switch; False and None: left out
    values = (
        same
        | scaling
        | {
            "no_yarn_correction_range_round_to_int": not rounds,
            "group_query_attention": grouped,
            "num_query_groups": s.num_query_groups if grouped else None,
            "kv_channels": s.kv_channels if s.attention_width != s.hidden_size else None,
            "padded_vocab_size": s.padded_vocab_size,
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
        }
    )
    words = []
    for name, value in values.items():
        if value is not None and value is not False:
            whole = isinstance(value, float) and value.is_integer()
            words += [
                f"--{name.replace('_', '-')}",
                *([] if value is True else [f"{value:.0f}" if whole else str(value)]),
            ]
    return words
