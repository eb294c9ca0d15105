"""Puts whole tensors together from the parts that ranks hold."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, Parts, ProvedRun, RankRun, get_parameter_name
from megatron_lite.formats.prove_record import TensorPart

Filled = tuple[TensorPart, Array]  # a part, and its numbers


@dataclass(frozen=True)
class Assembled:
    """A whole tensor that was put together."""

    array: Array
    # largest difference between replicas, relative to the largest number of one
    apart: float = 0.0


def select_block(whole: Array, starts: Sequence[int], shape: Sequence[int]) -> Array | None:
    """Take a block out of a whole; None where it does not lie within.

    Args:
        whole: The tensor.
        starts: Where the block begins in each dimension.
        shape: Shape of the block.
    """
    if len(starts) != whole.ndim or len(shape) != whole.ndim:
        return None
    slices = []
    for start, length, room in zip(starts, shape, whole.shape):
        end = start + length
        if start < 0 or end > room:
            return None
        slices.append(slice(start, end))
    return whole[tuple(slices)]


def find_cut_dims(whole: Sequence[int], shape: Sequence[int]) -> set[int]:
    """Find the dimensions in which a block is not as long as the whole."""
    dims = set()
    for dim, (room, length) in enumerate(zip(whole, shape)):
        if room != length:
            dims.add(dim)
    return dims


def get_starts(part: TensorPart, shape: Sequence[int]) -> tuple[int, ...]:
    """Where a part lies in its whole; at the beginning where nothing tells."""
    if part.is_placed and len(part.starts) == len(shape):
        return part.starts
    return (0,) * len(shape)


def assemble(parts: Iterable[Filled]) -> Assembled | None:
    """Put a whole together from the parts of ranks: blocks side by side, replicas once, partial ones added up.

    Returns:
        None where parts do not fill the whole, or disagree on its shape.
    """
    given = list(parts)
    wholes = set()
    for part, values in given:
        wholes.add(part.whole if part.is_placed else values.shape)
    if len(wholes) != 1:
        return None
    shape = wholes.pop()
    if all(part.is_partial for part, _ in given):
        given = _add_partial(given)
    array = np.zeros(shape)
    is_filled = np.zeros(shape, dtype=bool)
    apart = 0.0
    for part, values in given:
        starts = get_starts(part, values.shape)
        block = select_block(array, starts, values.shape)
        filled = select_block(is_filled, starts, values.shape)
        if block is None or filled is None:
            return None
        if values.size and filled.all():
            distance = relative_distance(values, block)
            apart = max(apart, distance)
            continue
        block[...] = values
        filled[...] = True
    if not is_filled.all():
        return None
    return Assembled(array, apart)


def _add_partial(parts: Sequence[Filled]) -> list[Filled]:
    """Add up the parts that lie at the same place."""
    sums: dict[tuple[int, ...], Filled] = {}
    for part, values in parts:
        starts = get_starts(part, values.shape)
        if starts not in sums:
            sums[starts] = (part, values)
            continue
        first, so_far = sums[starts]
        sums[starts] = (first, so_far + values)
    return list(sums.values())


def relative_distance(one: Array, other: Array) -> float:
    """The largest difference of two arrays of one shape, relative to the largest number of both."""
    if not one.size or np.array_equal(one, other):
        return 0.0
    largest = max(np.abs(one).max(), np.abs(other).max())
    if not np.isfinite(largest):
        return float("inf")
    distance = np.abs(one - other).max()
    return float(distance / largest)


def assemble_all(
    run: ProvedRun,
    list_parts: Callable[[RankRun], Parts],
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Assembled]:
    """Put together every tensor of a kind that a run recorded.

    Args:
        run: The records of all ranks.
        list_parts: Says which parts of a rank to take, such as its gradients in the first step.
        aliases: Other names of tensors, to the name under which they are kept.

    Returns:
        Wholes by name, without those whose parts do not fill them.
    """
    aliases = aliases or {}
    given = defaultdict(list)
    for rank in run.ranks.values():
        for part in list_parts(rank):
            array = rank.read(part)
            if array is None:
                continue
            own = get_parameter_name(part.name)
            name = aliases.get(own, own)
            given[name].append((part, array))
    wholes = {}
    for name, parts in given.items():
        whole = assemble(parts)
        if whole is not None:
            wholes[name] = whole
    return wholes


def write_weights(weights: Mapping[str, Array], path: Path) -> None:
    """Write whole weights by name, as float64 where float32 would lose anything, for a run that starts from them."""
    arrays = {}
    for name, array in weights.items():
        short = array.astype(np.float32)
        is_exact = np.array_equal(short.astype(np.float64), array)
        arrays[name] = short if is_exact else array
    np.savez(path, **arrays)  # type: ignore[arg-type]
