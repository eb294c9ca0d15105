"""Sizes of a model by its shape: parameters, and FLOPs of a step."""

from megatron_lite.config.shape import ExpertShape, LatentShape, ModelShape
from megatron_lite.pipeline_schedule import Stage

FORWARD_AND_BACKWARD = 3  # backward has two products of forward's size for each of forward's


def count_parameters(shape: ModelShape, stage: Stage | None = None) -> int:
    """Parameters of the whole model, every one counted once (tied embeddings too), or of a pipeline's stage.

    For the plain GPT this is v*h + s*h + L*(12h^2 + 13h) + 2h.
    """
    return sum(count_parameter_parts(shape, stage).values())


def count_matrix_parameters(shape: ModelShape, stage: Stage | None = None) -> dict[str, int]:
    """Parameters of matrices without word embedding and output, which Muon updates, by part of the model.

    The others of attention and MLP are biases and norms of heads.
    """
    depths = shape.mtp_num_layers if stage is None or stage.is_last else 0
    layers = depths + (shape.num_layers if stage is None else len(stage.layers))
    with_experts = count_expert_layers(shape, stage)
    if shape.has_experts(shape.num_layers):
        with_experts += depths
    parts = count_parameter_parts(shape, stage)
    names = ("position embedding", "router", "experts", "shared expert", "multi-token prediction")
    return {
        "attention": layers * sum(_count_elements(list_attention_matrices(shape))),
        "MLP": (layers - with_experts) * sum(_list_mlp_matrices(shape)),
        **{name: parts[name] for name in names},
    }


def count_matrices(shape: ModelShape, stage: Stage) -> int:
    """Parameter tensors that Muon updates, of a pipeline's stage; a layer's experts are in one tensor of each kind."""
    with_experts = count_expert_layers(shape, stage)
    without = len(stage.layers) - with_experts
    of_experts = [*_list_expert_tensors(shape), *_list_shared_expert_tensors(shape), _count_router_parameters(shape)]
    number = len(stage.layers) * len(list_attention_matrices(shape))
    number += without * len(_list_mlp_matrices(shape)) + with_experts * len(of_experts)
    if stage.is_first and shape.position_embedding == "learned_absolute":
        number += 1
    return number


def count_parameter_parts(shape: ModelShape, stage: Stage | None = None) -> dict[str, int]:
    """Parameters by part of the model; a part that the shape, or the stage, lacks is 0."""
    is_first = stage is None or stage.is_first
    is_last = stage is None or stage.is_last
    # layers of multi-token prediction, which are on the last stage
    depths = shape.mtp_num_layers if is_last else 0
    layers = depths + (shape.num_layers if stage is None else len(stage.layers))
    with_experts = count_expert_layers(shape, stage)
    if shape.has_experts(shape.num_layers):
        with_experts += depths
    norm = shape.hidden_size * _count_norm_vectors(shape)
    parts = {
        "word embedding": 0,
        "position embedding": 0,
        "attention": layers * sum(_list_attention_tensors(shape)),
        "MLP": (layers - with_experts) * sum(_list_mlp_tensors(shape)),
        "router": with_experts * _count_router_parameters(shape),
        "experts": with_experts * sum(_list_expert_tensors(shape)),
        "shared expert": with_experts * sum(_list_shared_expert_tensors(shape)),
        # each depth of multi-token prediction has three besides its layer's
        "norms": (2 * layers + 3 * depths) * norm,
        "output": 0,
        # which joins a token's hidden state and an embedding
        "multi-token prediction": depths * 2 * shape.hidden_size**2,
    }
    embeds = is_first or depths > 0
    vocabulary_matrix = shape.padded_vocab_size * shape.hidden_size
    if embeds or shape.tied_embeddings and is_last:
        parts["word embedding"] = vocabulary_matrix
    if embeds and shape.position_embedding == "learned_absolute":
        parts["position embedding"] = shape.max_position_embeddings * shape.hidden_size
    if is_last:
        parts["norms"] += norm
    if is_last and not shape.tied_embeddings:
        parts["output"] = vocabulary_matrix
    return parts


