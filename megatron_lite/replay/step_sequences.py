"""Describes the sequences of a step's batch: their losses and gradients, the documents in them, and which stand out."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from megatron_lite.data.sample_pieces import SamplePiece
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.formats.replay_record import DocumentPiece, SequenceRecord
from megatron_lite.replay.replayed_training import ReplayedTraining, keep_finite
from megatron_lite.train.data_streams import DataStreams

Place = tuple[int, int, int]  # data rank, micro-batch, row

MAX_PIECES = 8  # of a sequence that are described
MAX_TEXT_TOKENS = 64
# a sequence stands out where its loss is so many spreads above the middle of others, and so many nats
LOSS_SPREADS = 6.0
MIN_SPREAD = 0.02
MIN_EXCESS = 0.1
MIN_OTHER_LOSSES = 3  # that have a middle
# or its gradient is so many times that of the middle one of its batch
GRADIENT_FACTOR = 8.0
# or so much of it is one token, and so many times as much as in the middle one
TOP_SHARE = 0.5
TOP_FACTOR = 3.0
# of a batch that stands out as a whole, no sequence does
MAX_SUSPECT_SHARE = 0.5
MAD_TO_SPREAD = 1.4826


def average_losses(training: ReplayedTraining) -> list[float]:
    """The mean loss of each sequence of the newest watched step; only of those that this rank has losses of."""
    averages = []
    for _, losses_BT, mask_BT in _list_losses(training):
        sums = (losses_BT * mask_BT).sum(1)
        labels = mask_BT.sum(1).clamp(min=1)
        means = sums / labels
        averages += means.tolist()
    return [mean for mean in averages if math.isfinite(mean)]


def _list_losses(training: ReplayedTraining) -> Iterable[tuple[int, Tensor, Tensor]]:
    """List (micro-batch, losses_BT, mask_BT) of the newest watched step, in double precision."""
    for micro_batch, losses_BT in training.watched.losses.items():
        mask_BT = training.batches.made[micro_batch].loss_mask_BT
        if mask_BT is None:
            mask_BT = torch.ones_like(losses_BT)
        yield micro_batch, losses_BT.double(), mask_BT.double()


class SequenceReader:
    """Reads the sequences of steps.

    Args:
        streams: The run's data.
        tokenizer: Decodes documents.
        max_text: Characters that are kept of a text.
    """

    def __init__(self, streams: DataStreams, tokenizer: Tokenizer, max_text: int) -> None:
        self._streams = streams
        self._tokenizer = tokenizer
        self._max_text = max_text

    def read(self, training: ReplayedTraining, consumed: int) -> list[SequenceRecord]:
        """Read the sequences of the newest watched step.

        Args:
            training: It ran the step.
            consumed: Samples consumed before it.
        """
        layout = training.plan.layout
        losses = {}
        for number, losses_BT, mask_BT in _list_losses(training):
            losses[number] = (losses_BT, mask_BT)
        is_whole = layout.context == 1
        drawn = self._streams.draw_samples(consumed)
        records = []
        for micro_batch, raw_BT1 in enumerate(training.batches.raw):
            samples = None if drawn is None else next(drawn, None)
            gradients = training.watched.row_gradients.get(micro_batch)
            for row in range(len(raw_BT1)):
                found = SequenceRecord(data_rank=layout.data_rank, micro_batch=micro_batch, row=row)
                sample = None
                if samples is not None:
                    sample = samples[row]
                found = self._describe_tokens(found, raw_BT1[row], sample)
                if gradients is not None:
                    norm = float(gradients[row])
                    gradient = keep_finite(norm)
                    found = msgspec.structs.replace(found, gradient=gradient, is_finite=gradient is not None)
                if micro_batch in losses:
                    losses_BT, mask_BT = losses[micro_batch]
                    found = _add_losses(found, losses_BT[row], mask_BT[row], is_whole)
                records.append(found)
        return records

    def _describe_tokens(self, record: SequenceRecord, raw_T1: Tensor, sample: int | None) -> SequenceRecord:
        """Add what the tokens of a sequence tell.

        Args:
            record: Of the sequence.
            raw_T1: Its tokens, of which the complement marks beginnings.
            sample: Its number in the data set.
        """
        tokens = torch.where(raw_T1 < 0, ~raw_T1, raw_T1)
        _, counts = tokens.unique(return_counts=True)
        pieces: list[SamplePiece] = []
        if sample is not None:
            pieces = self._streams.find_pieces(sample)
        described = []
        for piece in pieces[:MAX_PIECES]:
            end = piece.begin + piece.tokens
            own = tokens[piece.begin : end]
            described.append(
                DocumentPiece(
                    prefix=piece.prefix,
                    number=piece.sequence,
                    offset=piece.offset,
                    tokens=piece.tokens,
                    text=self._decode(own),
                )
            )
        return msgspec.structs.replace(
            record,
            sample=sample,
            top_share=int(counts.max()) / len(tokens),
            variety=len(counts) / len(tokens),
            pieces=tuple(described),
            text="" if pieces else self._decode(tokens),
        )

    def _decode(self, tokens: Tensor) -> str:
        """Decode the beginning of a text; an id that the tokenizer does not know leaves the ids."""
        ids = tokens[:MAX_TEXT_TOKENS].tolist()
        try:
            text = self._tokenizer.decode(ids)
        except (ValueError, KeyError, IndexError, OverflowError):
            text = " ".join(map(str, ids))
        return text[: self._max_text]


def _add_losses(record: SequenceRecord, losses_T: Tensor, mask_T: Tensor, is_whole: bool) -> SequenceRecord:
    """Add the losses of a sequence.

    Args:
        record: Of the sequence.
        losses_T: Losses of its labels on this rank.
        mask_T: Which of them count.
        is_whole: This rank has all labels.
    """
    counted_T = losses_T * mask_T
    loss_sum = keep_finite(float(counted_T.sum()))
    pieces = list(record.pieces)
    # the label at a place is the token behind it
    begin = -1
    for number, piece in enumerate(pieces):
        end = begin + piece.tokens
        labels = slice(max(begin, 0), end)
        begin = end
        counted = float(mask_T[labels].sum())
        if not (is_whole and counted):
            continue
        total = float(counted_T[labels].sum())
        loss = keep_finite(total / counted)
        pieces[number] = msgspec.structs.replace(piece, loss=loss)
    return msgspec.structs.replace(
        record,
        loss_sum=loss_sum,
        labels=float(mask_T.sum()),
        is_finite=record.is_finite and loss_sum is not None,
        pieces=tuple(pieces),
    )


def merge_sequences(everyones: Iterable[Sequence[SequenceRecord]]) -> list[SequenceRecord]:
    """Merge what ranks saw of the same sequences: stages of a pipeline have losses or gradients, context parallel ranks
    some of the labels.

    Args:
        everyones: Those of each rank that counts: of tensor parallel ranks one.
    """
    merged: dict[Place, SequenceRecord] = {}
    for records in everyones:
        for one in records:
            place = find_place(one)
            known = merged.get(place)
            merged[place] = one if known is None else _merge(known, one)
    return [merged[place] for place in sorted(merged)]


def find_place(record: SequenceRecord) -> Place:
    """Find where a sequence stands in the batch."""
    return record.data_rank, record.micro_batch, record.row


def _merge(one: SequenceRecord, other: SequenceRecord) -> SequenceRecord:
    both = (one, other)
    with_losses = [record for record in both if record.labels]
    sums = [record.loss_sum for record in with_losses if record.loss_sum is not None]
    gradients = [record.gradient for record in both if record.gradient is not None]
    loss_sum = None
    if sums and len(sums) == len(with_losses):
        loss_sum = sum(sums)
    labels = sum(record.labels for record in with_losses)
    described = one
    if with_losses:
        described = with_losses[0]
    return msgspec.structs.replace(
        described,
        loss_sum=loss_sum,
        labels=labels,
        gradient=max(gradients, default=None),
        is_finite=one.is_finite and other.is_finite,
    )


def find_suspects(sequences: Sequence[SequenceRecord], earlier: Mapping[int, Sequence[float]]) -> list[Place]:
    """Find the sequences of a batch that stand out from the others, and from those of the steps before.

    Args:
        sequences: Those of the whole batch.
        earlier: Mean losses of sequences by iteration.

    Returns:
        Their places; none where half of the batch or more would stand out.
    """
    past = [loss for losses in earlier.values() for loss in losses]
    suspects = [find_place(one) for one in sequences if _stands_out(one, sequences, past)]
    if len(suspects) > MAX_SUSPECT_SHARE * len(sequences):
        return []
    return suspects


def _stands_out(one: SequenceRecord, sequences: Sequence[SequenceRecord], past: Sequence[float]) -> bool:
    """Whether a sequence stands out. The arguments are those of find_suspects."""
    if not one.is_finite:
        return True
    others = [other for other in sequences if other is not one]
    mean = _average(one)
    means = [_average(other) for other in others]
    losses = list(past)
    losses += [loss for loss in means if loss is not None]
    if mean is not None and _is_high(mean, losses):
        return True
    gradients = [other.gradient for other in others if other.gradient is not None]
    own = one.gradient
    if own is not None and len(gradients) > 1:
        usual = statistics.median(gradients)
        if own > GRADIENT_FACTOR * usual:
            return True
    shares = [other.top_share for other in others]
    if not shares:
        return False
    usual = statistics.median(shares)
    return one.top_share > max(TOP_SHARE, TOP_FACTOR * usual)


def _is_high(mean: float, losses: Sequence[float]) -> bool:
    """Whether a loss lies far above the middle of others."""
    if len(losses) < MIN_OTHER_LOSSES:
        return False
    middle = statistics.median(losses)
    deviations = [abs(loss - middle) for loss in losses]
    spread = MAD_TO_SPREAD * statistics.median(deviations)
    allowed = LOSS_SPREADS * max(spread, MIN_SPREAD)
    return mean - middle > max(allowed, MIN_EXCESS)


def _average(record: SequenceRecord) -> float | None:
    """The mean loss of a sequence."""
    if record.loss_sum is None or not record.labels:
        return None
    return record.loss_sum / record.labels


def replace_rows(
    raw: Sequence[Tensor], suspects: Sequence[Place], data_rank: int, spare: Sequence[Tensor]
) -> list[Tensor]:
    """Put other sequences of this rank in the place of those that stand out.

    Args:
        raw: This rank's micro-batches of the step, int64 [B, T + 1] each.
        suspects: Places of sequences of all ranks.
        data_rank: This rank's place among those that share the batch.
        spare: Micro-batches of the step before, whose sequences are taken where none of the step is left.
    """
    mine = {(micro_batch, row) for rank, micro_batch, row in suspects if rank == data_rank}
    places = [(number, row) for number, rows in enumerate(raw) for row in range(len(rows))]
    good = [raw[number][row] for number, row in places if (number, row) not in mine]
    if not good:
        good = [row for rows in (*spare, *raw) for row in rows]
    changed = [rows.clone() for rows in raw]
    for number, (micro_batch, row) in enumerate(sorted(mine)):
        changed[micro_batch][row] = good[number % len(good)]
    return changed
