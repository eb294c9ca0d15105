"""Cross entropy of the next token. Letters: B batch, T positions, M = B*T, R rows at a time, H hidden, V padded vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_losses(hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, rows_at_once: int = 512) -> Tensor:
    """losses_BT in fp32, in nats: -log softmax(hidden @ weight^T)[label], over the whole padded vocabulary.

    Logits are held once, in the model's precision, and become their own gradient; in fp32 only `rows_at_once` rows of them are at
    any time.
    """
    hidden_MH, labels_M = hidden_BTH.flatten(0, 1), labels_BT.flatten()
    if hidden_BTH.dtype == torch.float16:
        losses_M = _ScaledLosses.apply(F.linear(hidden_MH, weight_VH), labels_M, rows_at_once)
    else:
        losses_M = _Losses.apply(hidden_MH, weight_VH, labels_M, rows_at_once, torch.is_grad_enabled())
    return losses_M.view(labels_BT.shape)


class _Losses(torch.autograd.Function):
    """losses_M whose gradient with respect to the logits is made along with them, since softmax is at hand: softmax - one-hot.
    What backward brings along multiplies the small factors of the products, instead of the many logits."""

    @staticmethod
    def forward(ctx, hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, rows_at_once: int, learns: bool) -> Tensor:
        logits_MV = F.linear(hidden_MH, weight_VH)
        losses_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
        room_RV = logits_MV.new_empty(min(rows_at_once, len(logits_MV)), logits_MV.shape[1], dtype=torch.float32)
        for rows, labels_R1 in _chunks(labels_M, rows_at_once):
            logits_RV = logits_MV[rows]
            wide_RV = room_RV[: len(logits_RV)].copy_(logits_RV)
            torch.log_softmax(wide_RV, -1, out=wide_RV)
            torch.gather(wide_RV, 1, labels_R1, out=losses_M[rows, None])
            if learns:
                logits_RV.copy_(_minus_one_hot(wide_RV.exp_(), labels_R1))
        ctx.save_for_backward(hidden_MH, weight_VH, logits_MV)
        return losses_M.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_M: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_MH, weight_VH, gradients_MV = ctx.saved_tensors
        gradient_M1 = gradient_M[:, None]  # stays in fp32: rounded, it would be wrong in the same way for all tokens
        of_weight_VH = gradients_MV.t() @ torch.mul(hidden_MH, gradient_M1, out=torch.empty_like(hidden_MH))
        of_hidden_MH = (gradients_MV @ weight_VH).mul_(gradient_M1)
        return of_hidden_MH, of_weight_VH, None, None, None


class _ScaledLosses(torch.autograd.Function):
    """The same of logits_MV, which are overwritten: nobody else may hold them. fp16 cannot hold softmax itself, of which most is too
    small; multiplied by a gradient into which the loss scale went, it can."""

    @staticmethod
    def forward(ctx, logits_MV: Tensor, labels_M: Tensor, rows_at_once: int) -> Tensor:
        losses_M = torch.empty(len(logits_MV), dtype=torch.float32, device=logits_MV.device)
        for rows, labels_R1 in _chunks(labels_M, rows_at_once):
            losses_M[rows] = _row_losses(logits_MV[rows], labels_R1)
        ctx.save_for_backward(logits_MV, labels_M)
        ctx.rows_at_once = rows_at_once
        return losses_M

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_M: Tensor) -> tuple[Tensor, None, None]:
        """To be called once; torch notices a second time."""
        logits_MV, labels_M = ctx.saved_tensors
        for rows, labels_R1 in _chunks(labels_M, ctx.rows_at_once):
            logits_MV[rows] = _row_gradients(logits_MV[rows], labels_R1, gradient_M[rows, None])
        return logits_MV, None, None


def _row_losses(logits_RV: Tensor, labels_R1: Tensor) -> Tensor:
    """losses_R in fp32. A function of its own, like the next, so that no rows in fp32 outlive their turn."""
    return -logits_RV.log_softmax(-1, dtype=torch.float32).gather(1, labels_R1).squeeze(1)


def _row_gradients(logits_RV: Tensor, labels_R1: Tensor, gradient_R1: Tensor) -> Tensor:
    """Of the losses with respect to the logits, in fp32."""
    return _minus_one_hot(logits_RV.softmax(-1, dtype=torch.float32), labels_R1).mul_(gradient_R1)


def _minus_one_hot(softmax_RV: Tensor, labels_R1: Tensor) -> Tensor:
    """Changes and returns softmax_RV."""
    return softmax_RV.scatter_add_(1, labels_R1, softmax_RV.new_full((), -1.0).expand_as(labels_R1))


def _chunks(labels_M: Tensor, rows_at_once: int):
    for first in range(0, len(labels_M), rows_at_once):
        rows = slice(first, first + rows_at_once)
        yield rows, labels_M[rows, None]
