"""How many parameters a shape has."""

from megatron_lite.config.shape import ModelShape


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the whole model, every one counted once (tied embeddings too).

    For the plain GPT this is v*h + s*h + L*(12h^2 + 13h) + 2h.
    """
    return sum(parameter_parts(shape).values())


def parameter_parts(shape: ModelShape) -> dict[str, int]:
    """Parameters by part of the model; a part that the shape lacks is 0."""
    hidden, vocabulary, layers = shape.hidden_size, shape.padded_vocab_size, shape.num_layers
    learned = shape.position_embedding == "learned_absolute"
    of_norm = 2 if shape.normalization == "LayerNorm" else 1  # numbers per channel
    attention = (shape.qkv_width + shape.attention_width) * hidden
    attention += shape.qkv_bias * shape.qkv_width + shape.linear_bias * hidden
    attention += 2 * shape.qk_layernorm * of_norm * shape.kv_channels
    mlp = (shape.fc1_width + shape.ffn_hidden_size) * hidden + shape.linear_bias * (shape.fc1_width + hidden)
    return {
        "word embedding": vocabulary * hidden,
        "position embedding": shape.max_position_embeddings * hidden if learned else 0,
        "attention": layers * attention,
        "MLP": layers * mlp,
        "norms": (2 * layers + 1) * of_norm * hidden,
        "output": 0 if shape.tied_embeddings else vocabulary * hidden,
    }


def layer_parameters(shape: ModelShape) -> int:
    """Of one layer. The final norm counts as a part of each."""
    parts = parameter_parts(shape)
    return (parts["attention"] + parts["MLP"] + parts["norms"]) // shape.num_layers
