"""Reads what the ranks of a command recorded for a proof."""

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_lite.formats.prove_record import RANK_FILE, TENSORS_FILE, ProvedStep, ProveRecord, TensorPart

Array = NDArray[Any]
Parts = Sequence[TensorPart]
PART_MARK = " ["  # in the names of parts that a rank has of one parameter: "weight", "weight [1]"


@dataclass(frozen=True)
class RankRun:
    """The record of a rank, and its tensors by key."""

    record: ProveRecord
    tensors: Mapping[str, Array]

    def read(self, part: TensorPart) -> Array | None:
        """The array of a part in float64; None where the rank has none."""
        if not part.key:
            return None
        return np.asarray(self.tensors[part.key], dtype=np.float64)


@dataclass(frozen=True)
class ProvedRun:
    """The records of a command's ranks."""

    # by rank, without those whose records are missing or damaged
    ranks: dict[int, RankRun]
    # how many the command has
    world: int
    # sentences on the ranks that are left out
    missing: tuple[str, ...] = ()
    # whether ranks take slices of samples, whose rows are named by the whole samples
    has_slices: bool = False

    @property
    def steps(self) -> int:
        """Steps that all ranks recorded."""
        return min((len(rank.record.steps) for rank in self.ranks.values()), default=0)

    @property
    def engines(self) -> tuple[str, ...]:
        """How gradients were brought together, in words, each once."""
        return tuple(dict.fromkeys(word for rank in self.ranks.values() for word in rank.record.engines))

    def list_steps(self, number: int) -> dict[int, ProvedStep]:
        """A step of each rank; `number` is from 0."""
        return {rank: run.record.steps[number] for rank, run in self.ranks.items()}


def read_run(folder: Path) -> ProvedRun:
    """Read the records of a command's ranks; what is missing or damaged is named."""
    ranks = {}
    # by rank: why it is left out
    missing = {}
    world = 0
    for path in sorted(folder.glob(RANK_FILE.format("*"))):
        number = path.stem.removeprefix("rank")
        if not number.isdecimal():
            continue
        rank = _read_rank(folder, int(number))
        if isinstance(rank, str):
            missing[int(number)] = rank
            continue
        world = max(world, rank.record.ranks)
        ranks[rank.record.rank] = rank
    world = max(world, len(ranks))
    for lost in range(world):
        if lost not in ranks and lost not in missing:
            missing[lost] = f"rank {lost}: it left no record"
    return ProvedRun(ranks, world, tuple(missing.values()))


def _read_rank(folder: Path, number: int) -> RankRun | str:
    """Read a rank's files, or say why not."""
    try:
        content = (folder / RANK_FILE.format(number)).read_bytes()
        record = msgspec.json.decode(content, type=ProveRecord)
    except (OSError, msgspec.DecodeError) as error:
        return f"rank {number}: its record cannot be read ({error})"
    if record.failure:
        return f"rank {number}: {record.failure}"
    if record.rank != number:
        return f"rank {number}: its record is that of rank {record.rank}"
    keys = {part.key for part in list_all_parts(record) if part.key}
    if not keys:
        return RankRun(record, {})
    path = folder / TENSORS_FILE.format(number)
    try:
        damaged = zipfile.ZipFile(path).testzip()
        tensors = np.load(path)
        has_numbers = all(tensors[key].dtype.kind == "f" for key in keys if key in tensors)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        return f"rank {number}: its tensors cannot be read ({error})"
    lacking = sorted(keys - set(tensors))
    if lacking and not damaged:
        damaged = lacking[0]
    if not has_numbers and not damaged:
        damaged = "no numbers"
    if damaged:
        return f"rank {number}: its tensors are damaged ({damaged})"
    return RankRun(number_parts(record), tensors)


def number_parts(record: ProveRecord) -> ProveRecord:
    """Give parts that a rank has of one parameter names of their own."""
    steps = []
    for step in record.steps:
        numbered = msgspec.structs.replace(
            step,
            gradients=_number(step.gradients),
            local_gradients=_number(step.local_gradients),
            weights=_number(step.weights),
        )
        steps.append(numbered)
    return msgspec.structs.replace(
        record,
        weights=_number(record.weights),
        steps=tuple(steps),
    )


def _number(parts: Parts) -> tuple[TensorPart, ...]:
    seen: dict[str, int] = defaultdict(int)
    numbered = []
    for part in parts:
        count = seen[part.name]
        seen[part.name] += 1
        name = f"{part.name}{PART_MARK}{count}]" if count else part.name
        numbered.append(msgspec.structs.replace(part, name=name))
    return tuple(numbered)


def get_parameter_name(name: str) -> str:
    """The name of the parameter that a part is of."""
    return name.partition(PART_MARK)[0]


def list_all_parts(record: ProveRecord) -> Iterable[TensorPart]:
    """List every tensor that a record names."""
    yield from record.weights
    for output in record.outputs:
        yield from output.parts
    for step in record.steps:
        yield from step.gradients
        yield from step.local_gradients
        yield from step.weights


def group_ranks(run: ProvedRun, key: Callable[[RankRun], object]) -> list[list[int]]:
    """Group ranks by what a function says of each, in the order of their first rank."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number, rank in sorted(run.ranks.items()):
        groups[key(rank)].append(number)
    return list(groups.values())


def list_rows(rank: RankRun, step: int) -> tuple[str, ...]:
    """Hashes of the rows that a rank took in a step, from 0, in order."""
    batches = rank.record.steps[step].micro_batches
    return tuple(row for batch in batches for row in batch.rows)


def list_indices(rank: RankRun, step: int) -> tuple[int, ...]:
    """Loaders' indices of the samples that a rank took in a step, from 0, in order."""
    batches = rank.record.steps[step].micro_batches
    return tuple(index for batch in batches for index in batch.indices)
