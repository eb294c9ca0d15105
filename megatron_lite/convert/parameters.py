"""The parameters that a shape has, under Megatron-Core's names, without building the model."""

from collections.abc import Iterator

from megatron_lite.config.shape import ModelShape


def layer_prefix(layer: int) -> str:
    """Of the layer's parameters; layers count from 0 in names."""
    return f"decoder.layers.{layer}."


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """{name: size}, in the model's order; a matrix is [out, in], the embeddings [rows, hidden]."""
    hidden = shape.hidden_size
    sizes = {"embedding.word_embeddings.weight": (shape.padded_vocab_size, hidden)}
    if shape.position_embedding == "learned_absolute":
        sizes["embedding.position_embeddings.weight"] = (shape.max_position_embeddings, hidden)
    for layer in range(shape.num_layers):
        sizes.update((layer_prefix(layer) + name, size) for name, size in _layer(shape))
    sizes.update(_norm("decoder.final_layernorm", hidden, shape))
    if not shape.tied_embeddings:
        sizes["output_layer.weight"] = (shape.padded_vocab_size, hidden)
    return sizes


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, linear = shape.hidden_size, shape.linear_bias
    yield from _norm("input_layernorm", hidden, shape)
    yield from _matrix("self_attention.linear_qkv", shape.qkv_width, hidden, shape.qkv_bias)
    yield from _matrix("self_attention.linear_proj", hidden, shape.attention_width, linear)
    if shape.qk_layernorm:
        yield from _norm("self_attention.q_layernorm", shape.kv_channels, shape)
        yield from _norm("self_attention.k_layernorm", shape.kv_channels, shape)
    yield from _norm("pre_mlp_layernorm", hidden, shape)
    yield from _matrix("mlp.linear_fc1", shape.fc1_width, hidden, linear)
    yield from _matrix("mlp.linear_fc2", hidden, shape.ffn_hidden_size, linear)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if shape.normalization == "LayerNorm":
        yield f"{name}.bias", (width,)
