"""Writes the inputs and targets that a reference takes from the ranks of another run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.analysis.equality.same_data import Source
from megatron_lite.formats.prove_record import FED_INPUTS, FED_TARGETS


def write_fed_tensors(run: ProvedRun, micro_batches: Sequence[Sequence[Source]], path: Path) -> None:
    """Write the file of a feed's tensors.

    Args:
        run: The records that hold them.
        micro_batches: What each of the reference's is made of.
        path: Of the file.
    """
    arrays = {}
    for number, sources in enumerate(micro_batches):
        for kind in (FED_INPUTS, FED_TARGETS):
            for place in _list_places(run, kind, sources[0]):
                pieces = [run.ranks[source.rank].tensors[f"{kind}/{source.micro_batch}/{place}"] for source in sources]
                arrays[f"{kind}/{number}/{place}"] = _lay_together(pieces)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _list_places(run: ProvedRun, kind: str, source: Source) -> list[str]:
    """List the tensors of a micro-batch."""
    begin = f"{kind}/{source.micro_batch}/"
    return [key.removeprefix(begin) for key in run.ranks[source.rank].tensors if key.startswith(begin)]


def _lay_together(pieces: list[Array]) -> Array:
    """Lay samples one behind the other; what is the same for all of them, such as a mask of positions, stays."""
    first = pieces[0]
    if not first.ndim or all(np.array_equal(piece, first) for piece in pieces[1:]):
        return first
    return np.concatenate(pieces)
