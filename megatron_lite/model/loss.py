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
# makes own_M and normalizers_M of this rank's vocabulary entries those of all
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def token_losses(
    hidden_BTH: Tensor,
    weight_VH: Tensor,
    labels_BT: Tensor,
    rows_at_once: int = 512,
    kernels: Kernels = TORCH,
) -> Tensor:
    """Compute each token's loss, -log softmax(hidden @ weight^T)[label], over the whole padded vocabulary.

    Logits are held once, in the model's precision, and become their own gradient.

    Args:
        hidden_BTH: Outputs of the last layer, in the model's precision.
        weight_VH: The output projection, in the same precision.
        labels_BT: int64, the token that each position is to predict.
        rows_at_once: Rows of 16-bit logits that are held in fp32 at any time.
        kernels: Functions that multiply and exponentiate.

    Returns:
        losses_BT, fp32, in nats.
    """
    if hidden_BTH.dtype == torch.float16:  # it cannot hold softmax itself, of which most is too small
        pieces = take_rows_apart(rows_at_once, kernels)
        return fused_token_losses(hidden_BTH, weight_VH, labels_BT, pieces, project=kernels.products.linear)
    # torch gives apply no types
    losses_M: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        hidden_BTH.flatten(0, 1),
        weight_VH,
        labels_BT.flatten(),
        rows_at_once,
        torch.is_grad_enabled(),
        kernels,
    )
    return losses_M.view(labels_BT.shape)


class _Losses(torch.autograd.Function):
    """Losses whose gradient with respect to the logits, softmax - one-hot, is made along with them.

    The gradient that backward is given multiplies the small factors of the products, instead of the many logits.
    """

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
        """Compute losses_M, fp32. learns: whether a backward follows; the other arguments are token_losses'."""
        logits_MV = kernels.multiply_logits(hidden_MH, weight_VH)
        below_M1 = logits_MV.gather(1, labels_M[:, None]).float()
        highest_M1, sums_M1 = _softmax(logits_MV, rows_at_once, learns, kernels)
        below_M1.sub_(highest_M1)  # the label's logit, counted from the highest
        if learns:  # the label's own number, in fp32 until it is written; scatter_ takes 130 ms in 16 bits
            own_M1 = below_M1.exp() / sums_M1 - 1
            own_M = own_M1.squeeze(1).to(logits_MV.dtype)
            rows_M = torch.arange(len(labels_M), device=labels_M.device)
            logits_MV[rows_M, labels_M] = own_M
        ctx.save_for_backward(hidden_MH, weight_VH, logits_MV)
        ctx.products = kernels.products
        return sums_M1.log_().sub_(below_M1).squeeze(1)

    @staticmethod
    @once_differentiable
    @mark_memory(LOSS)
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, gradients_MV = ctx.saved_tensors
        gradient_M1 = gradient_M[:, None]  # stays in fp32: rounded, it would be wrong in the same way for all tokens
        scaled_MH = torch.empty_like(hidden_MH)
        torch.mul(hidden_MH, gradient_M1, out=scaled_MH)
        of_weight_VH = _weight_gradient(ctx.products, gradients_MV, scaled_MH)
        del scaled_MH
        of_hidden_MH = ctx.products.compute_input_gradient(gradients_MV, weight_VH, hidden_MH)
        of_hidden_MH.mul_(gradient_M1)
        return of_hidden_MH, of_weight_VH, None, None, None, None


@mark_memory(WEIGHT_GRADIENT)
def _weight_gradient(products: Products, gradients_MV: Tensor, hidden_MH: Tensor) -> Tensor:
    """Gradient of the weight, weight_VH's shape.

    Its memory outlives backward; by its mark a snapshot's reader tells it from what backward gives back.
    """
    return products.compute_weight_gradient(gradients_MV, hidden_MH)


