"""Counts the parameters of a model, by part and by pipeline stage."""

from megatron_lite.config.layout import Stage
from megatron_lite.config.shape import ModelShape


def count_parameters(shape: ModelShape, stage: Stage | None = None) -> int:
    """Parameters of the whole model, every one counted once (tied embeddings too), or of a pipeline's stage.

    For the plain GPT this is v*h + s*h + L*(12h^2 + 13h) + 2h.
    """
    return sum(count_parameter_parts(shape, stage).values())


def count_parameter_parts(shape: ModelShape, stage: Stage | None = None) -> dict[str, int]:
    """Parameters by part of the model; a part that the shape, or the stage, lacks is 0."""
    hidden, vocabulary, layers = shape.hidden_size, shape.padded_vocab_size, shape.num_layers
    is_first, is_last, tied = True, True, shape.tied_embeddings
    if stage is not None:
        layers, is_first, is_last = len(stage.layers), stage.is_first, stage.is_last
    learned = shape.position_embedding == "learned_absolute"
    of_norm = 2 if shape.normalization == "LayerNorm" else 1  # numbers per channel
    attention = (shape.qkv_rows + shape.attention_width) * hidden
    attention += shape.qkv_bias * shape.qkv_rows + shape.linear_bias * hidden
    attention += 2 * shape.qk_layernorm * of_norm * shape.kv_channels
    mlp = (shape.fc1_width + shape.ffn_hidden_size) * hidden + shape.linear_bias * (shape.fc1_width + hidden)
    return {
        "word embedding": vocabulary * hidden if is_first or is_last and tied else 0,
        "position embedding": shape.max_position_embeddings * hidden if learned and is_first else 0,
        "attention": layers * attention,
        "MLP": layers * mlp,
        "norms": (2 * layers + is_last) * of_norm * hidden,
        "output": vocabulary * hidden if is_last and not tied else 0,
    }


def count_layer_parameters(shape: ModelShape) -> int:
    """Parameters of one layer; the final norm is divided among all layers."""
    parts = count_parameter_parts(shape)
    return (parts["attention"] + parts["MLP"] + parts["norms"]) // shape.num_layers
