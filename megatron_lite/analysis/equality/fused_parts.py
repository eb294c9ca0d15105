"""Takes weights apart of which a rank has several blocks, as of a layer that fuses queries, keys and values.

A rank's part of such a layer is a block of each third, one behind the other. Where nothing tells, the contents do: the
rows of a rank are looked for among those with which the reference begins.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_lite.analysis.equality.proved_run import PART_MARK, Array, ProvedRun, RankRun
from megatron_lite.analysis.equality.wholes import find_cut_dims
from megatron_lite.formats.prove_record import TensorPart

BIAS = "bias"
WEIGHT = "weight"


@dataclass(frozen=True)
class _Run:
    """Rows of a part that lie one behind the other in the whole, too."""

    begin: int
    whole_begin: int
    length: int


@dataclass(frozen=True)
class _Cut:
    """How a rank's part lies in the whole."""

    dim: int
    whole: tuple[int, ...]
    runs: tuple[_Run, ...]


def split_fused_parts(run: ProvedRun, start: Mapping[str, Array], aliases: Mapping[str, str]) -> ProvedRun:
    """Name each block of such weights, and of their gradients, as a part of its own, with its place.

    Args:
        run: The records of the ranks.
        start: The reference's whole weights at the start, by name.
        aliases: Other names of the reference's parameters, to the name in `start`.
    """
    ranks = {}
    for number, rank in run.ranks.items():
        cuts = _find_cuts(rank, start, aliases)
        ranks[number] = _split_rank(rank, cuts) if cuts else rank
    return replace(run, ranks=ranks)


def _find_cuts(rank: RankRun, start: Mapping[str, Array], aliases: Mapping[str, str]) -> dict[str, _Cut]:
    """Find how a rank's weights lie in the reference's, by name, where they are several blocks."""
    cuts = {}
    # the reference's, by the rank's name
    wholes = {}
    for part in rank.record.weights:
        whole = start.get(aliases.get(part.name, part.name))
        if whole is None or part.is_placed:
            continue
        wholes[part.name] = whole
        array = rank.read(part)
        if array is None:
            continue
        cut = _find_cut(array, whole)
        if cut is not None:
            cuts[part.name] = cut
    for name, whole in wholes.items():
        module, _, last = name.rpartition(".")
        if last != BIAS or name in cuts:
            continue
        # a bias that begins with zeros does not tell, and lies as the rows of its weight do
        weight = cuts.get(f"{module}.{WEIGHT}")
        if weight is None or weight.dim != 0:
            continue
        if whole.shape == weight.whole[:1]:
            cuts[name] = _Cut(0, whole.shape, weight.runs)
    return cuts


def _find_cut(array: Array, whole: Array) -> _Cut | None:
    """Find where the rows of a part lie in a whole; None where they are one block, or are not all found."""
    dim = _find_cut_dim(array.shape, whole.shape)
    if dim is None:
        return None
    numbers: dict[bytes, int] = {}
    for number, row in enumerate(np.moveaxis(whole, dim, 0)):
        content = row.tobytes()
        # rows that are there twice do not tell which one a rank has
        if content in numbers:
            return None
        numbers[content] = number
    found = []
    for row in np.moveaxis(array, dim, 0):
        content = row.tobytes()
        if content not in numbers:
            return None
        found.append(numbers[content])
    runs = _list_runs(found)
    if len(runs) < 2:
        return None
    return _Cut(dim, whole.shape, runs)


def _find_cut_dim(shape: Sequence[int], whole: Sequence[int]) -> int | None:
    """Find the one dimension in which a part is smaller than a whole; None where there is none, or several."""
    if len(shape) != len(whole):
        return None
    differing = find_cut_dims(whole, shape)
    if len(differing) != 1:
        return None
    (dim,) = differing
    if shape[dim] > whole[dim]:
        return None
    return dim


def _list_runs(numbers: list[int]) -> tuple[_Run, ...]:
    """List the runs of numbers that follow each other."""
    runs: list[_Run] = []
    for at, number in enumerate(numbers):
        if runs:
            last = runs[-1]
            if number == last.whole_begin + last.length:
                runs[-1] = replace(last, length=last.length + 1)
                continue
        runs.append(_Run(begin=at, whole_begin=number, length=1))
    return tuple(runs)


def _split_rank(rank: RankRun, cuts: Mapping[str, _Cut]) -> RankRun:
    """Name the blocks of a rank's weights and gradients as parts of their own."""
    added: dict[str, Array] = {}

    def split(parts: Iterable[TensorPart]) -> tuple[TensorPart, ...]:
        pieces: list[TensorPart] = []
        for part in parts:
            cut = cuts.get(part.name)
            pieces.extend(_split_part(rank, part, cut, added))
        return tuple(pieces)

    steps = []
    for step in rank.record.steps:
        changed = msgspec.structs.replace(
            step,
            gradients=split(step.gradients),
            local_gradients=split(step.local_gradients),
            weights=split(step.weights),
        )
        steps.append(changed)
    record = msgspec.structs.replace(
        rank.record,
        weights=split(rank.record.weights),
        steps=tuple(steps),
    )
    return RankRun(record, ChainMap(added, rank.tensors))  # type: ignore[arg-type]


def _split_part(rank: RankRun, part: TensorPart, cut: _Cut | None, added: dict[str, Array]) -> list[TensorPart]:
    """Split a part into its blocks, whose arrays are added to those of the rank."""
    array = rank.read(part)
    if cut is None or array is None:
        return [part]
    pieces = []
    for number, each in enumerate(cut.runs):
        mark = f"{PART_MARK}{number}]"
        key = f"{part.key}{mark}"
        rows = range(each.begin, each.begin + each.length)
        added[key] = np.take(array, rows, axis=cut.dim)
        starts = [0] * array.ndim
        starts[cut.dim] = each.whole_begin
        piece = msgspec.structs.replace(
            part,
            name=f"{part.name}{mark}",
            key=key,
            whole=cut.whole,
            starts=tuple(starts),
            is_placed=True,
        )
        pieces.append(piece)
    return pieces
