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
            # of the first forward, whose shapes stand for those of all
            first = _make_key(FED_INPUTS, 0, place)
            whole = own.get(first)
            pieces = [_read(run, FED_INPUTS, source, place) for source in sources]
            reason = _find_other_shapes(pieces, whole)
            if reason:
                return reason
    return ""


def _find_other_shapes(pieces: Sequence[Array | None], whole: Array | None) -> str:
    """Say why the ranks' pieces of one input cannot stand for the reference's; "": they can.

    Args:
        pieces: What each rank had; None where it had none.
        whole: The reference's own input; None where it has none.
    """
    present = [piece for piece in pieces if piece is not None]
    shapes = {piece.shape[1:] for piece in present}
    if len(present) < len(pieces) or len(shapes) != 1:
        return "samples of the ranks have other shapes than each other"
    if whole is None:
        return ""
    shape = shapes.pop()
    if _is_slice(shape, whole.shape[1:]):
        return "the ranks' samples are as long as a slice of the reference's, and are none"
    return ""


def _make_key(kind: str, micro_batch: int, place: str) -> str:
    """The name of a tensor in a record and in a feed."""
    return f"{kind}/{micro_batch}/{place}"


def _read(run: ProvedRun, kind: str, source: Source, place: str) -> Array | None:
    tensors = run.ranks[source.rank].tensors
    key = _make_key(kind, source.micro_batch, place)
    return tensors.get(key)


def _is_slice(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether samples of one shape may be equal slices of those of the other."""
    if not shape or len(shape) != len(whole):
        return False
    length = shape[0]
    room = whole[0]
    if length in (0, room):
        return False
    return room % length == 0 and shape[1:] == whole[1:]


def write_fed_tensors(run: ProvedRun, micro_batches: Sequence[Sequence[Source]], path: Path) -> None:
    """Write the file of a feed's tensors.

    Args:
        run: The records that hold them.
        micro_batches: What each of the reference's is made of.
        path: Path of the file.
    """
    arrays: dict[str, Array] = {}
    for number, sources in enumerate(micro_batches):
        samples = _count_samples(run, sources[0])
        inputs = _join_pieces(run, FED_INPUTS, sources, samples)
        for place, array in inputs.items():
            key = _make_key(FED_INPUTS, number, place)
            arrays[key] = array
        targets = _join_pieces(run, FED_TARGETS, sources, None)
        for place, array in targets.items():
            key = _make_key(FED_TARGETS, number, place)
            arrays[key] = array
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _join_pieces(
    run: ProvedRun,
    kind: str,
    sources: Sequence[Source],
    samples: int | None,
) -> dict[str, Array]:
    """Lay the tensors of several micro-batches one behind the other, except for those that they share.

    Args:
        run: The records that hold them.
        kind: Inputs or targets.
        sources: The micro-batches, all of which have the tensors of the first.
        samples: How many samples the first has, which tells what is shared; None: each rank has its own tensors.
    """
    joined = {}
    for place in _list_places(run, kind, sources[0]):
        pieces = []
        for source in sources:
            tensors = run.ranks[source.rank].tensors
            key = _make_key(kind, source.micro_batch, place)
            pieces.append(tensors[key])
        if _is_shared(pieces, samples):
            joined[place] = pieces[0]
        else:
            joined[place] = np.concatenate(pieces)
    return joined


def _list_places(run: ProvedRun, kind: str, source: Source) -> list[str]:
    """List the tensors of a micro-batch."""
    begin = _make_key(kind, source.micro_batch, "")
    places = []
    for key in run.ranks[source.rank].tensors:
        if key.startswith(begin):
            places.append(key.removeprefix(begin))
    return places


def _count_samples(run: ProvedRun, source: Source) -> int:
    """Count the samples of a micro-batch: the rows of its first input that has any; 0 where none has."""
    for place in _list_places(run, FED_INPUTS, source):
        piece = _read(run, FED_INPUTS, source, place)
        if piece is not None and piece.ndim:
            return len(piece)
    return 0


def _is_shared(pieces: list[Array], samples: int | None) -> bool:
    """Whether one tensor is that of all samples, such as a mask of positions: the same on all ranks, and without a row
    of each of a number of samples; None: each rank has its own."""
    first = pieces[0]
    if not first.ndim:
        return True
    if samples is None or len(first) == samples:
        return False
    return all(np.array_equal(piece, first) for piece in pieces[1:])