def count_linear_weights(shape: ModelShape, layer: int) -> tuple[int, int]:
    """Elements of the matrices of one layer's linear layers: (those of attention and of what all tokens pass, those of
    its experts). The router is none of them. layer: counted from 0."""
    attention = count_attention_weights(shape)
    if not shape.has_experts(layer):
        return attention + sum(_list_mlp_matrices(shape)), 0
    # of the shared expert its two matrices, without its gate
    return attention + sum(_list_shared_expert_tensors(shape)[:2]), sum(_list_expert_tensors(shape))


def count_expert_layers(shape: ModelShape, stage: Stage | None = None) -> int:
    """Layers that have experts in the place of an MLP, of the whole model or of a pipeline's stage."""
    if shape.experts is None:
        return 0
    if stage is None:
        return shape.experts.layers.count(True)
    return sum(shape.experts.layers[chunk.start : chunk.stop].count(True) for chunk in stage.chunks)


def _count_router_parameters(shape: ModelShape) -> int:
    """Elements of one layer's router."""
    return 0 if shape.experts is None else shape.experts.number * shape.hidden_size


def _list_expert_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's experts, those that this rank has of them."""
    e = shape.experts
    if e is None:
        return []
    first = shape.count_fc1_rows(e.ffn_hidden_size) * shape.hidden_size
    second = e.ffn_hidden_size * shape.hidden_size
    return [e.local_number * first, e.local_number * second]


def _list_shared_expert_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's expert that all tokens pass; [] without one."""
    e = shape.experts
    if e is None or not e.shared_ffn_hidden_size:
        return []
    width = e.shared_ffn_hidden_size
    tensors = [shape.count_fc1_rows(width) * shape.hidden_size, width * shape.hidden_size]
    return [*tensors, shape.hidden_size] if e.shared_gate else tensors


def _count_norm_vectors(shape: ModelShape) -> int:
    """Numbers per channel: a weight, and LayerNorm's bias."""
    return 2 if shape.normalization == "LayerNorm" else 1


def list_attention_matrices(shape: ModelShape, split_qkv: bool = False) -> list[tuple[int, int]]:
    """List (rows, columns) of each matrix of one layer's attention.

    Args:
        shape: The model's shape.
        split_qkv: Whether queries, keys and values count as three matrices.
    """
    if shape.latent is not None:
        return _list_latent_matrices(shape, shape.latent)
    hidden = shape.hidden_size
    keys = shape.num_query_groups * shape.kv_channels
    if split_qkv:
        matrices = [(shape.attention_width, hidden), (keys, hidden), (keys, hidden)]
    else:
        matrices = [(shape.qkv_rows, hidden)]
    matrices.append((hidden, shape.attention_width))
    return matrices


def _count_elements(matrices: list[tuple[int, int]]) -> list[int]:
    """Elements of each matrix."""
    return [rows * columns for rows, columns in matrices]


def _list_attention_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's attention."""
    if shape.latent is not None:
        return _list_latent_tensors(shape, shape.latent)
    tensors = _count_elements(list_attention_matrices(shape))
    if shape.qkv_bias:
        tensors.append(shape.qkv_rows)
    if shape.linear_bias:
        tensors.append(shape.hidden_size)
    if shape.qk_layernorm:
        # one norm of queries, one of keys
        tensors += 2 * _count_norm_vectors(shape) * [shape.kv_channels]
    if shape.softmax_type == "learnable":
        tensors.append(shape.num_attention_heads)
    return tensors


def _list_latent_matrices(shape: ModelShape, latent: LatentShape) -> list[tuple[int, int]]:
    """List (rows, columns) of each matrix of one layer's latent attention."""
    hidden = shape.hidden_size
    query_rows = shape.num_attention_heads * latent.query_width
    if latent.q_lora_rank is None:
        matrices = [(query_rows, hidden)]
    else:
        matrices = [(latent.q_lora_rank, hidden), (query_rows, latent.q_lora_rank)]
    # keys and values: down to the latent vector, beside the channels of keys that rotate, and up to all heads
    matrices.append((latent.kv_lora_rank + latent.qk_pos_emb_head_dim, hidden))
    key_and_value_width = latent.qk_head_dim + latent.v_head_dim
    matrices.append((shape.num_attention_heads * key_and_value_width, latent.kv_lora_rank))
    matrices.append((hidden, shape.attention_width))
    return matrices


