"""Which Hugging Face model a shape is, or a config.json describes, and the flags that build it here."""

from collections.abc import Iterator
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
    return [*_sizes(shape), *_positions(shape), *_norms(shape), *_mlp(shape), *_rest(shape)]


def _sizes(shape: ModelShape) -> Iterator[str]:
    yield from ("--num-layers", str(shape.num_layers), "--hidden-size", str(shape.hidden_size))
    yield from ("--ffn-hidden-size", str(shape.ffn_hidden_size))
    yield from ("--num-attention-heads", str(shape.num_attention_heads))
    if shape.num_query_groups != shape.num_attention_heads:
        yield from ("--group-query-attention", "--num-query-groups", str(shape.num_query_groups))
    if shape.attention_width != shape.hidden_size:
        yield from ("--kv-channels", str(shape.kv_channels))
    yield from ("--seq-length", str(shape.seq_length))
    yield from ("--max-position-embeddings", str(shape.max_position_embeddings))
    yield from ("--padded-vocab-size", str(shape.padded_vocab_size))


def _positions(shape: ModelShape) -> Iterator[str]:
    yield from ("--position-embedding-type", shape.position_embedding)
    if shape.position_embedding != "rope":
        return
    yield from ("--rotary-base", f"{shape.rotary_base:.0f}")
    if shape.rotary_percent != 1:
        yield from ("--rotary-percent", str(shape.rotary_percent))
    if shape.rotary_interleaved:
        yield "--rotary-interleaved"
    if shape.rotary_seq_len_interpolation_factor is not None:
        yield from ("--rotary-seq-len-interpolation-factor", f"{shape.rotary_seq_len_interpolation_factor:.0f}")


def _norms(shape: ModelShape) -> Iterator[str]:
    yield from ("--normalization", shape.normalization, "--norm-epsilon", str(shape.norm_epsilon))
    if shape.layernorm_1p:
        yield "--apply-layernorm-1p"
    if shape.qk_layernorm:
        yield "--qk-layernorm"


def _mlp(shape: ModelShape) -> Iterator[str]:
    if shape.activation in ("swiglu", "squared_relu"):
        yield f"--{shape.activation.replace('_', '-')}"
    if not shape.linear_bias:
        yield "--disable-bias-linear"
    elif shape.activation == "gelu_erf":  # without biases GELU is that one anyway
        yield "--no-bias-gelu-fusion"
    if shape.qkv_bias and not shape.linear_bias:
        yield "--add-qkv-bias"


def _rest(shape: ModelShape) -> Iterator[str]:
    if not shape.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    yield from ("--hidden-dropout", str(shape.hidden_dropout), "--attention-dropout", str(shape.attention_dropout))
    yield from ("--init-method-std", str(shape.init_method_std))
    if shape.query_key_layer_scaling:
        yield "--apply-query-key-layer-scaling"
    if shape.softmax_in_fp32:
        yield "--attention-softmax-in-fp32"
