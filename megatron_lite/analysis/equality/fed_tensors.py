"""Writes the inputs and targets that a reference takes from the ranks of another run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.formats.prove_record import FED_INPUTS, FED_TARGETS


@dataclass(frozen=True)
class Source:
    """Where a micro-batch of a run comes from in another one."""

    rank: int
    # of all forwards of that rank's model, from 0
    micro_batch: int


def find_misfit(run: ProvedRun, reference: ProvedRun, micro_batches: Sequence[Sequence[Source]]) -> str:
    """Say why a reference cannot take the ranks' inputs one behind the other; "": it can.

    Args:
        run: The records that hold them.
        reference: The records of the reference by itself.
        micro_batches: What each of the reference's is made of.
    """
    own = reference.ranks[min(reference.ranks)].tensors
    for sources in micro_batches:
        for place in _list_places(run, FED_INPUTS, sources[0]):
            pieces = [_read(run, FED_INPUTS, source, place) for source in sources]
            shapes = {None if piece is None else piece.shape[1:] for piece in pieces}
            if len(shapes) > 1 or None in shapes:
                return "samples of the ranks have other shapes than each other"
            whole = own.get(f"{FED_INPUTS}/0/{place}")
            if whole is not None and _is_slice(shapes.pop() or (), whole.shape[1:]):
                return "the ranks' samples are as long as a slice of the reference's, and are none"
    return ""


def _read(run: ProvedRun, kind: str, source: Source, place: str) -> Array | None:
    return run.ranks[source.rank].tensors.get(f"{kind}/{source.micro_batch}/{place}")


def _is_slice(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether samples of one shape may be equal slices of those of the other."""
    if len(shape) != len(whole) or not shape or not shape[0] or shape[0] == whole[0]:
        return False
    return shape[1:] == whole[1:] and whole[0] % shape[0] == 0


def write_fed_tensors(run: ProvedRun, micro_batches: Sequence[Sequence[Source]], path: Path) -> None:
    """Write the file of a feed's tensors.

    Args:
        run: The records that hold them.
        micro_batches: What each of the reference's is made of.
        path: Path of the file.
    """
    arrays = {}
    for number, sources in enumerate(micro_batches):
        for kind in (FED_INPUTS, FED_TARGETS):
            for place in _list_places(run, kind, sources[0]):
                pieces = [run.ranks[source.rank].tensors[f"{kind}/{source.micro_batch}/{place}"] for source in sources]
                samples = _count_samples(run, sources[0]) if kind == FED_INPUTS else None
                is_shared = _is_shared(pieces, samples)
                arrays[f"{kind}/{number}/{place}"] = pieces[0] if is_shared else np.concatenate(pieces)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _list_places(run: ProvedRun, kind: str, source: Source) -> list[str]:
    """List the tensors of a micro-batch."""
    begin = f"{kind}/{source.micro_batch}/"
    return [key.removeprefix(begin) for key in run.ranks[source.rank].tensors if key.startswith(begin)]


def _count_samples(run: ProvedRun, source: Source) -> int:
    """Count the samples of a micro-batch: the rows of its first input that has any; 0 where none has."""
    pieces = (_read(run, FED_INPUTS, source, place) for place in _list_places(run, FED_INPUTS, source))
    return next((len(piece) for piece in pieces if piece is not None and piece.ndim), 0)


def _is_shared(pieces: list[Array], samples: int | None) -> bool:
    """Whether one tensor is that of all samples, such as a mask of positions: the same on all ranks, and without a row
    of each of a number of samples; None: each rank has its own."""
    first = pieces[0]
    if not first.ndim or samples is None:
        return not first.ndim
    return len(first) != samples and all(np.array_equal(piece, first) for piece in pieces[1:])
