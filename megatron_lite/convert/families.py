"""Which Hugging Face model a shape is, or a config.json describes, and the flags that build it here."""

from types import ModuleType

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
    factor = s.rotary_seq_len_interpolation_factor
    # True: a switch; False and None: left out
    values = [
        ("--num-layers", s.num_layers),
        ("--hidden-size", s.hidden_size),
        ("--ffn-hidden-size", s.ffn_hidden_size),
        ("--num-attention-heads", s.num_attention_heads),
        ("--group-query-attention", grouped),
        ("--num-query-groups", s.num_query_groups if grouped else None),
        ("--kv-channels", s.kv_channels if s.attention_width != s.hidden_size else None),
        ("--seq-length", s.seq_length),
        ("--max-position-embeddings", s.max_position_embeddings),
        ("--padded-vocab-size", s.padded_vocab_size),
        ("--position-embedding-type", s.position_embedding),
        ("--rotary-base", f"{s.rotary_base:.0f}" if rope else None),
        ("--rotary-percent", s.rotary_percent if rope and s.rotary_percent != 1 else None),
        ("--rotary-interleaved", rope and s.rotary_interleaved),
        ("--rotary-seq-len-interpolation-factor", f"{factor:.0f}" if rope and factor is not None else None),
        ("--normalization", s.normalization),
        ("--norm-epsilon", s.norm_epsilon),
        ("--apply-layernorm-1p", s.layernorm_1p),
        ("--qk-layernorm", s.qk_layernorm),
        ("--swiglu", s.activation == "swiglu"),
        ("--squared-relu", s.activation == "squared_relu"),
        ("--disable-bias-linear", not s.linear_bias),
        # without biases GELU is that one anyway
        ("--no-bias-gelu-fusion", s.linear_bias and s.activation == "gelu_erf"),
        ("--add-qkv-bias", s.qkv_bias and not s.linear_bias),
        ("--untie-embeddings-and-output-weights", not s.tied_embeddings),
        ("--hidden-dropout", s.hidden_dropout),
        ("--attention-dropout", s.attention_dropout),
        ("--init-method-std", s.init_method_std),
        ("--apply-query-key-layer-scaling", s.query_key_layer_scaling),
        ("--attention-softmax-in-fp32", s.softmax_in_fp32),
    ]
    given = [(flag, value) for flag, value in values if value is not None and value is not False]
    return [word for flag, value in given for word in ((flag,) if value is True else (flag, str(value)))]
