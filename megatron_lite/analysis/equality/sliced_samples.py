"""Recognizes ranks that take a slice of each of the reference's sequences, as context parallelism deals them out."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, RankRun
from megatron_lite.formats.prove_record import FED_INPUTS, ProvedStep

SLICED_DIM = 1  # of inputs (samples, positions, ...)


@dataclass(frozen=True)
class _Slices:
    """Slices of a step's samples of the reference, by content."""

    # positions of a slice
    length: int
    # by content: hashes of the samples that it is cut from
    found: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, sample: Array, name: str) -> None:
        """Add the slices of a sample: equal chunks, or a chunk from the front and its mirror image from the back."""
        count = len(sample) // self.length
        chunks = np.split(sample, count)
        if self.length % 2 == 0:
            halves = np.split(sample, 2 * count)
            chunks += [np.concatenate([halves[rank], halves[-1 - rank]]) for rank in range(count)]
        for content in {chunk.tobytes() for chunk in chunks}:
            self.found[content].append(name)

    def find(self, piece: Array) -> str:
        """Find the sample that a slice is cut from; "" where it is of none."""
        return next(iter(self.found.get(piece.tobytes(), ())), "")


def name_sliced_samples(run: ProvedRun, reference: ProvedRun) -> ProvedRun:
    """Name the rows of ranks that take slices of the reference's samples by those samples.

    Args:
        run: The records of the ranks.
        reference: The records of the reference by itself.

    Returns:
        The run itself where ranks take whole samples, or others than the reference.
    """
    if not run.ranks or not reference.ranks:
        return run
    whole = reference.ranks[min(reference.ranks)]
    renamed = {}
    for number, rank in run.ranks.items():
        if not any(_has_inputs(rank, step) for step in range(run.steps)):
            renamed[number] = rank
            continue
        steps = _name_steps(rank, whole, min(run.steps, reference.steps))
        if steps is None:
            return run
        renamed[number] = RankRun(msgspec.structs.replace(rank.record, steps=steps), rank.tensors)
    is_any = any(renamed[number] is not rank for number, rank in run.ranks.items())
    return replace(run, ranks=renamed, has_slices=True) if is_any else run


def _has_inputs(rank: RankRun, step: int) -> bool:
    return any(array is not None for array in _list_inputs(rank, step))


def _list_inputs(rank: RankRun, step: int) -> Iterator[Array | None]:
    """List the first input of each forward in a step; None where it is no batch of sequences."""
    steps = rank.record.steps
    begin = sum(len(earlier.micro_batches) for earlier in steps[:step])
    for number in range(len(steps[step].micro_batches)):
        key = f"{FED_INPUTS}/{begin + number}/0"
        array = np.asarray(rank.tensors[key], dtype=np.float64) if key in rank.tensors else None
        yield array if array is not None and array.ndim > SLICED_DIM else None


def _name_steps(rank: RankRun, whole: RankRun, steps: int) -> tuple[ProvedStep, ...] | None:
    """Name the samples of a rank's steps; None where they are no slices of the reference's."""
    named = list(rank.record.steps)
    for step in range(steps):
        own = list(_list_inputs(rank, step))
        first = next((array for array in own if array is not None), None)
        slices = None if first is None else _cut_reference(whole, step, first.shape[SLICED_DIM])
        if slices is None:
            return None
        batches = []
        for batch, array in zip(named[step].micro_batches, own):
            rows = () if array is None else tuple(slices.find(piece) for piece in array)
            if not rows or not all(rows):
                return None
            batches.append(msgspec.structs.replace(batch, rows=rows))
        named[step] = msgspec.structs.replace(named[step], micro_batches=tuple(batches))
    return tuple(named)


def _cut_reference(whole: RankRun, step: int, length: int) -> _Slices | None:
    """Cut a step's samples of the reference into slices of a length; None where that does not divide them."""
    slices = _Slices(length)
    for batch, array in zip(whole.record.steps[step].micro_batches, _list_inputs(whole, step)):
        if array is None or array.shape[SLICED_DIM] <= length or array.shape[SLICED_DIM] % length:
            return None
        if len(array) != len(batch.rows):
            return None
        for sample, name in zip(array, batch.rows):
            slices.add(sample, name)
    return slices
