"""GPT-2 in both worlds: learned positions, LayerNorm, biases everywhere, GELU."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import (
    SAME,
    TRANSPOSED,
    Link,
    lay_out_fused_qkv,
    lay_out_norm,
    lay_out_vocabulary,
)

ARCHITECTURE = "GPT2LMHeadModel"
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf"}  # theirs: ours
PREFIX = "transformer."
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files hold
MATRICES = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
NORMS = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}


def title(shape: ModelShape) -> str:
    """Name the models, for messages."""
    return "GPT-2"


def objections(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """List what GPT-2 cannot be: a flag, and what GPT-2 has instead."""
    if shape.position_embedding != "learned_absolute":
        yield f"--position-embedding-type {shape.position_embedding}", "learned positions"
    if shape.normalization != "LayerNorm":
        yield f"--normalization {shape.normalization}", "LayerNorm"
    if shape.activation not in GPT2_ACTIVATIONS.values():
        yield f"--{shape.activation.replace('_', '-')}", "GELU"
    if shape.mtp_num_layers:
        yield f"--mtp-num-layers {shape.mtp_num_layers}", "no layers of further tokens"
    if shape.num_query_groups != shape.num_attention_heads:
        yield f"--num-query-groups {shape.num_query_groups}", "a key and a value for each head"
    if shape.attention_width != shape.hidden_size:
        yield f"--kv-channels {shape.kv_channels}", "heads of hidden size / heads"
    if shape.qk_layernorm:
        yield "--qk-layernorm", "queries and keys that are not normalized"
    if shape.window is not None:
        yield "--window-size", "attention to all tokens before"
    if shape.experts is not None:
        yield f"--num-experts {shape.experts.number}", "an MLP in each layer"


def complete(shape: ModelShape) -> ModelShape:
    """The shape with all that every GPT-2 has: biases, which are zeros where ours has none."""
    return replace(shape, linear_bias=True, qkv_bias=True)


def notes(shape: ModelShape) -> Iterator[str]:
    """Note what GPT-2 says otherwise, with the same result."""
    if not (shape.linear_bias and shape.qkv_bias):
        yield "--disable-bias-linear: every GPT-2 has biases; they are written as zeros"


def links(shape: ModelShape, vocab_size: int) -> Iterator[Link]:
    """All parameters of a complete shape, in the model's order.

    Args:
        shape: Shape of the model.
        vocab_size: Ids without padding.
    """
    rows = lay_out_vocabulary(shape, vocab_size)
    norm = lay_out_norm(shape)
    qkv = lay_out_fused_qkv(shape)
    yield Link("embedding.word_embeddings.weight", (f"{PREFIX}wte.weight",), rows)
    yield Link("embedding.position_embeddings.weight", (f"{PREFIX}wpe.weight",), SAME)
    for layer in range(shape.num_layers):
        ours = f"decoder.layers.{layer}."
        theirs = f"{PREFIX}h.{layer}."
        for name, their_name in NORMS.items():
            yield Link(f"{ours}{name}.weight", (f"{theirs}{their_name}.weight",), norm)
            yield Link(f"{ours}{name}.bias", (f"{theirs}{their_name}.bias",), SAME)
        for kind in ("weight", "bias"):
            yield Link(f"{ours}self_attention.linear_qkv.{kind}", (f"{theirs}attn.c_attn.{kind}",), qkv)
            for name, their_name in MATRICES.items():
                yield Link(f"{ours}{name}.{kind}", (f"{theirs}{their_name}.{kind}",), TRANSPOSED)
    yield Link("decoder.final_layernorm.weight", (f"{PREFIX}ln_f.weight",), norm)
    yield Link("decoder.final_layernorm.bias", (f"{PREFIX}ln_f.bias",), SAME)
    if not shape.tied_embeddings:
        yield Link("output_layer.weight", ("lm_head.weight",), rows)


def standard_name(name: str) -> str | None:
    """The name of a tensor as the model with its head calls it; None for what is no parameter."""
    if name.endswith(BUFFERS):
        return None
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


def build_config(shape: ModelShape, vocab_size: int) -> dict[str, object]:
    """Make the shape's part of config.json.

    Args:
        shape: Shape of the model.
        vocab_size: Ids without padding.
    """
    # the first of several names for one function
    activations = {ours: theirs for theirs, ours in reversed(GPT2_ACTIVATIONS.items())}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": shape.max_position_embeddings,
        "n_ctx": shape.max_position_embeddings,
        "n_embd": shape.hidden_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_attention_heads,
        "n_inner": shape.ffn_hidden_size,
        "activation_function": activations[shape.activation],
        "layer_norm_epsilon": shape.norm_epsilon,
        "initializer_range": shape.init_method_std,
        "resid_pdrop": shape.hidden_dropout,
        "embd_pdrop": shape.hidden_dropout,
        "attn_pdrop": shape.attention_dropout,
        "scale_attn_weights": True,
        "tie_word_embeddings": shape.tied_embeddings,
    }


def read_shape(config: ConfigFile, padded_vocab_size: int) -> ModelShape:
    """The shape of a config.json.

    Args:
        config: Config of the model.
        padded_vocab_size: Rows of the embeddings here.

    Raises:
        CheckpointError: A key is missing, or a value does not exist here.
    """
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.refuse_unless(key, (False, None), "there is no such attention here")
    config.refuse_unless("scale_attn_weights", (True, None), "attention scores are always scaled here")
    activation = str(config.get("activation_function", "gelu_new"))
    if activation not in GPT2_ACTIVATIONS:
        raise config.wrong("activation_function", activation, f"only {', '.join(GPT2_ACTIVATIONS)} exist here")
    hidden = config.whole("n_embd")
    heads = config.whole("n_head")
    positions = config.whole("n_positions", 1024)
    if hidden % heads:
        raise config.wrong("n_head", heads, f"must divide n_embd, which is {hidden}")
    return ModelShape(
        num_layers=config.whole("n_layer"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=config.whole("n_inner", None) or 4 * hidden,
        seq_length=positions,
        max_position_embeddings=positions,
        padded_vocab_size=padded_vocab_size,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=GPT2_ACTIVATIONS[activation],
        tied_embeddings=config.switch("tie_word_embeddings", True),
        hidden_dropout=config.number("resid_pdrop", 0.1),
        attention_dropout=config.number("attn_pdrop", 0.1),
        init_method_std=config.number("initializer_range", 0.02),
    )
