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
    return {
        "word embedding": vocabulary * hidden,
        "position embedding": shape.max_position_embeddings * hidden if learned else 0,
        "attention": layers * _attention(shape),
        "MLP": layers * _mlp(shape),
        "norms": (2 * layers + 1) * _norm(hidden, shape),
        "output": 0 if shape.tied_embeddings else vocabulary * hidden,
    }


def _attention(shape: ModelShape) -> int:
    matrices = (shape.qkv_width + shape.attention_width) * shape.hidden_size
    biases = shape.qkv_bias * shape.qkv_width + shape.linear_bias * shape.hidden_size
    return matrices + biases + 2 * shape.qk_layernorm * _norm(shape.kv_channels, shape)


def _mlp(shape: ModelShape) -> int:
    matrices = (shape.fc1_width + shape.ffn_hidden_size) * shape.hidden_size
    return matrices + shape.linear_bias * (shape.fc1_width + shape.hidden_size)


def _norm(width: int, shape: ModelShape) -> int:
    return width * (2 if shape.normalization == "LayerNorm" else 1)
