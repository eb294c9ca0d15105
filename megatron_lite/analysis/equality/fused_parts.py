"""Takes weights apart of which a rank has several blocks, as of a layer that fuses queries, keys and values.

A rank's part of such a layer is a block of each third, one behind the other. Where nothing tells, the contents do: the
rows of a rank are looked for among those with which the reference begins.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from megatron_lite.analysis.equality.proved_run import PART_MARK, Array, ProvedRun, RankRun
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
    cuts = {}
    for part in rank.record.weights:
        whole = start.get(aliases.get(part.name, part.name))
        array = rank.read(part)
        if whole is None or array is None or part.is_placed:
            continue
        cut = _find_cut(array, whole)
        if cut is not None:
            cuts[part.name] = cut
    for part in rank.record.weights:
        module, _, last = part.name.rpartition(".")
        weight = cuts.get(f"{module}.{WEIGHT}")
        # a bias that begins with zeros does not tell, and lies as the rows of its weight do
        if last == BIAS and part.name not in cuts and weight is not None and weight.dim == 0 and not part.is_placed:
            whole = start.get(aliases.get(part.name, part.name))
            if whole is not None and whole.shape == weight.whole[:1]:
                cuts[part.name] = _Cut(0, whole.shape, weight.runs)
    return cuts


def _find_cut(array: Array, whole: Array) -> _Cut | None:
    """Find where the rows of a part lie in a whole; None where they are one block, or are not all found."""
    if array.ndim != whole.ndim:
        return None
    cut = [dim for dim, length in enumerate(array.shape) if length != whole.shape[dim]]
    if len(cut) != 1 or array.shape[cut[0]] > whole.shape[cut[0]]:
        return None
    numbers: dict[bytes, int] = {}
    for number, row in enumerate(np.moveaxis(whole, cut[0], 0)):
        if numbers.setdefault(row.tobytes(), number) != number:
            return None
    found = [numbers.get(row.tobytes(), -1) for row in np.moveaxis(array, cut[0], 0)]
    if min(found, default=-1) < 0:
        return None
    runs = _list_runs(found)
    return _Cut(cut[0], whole.shape, runs) if len(runs) > 1 else None


def _list_runs(numbers: list[int]) -> tuple[_Run, ...]:
    """List the runs of numbers that follow each other."""
    runs: list[_Run] = []
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            runs.append(_Run(begin, numbers[begin], at - begin))
            begin = at
    return tuple(runs)


def _split_rank(rank: RankRun, cuts: Mapping[str, _Cut]) -> RankRun:
    added: dict[str, Array] = {}

    def split(parts: Iterable[TensorPart]) -> tuple[TensorPart, ...]:
        return tuple(piece for part in parts for piece in _split_part(rank, part, cuts.get(part.name), added))

    record = rank.record
    steps = []
    for step in record.steps:
        changed = msgspec.structs.replace(
            step,
            gradients=split(step.gradients),
            local_gradients=split(step.local_gradients),
            weights=split(step.weights),
        )
        steps.append(changed)
    record = msgspec.structs.replace(record, weights=split(record.weights), steps=tuple(steps))
    return RankRun(record, ChainMap(added, rank.tensors))  # type: ignore[arg-type]


def _split_part(rank: RankRun, part: TensorPart, cut: _Cut | None, added: dict[str, Array]) -> list[TensorPart]:
    array = rank.read(part)
    if cut is None or array is None:
        return [part]
    pieces = []
    for number, each in enumerate(cut.runs):
        key = f"{part.key}{PART_MARK}{number}]"
        added[key] = np.take(array, range(each.begin, each.begin + each.length), axis=cut.dim)
        starts = tuple(each.whole_begin if dim == cut.dim else 0 for dim in range(array.ndim))
        name = f"{part.name}{PART_MARK}{number}]"
        piece = msgspec.structs.replace(part, name=name, key=key, whole=cut.whole, starts=starts, is_placed=True)
        pieces.append(piece)
    return pieces