def count_attention_weights(shape: ModelShape) -> int:
    """Elements of the matrices of one layer's attention."""
    return sum(_count_elements(list_attention_matrices(shape)))


def _list_latent_tensors(shape: ModelShape, latent: LatentShape) -> list[int]:
    """Elements of each parameter tensor of one layer's latent attention."""
    tensors = _count_elements(_list_latent_matrices(shape, latent))
    if shape.linear_bias:
        tensors.append(shape.hidden_size)
    if shape.qk_layernorm:
        widths = [latent.kv_lora_rank]
        if latent.q_lora_rank is not None:
            widths.append(latent.q_lora_rank)
        tensors += _count_norm_vectors(shape) * widths
    return tensors


def _list_mlp_matrices(shape: ModelShape) -> list[int]:
    """Elements of each matrix of one layer's MLP."""
    return [shape.fc1_width * shape.hidden_size, shape.ffn_hidden_size * shape.hidden_size]


def _list_mlp_tensors(shape: ModelShape) -> list[int]:
    """Elements of each parameter tensor of one layer's MLP."""
    tensors = _list_mlp_matrices(shape)
    if shape.linear_bias:
        tensors += [shape.fc1_width, shape.hidden_size]
    return tensors


def count_parameter_tensors(shape: ModelShape, stage: Stage) -> int:
    """Tensors that hold the parameters of a pipeline's stage; ranks that shard them have a part of each."""
    vectors = _count_norm_vectors(shape)
    of_attention = len(_list_attention_tensors(shape))
    of_mlp = len(_list_mlp_tensors(shape))
    number = len(stage.layers) * (of_attention + of_mlp + 2 * vectors)
    router = 1
    of_experts = len(_list_expert_tensors(shape)) + len(_list_shared_expert_tensors(shape)) + router
    number += count_expert_layers(shape, stage) * (of_experts - of_mlp)
    if stage.is_first:
        number += 2 if shape.position_embedding == "learned_absolute" else 1
    if stage.is_last:
        number += vectors
    # the last stage has an output layer, or a copy of the embedding in its place
    if stage.is_last and not (stage.is_first and shape.tied_embeddings):
        number += 1
    return number


def count_layer_parameters(shape: ModelShape) -> int:
    """Parameters of one layer, on average; the final norm is divided among all layers."""
    parts = count_parameter_parts(shape)
    names = ("attention", "MLP", "router", "experts", "shared expert", "norms")
    return sum(parts[name] for name in names) // shape.num_layers


# --- arithmetic: only matrix products count, and a multiply-add is 2 operations


def step_flops(shape: ModelShape, tokens_sequences: int, causal: bool) -> int:
    """FLOPs of forward and backward over full sequences; a multiply-add is 2, backward 2 x forward.

    Only matrix products count; recomputation, dropout, norms and the embedding lookup do not.

    Args:
        shape: The model's shape.
        tokens_sequences: Number of sequences, of shape.seq_length tokens each.
        causal: Whether only the half of the attention matrix counts that is used: the convention of Megatron-LM's own
            "throughput per GPU", 6*B*s*(L*(2*h*ffn + 3h^2 + h*s + h^2) + h*V) for the plain GPT. Else all of it does
            (12*L*h*s per token): the convention of nanoGPT, torchtitan and PaLM's MFU (Chowdhery et al. 2022, app. B).
    """
    depths = shape.mtp_num_layers
    with_experts = count_expert_layers(shape)
    if shape.has_experts(shape.num_layers):
        with_experts += depths
    without = shape.num_layers + depths - with_experts
    layers = with_experts * count_layer_flops(shape, tokens_sequences, causal, has_experts=True)
    layers += without * count_layer_flops(shape, tokens_sequences, causal, has_experts=False)
    # each depth of multi-token prediction joins two vectors of the hidden size, and has logits of its own
    joining = depths * 2 * tokens_sequences * shape.seq_length * 2 * shape.hidden_size**2
    outputs = (1 + depths) * count_output_flops(shape, tokens_sequences)
    return FORWARD_AND_BACKWARD * (layers + joining + outputs)


