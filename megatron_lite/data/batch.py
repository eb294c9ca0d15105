"""Makes what the model and the loss take from raw samples.

Shapes: B samples of a micro-batch, T tokens of a sequence (T1 = T + 1: inputs and labels overlap).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import DataError
from megatron_lite.marks import INPUT, mark_memory


@dataclass(frozen=True)
class Batch:
    """A micro-batch. What an option adds is None while the option is off, so that the plain case costs nothing."""

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64
    loss_mask_BT: Tensor | None  # float32, 0 where the loss does not count; --eod-mask-loss
    positions_BT: Tensor | None  # int64, counted from the start of the document; --reset-position-ids
    # int64, attention stays inside equal numbers; --reset-attention-mask. They lie where the samples came from, which
    # is the host, and are those of whole sequences, whatever part of them this batch has
    documents_BT: Tensor | None
    # of the tokens whose loss counts, those of one context parallel rank on average; None: this batch's own number
    mean_tokens: Tensor | None = None

    def cut(self, chunks: tuple[range, ...]) -> "Batch":
        """The positions of one context parallel rank.

        Args:
            chunks: The stretches of the sequence that the rank has.
        """

        def take(x_BT: Tensor) -> Tensor:
            return torch.cat([x_BT[:, chunk.start : chunk.stop] for chunk in chunks], dim=1)

        mask_BT = self.loss_mask_BT
        positions_BT = self.positions_BT
        mean_tokens = None
        if mask_BT is not None:
            share = sum(map(len, chunks)) / mask_BT.shape[1]
            mean_tokens = mask_BT.sum() * share
        return Batch(
            take(self.tokens_BT),
            take(self.labels_BT),
            None if mask_BT is None else take(mask_BT),
            None if positions_BT is None else take(positions_BT),
            self.documents_BT,
            mean_tokens,
        )


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def make_batch(
    raw_BT1: Tensor,
    *,
    eod: int | None,
    eod_mask_loss: bool,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    to_device: Callable[[Tensor], Tensor] = _keep,
) -> Batch:
    """Split raw samples into inputs and labels, on the device where they are needed and without waiting for it.

    The end-of-document token belongs to the document that it ends; the loss is masked where it is the input.

    Args:
        raw_BT1: int64 [B, T + 1].
        eod: The id of the end-of-document token; None: there is none.
        eod_mask_loss: --eod-mask-loss.
        reset_position_ids: --reset-position-ids.
        reset_attention_mask: --reset-attention-mask.
        to_device: Copies a tensor to where the batch is needed.

    Raises:
        DataError: An option needs the end-of-document token and there is none.
    """
    documents_BT: Tensor | None = None
    if reset_attention_mask and eod is not None:
        # before the copy: who finds documents must not wait for a GPU
        ended_BT = (raw_BT1[:, :-1] == eod).long()
        documents_BT = ended_BT.cumsum(dim=1) - ended_BT
    raw_BT1 = to_device(raw_BT1)
    tokens_BT = raw_BT1[:, :-1].contiguous()
    labels_BT = raw_BT1[:, 1:].contiguous()
    if not (eod_mask_loss or reset_position_ids or reset_attention_mask):
        return Batch(tokens_BT, labels_BT, None, None, None)
    if eod is None:
        raise DataError(
            "--eod-mask-loss, --reset-position-ids, --reset-attention-mask: this tokenizer has no end-of-document "
            "token; leave them out or choose another --tokenizer-type"
        )
    is_eod_BT = tokens_BT == eod
    loss_mask_BT: Tensor | None = None
    positions_BT: Tensor | None = None
    if eod_mask_loss:
        loss_mask_BT = (~is_eod_BT).float()
    if reset_position_ids:
        positions_T = torch.arange(is_eod_BT.shape[1], device=is_eod_BT.device)
        # A document starts one after the last EOD strictly before the token: its own EOD does not count.
        starts_BT = torch.zeros_like(is_eod_BT, dtype=torch.int64)
        starts_BT[:, 1:] = is_eod_BT[:, :-1] * positions_T[1:]
        positions_BT = positions_T - starts_BT.cummax(dim=1).values
    return Batch(tokens_BT, labels_BT, loss_mask_BT, positions_BT, documents_BT)


@mark_memory(INPUT)
class ToDevice:
    """Copies tensors to the device; to a GPU on a stream of its own.

    The host runs ahead of the GPU: on the stream that computes, the copy of a micro-batch would queue behind all
    kernels of the one before. On its own stream it runs while they do, and the computing stream waits for it only when
    it gets there. The host waits for nothing, provided that the tensor lies in pinned memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; itself if it lies there already. To be used on the stream that is current now."""
        if self._copying is None or tensor.device == self.device:
            return tensor.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copying):
            copied = tensor.to(self.device, non_blocking=True)
        computing.wait_stream(self._copying)
        # Its memory belongs to the copying stream, which must not fill it again before computing is done with it.
        copied.record_stream(computing)
        return copied
