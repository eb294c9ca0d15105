"""How many bytes a training step needs, in closed form: a cross-check beside what was measured.

Letters: N parameters, L layers, b micro-batch, s sequence, h hidden, V padded vocabulary. The forms tell how much, not when:
fragmentation and workspaces of libraries come on top.
"""

from megatron_lite.estimate.activations import input_of_layer, kept_at_ends, kept_by_embedding, kept_by_layer, total
from megatron_lite.estimate.loss import in_cross_entropy, in_loss_backward
from megatron_lite.estimate.sizes import FP32, PASSING, Setting


def element_bytes(precision: str) -> int:
    """Of weights and activations in fp32, fp16 or bf16."""
    return 4 if precision == "fp32" else 2


def state_bytes(
    parameters: int, precision: str, fp32_gradients: bool, optimizer: str, momentum: bool = True
) -> dict[str, int]:
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


def activation_bytes(setting: Setting, recomputed_layers: int = 0) -> int:
    """Most bytes that forward keeps for backward: when it reaches the logits, or when backward has computed the last
    recomputed layer again.

    Per layer, with fused attention: 34*s*b*h in 16 bits for the plain GPT with dropout, Korthikanti et al. 2022
    (Reducing Activation Recomputation, equation 2) without its term 5*a*s/h, which only attention that writes its scores
    down has; and statistics of norms and attention. A recomputed layer keeps its input, e*s*b*h.
    """
    shape = setting.shape
    layer, inputs = total(kept_by_layer(setting)), recomputed_layers * total(input_of_layer(setting))
    at_logits = (shape.num_layers - recomputed_layers) * layer + inputs + total(kept_at_ends(setting))
    result = setting.hidden(PASSING).num_bytes if shape.hidden_dropout else 0  # of the last dropout computed again
    again = inputs + layer + total(kept_by_embedding(setting)) + result if recomputed_layers else 0
    return max(at_logits, again)


def logits_bytes(setting: Setting) -> int:
    """Of the loss at its highest: all logits in the model's precision, e*s*b*V, and either some rows of them in fp32, or what its
    backward works with: as much as its input, e*s*b*h."""
    forward = total(in_cross_entropy(setting))
    # fp16's products are torch's own
    return forward if setting.in_fp16 else max(forward, total(in_loss_backward(setting)))
