"""The memory of the output layer and the loss (model/loss.py): logits, softmax, cross entropy.

Letters: n tokens, V padded vocabulary, h hidden, e bytes of one activation.
"""

from collections import Counter

from megatron_lite.estimate.liveness import Sized, gradient_of
from megatron_lite.estimate.sizes import FP32, Setting
from megatron_lite.model.kernel_choice import rows_at_once
from megatron_lite.units import count


def in_cross_entropy(setting: Setting) -> Counter[Sized]:
    """The logits in the model's precision, kept for backward; in 16 bits of some rows their fp32 copy, which becomes softmax. In
    fp16 the copy and its softmax; in backward once more. e*n*V and more."""
    if setting.element_bytes == FP32:
        return Counter([_logits(setting)])
    rows = min(setting.tokens, rows_at_once(setting.shape.padded_vocab_size, setting.threads if setting.on_cpu else 0))
    num_bytes = rows * setting.shape.padded_vocab_size * FP32
    chunk = Sized(
        "logits and loss",
        "rows of logits in fp32",
        num_bytes,
        f"{FP32} bytes x {count(rows)} tokens at a time x {count(setting.shape.padded_vocab_size)} words",
    )
    return Counter({_logits(setting): 1, chunk: 2 if setting.in_fp16 else 1})


def in_output_backward(setting: Setting, weight: Sized) -> Counter[Sized]:
    """What the output layer makes in backward: the gradients of hidden vectors and of its weights."""
    return in_loss_backward(setting) + output_weights(setting, weight)


def in_loss_backward(setting: Setting) -> Counter[Sized]:
    """The logits' gradient, in the logits' place, and that of hidden vectors, or before it as large a copy of them."""
    return Counter([_logits(setting), gradient_of(setting.hidden(""))])


def output_weights(setting: Setting, weight: Sized) -> Counter[Sized]:
    """The gradient of the output layer's matrix."""
    return Counter({weight: setting.shape.padded_vocab_size * setting.shape.hidden_size})


def _logits(setting: Setting) -> Sized:
    sized = setting.rows("logits, later their gradients", setting.shape.padded_vocab_size)
    return Sized("logits and loss", sized.name, sized.num_bytes, f"{sized.formula} words")
