"""The memory of the output layer and the loss (model/loss.py): logits, softmax, cross entropy.

Letters: n tokens, V padded vocabulary, h hidden, e bytes of one activation.
"""

from collections import Counter

from megatron_lite.estimate.sizes import FP32, Setting
from megatron_lite.estimate.tape import Sized, gradient_of


def in_cross_entropy(setting: Setting) -> Counter[Sized]:
    """In forward: fp32 logits, which a variable holds, and their log softmax. 8*n*V. (The 16-bit logits are gone.)"""
    return Counter([_logits(setting, "logits in fp32", FP32), _logits(setting, "log softmax", FP32)])


def in_cross_entropy_backward(setting: Setting) -> Counter[Sized]:
    """Log softmax, its gradient and the logits' gradient. 12*n*V."""
    return Counter([_logits(setting, name, FP32) for name in ("log softmax", "gradient of log softmax", "gradient of logits")])


def in_output_backward(setting: Setting, weight: Sized) -> Counter[Sized]:
    """The logits' gradient and what the output layer makes of it: the gradients of hidden vectors and of its weights; or,
    before that, the logits' gradient in fp32 and again in 16 bits."""
    gradient = _logits(setting, "gradient of logits", setting.element_bytes)
    products = Counter([gradient, gradient_of(setting.hidden(""))]) + output_weights(setting, weight)
    if setting.element_bytes == FP32:
        return products
    rounding = Counter([_logits(setting, "gradient of logits", FP32), gradient])
    return max(products, rounding, key=lambda tensors: sum(sized.num_bytes * times for sized, times in tensors.items()))


def output_weights(setting: Setting, weight: Sized) -> Counter[Sized]:
    """The gradient of the output layer's matrix."""
    return Counter({weight: setting.shape.padded_vocab_size * setting.shape.hidden_size})


def _logits(setting: Setting, name: str, num_bytes: int) -> Sized:
    sized = setting.rows(name, setting.shape.padded_vocab_size, num_bytes)
    return Sized("logits and loss", name, sized.num_bytes, f"{sized.formula} words")
