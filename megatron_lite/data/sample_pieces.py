"""Finds the pieces of documents that a sample of a data set is made of."""

from dataclasses import dataclass

from torch.utils.data import ConcatDataset

from megatron_lite.data.blend_order import BlendedDataset
from megatron_lite.data.gpt_dataset import EXTRA, GPTDataset


@dataclass(frozen=True)
class SamplePiece:
    """A piece of a document in a sample.

    Attributes:
        prefix: The files that it is in, without .bin and .idx.
        sequence: Number of the document's sequence in these files.
        offset: Tokens of the sequence before the piece.
        begin: Tokens of the sample before the piece.
        tokens: Number of tokens of the piece.
    """

    prefix: str
    sequence: int
    offset: int
    begin: int
    tokens: int


def find_pieces(dataset: object, sample: int) -> list[SamplePiece]:
    """Find where the tokens of a sample come from; [] where that is unknown, as for mock data and infilling.

    Args:
        dataset: A data set of build_datasets.
        sample: Number of the sample.
    """
    if isinstance(dataset, BlendedDataset):
        inner = dataset.datasets[int(dataset.dataset_index[sample])]
        return find_pieces(inner, int(dataset.dataset_sample_index[sample]))
    if isinstance(dataset, ConcatDataset):
        before = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            if sample < end:
                return find_pieces(part, sample - before)
            before = end
    if not isinstance(dataset, GPTDataset):
        return []
    return _find_in_files(dataset, int(dataset.shuffle_index[sample]))


def _find_in_files(dataset: GPTDataset, place: int) -> list[SamplePiece]:
    """Find the pieces of the sample at a place of the stream."""
    (position, offset), (last, last_offset) = dataset.sample_index[place : place + 2].tolist()
    pieces: list[SamplePiece] = []
    begin = 0
    sequences = dataset.document_index[position : last + 1].tolist()
    lengths = dataset.indexed.sequence_lengths
    for number, sequence in enumerate(sequences, start=position):
        end = last_offset + EXTRA if number == last else int(lengths[sequence])
        tokens = end - offset
        if tokens > 0:
            pieces.append(SamplePiece(dataset.indexed.prefix, sequence, offset, begin, tokens))
        begin += tokens
        offset = 0
    return pieces
