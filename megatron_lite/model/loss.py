"""Cross entropy of the next token.

Letters: B batch, T positions, M = B*T, R rows at a time, H hidden, V padded vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.marks import LOSS, WEIGHT_GRADIENT, mark_memory
from megatron_lite.model.kernels import Kernels
from megatron_lite.model.products import Products

TORCH = Kernels()
# makes own_M and normalizers_M of this rank's words those of all words
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def token_losses(
    hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor, rows_at_once: int = 512, kernels: Kernels = TORCH
) -> Tensor:
    """losses_BT in fp32, in nats: -log softmax(hidden @ weight^T)[label], over the whole padded vocabulary.

    Logits are held once, in the model's precision, and become their own gradient; of 16-bit ones `rows_at_once` rows
    are held in fp32 at any time. kernels: what multiplies and exponentiates.
    """
    if hidden_BTH.dtype == torch.float16:  # it cannot hold softmax itself, of which most is too small
        pieces = take_rows_apart(rows_at_once, kernels)
        return fused_token_losses(hidden_BTH, weight_VH, labels_BT, pieces, project=kernels.products.linear)
    hidden_MH, labels_M = hidden_BTH.flatten(0, 1), labels_BT.flatten()
    # torch gives apply no types
    losses_M: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight_VH, labels_M, rows_at_once, torch.is_grad_enabled(), kernels
    )
    return losses_M.view(labels_BT.shape)


class _Losses(torch.autograd.Function):
    """losses_M whose gradient with respect to the logits is made along with them, since softmax is at hand: softmax -
    one-hot. What backward brings along multiplies the small factors of the products, instead of the many logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        labels_M: Tensor,
        rows_at_once: int,
        learns: bool,
        kernels: Kernels,
    ) -> Tensor:
        logits_MV = kernels.multiply_logits(hidden_MH, weight_VH)
        below_M1 = logits_MV.gather(1, labels_M[:, None]).float()
        highest_M1, sums_M1 = _softmax(logits_MV, rows_at_once, learns, kernels)
        below_M1.sub_(highest_M1)  # the label's logit, counted from the highest
        if learns:  # the label's own number, in fp32 until it is written; scatter_ takes 130 ms in 16 bits
            own_M = (below_M1.exp() / sums_M1 - 1).squeeze(1)
            logits_MV[torch.arange(len(labels_M), device=labels_M.device), labels_M] = own_M.to(logits_MV.dtype)
        ctx.save_for_backward(hidden_MH, weight_VH, logits_MV)
        ctx.products = kernels.products
        return sums_M1.log_().sub_(below_M1).squeeze(1)

    @staticmethod
    @once_differentiable
    @mark_memory(LOSS)
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, gradients_MV = ctx.saved_tensors
        gradient_M1 = gradient_M[:, None]  # stays in fp32: rounded, it would be wrong in the same way for all tokens
        of_weight_VH = _weight_gradient(
            ctx.products, gradients_MV, torch.mul(hidden_MH, gradient_M1, out=torch.empty_like(hidden_MH))
        )
        of_hidden_MH = ctx.products.compute_input_gradient(gradients_MV, weight_VH, hidden_MH).mul_(gradient_M1)
        return of_hidden_MH, of_weight_VH, None, None, None, None


@mark_memory(WEIGHT_GRADIENT)
def _weight_gradient(products: Products, gradients_MV: Tensor, hidden_MH: Tensor) -> Tensor:
    """Gradient of the weight, whose memory stays;
    by its mark a snapshot's reader tells it from what backward gives back."""
    return products.compute_weight_gradient(gradients_MV, hidden_MH)


def _softmax(logits_MV: Tensor, rows_at_once: int, learns: bool, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """highest_M1 and sums_M1: each row's highest logit, and the sum of exp(logit - highest), in fp32. Logits become
    softmax, if anyone learns from it. In steps of its own, which on a CPU take less time than torch's softmax."""
    highest_M1, sums_M1 = torch.empty(2, len(logits_MV), 1, dtype=torch.float32, device=logits_MV.device)
    room_RV = None
    if logits_MV.dtype != torch.float32:
        room_RV = torch.empty_like(logits_MV[:rows_at_once], dtype=torch.float32)
    for logits_RV, highest_R1, sums_R1 in _split_rows(rows_at_once, logits_MV, highest_M1, sums_M1):
        wide_RV = logits_RV if room_RV is None else room_RV[: len(logits_RV)].copy_(logits_RV)
        torch.amax(wide_RV, -1, keepdim=True, out=highest_R1)
        torch.sum(kernels.exponentiate(wide_RV.sub_(highest_R1)), -1, keepdim=True, out=sums_R1)
        if learns:
            wide_RV.mul_(sums_R1.reciprocal())
        if learns and room_RV is not None:
            logits_RV.copy_(wide_RV)
    return highest_M1, sums_M1


def _split_rows(rows_at_once: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(rows_at_once) for tensor in tensors))


# --- in two pieces around what ranks may have to tell each other. With torch.compile each becomes one kernel over all
# rows, which holds its fp32 numbers in registers, so that no rows have to be taken apart for memory's sake


