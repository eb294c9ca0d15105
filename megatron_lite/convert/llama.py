"""Llama and its likes in both worlds: RMSNorm, SwiGLU, rotary positions; some with windows, with experts, or with
latent attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lite.config.expert_layers import MAX_PATTERN_LAYERS
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert import experts, further_tokens, latent, window_config
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.experts import ExpertKeys
from megatron_lite.convert.mappings import GATED_HALVES, SAME, Link, lay_out_norm, lay_out_qkv, lay_out_vocabulary
from megatron_lite.convert.rotary_config import build_rope_scaling, read_rotation
from megatron_lite.convert.window_config import WindowKeys

# which linear layers have biases: values of Architecture.biases
ALL_OR_NONE = "all or none"
OF_QKV = "of queries, keys and values"
NO_BIASES = "none"


@dataclass(frozen=True)
class Architecture:
    """Models of one class of transformers. Numbers are of keys that their config.json leaves out."""

    title: str  # for messages
    model_type: str
    biases: str = NO_BIASES
    normalizes_heads: bool = False  # queries and keys
    is_latent: bool = False  # attention
    windows: WindowKeys | None = None
    experts: ExpertKeys | None = None
    has_further_tokens: bool = False  # layers that predict them
    max_position_embeddings: int = 32768
    num_key_value_heads: int | None = None  # None: a key and a value for each head
    head_dim: int | None = None  # None: hidden size / heads
    rope_theta: int = 10000
    rms_norm_eps: float = 1e-6


LATE_WINDOWS = WindowKeys(size=4096, has_switch=True, by_layer=True)
DEEPSEEK_V2 = Architecture(
    "DeepSeek-V2", "deepseek_v2", is_latent=True, experts=experts.DEEPSEEK_V2, max_position_embeddings=2048
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("Llama", "llama", biases=ALL_OR_NONE, max_position_embeddings=2048),
    "MistralForCausalLM": Architecture(
        "Mistral", "mistral", windows=WindowKeys(size=4096), max_position_embeddings=131072, num_key_value_heads=8
    ),
    "Qwen2ForCausalLM": Architecture("Qwen2", "qwen2", biases=OF_QKV, windows=LATE_WINDOWS, num_key_value_heads=32),
    "Qwen3ForCausalLM": Architecture(
        "Qwen3", "qwen3", normalizes_heads=True, windows=LATE_WINDOWS, num_key_value_heads=32, head_dim=128
    ),
    "MixtralForCausalLM": Architecture(
        "Mixtral",
        "mixtral",
        windows=WindowKeys(size=None),
        experts=experts.MIXTRAL,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rope_theta=1000000,
        rms_norm_eps=1e-5,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "Qwen2-MoE",
        "qwen2_moe",
        biases=OF_QKV,
        windows=replace(LATE_WINDOWS, begins_late=False),
        experts=experts.QWEN2,
        num_key_value_heads=16,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "Qwen3-MoE",
        "qwen3_moe",
        normalizes_heads=True,
        windows=WindowKeys(size=4096, has_switch=True),
        experts=experts.QWEN3,
        num_key_value_heads=4,
    ),
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": replace(
        DEEPSEEK_V2,
        title="DeepSeek-V3",
        model_type="deepseek_v3",
        has_further_tokens=True,
        experts=experts.DEEPSEEK_V3,
        max_position_embeddings=4096,
    ),
}
BUFFERS = (".rotary_emb.inv_freq",)  # in old files


def _find_name(shape: ModelShape) -> str:
    """The architecture that a shape is nearest to."""
    e = shape.experts
    if shape.latent is not None:
        return "DeepseekV3ForCausalLM" if e is None or e.score_function == "sigmoid" else "DeepseekV2ForCausalLM"
    if e is not None:
        if e.shared_ffn_hidden_size:
            return "Qwen2MoeForCausalLM"
        return "Qwen3MoeForCausalLM" if shape.qk_layernorm else "MixtralForCausalLM"
    if shape.qk_layernorm:
        return "Qwen3ForCausalLM"
    if shape.qkv_bias and not shape.linear_bias:
        return "Qwen2ForCausalLM"
    return "LlamaForCausalLM" if shape.window is None else "MistralForCausalLM"


def _find(shape: ModelShape) -> Architecture:
    """All that is known of the architecture that a shape is nearest to."""
    return ARCHITECTURES[_find_name(shape)]


def title(shape: ModelShape) -> str:
    """Name the models that a shape is nearest to, for messages."""
    return _find(shape).title


def objections(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """List what the nearest of these models cannot be: a flag, and what they have instead."""
    of = _find(shape)
    if shape.position_embedding == "learned_absolute":
        yield "--position-embedding-type learned_absolute", "rope"
    if shape.normalization != "RMSNorm":
        yield f"--normalization {shape.normalization}", "RMSNorm"
    if shape.activation != "swiglu":
        flag = "--squared-relu" if shape.activation == "squared_relu" else "GELU (no --swiglu)"
        yield flag, "--swiglu"
    if shape.rotary_percent != 1:
        yield f"--rotary-percent {shape.rotary_percent:g}", "heads that rotate as a whole"
    if of.biases == NO_BIASES and shape.adds_biases:
        flag = "--qk-layernorm with biases" if of.normalizes_heads else "biases (no --disable-bias-linear)"
        yield flag, "it without any bias" if of.normalizes_heads else "none"
    if shape.latent is not None:
        yield from latent.list_objections(shape, shape.latent)
    elif shape.qk_layernorm and not of.normalizes_heads:
        yield "--qk-layernorm", "queries and keys that are not normalized"
    elif shape.hidden_size % shape.num_attention_heads and not shape.qk_layernorm:
        yield f"--num-attention-heads {shape.num_attention_heads}", "a hidden size that is a multiple of the heads"
    if shape.mtp_num_layers and not of.has_further_tokens:
        yield f"--mtp-num-layers {shape.mtp_num_layers}", "no layers of further tokens"
    elif shape.mtp_num_layers and shape.tied_embeddings:
        yield "--mtp-num-layers with tied embeddings", "an output layer of its own beside such layers"
    yield from window_config.list_objections(shape, of.windows)
    if shape.experts is not None and of.experts is not None:
        yield from experts.list_objections(shape.experts, of.experts)


def complete(shape: ModelShape) -> ModelShape:
    """The shape with all that every one of these models has: biases of experts, where DeepSeek-V3 chooses them."""
    keys = _find(shape).experts
    if shape.experts is None or keys is None:
        return shape
    return replace(shape, experts=experts.complete(shape.experts, keys))


def notes(shape: ModelShape) -> Iterator[str]:
    """Note what these models do not know, or say otherwise, with the same result."""
    keys = _find(shape).experts
    if shape.hidden_dropout:
        yield f"--hidden-dropout {shape.hidden_dropout:g}: they have none, and it matters in training only"
    if shape.rotary_interleaved and shape.latent is None:
        yield "--rotary-interleaved: the channels of queries and keys change places, so that halves rotate instead"
    yield from window_config.list_notes(shape)
    if shape.experts is not None and keys is not None:
        yield from experts.list_notes(shape.experts, keys)


def links(shape: ModelShape, vocab_size: int) -> Iterator[Link]:
    """All parameters of a complete shape, in the model's order.

    Args:
        shape: Shape of the model.
        vocab_size: Ids without padding.
    """
    rows = lay_out_vocabulary(shape, vocab_size)
    norm = lay_out_norm(shape)
    copies = further_tokens.name_copies(shape, further_tokens.EMBEDDING_COPY)
    embeddings = further_tokens.lay_out_copies(rows, copies)
    yield Link("embedding.word_embeddings.weight", ("model.embed_tokens.weight", *copies), embeddings)
    for layer in range(shape.num_layers):
        ours = f"decoder.layers.{layer}."
        theirs = f"model.layers.{layer}."
        yield from _list_layer_links(ours, theirs, shape, layer)
    yield Link("decoder.final_layernorm.weight", ("model.norm.weight",), norm)
    for depth in range(shape.mtp_num_layers):
        ours = f"mtp.layers.{depth}."
        theirs = further_tokens.name_layer(shape, depth)
        yield from further_tokens.list_links(ours, theirs, norm)
        yield from _list_layer_links(f"{ours}transformer_layer.", theirs, shape, shape.num_layers + depth)
    if not shape.tied_embeddings:
        copies = further_tokens.name_copies(shape, further_tokens.OUTPUT_COPY)
        outputs = further_tokens.lay_out_copies(rows, copies)
        yield Link("output_layer.weight", ("lm_head.weight", *copies), outputs)


def _list_layer_links(ours: str, theirs: str, shape: ModelShape, layer: int) -> Iterator[Link]:
    """All parameters of one layer.

    Args:
        ours: What names of the layer's parameters begin with here.
        theirs: The prefix of the layer's tensors there.
        shape: The model's shape.
        layer: The layer's number, from 0.
    """
    norm = lay_out_norm(shape)
    yield Link(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), norm)
    yield Link(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",), norm)
    yield from _list_attention_links(ours, theirs, shape)
    yield from _list_mlp_links(ours, theirs, shape, layer)


def _list_attention_links(ours: str, theirs: str, shape: ModelShape) -> Iterator[Link]:
    """Parameters of one layer's attention.

    Args:
        ours: What names of the layer's parameters begin with here.
        theirs: Beginning of the layer's names there.
        shape: Shape of the model.
    """
    if shape.latent is not None:
        yield from latent.list_links(ours, theirs, shape, shape.latent)
        return
    rotated = lay_out_norm(shape, rotated=True)
    qkv = lay_out_qkv(shape)
    for kind in ("weight", "bias"):
        if kind == "weight" or shape.qkv_bias:
            apart = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            yield Link(f"{ours}self_attention.linear_qkv.{kind}", apart, qkv)
        if kind == "weight" or shape.linear_bias:
            yield Link(f"{ours}self_attention.linear_proj.{kind}", (f"{theirs}self_attn.o_proj.{kind}",), SAME)
    if shape.qk_layernorm:
        yield Link(f"{ours}self_attention.q_layernorm.weight", (f"{theirs}self_attn.q_norm.weight",), rotated)
        yield Link(f"{ours}self_attention.k_layernorm.weight", (f"{theirs}self_attn.k_norm.weight",), rotated)


def _list_mlp_links(ours: str, theirs: str, shape: ModelShape, layer: int) -> Iterator[Link]:
    """Parameters of one layer's MLP, or of its experts.

    Args:
        ours: What names of the layer's parameters begin with here.
        theirs: Beginning of the layer's names there.
        shape: Shape of the model.
        layer: The layer's number, from 0.
    """
    keys = _find(shape).experts
    if shape.experts is not None and keys is not None and shape.has_experts(layer):
        yield from experts.list_links(ours, theirs, shape.experts, keys)
        return
    for kind in ("weight", "bias"):
        if kind == "weight" or shape.linear_bias:
            gated = tuple(f"{theirs}mlp.{part}_proj.{kind}" for part in ("gate", "up"))
            yield Link(f"{ours}mlp.linear_fc1.{kind}", gated, GATED_HALVES)
            yield Link(f"{ours}mlp.linear_fc2.{kind}", (f"{theirs}mlp.down_proj.{kind}",), SAME)


def standard_name(name: str) -> str | None:
    """The name of a tensor; None for what is no parameter."""
    return None if name.endswith(BUFFERS) else name


def build_config(shape: ModelShape, vocab_size: int) -> dict[str, object]:
    """Make the shape's part of config.json.

    Args:
        shape: Shape of the model.
        vocab_size: Ids without padding.
    """
    name = _find_name(shape)
    of = ARCHITECTURES[name]
    values: dict[str, object] = {
        "architectures": [name],
        "model_type": of.model_type,
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
        "rope_scaling": build_rope_scaling(shape),
        "rms_norm_eps": shape.norm_epsilon,
        "attention_bias": shape.linear_bias,
        "mlp_bias": shape.linear_bias,
        "attention_dropout": shape.attention_dropout,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied_embeddings,
        **window_config.build_window(shape, of.windows),
    }
    if shape.latent is not None:
        values |= latent.build_latent(shape, shape.latent)
        values[further_tokens.KEY] = shape.mtp_num_layers
    if shape.experts is not None and of.experts is not None:
        values |= experts.build_experts(shape.experts, of.experts)
        if of.biases == OF_QKV:
            values["qkv_bias"] = shape.qkv_bias
    return values


def read_shape(config: ConfigFile, padded_vocab_size: int) -> ModelShape:
    """The shape of a config.json.

    Args:
        config: Config of the model.
        padded_vocab_size: Rows of the embeddings here.

    Raises:
        CheckpointError: A key is missing, or a value does not exist here.
    """
    of = _find_architecture(config)
    num_layers = config.whole("num_hidden_layers", most=MAX_PATTERN_LAYERS)
    linear_bias, qkv_bias = _read_biases(config, of)
    positions = config.whole("max_position_embeddings", of.max_position_embeddings)
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
    rotation = read_rotation(config, positions, of.rope_theta)
    of_experts = None if of.experts is None else experts.read_experts(config, of.experts, num_layers)
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=config.whole("intermediate_size"),
        seq_length=positions,
        max_position_embeddings=positions,
        padded_vocab_size=padded_vocab_size,
        position_embedding="rope",
        **rotation,
        normalization="RMSNorm",
        norm_epsilon=config.number("rms_norm_eps", of.rms_norm_eps),
        activation="swiglu",
        linear_bias=linear_bias,
        qkv_bias=qkv_bias,
        qk_layernorm=of.normalizes_heads or of.is_latent,
        tied_embeddings=config.switch("tie_word_embeddings", False),
        hidden_dropout=0.0,
        attention_dropout=config.number("attention_dropout", 0.0),
        init_method_std=config.number("initializer_range", 0.02),
        experts=of_experts,
        mtp_num_layers=further_tokens.read_number(config) if of.has_further_tokens else 0,
        **window_config.read_window(config, of.windows, num_layers),
    )
    if of.is_latent:
        of_latent = latent.read_latent(config, rotation)
        return replace(shape, latent=of_latent, kv_channels=of_latent.head_width, rotary_interleaved=True)
    groups = config.whole("num_key_value_heads", of.num_key_value_heads) or heads
    if heads % groups:
        raise config.wrong("num_key_value_heads", groups, f"must divide num_attention_heads, which is {heads}")
    width = config.whole("head_dim", of.head_dim) or hidden // heads
    return replace(shape, num_query_groups=groups, kv_channels=width)


def _find_architecture(config: ConfigFile) -> Architecture:
    """The architecture that a config.json tells of. CheckpointError for one that does not exist here."""
    named = config.values.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in ARCHITECTURES:
        raise config.wrong("architectures", named, f"known here are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _read_biases(config: ConfigFile, of: Architecture) -> tuple[bool, bool]:
    """Whether all linear layers have biases, and whether those of queries, keys and values have.

    Args:
        config: Config of the model.
        of: Architecture of the model.

    Raises:
        CheckpointError: Others have some.
    """
    config.refuse_unless("hidden_act", ("silu", "swish"), "the gate is SiLU here")
    attention_bias = config.switch("attention_bias", False)
    alike = "attention and MLP both have biases here, or neither"
    if of.biases == ALL_OR_NONE and config.switch("mlp_bias", False) != attention_bias:
        raise config.wrong("mlp_bias", not attention_bias, alike)
    if of.biases == NO_BIASES:
        for key in ("attention_bias", "mlp_bias"):
            config.refuse_unless(key, (False, None), alike)
    if of.biases == OF_QKV:
        return False, of.experts is None or config.switch("qkv_bias", True)
    return attention_bias, attention_bias
