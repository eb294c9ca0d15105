"""The least bytes between a GPU and its memory in a training step, beside those of matrix products.

Counted as if all neighbouring operations were one kernel: a tensor is written once, and read once by each later kernel,
except by the one right behind its producer, which may find it in the cache. (A model so small that the cache holds a
whole micro-batch can do with less; launches are its limit.) What products and fused attention read and write goes on
under their arithmetic, and is left out.

Letters: N parameters, h hidden, e bytes of one activation.
"""

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.memory import element_bytes
from megatron_lite.estimate.sizes import FP32


def layers_bytes_per_token(shape: ModelShape, precision: str, compiled: bool) -> int:
    """Of one layer, forward and backward: residual sum with norm (twice), activation function, dropout masks.

    Forward writes the sum and the norm's result, and reads the sum before; backward reads the saved sum and its
    gradient, and writes the new gradient: 6*h*e, twice. The activation function writes its result; backward reads its
    saved input and writes its gradient. A mask is a byte, written and read; torch.compile draws it again instead.
    """
    backward = element_bytes(precision) * (2 * 3 * shape.hidden_size + 2 * shape.fc1_width)
    return forward_bytes_per_token(shape, precision, compiled) + backward + _masks(shape, compiled)


def forward_bytes_per_token(shape: ModelShape, precision: str, compiled: bool) -> int:
    """Of one layer's forward pass alone, as when it is computed again."""
    return element_bytes(precision) * (2 * 3 * shape.hidden_size + shape.ffn_hidden_size) + _masks(shape, compiled)


def logits_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """Forward reads the logits that the product has written; backward reads them again and writes their gradients."""
    return 3 * element_bytes(precision) * shape.padded_vocab_size


def scores_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """Of one layer, if attention writes its scores down: beside forward, backward reads the probabilities and their
    gradients, and writes those of the scores."""
    return forward_scores_bytes_per_token(shape, precision) * 5 // 2


def forward_scores_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """The softmax reads scores and writes probabilities."""
    return 2 * element_bytes(precision) * shape.num_attention_heads * shape.seq_length


def optimizer_bytes_per_parameter(plan: Plan) -> int:
    """One pass over the gradients for their norm and one for the update, which reads and writes masters and moments and
    writes 16-bit weights: Adam in fp32 4 + 28, in fp16 2 + 28, in bf16 with fp32 gradients 4 + 30."""
    o = plan.args.optimizer
    moments = 2 if o.optimizer == "adam" else int(bool(o.sgd_momentum))
    weights = 0 if plan.precision == "fp32" else element_bytes(plan.precision)
    return 2 * gradient_bytes(plan) + 2 * FP32 * (1 + moments) + weights


def gradient_bytes(plan: Plan) -> int:
    """Of one parameter's gradient, as it is reduced over ranks."""
    return FP32 if plan.fp32_gradients else element_bytes(plan.precision)


def _masks(shape: ModelShape, compiled: bool) -> int:
    """Of a layer's two dropouts."""
    return 0 if compiled or not shape.hidden_dropout else 2 * shape.hidden_size
