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
    # int64, counted from the start of the document; --reset-position-ids, --dataloader-inter-document-masking
    positions_BT: Tensor | None
    # int64, attention stays inside equal numbers; --reset-attention-mask, --dataloader-inter-document-masking. They lie
    # where the samples came from, which is the host, and are those of whole sequences, whatever part this batch has
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
    begins_are_marked: bool = False,
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
        begins_are_marked: --dataloader-inter-document-masking: documents begin where a token is written as its
            complement, ~token, as by GPTDataset; they decide about positions and attention, and no EOD does.
        to_device: Copies a tensor to where the batch is needed.

    Raises:
        DataError: An option needs the end-of-document token and there is none.
    """
    finds_ends = reset_position_ids or reset_attention_mask
    if eod is None and (eod_mask_loss or (finds_ends and not begins_are_marked)):
        raise DataError(
            "--eod-mask-loss, --reset-position-ids, --reset-attention-mask: this tokenizer has no end-of-document "
            "token; leave them out or choose another --tokenizer-type"
        )
    documents_BT: Tensor | None = None
    if begins_are_marked or reset_attention_mask:
        # before the copy: who finds documents must not wait for a GPU
        documents_BT = _find_begins(raw_BT1, eod, begins_are_marked).cumsum(dim=1)
    raw_BT1 = to_device(raw_BT1)
    positions_BT: Tensor | None = None
    if begins_are_marked or reset_position_ids:
        begins_BT = _find_begins(raw_BT1, eod, begins_are_marked)
        positions_T = torch.arange(begins_BT.shape[1], device=begins_BT.device)
        starts_BT = begins_BT * positions_T
        positions_BT = positions_T - starts_BT.cummax(dim=1).values
    if begins_are_marked:
        raw_BT1 = torch.where(raw_BT1 < 0, ~raw_BT1, raw_BT1)
    tokens_BT = raw_BT1[:, :-1].contiguous()
    labels_BT = raw_BT1[:, 1:].contiguous()
    loss_mask_BT: Tensor | None = None
    if eod_mask_loss:
        assert eod is not None
        loss_mask_BT = torch.ne(tokens_BT, eod).float()
    return Batch(tokens_BT, labels_BT, loss_mask_BT, positions_BT, documents_BT)


def _find_begins(raw_BT1: Tensor, eod: int | None, begins_are_marked: bool) -> Tensor:
    """Find the inputs with which a document begins, bool [B, T].

    The first of a sample need not be among them.

    Args:
        raw_BT1: int64 [B, T + 1].
        eod: The id of the end-of-document token.
        begins_are_marked: Whether documents begin at negative numbers, and not behind EODs.
    """
    if begins_are_marked:
        return raw_BT1[:, :-1] < 0
    assert eod is not None
    is_end_BT = torch.eq(raw_BT1[:, :-1], eod)
    # a document's own EOD ends it, so that the next one begins behind it
    begins_BT = torch.zeros_like(is_end_BT)
    begins_BT[:, 1:] = is_end_BT[:, :-1]
    return begins_BT


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
