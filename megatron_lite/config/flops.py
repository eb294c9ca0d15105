"""How many floating-point operations a training step's matrix products take. A multiply-add is 2."""

from megatron_lite.config.shape import ModelShape

FORWARD_AND_BACKWARD = 3  # backward has two products of forward's size for each of forward's


def step_flops(shape: ModelShape, tokens_sequences: int, causal: bool) -> int:
    """FLOPs of forward and backward over `tokens_sequences` full sequences; a multiply-add is 2, backward 2 x forward.

    Only matrix products count; recomputation, dropout, norms and the embedding lookup do not.
    causal=True counts the half of the attention matrix that is used: the convention of Megatron-LM's own
    "throughput per GPU", 6*B*s*(L*(2*h*ffn + 3h^2 + h*s + h^2) + h*V) for the plain GPT.
    causal=False counts all of it (12*L*h*s per token): the convention of nanoGPT, torchtitan and PaLM's MFU
    (Chowdhery et al. 2022, appendix B).
    """
    layer = linear_flops(shape, tokens_sequences) + attention_flops(shape, tokens_sequences, causal)
    return FORWARD_AND_BACKWARD * (shape.num_layers * layer + output_flops(shape, tokens_sequences))


def linear_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of one layer's four linear maps."""
    projections = (shape.qkv_rows + shape.attention_width) * shape.hidden_size
    mlp = (shape.fc1_width + shape.ffn_hidden_size) * shape.hidden_size
    return 2 * sequences * shape.seq_length * (projections + mlp)


def attention_flops(shape: ModelShape, sequences: int, causal: bool) -> int:
    """Forward of one layer's two products with the matrix of scores; causal: with the half of it that is used."""
    return 2 * sequences * shape.attention_width * shape.seq_length**2 * (1 if causal else 2)


def output_flops(shape: ModelShape, sequences: int) -> int:
    """Forward of the product that makes the logits."""
    return 2 * sequences * shape.seq_length * shape.hidden_size * shape.padded_vocab_size
