"""Cross entropy of the next token. Letters: B batch, T positions, M = B*T, H hidden, V padded vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_losses(hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, rows_at_once: int = 512) -> Tensor:
    """losses_BT in fp32, in nats: -log softmax(hidden @ weight^T)[label], over the whole padded vocabulary.

    Logits are held once, in the model's precision; in fp32 only `rows_at_once` rows of them are at any time. Backward turns them
    into their own gradient; torch refuses a second one, since it notices that.
    """
    logits_MV = F.linear(hidden_BTH.flatten(0, 1), weight_VH)
    return _RowLosses.apply(logits_MV, labels_BT.flatten(), rows_at_once).view(labels_BT.shape)


class _RowLosses(torch.autograd.Function):
    """losses_M of logits_MV, which are overwritten: nobody else may hold them."""

    @staticmethod
    def forward(ctx, logits_MV: Tensor, labels_M: Tensor, rows_at_once: int) -> Tensor:
        losses_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
        for rows, labels_R1 in _chunks(labels_M, rows_at_once):
            losses_M[rows] = row_losses(logits_MV[rows], labels_R1)
        ctx.save_for_backward(logits_MV, labels_M)
        ctx.rows_at_once = rows_at_once
        return losses_M

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_M: Tensor) -> tuple[Tensor, None, None]:
        logits_MV, labels_M = ctx.saved_tensors
        for rows, labels_R1 in _chunks(labels_M, ctx.rows_at_once):
            # in fp32 down to here: a small gradient times a large loss scale is what fp16 can hold
            logits_MV[rows] = row_gradients(logits_MV[rows], labels_R1, gradient_M[rows, None])
        return logits_MV, None, None


def row_losses(logits_RV: Tensor, labels_R1: Tensor) -> Tensor:
    """losses_R in fp32."""
    return -logits_RV.log_softmax(-1, dtype=torch.float32).gather(1, labels_R1).squeeze(1)


def row_gradients(logits_RV: Tensor, labels_R1: Tensor, gradient_R1: Tensor) -> Tensor:
    """Of the losses with respect to the logits: (softmax - one-hot) * gradient, in fp32."""
    gradients_RV = logits_RV.softmax(-1, dtype=torch.float32)
    gradients_RV.scatter_add_(1, labels_R1, gradient_R1.new_full((), -1.0).expand_as(labels_R1))
    return gradients_RV.mul_(gradient_R1)


def _chunks(labels_M: Tensor, rows_at_once: int):
    for first in range(0, len(labels_M), rows_at_once):
        rows = slice(first, first + rows_at_once)
        yield rows, labels_M[rows, None]
