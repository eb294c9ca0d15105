"""How many bytes a training step needs, in closed form: a cross-check beside what was measured.

Letters: N parameters, L layers, b micro-batch, s sequence, h hidden, f MLP width, a attention heads, V padded vocabulary,
e bytes of one activation (2 in fp16 and bf16, 4 in fp32). The forms tell how much, not when: fragmentation, workspaces of
libraries and temporaries of a phase come on top.
"""

from megatron_lite.config.shape import ModelShape

FP32 = 4
# How attention is computed: scores stay in registers; are written down; are written down in fp32, with fp32 copies of
# queries, keys and values, as torch's fallback does (aten::_scaled_dot_product_attention_math).
FUSED, UNFUSED, MATH = "fused", "unfused", "math"


def element_bytes(precision: str) -> int:
    """Of weights and activations in fp32, fp16 or bf16."""
    return 4 if precision == "fp32" else 2


def state_bytes(parameters: int, precision: str, fp32_gradients: bool, optimizer: str, momentum: bool = True) -> dict[str, int]:
    """Bytes that live from step to step on every rank: weights, gradients, fp32 masters of 16-bit weights, Adam's two
    moments or SGD's one. 16 bytes per parameter for fp16 with Adam: 2 + 2 + 4 + 4 + 4 (Rajbhandari et al. 2020, ZeRO,
    section 3.1); 18 with gradients in fp32; 16 in fp32: 4 + 4 + 8.
    """
    width = element_bytes(precision)
    return {
        "parameters": parameters * width,
        "gradients": parameters * (FP32 if fp32_gradients else width),
        "master weights": parameters * FP32 if precision != "fp32" else 0,
        "moments": parameters * FP32 * (2 if optimizer == "adam" else int(momentum)),
    }


def activation_bytes(shape: ModelShape, micro_batch: int, precision: str, recomputed_layers: int = 0,
                     attention: str = FUSED, on_cpu: bool = False) -> int:
    """Most bytes that forward keeps for backward: when it reaches the logits, or when backward has computed the last
    recomputed layer again.

    Per layer, with fused attention: 34*s*b*h in 16 bits for the plain GPT with dropout, Korthikanti et al. 2022
    (Reducing Activation Recomputation, equation 2) without its term 5*a*s/h, which only attention that writes its scores
    down has. A recomputed layer keeps its input, e*s*b*h. The norms' statistics are left out.
    on_cpu: torch's kernels there keep dropout's masks in the activations' type, and RMSNorm keeps the normalised input too
    (seen with torch 2.13).
    """
    tokens, width, hidden = micro_batch * shape.seq_length, element_bytes(precision), shape.hidden_size
    mask = (width if on_cpu else 1) * hidden * (shape.hidden_dropout > 0)
    norm = width * hidden * (3 if on_cpu and shape.normalization == "RMSNorm" else 2)  # input and output
    per_token = 2 * norm + 2 * mask + _attention(shape, width, attention, on_cpu) + width * _mlp_elements(shape)
    layer = tokens * per_token + micro_batch * _scores(shape, width, attention)
    ends = tokens * (norm + mask)  # the last norm, the embedding's dropout
    inputs = recomputed_layers * tokens * hidden * width
    at_logits = (shape.num_layers - recomputed_layers) * layer + inputs + ends
    dropped = tokens * (mask + hidden * width * (shape.hidden_dropout > 0))  # the embedding's mask, a dropout's result
    again = inputs + layer + dropped if recomputed_layers else 0
    return max(at_logits, again)


def logits_bytes(shape: ModelShape, micro_batch: int) -> int:
    """12*s*b*V: torch's cross entropy holds three fp32 copies at its highest, in backward: log softmax, its gradient and
    the logits' gradient."""
    return 3 * FP32 * micro_batch * shape.seq_length * shape.padded_vocab_size


def _attention(shape: ModelShape, width: int, attention: str, on_cpu: bool) -> int:
    """One layer's bytes per token without scores: queries, keys, values and the result; what rotation copies."""
    if attention == MATH:
        return FP32 * shape.qkv_width + width * shape.attention_width
    rotated = shape.qkv_width - shape.num_query_groups * shape.kv_channels  # queries and keys, beside the unrotated ones
    rotated += shape.attention_width * on_cpu  # the result then has another order, and is copied for the projection
    return width * (shape.qkv_width + shape.attention_width + rotated * (shape.position_embedding == "rope"))


def _mlp_elements(shape: ModelShape) -> int:
    """What the activation function and fc2 keep: gelu its input and result; swiglu gate, value, silu and product; a squared
    relu its result and the square."""
    return (4 if shape.activation == "swiglu" else 2) * shape.ffn_hidden_size


def _scores(shape: ModelShape, width: int, attention: str) -> int:
    """One layer's score matrices of one sequence: the softmax, and with dropout its mask and what is left of it."""
    if attention == FUSED:
        return 0
    dropped = shape.attention_dropout > 0
    per_score = FP32 * (1 + 2 * dropped) if attention == MATH else width + (1 + width) * dropped
    return shape.num_attention_heads * shape.seq_length**2 * per_score