def weigh_chunks(shape: ModelShape, stage: Stage) -> tuple[float, ...]:
    """Weigh what one micro-batch computes in each chunk of a stage, against the mean of all.

    Returns:
        A factor for each chunk; () where chunks are equal but for the loss.
    """
    if stage.has_equal_chunks and shape.experts is None:
        return ()
    flops_of_chunks = []
    for number, chunk in enumerate(stage.chunks):
        flops = sum(count_layer_flops(shape, 1, True, shape.has_experts(layer)) for layer in chunk)
        if stage.ends(number):
            flops += count_output_flops(shape, 1)
        flops_of_chunks.append(flops)
    mean = sum(flops_of_chunks) / len(flops_of_chunks)
    return tuple(flops / mean for flops in flops_of_chunks)


def count_layer_flops(shape: ModelShape, sequences: int, causal: bool, has_experts: bool) -> int:
    """FLOPs of one layer's forward: its linear maps, and attention.

    Args:
        shape: The model's shape.
        sequences: Number of sequences, of shape.seq_length tokens each.
        causal: Whether only the half of the attention matrix counts that is used.
        has_experts: Whether the layer has experts in the place of its MLP.
    """
    mlp = shape.fc1_width + shape.ffn_hidden_size
    if shape.experts is not None and has_experts:
        mlp = _count_expert_width(shape, shape.experts)
    return _count_map_flops(shape, sequences, mlp) + attention_flops(shape, sequences, causal)


def count_linear_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of the four linear maps of a layer without experts."""
    return _count_map_flops(shape, sequences, shape.fc1_width + shape.ffn_hidden_size)


def _count_map_flops(shape: ModelShape, sequences: int, mlp: int) -> int:
    """FLOPs of one layer's linear maps in forward.

    Args:
        shape: The model, or a rank's share of it.
        sequences: Number of sequences, of the shape's length.
        mlp: Rows and columns of the MLP's matrices, or of those that a token passes.
    """
    weights = count_attention_weights(shape) + mlp * shape.hidden_size
    tokens = sequences * shape.seq_length
    return 2 * tokens * weights


def _count_expert_width(shape: ModelShape, e: ExpertShape) -> int:
    """Rows and columns of the matrices that a token passes in a layer of experts.

    They are those of its experts, and of the shared one. As in Megatron-LM, the router's product does not count.
    """
    routed = e.topk * (shape.count_fc1_rows(e.ffn_hidden_size) + e.ffn_hidden_size)
    shared = shape.count_fc1_rows(e.shared_ffn_hidden_size) + e.shared_ffn_hidden_size
    return routed + shared


def attention_flops(shape: ModelShape, sequences: int, causal: bool) -> int:
    """FLOPs of one layer's two products with the matrix of scores, in forward.

    Args:
        shape: The model's shape.
        sequences: Number of sequences, of shape.seq_length tokens each.
        causal: Whether only the half of the matrix counts that is used.
    """
    multiply_adds = sequences * count_scored_width(shape) * shape.seq_length**2
    return multiply_adds if causal else 2 * multiply_adds


def count_scored_width(shape: ModelShape) -> int:
    """Channels of all heads in the two products with the matrix of scores: those of queries, and those of values."""
    query_width = shape.attention_width
    if shape.latent is not None:
        query_width = shape.num_attention_heads * shape.latent.query_width
    return query_width + shape.attention_width


def count_output_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of the product that makes the logits."""
    return 2 * sequences * shape.seq_length * shape.hidden_size * shape.padded_vocab_size
