"""Puts whole tensors together from the parts that ranks hold."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, Parts, ProvedRun, RankRun, get_parameter_name
from megatron_lite.formats.prove_record import TensorPart


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
    if any(start < 0 or start + length > room for start, length, room in zip(starts, shape, whole.shape)):
        return None
    return whole[tuple(slice(start, start + length) for start, length in zip(starts, shape))]


def get_starts(part: TensorPart, shape: Sequence[int]) -> tuple[int, ...]:
    """Where a part lies in its whole; at the beginning where nothing tells."""
    return part.starts if part.is_placed and len(part.starts) == len(shape) else (0,) * len(shape)


def assemble(parts: Iterable[tuple[TensorPart, Array]]) -> Assembled | None:
    """Put a whole together from the parts of ranks: blocks side by side, replicas once, partial ones added up.

    Returns:
        None where parts do not fill the whole, or disagree on its shape.
    """
    given = list(parts)
    if not given:
        return None
    wholes = {part.whole if part.is_placed else array.shape for part, array in given}
    if len(wholes) > 1:
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
            apart = max(apart, relative_distance(values, block))
            continue
        block[...] = values
        filled[...] = True
    return Assembled(array, apart) if is_filled.all() else None


def _add_partial(parts: Sequence[tuple[TensorPart, Array]]) -> list[tuple[TensorPart, Array]]:
    """Add up the parts that lie at the same place."""
    sums: dict[tuple[int, ...], Array] = {}
    first: dict[tuple[int, ...], TensorPart] = {}
    for part, values in parts:
        starts = get_starts(part, values.shape)
        first.setdefault(starts, part)
        sums[starts] = sums[starts] + values if starts in sums else values
    return [(first[starts], values) for starts, values in sums.items()]


def relative_distance(one: Array, other: Array) -> float:
    """The largest difference of two arrays of one shape, relative to the largest number of both."""
    if not one.size or np.array_equal(one, other):
        return 0.0
    largest = max(np.abs(one).max(), np.abs(other).max())
    return float(np.abs(one - other).max() / largest) if np.isfinite(largest) else float("inf")


def assemble_all(
    run: ProvedRun, list_parts: Callable[[RankRun], Parts], aliases: Mapping[str, str] | None = None
) -> dict[str, Assembled]:
    """Put together every tensor of a kind that a run recorded.

    Args:
        run: The records of all ranks.
        list_parts: Says which parts of a rank to take, such as its gradients in the first step.
        aliases: Other names of tensors, to the name under which they are kept.

    Returns:
        Wholes by name, without those whose parts do not fill them.
    """
    given = defaultdict(list)
    for rank in run.ranks.values():
        for part in list_parts(rank):
            array = rank.read(part)
            if array is not None:
                own = get_parameter_name(part.name)
                name = (aliases or {}).get(own, own)
                given[name].append((part, array))
    wholes = {name: assemble(parts) for name, parts in given.items()}
    return {name: whole for name, whole in wholes.items() if whole is not None}


def write_weights(weights: Mapping[str, Array], path: Path) -> None:
    """Write whole weights by name, as float64 where float32 would lose anything, for a run that starts from them."""
    arrays = {}
    for name, array in weights.items():
        short = array.astype(np.float32)
        arrays[name] = short if np.array_equal(short.astype(np.float64), array) else array
    np.savez(path, **arrays)  # type: ignore[arg-type]
