"""model/loss.py's cross entropy in two pieces for torch.compile, of which each becomes one kernel over all rows.

A compiled kernel holds its fp32 numbers in registers, so that no rows have to be taken apart for memory's sake. Letters: M = B*T
tokens, V padded vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.marks import LOSS, mark_memory


def losses_and_normalizers(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """losses_M and log(sum(exp(logits)))_M, which tells backward all about a row; fp32."""
    normalizers_M = logits_MV.float().logsumexp(-1)
    return normalizers_M - logits_MV.gather(1, labels_M[:, None]).squeeze(1).float(), normalizers_M


def write_gradients(logits_MV: Tensor, labels_M: Tensor, normalizers_M: Tensor, gradient_M: Tensor):
    """Turn logits into the losses' gradient with respect to them: (softmax - one-hot) * gradient, in fp32 until it is written.

    Each number by itself; a scatter of ones would be a kernel of its own.
    """
    softmax_MV = (logits_MV.float() - normalizers_M[:, None]).exp()
    is_label_MV = torch.arange(logits_MV.shape[1], device=logits_MV.device) == labels_M[:, None]
    logits_MV.copy_(torch.where(is_label_MV, softmax_MV - 1, softmax_MV) * gradient_M[:, None])


class Pieces(NamedTuple):
    """The two functions above, compiled or not."""

    losses_and_normalizers: Callable[..., tuple[Tensor, Tensor]] = losses_and_normalizers
    write_gradients: Callable[..., None] = write_gradients


def fused_token_losses(hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, pieces: Pieces) -> Tensor:
    """As model.loss.token_losses. Logits are held once, in the model's precision, and become their own gradient; torch refuses
    a second backward, since it notices that."""
    logits_MV = F.linear(hidden_BTH.flatten(0, 1), weight_VH)
    return _Losses.apply(logits_MV, labels_BT.flatten(), pieces).view(labels_BT.shape)


class _Losses(torch.autograd.Function):
    """losses_M of logits_MV, which are overwritten: nobody else may hold them."""

    @staticmethod
    def forward(ctx, logits_MV: Tensor, labels_M: Tensor, pieces: Pieces) -> Tensor:
        # detached, so that training and evaluating are alike to the compiler
        losses_M, normalizers_M = pieces.losses_and_normalizers(logits_MV.detach(), labels_M)
        ctx.save_for_backward(logits_MV, labels_M, normalizers_M)
        ctx.pieces = pieces
        return losses_M

    @staticmethod
    @once_differentiable
    @mark_memory(LOSS)
    def backward(ctx, gradient_M: Tensor) -> tuple[Tensor, None, None]:
        logits_MV, labels_M, normalizers_M = ctx.saved_tensors
        ctx.pieces.write_gradients(logits_MV, labels_M, normalizers_M, gradient_M)
        return logits_MV, None, None
