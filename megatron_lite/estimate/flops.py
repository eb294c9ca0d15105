"""How many floating-point operations a training step's matrix products take."""

from megatron_lite.config.shape import ModelShape


def step_flops(shape: ModelShape, tokens_sequences: int, causal: bool) -> int:
    """FLOPs of forward and backward over `tokens_sequences` full sequences; a multiply-add is 2, backward 2 x forward.

    Only matrix products count; recomputation, dropout, norms and the embedding lookup do not.
    causal=True counts the half of the attention matrix that is used: the convention of Megatron-LM's own
    "throughput per GPU", 6*B*s*(L*(2*h*ffn + 3h^2 + h*s + h^2) + h*V) for the plain GPT.
    causal=False counts all of it (12*L*h*s per token): the convention of nanoGPT, torchtitan and PaLM's MFU
    (Chowdhery et al. 2022, appendix B).
    """
    hidden, sequence = shape.hidden_size, shape.seq_length
    projections = (shape.qkv_width + shape.attention_width) * hidden
    scores = shape.attention_width * sequence * (1 if causal else 2)
    mlp = (shape.fc1_width + shape.ffn_hidden_size) * hidden
    output = hidden * shape.padded_vocab_size
    multiply_adds_per_token = shape.num_layers * (projections + scores + mlp) + output
    return 6 * tokens_sequences * sequence * multiply_adds_per_token