def measure_logits(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """own_M, the labels' logits, and log(sum(exp(logits)))_M, which tells backward all about a row; fp32."""
    return _own_logits(logits_MV, labels_M), logits_MV.float().logsumexp(-1)


def _own_logits(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """own_M in fp32. A label may be none of these words, but another rank's, and its logit then counts as 0."""
    own_M1 = logits_MV.gather(1, labels_M.clamp(0, logits_MV.shape[1] - 1)[:, None])
    return own_M1.squeeze(1).float().where((labels_M >= 0) & (labels_M < logits_MV.shape[1]), 0.0)


def write_gradients(logits_MV: Tensor, labels_M: Tensor, normalizers_M: Tensor, gradient_M: Tensor) -> None:
    """Turn logits into the losses' gradient with respect to them: (softmax - one-hot) * gradient, in fp32 until it is
    written.

    Each number by itself; a scatter of ones would be a kernel of its own.
    """
    softmax_MV = (logits_MV.float() - normalizers_M[:, None]).exp()
    is_label_MV = torch.arange(logits_MV.shape[1], device=logits_MV.device) == labels_M[:, None]
    logits_MV.copy_(torch.where(is_label_MV, softmax_MV - 1, softmax_MV) * gradient_M[:, None])


class Pieces(NamedTuple):
    """The two functions above, compiled or not, or what does the same."""

    measure_logits: Callable[..., tuple[Tensor, Tensor]] = measure_logits
    write_gradients: Callable[..., None] = write_gradients


def take_rows_apart(rows_at_once: int, kernels: Kernels = TORCH) -> Pieces:
    """Pieces that hold so many rows in fp32 at a time."""
    measure = partial(_measure_rows, rows_at_once, kernels)
    write = partial(_write_row_gradients, rows_at_once, kernels)
    return Pieces(measure, write)


def _measure_rows(rows_at_once: int, kernels: Kernels, logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    normalizers = [_normalize_rows(kernels, logits_RV) for logits_RV in logits_MV.split(rows_at_once)]
    return _own_logits(logits_MV, labels_M), torch.cat(normalizers)


def _normalize_rows(kernels: Kernels, logits_RV: Tensor) -> Tensor:
    """log(sum(exp(logits)))_R in fp32.

    A function of its own, like the next, so that no rows in fp32 outlive their turn.
    """
    wide_RV = logits_RV.to(torch.float32, copy=True)
    highest_R1 = wide_RV.amax(-1, keepdim=True)
    sums_R1 = kernels.exponentiate(wide_RV.sub_(highest_R1)).sum(-1, keepdim=True)
    return (sums_R1.log_() + highest_R1).squeeze(1)


def _write_row_gradients(
    rows_at_once: int,
    kernels: Kernels,
    logits_MV: Tensor,
    labels_M: Tensor,
    normalizers_M: Tensor,
    gradient_M: Tensor,
) -> None:
    for rows in _split_rows(rows_at_once, logits_MV, labels_M, normalizers_M, gradient_M):
        rows[0].copy_(_row_gradients(kernels, *rows))


def _row_gradients(
    kernels: Kernels, logits_RV: Tensor, labels_R: Tensor, normalizers_R: Tensor, gradient_R: Tensor
) -> Tensor:
    """Gradients of the losses with respect to the logits, in fp32."""
    softmax_RV = kernels.exponentiate(logits_RV.to(torch.float32, copy=True).sub_(normalizers_R[:, None]))
    is_here_R1 = ((labels_R >= 0) & (labels_R < logits_RV.shape[1]))[:, None]
    labels_R1 = labels_R.clamp(0, logits_RV.shape[1] - 1)[:, None]
    return softmax_RV.scatter_add_(1, labels_R1, -is_here_R1.float()).mul_(gradient_R[:, None])


def fused_token_losses(
    hidden_BTH: Tensor,
    weight_VH: Tensor,
    labels_BT: Tensor,
    pieces: Pieces,
    *,
    project: Callable[..., Tensor] = F.linear,
    first_word: int = 0,
    combine: Combine | None = None,
) -> Tensor:
    """As token_losses. Logits are held once, in the model's precision, and become their own gradient; torch refuses
    a second backward, since it notices that.

    Where ranks have a part of the vocabulary each, from `first_word` on, `project` makes this rank's logits from
    hidden_BTH, of which it may have some tokens only, and `combine` makes what pieces.measure_logits gives on each rank
    that of all words.
    """
    logits_MV = project(hidden_BTH, weight_VH).flatten(0, 1)
    labels_M = labels_BT.flatten()
    labels_M = labels_M - first_word if first_word else labels_M
    # torch gives apply no types
    losses_M: Tensor = _FusedLosses.apply(logits_MV, labels_M, pieces, combine)  # type: ignore[no-untyped-call]
    return losses_M.view(labels_BT.shape)


class _FusedLosses(torch.autograd.Function):
    """losses_M of logits_MV, which are overwritten: nobody else may hold them. They hold no softmax, of which fp16
    would lose most; multiplied by a gradient into which the loss scale went, it can hold it."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor, pieces: Pieces, combine: Combine | None) -> Tensor:
        # detached, so that training and evaluating are alike to the compiler
        own_M, normalizers_M = pieces.measure_logits(logits_MV.detach(), labels_M)
        if combine is not None:
            own_M, normalizers_M = combine(own_M, normalizers_M)
        ctx.save_for_backward(logits_MV, labels_M, normalizers_M)
        ctx.pieces = pieces
        return normalizers_M - own_M

    @staticmethod
    @once_differentiable
    @mark_memory(LOSS)
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor, None, None, None]:
        logits_MV, labels_M, normalizers_M = ctx.saved_tensors
        ctx.pieces.write_gradients(logits_MV, labels_M, normalizers_M, gradient_M)
        return logits_MV, None, None, None