def _softmax(
    logits_MV: Tensor,
    rows_at_once: int,
    learns: bool,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Measure each row of logits, and turn it into its softmax, in steps that take a CPU less time than torch's own.

    Args:
        logits_MV: Logits, in the model's precision.
        rows_at_once: Rows that are held in fp32 at a time.
        learns: Whether logits become softmax.
        kernels: Has the exponential.

    Returns:
        highest_M1 and sums_M1: a row's highest logit, and the sum of exp(logit - highest); fp32.
    """
    both_2M1 = torch.empty(2, len(logits_MV), 1, dtype=torch.float32, device=logits_MV.device)
    highest_M1, sums_M1 = both_2M1
    room_RV = None
    if logits_MV.dtype != torch.float32:
        room_RV = torch.empty_like(logits_MV[:rows_at_once], dtype=torch.float32)
    for logits_RV, highest_R1, sums_R1 in _split_rows(rows_at_once, logits_MV, highest_M1, sums_M1):
        wide_RV = logits_RV
        if room_RV is not None:
            wide_RV = room_RV[: len(logits_RV)]
            wide_RV.copy_(logits_RV)
        torch.amax(wide_RV, -1, keepdim=True, out=highest_R1)
        wide_RV.sub_(highest_R1)
        exponentials_RV = kernels.exponentiate(wide_RV)
        torch.sum(exponentials_RV, -1, keepdim=True, out=sums_R1)
        if learns:
            wide_RV.mul_(sums_R1.reciprocal())
        if learns and room_RV is not None:
            logits_RV.copy_(wide_RV)
    return highest_M1, sums_M1


def _split_rows(rows_at_once: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all tensors, so many at a time."""
    return zip(*(tensor.split(rows_at_once) for tensor in tensors))


# --- in two pieces around what ranks may have to tell each other. With torch.compile each becomes one kernel over all
# rows, which holds its fp32 numbers in registers, so that no rows have to be taken apart for memory's sake


def measure_logits(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the labels' logits, own_M, and log(sum(exp(logits)))_M, which tells backward all about a row; fp32."""
    normalizers_M = logits_MV.float().logsumexp(-1)
    return _own_logits(logits_MV, labels_M), normalizers_M


def _own_logits(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """The labels' logits, own_M, in fp32.

    A label that is not among these vocabulary entries is another rank's, and its logit counts as 0.
    """
    number = logits_MV.shape[1]
    places_M = labels_M.clamp(0, number - 1)
    own_M = logits_MV.gather(1, places_M[:, None]).squeeze(1).float()
    is_here_M = (labels_M >= 0) & (labels_M < number)
    return own_M.where(is_here_M, 0.0)


def write_gradients(
    logits_MV: Tensor,
    labels_M: Tensor,
    normalizers_M: Tensor,
    gradient_M: Tensor,
) -> None:
    """Turn logits in place into the losses' gradient with respect to them: (softmax - one-hot) * gradient.

    Args:
        logits_MV: Logits, in the model's precision. The gradient is fp32 until it is written.
        labels_M: int64. Labels that are not among these vocabulary entries are another rank's.
        normalizers_M: log(sum(exp(logits))), fp32.
        gradient_M: The gradient with respect to the losses, fp32.
    """
    softmax_MV = logits_MV.float() - normalizers_M[:, None]
    softmax_MV = softmax_MV.exp()
    # each number by itself: a scatter of ones would be a kernel of its own
    entries_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    is_label_MV = entries_V == labels_M[:, None]
    of_losses_MV = torch.where(is_label_MV, softmax_MV - 1, softmax_MV)
    logits_MV.copy_(of_losses_MV * gradient_M[:, None])


class Pieces(NamedTuple):
    """The two functions above, compiled or not, or what does the same."""

    measure_logits: Callable[..., tuple[Tensor, Tensor]] = measure_logits
    write_gradients: Callable[..., None] = write_gradients


def take_rows_apart(rows_at_once: int, kernels: Kernels = TORCH) -> Pieces:
    """Pieces that hold so many rows in fp32 at a time."""
    measure = partial(_measure_rows, rows_at_once, kernels)
    write = partial(_write_row_gradients, rows_at_once, kernels)
    return Pieces(measure, write)


def _measure_rows(
    rows_at_once: int,
    kernels: Kernels,
    logits_MV: Tensor,
    labels_M: Tensor,
) -> tuple[Tensor, Tensor]:
    """Measure logits as measure_logits does, with so many rows in fp32 at a time."""
    normalizers = [_normalize_rows(kernels, logits_RV) for logits_RV in logits_MV.split(rows_at_once)]
    return _own_logits(logits_MV, labels_M), torch.cat(normalizers)


def _normalize_rows(kernels: Kernels, logits_RV: Tensor) -> Tensor:
    """The rows' log(sum(exp(logits)))_R, fp32.

    A function of its own, like _row_gradients, so that no rows in fp32 outlive their turn.
    """
    wide_RV = logits_RV.to(torch.float32, copy=True)
    highest_R1 = wide_RV.amax(-1, keepdim=True)
    wide_RV.sub_(highest_R1)
    exponentials_RV = kernels.exponentiate(wide_RV)
    sums_R1 = exponentials_RV.sum(-1, keepdim=True)
    normalizers_R1 = sums_R1.log_() + highest_R1
    return normalizers_R1.squeeze(1)


def _write_row_gradients(
    rows_at_once: int,
    kernels: Kernels,
    logits_MV: Tensor,
    labels_M: Tensor,
    normalizers_M: Tensor,
    gradient_M: Tensor,
) -> None:
    """Write gradients as write_gradients does, with so many rows in fp32 at a time."""
    for rows in _split_rows(rows_at_once, logits_MV, labels_M, normalizers_M, gradient_M):
        rows[0].copy_(_row_gradients(kernels, *rows))


def _row_gradients(
    kernels: Kernels,
    logits_RV: Tensor,
    labels_R: Tensor,
    normalizers_R: Tensor,
    gradient_R: Tensor,
) -> Tensor:
    """Gradients of the losses with respect to the logits of these rows, fp32 [R, V]."""
    number = logits_RV.shape[1]
    wide_RV = logits_RV.to(torch.float32, copy=True)
    wide_RV.sub_(normalizers_R[:, None])
    softmax_RV = kernels.exponentiate(wide_RV)
    is_here_R = (labels_R >= 0) & (labels_R < number)
    one_hot_R1 = is_here_R.float()[:, None]
    places_R1 = labels_R.clamp(0, number - 1)[:, None]
    of_losses_RV = softmax_RV.scatter_add_(1, places_R1, -one_hot_R1)
    return of_losses_RV.mul_(gradient_R[:, None])


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
    """Compute each token's loss, as token_losses does, also where ranks have a part of the vocabulary each.

    Logits are held once, in the model's precision, and become their own gradient; torch notices that, and refuses a
    second backward.

    Args:
        hidden_BTH: Outputs of the last layer. A rank may have those of some tokens only.
        weight_VH: This rank's rows of the output projection.
        labels_BT: int64, the token that each position is to predict.
        pieces: The functions that measure logits and write their gradients.
        project: Makes this rank's logits_BTV of all tokens from hidden_BTH and weight_VH.
        first_word: The first vocabulary entry of this rank.
        combine: Makes what pieces.measure_logits gives on each rank that of the whole vocabulary; None: it is.

    Returns:
        losses_BT, fp32, in nats.
    """
    logits_BTV = project(hidden_BTH, weight_VH)
    labels_M = labels_BT.flatten()
    if first_word:
        labels_M = labels_M - first_word
    logits_MV = logits_BTV.flatten(0, 1)
    # torch gives apply no types
    losses_M: Tensor = _FusedLosses.apply(logits_MV, labels_M, pieces, combine)  # type: ignore[no-untyped-call]
    return losses_M.view(labels_BT.shape)


class _FusedLosses(torch.autograd.Function):
    """Losses of logits that backward overwrites: nobody else may hold them.

    They never hold softmax, of which fp16 would lose most; they hold it multiplied by a gradient that has the loss
    scale in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_MV: Tensor,
        labels_M: Tensor,
        pieces: Pieces,
        combine: Combine | None,
    ) -> Tensor:
        """Compute the losses, losses_M, in fp32."""
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
