"""Recognizes ranks that take a slice of each of the reference's sequences, as context parallelism deals them out."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
        contents = {chunk.tobytes() for chunk in chunks}
        if self.length % 2 == 0:
            halves = np.split(sample, 2 * count)
            for front, back in zip(halves[:count], reversed(halves)):
                mirrored = np.concatenate([front, back])
                contents.add(mirrored.tobytes())
        for content in contents:
            self.found[content].append(name)

    def find(self, piece: Array) -> str:
        """Find the sample that a slice is cut from; "" where it is of none."""
        names = self.found.get(piece.tobytes())
        if not names:
            return ""
        return names[0]


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
    common = min(run.steps, reference.steps)
    ranks = dict(run.ranks)
    has_slices = False
    for number, rank in run.ranks.items():
        if not _has_inputs(rank, run.steps):
            continue
        steps = _name_steps(rank, whole, common)
        if steps is None:
            return run
        record = msgspec.structs.replace(rank.record, steps=steps)
        ranks[number] = RankRun(record, rank.tensors)
        has_slices = True
    if not has_slices:
        return run
    return replace(run, ranks=ranks, has_slices=True)


def _has_inputs(rank: RankRun, steps: int) -> bool:
    """Whether any forward of a rank's first steps took a batch of sequences."""
    for step in range(steps):
        inputs = _list_inputs(rank, step)
        if any(array is not None for array in inputs):
            return True
    return False


def _list_inputs(rank: RankRun, step: int) -> Iterator[Array | None]:
    """List the first input of each forward in a step; None where it is no batch of sequences."""
    steps = rank.record.steps
    begin = sum(len(earlier.micro_batches) for earlier in steps[:step])
    end = begin + len(steps[step].micro_batches)
    for number in range(begin, end):
        yield _read_input(rank, f"{FED_INPUTS}/{number}/0")


def _read_input(rank: RankRun, key: str) -> Array | None:
    if key not in rank.tensors:
        return None
    array = np.asarray(rank.tensors[key], dtype=np.float64)
    if array.ndim <= SLICED_DIM:
        return None
    return array


def _name_steps(rank: RankRun, whole: RankRun, steps: int) -> tuple[ProvedStep, ...] | None:
    """Name the samples of a rank's steps; None where they are no slices of the reference's."""
    named = list(rank.record.steps)
    for number in range(steps):
        inputs = list(_list_inputs(rank, number))
        slices = _cut_as(inputs, whole, number)
        if slices is None:
            return None
        step = _name_step(named[number], inputs, slices)
        if step is None:
            return None
        named[number] = step
    return tuple(named)


def _name_step(step: ProvedStep, inputs: Sequence[Array | None], slices: _Slices) -> ProvedStep | None:
    """Name the samples of one step; None where one of its inputs has others."""
    batches = []
    for batch, array in zip(step.micro_batches, inputs):
        if array is None:
            return None
        rows = tuple(slices.find(piece) for piece in array)
        if not rows or not all(rows):
            return None
        named = msgspec.structs.replace(batch, rows=rows)
        batches.append(named)
    return msgspec.structs.replace(step, micro_batches=tuple(batches))


def _cut_as(inputs: Sequence[Array | None], whole: RankRun, step: int) -> _Slices | None:
    """Cut a step's samples of the reference into slices that are as long as a rank's first input."""
    for array in inputs:
        if array is None:
            continue
        length = array.shape[SLICED_DIM]
        return _cut_reference(whole, step, length)
    return None


def _cut_reference(whole: RankRun, step: int, length: int) -> _Slices | None:
    """Cut a step's samples of the reference into slices of a length; None where that does not divide them."""
    slices = _Slices(length)
    batches = whole.record.steps[step].micro_batches
    for batch, array in zip(batches, _list_inputs(whole, step)):
        if array is None or len(array) != len(batch.rows):
            return None
        room = array.shape[SLICED_DIM]
        if room <= length or room % length:
            return None
        for sample, name in zip(array, batch.rows):
            slices.add(sample, name)
    return slices
