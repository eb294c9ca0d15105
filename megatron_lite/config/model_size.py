"""Sizes of a model by its shape: parameters, and FLOPs of a step."""

from megatron_lite.config.layout import Stage
from megatron_lite.config.shape import ModelShape

FORWARD_AND_BACKWARD = 3  # backward has two products of forward's size for each of forward's


def count_parameters(shape: ModelShape, stage: Stage | None = None) -> int:
    """Parameters of the whole model, every one counted once (tied embeddings too), or of a pipeline's stage.

    For the plain GPT this is v*h + s*h + L*(12h^2 + 13h) + 2h.
    """
    return sum(count_parameter_parts(shape, stage).values())


def count_parameter_parts(shape: ModelShape, stage: Stage | None = None) -> dict[str, int]:
    """Parameters by part of the model; a part that the shape, or the stage, lacks is 0."""
    layers = shape.num_layers if stage is None else len(stage.layers)
    is_first = stage is None or stage.is_first
    is_last = stage is None or stage.is_last
    matrix = shape.padded_vocab_size * shape.hidden_size
    norm = shape.hidden_size * _count_norm_vectors(shape)
    learned = shape.position_embedding == "learned_absolute"
    has_embedding = is_first or (is_last and shape.tied_embeddings)
    final_norm = norm if is_last else 0
    return {
        "word embedding": matrix if has_embedding else 0,
        "position embedding": shape.max_position_embeddings * shape.hidden_size if learned and is_first else 0,
        "attention": layers * sum(_list_attention_tensors(shape)),
        "MLP": layers * sum(_list_mlp_tensors(shape)),
        "norms": 2 * layers * norm + final_norm,
        "output": matrix if is_last and not shape.tied_embeddings else 0,
    }


def _count_norm_vectors(shape: ModelShape) -> int:
    """Numbers per channel: a weight, and LayerNorm's bias."""
    return 2 if shape.normalization == "LayerNorm" else 1


def _list_attention_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's attention."""
    tensors = [shape.qkv_rows * shape.hidden_size, shape.attention_width * shape.hidden_size]
    if shape.qkv_bias:
        tensors.append(shape.qkv_rows)
    if shape.linear_bias:
        tensors.append(shape.hidden_size)
    if shape.qk_layernorm:
        # one norm of queries, one of keys
        tensors += 2 * _count_norm_vectors(shape) * [shape.kv_channels]
    return tensors


def _list_mlp_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's MLP."""
    tensors = [shape.fc1_width * shape.hidden_size, shape.ffn_hidden_size * shape.hidden_size]
    if shape.linear_bias:
        tensors += [shape.fc1_width, shape.hidden_size]
    return tensors


def count_parameter_tensors(shape: ModelShape, stage: Stage) -> int:
    """Tensors among which the parameters of a pipeline's stage are divided; ranks that shard them have a part of each."""
    vectors = _count_norm_vectors(shape)
    of_layer = len(_list_attention_tensors(shape)) + len(_list_mlp_tensors(shape)) + 2 * vectors
    number = len(stage.layers) * of_layer
    if stage.is_first:
        number += 2 if shape.position_embedding == "learned_absolute" else 1
    if stage.is_last:
        number += vectors
    # the last stage has an output layer, or a copy of the embedding in its place
    if stage.is_last and not (stage.is_first and shape.tied_embeddings):
        number += 1
    return number


def count_layer_parameters(shape: ModelShape) -> int:
    """Parameters of one layer; the final norm is divided among all layers."""
    parts = count_parameter_parts(shape)
    return (parts["attention"] + parts["MLP"] + parts["norms"]) // shape.num_layers


# --- arithmetic: only matrix products count, and a multiply-add is 2 operations


def step_flops(shape: ModelShape, tokens_sequences: int, causal: bool) -> int:
    """FLOPs of forward and backward over `tokens_sequences` full sequences; a multiply-add is 2, backward 2 x forward.

    Only matrix products count; recomputation, dropout, norms and the embedding lookup do not.
    causal=True counts the half of the attention matrix that is used: the convention of Megatron-LM's own
    "throughput per GPU", 6*B*s*(L*(2*h*ffn + 3h^2 + h*s + h^2) + h*V) for the plain GPT.
    causal=False counts all of it (12*L*h*s per token): the convention of nanoGPT, torchtitan and PaLM's MFU
    (Chowdhery et al. 2022, appendix B).
    """
    layer = count_linear_flops(shape, tokens_sequences) + attention_flops(shape, tokens_sequences, causal)
    return FORWARD_AND_BACKWARD * (shape.num_layers * layer + count_output_flops(shape, tokens_sequences))


def weigh_chunks(shape: ModelShape, stage: Stage) -> tuple[float, ...]:
    """What one micro-batch computes in each chunk of a stage, beside the mean of all; () where they are equal but for the loss."""
    if stage.has_equal_chunks:
        return ()
    layer = count_linear_flops(shape, 1) + attention_flops(shape, 1, causal=True)
    output = count_output_flops(shape, 1)
    flops = [len(chunk) * layer + (output if stage.ends(number) else 0) for number, chunk in enumerate(stage.chunks)]
    mean = sum(flops) / len(flops)
    return tuple(one / mean for one in flops)


def count_linear_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of one layer's four linear maps."""
    projections = (shape.qkv_rows + shape.attention_width) * shape.hidden_size
    mlp = (shape.fc1_width + shape.ffn_hidden_size) * shape.hidden_size
    return 2 * sequences * shape.seq_length * (projections + mlp)


def attention_flops(shape: ModelShape, sequences: int, causal: bool) -> int:
    """Forward of one layer's two products with the matrix of scores; causal: with the half of it that is used."""
    return 2 * sequences * shape.attention_width * shape.seq_length**2 * (1 if causal else 2)


def count_output_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of the product that makes the logits."""
    return 2 * sequences * shape.seq_length * shape.hidden_size * shape.padded_vocab_size
