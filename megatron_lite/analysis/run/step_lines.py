"""steps.jsonl, line by line, into columns: what the trainer appended, and what of it can be read.

A run may have a million steps: a line is gone as soon as its numbers stand in columns of eight bytes each. A run that
goes on appends more: only that is read the next time.
"""

import json
import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.run.run_results import Phases, RankLines, Steps
from megatron_lite.formats.step_records import RankInterval, RankNumbers, RanksRecord, RoutingRecord, StepRecord
from megatron_lite.phases import Phase
from megatron_lite.shared_files import open_foreign

NOT_GIVEN = -math.inf  # of a loss: null stands for one that is NaN or Inf
BATCH = 500  # lines that are read before their numbers are moved into columns
MAX_RANK_NUMBERS = 2**18  # of console lines that are kept; of longer runs evenly chosen lines
MIN_RANK_LINES = 32  # that are kept of any number of ranks before some are left out
RECENT = 8  # console lines, as many as the trainer asks before it names a slow rank

Ranks = RanksRecord[msgspec.Raw]  # an interval is read where it is wanted
TYPES = {field.name: field.type for field in msgspec.structs.fields(StepRecord)}
# lists with a number per rank, beside those of phases
LISTS_OF_INTERVAL = len(set(RankInterval.__struct_fields__) - {"iterations", "phases_ms", "gpu_phases_ms"})


class Columns:
    """Columns of numbers that grow together; `missing` is what a row lacks, or a column before it first occurs.

    A column that has had one value only takes no room.
    """

    def __init__(self, missing: float, kind: str = "d"):
        self._missing, self._kind, self._length = missing, kind, 0
        self._constant: dict[str, float] = {}
        self._varying: dict[str, array[float]] = {}

    def append(self, rows: Mapping[str, NDArray[Any]], length: int) -> None:
        """`length` numbers to every column."""
        for name in dict.fromkeys((*self._constant, *rows)):
            value = self._constant.setdefault(name, self._missing if self._length else rows[name].flat[0])
            values = rows[name] if name in rows else np.full(length, self._missing)
            if name not in self._varying and not np.array_equal(values, np.full(length, value), equal_nan=True):
                kind = "d" if value >= 2**32 else self._kind
                self._varying[name] = array(kind, np.full(self._length, value, kind).tobytes())
            if name in self._varying:
                column = self._varying[name]
                if column.typecode == "I" and values.max() >= 2**32:
                    column = self._varying[name] = array("d", column)
                column.frombytes(values.astype(column.typecode).tobytes())
        self._length += length

    def append_rows(self, rows: list[dict[str, float]]) -> None:
        """A number to each column of a row, times 1000: milliseconds become microseconds."""
        for names, group in groupby(rows, tuple):
            alike = list(group)  # with the same names in the same order
            flat = np.fromiter(chain.from_iterable(map(dict.values, alike)), float, len(alike) * len(names))
            table = np.rint(1000 * flat.reshape(len(alike), len(names)))
            self.append(dict(zip(names, table.T)), len(alike))

    def cut(self, length: int) -> None:
        """Forget all but the first `length` rows."""
        for column in self._varying.values():
            del column[length:]
        self._length = length

    def read(self) -> dict[str, NDArray[Any]]:
        """Without copying."""
        varying = {name: np.frombuffer(column, column.typecode) for name, column in self._varying.items()}
        return {name: np.broadcast_to(value, self._length) for name, value in self._constant.items()} | varying


@dataclass(frozen=True)
class LineEnd:
    """An end of a line in the file, and what had been read up to it."""

    offset: int = 0
    text: bytes = b""  # the line
    lines: int = 0
    steps: int = 0  # of this start
    last_step: float = math.inf  # a start counts its own steps from 1
    local: bool = False  # the line is of a step whose loss is one rank's only: it may be written anew

    def is_in(self, file: BinaryIO) -> bool:
        """Does the line still stand there?"""
        file.seek(self.offset - len(self.text))
        return file.read(len(self.text)) == self.text


class StepLines:
    """What the last start wrote, as far as its file has been read.

    The arrays that `read_steps` returns share memory with what the next `read` appends to: nobody may hold them then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.starts = 0  # that have steps
        self.unread: list[int] = []  # numbers of lines that are no JSON, or not of this format
        self.cut = False  # the file ends within a line
        self._here = self._settled = LineEnd()  # steps between the two may be written anew
        self._begin(0)

    def _begin(self, first_step: int) -> None:
        """Forget the start before."""
        self.first_step = first_step
        self._iterations = array("q")
        self._numbers = Columns(math.nan)
        # whole microseconds
        self._phases, self._gpu_phases = Columns(0, "I"), Columns(0, "I")
        self._flags: dict[str, bytearray] = {}
        self._begin_ranks()

    def _begin_ranks(self) -> None:
        self.rank_lines, self.every = 0, 1  # how many there are, and that each `every`-th of them is kept
        self._ranks: list[RankInterval] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT)

    def read(self) -> bool:
        """Read what the file has more than the last time; False for nothing. OSError as open raises it.

        A line that cannot be read is counted and left out. If the file was cut back, because steps that were written
        ahead of their console line are written anew, it is read again from the console line before; another file from
        its beginning.
        """
        with open_foreign(self._path) as file:
            if not self._here.is_in(file):
                if self._settled.offset and self._settled.is_in(file):
                    self._go_back()
                else:
                    self._forget()
            before = self._here
            self._read_lines(file)
        return self._here is not before

    def _go_back(self) -> None:
        self._here = place = self._settled
        for column in (self._iterations, *self._flags.values()):
            del column[place.steps :]
        for columns in (self._numbers, self._phases, self._gpu_phases):
            columns.cut(place.steps)
        self.unread = [number for number in self.unread if number <= place.lines]

    def _read_lines(self, file: BinaryIO) -> None:
        """From where reading has stopped."""
        decode, steps, here = msgspec.json.Decoder(StepRecord | Ranks).decode, list[StepRecord](), self._here
        offset, number, last, last_step, local = here.offset, here.lines, here.text, here.last_step, here.local
        file.seek(offset)
        self.cut = False
        for text in file:
            line: StepRecord | Ranks | None
            try:
                line = decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                if not text.endswith(b"\n"):
                    self.cut = True
                    break
                line = _read_damaged(text)
            if isinstance(line, StepRecord):
                if line.step <= last_step:
                    self._begin(line.step)
                    self.starts, steps = self.starts + 1, []
                    self._settled = LineEnd()
                elif line.local and not local:
                    self._settled = LineEnd(offset, last, number, len(self._iterations) + len(steps), last_step)
                last_step, local = line.step, line.local
                steps.append(line)
                if len(steps) >= BATCH:
                    self._add_steps(steps)
                    steps = []
            elif line is not None and self._add_ranks(bytes(line.ranks)):
                known = len(self._iterations) + len(steps)
                self._settled = LineEnd(offset + len(text), text, number + 1, known, last_step)
            elif text.strip():
                self.unread.append(number + 1)
            offset, number, last = offset + len(text), number + 1, text
        self._add_steps(steps)
        if offset > here.offset:
            self._here = LineEnd(offset, last, number, len(self._iterations), last_step, local)

    def _add_steps(self, records: list[StepRecord]) -> None:
        if not records:
            return
        self._iterations.extend([record.iteration for record in records])
        self._numbers.append(_take_numbers(records), len(records))
        self._phases.append_rows([record.phases_ms for record in records])
        self._gpu_phases.append_rows([record.gpu_phases_ms for record in records])
        for name, flags in _take_flags(records).items():
            self._flags.setdefault(name, bytearray()).extend(flags)

    def _add_ranks(self, text: bytes) -> bool:
        """A console line; False if it is none. Lines of another number of ranks are no part of the same medians."""
        if self.rank_lines % self.every == 0:
            line = _decode_ranks(text)
            if line is None:
                return False
            if self._ranks and len(self._ranks[0].step_ms) != len(line.step_ms):
                self._begin_ranks()
            self._ranks.append(line)
            lists = LISTS_OF_INTERVAL + len(line.phases_ms) + len(line.gpu_phases_ms)
            numbers = len(line.step_ms) * lists
            if len(self._ranks) > max(MAX_RANK_NUMBERS // numbers, MIN_RANK_LINES):
                del self._ranks[1::2]
                self.every *= 2
        self.rank_lines += 1
        self._recent.append(text)
        return True

    def read_steps(self) -> Steps:
        """The steps' columns."""
        flags = {name: np.frombuffer(self._flags.get(name, b""), np.bool_) for name in _take_flags([])}
        undisturbed = ~(flags["profiled"] | flags.pop("beside_profile") | flags["compiling"])
        if self.first_step == 1:
            undisturbed[:1] = False
        numbers = _take_numbers([]) | self._numbers.read()
        not_finite = np.isnan(numbers["losses"]) & ~flags["skipped"]
        if NOT_GIVEN in numbers["losses"]:
            numbers["losses"] = np.where(numbers["losses"] == NOT_GIVEN, math.nan, numbers["losses"])
        phases_ms, gpu_phases_ms = Phases(self._phases.read()), Phases(self._gpu_phases.read())
        none = np.zeros(len(not_finite))
        evaluating_ms = phases_ms.get(Phase.EVAL.value, none)
        saving_ms = phases_ms.get(Phase.SAVE.value, none)
        evaluating, saving = evaluating_ms > 0, saving_ms > 0
        columns: dict[str, Any] = {**flags, **numbers}
        return Steps(
            iterations=np.frombuffer(self._iterations, np.int64),
            training_ms=np.maximum(numbers["step_ms"] - evaluating_ms - saving_ms, 0.0),
            phases_ms=phases_ms,
            gpu_phases_ms=gpu_phases_ms,
            not_finite=not_finite,
            evaluating=evaluating,
            saving=saving,
            undisturbed=undisturbed,
            ordinary=undisturbed & ~evaluating & ~saving,
            **columns,
        )

    def read_ranks(self, recent: bool = False) -> RankLines | None:
        """The console lines' tables, those of the last few if `recent`; None without any."""
        lines = list(filter(None, map(_decode_ranks, self._recent))) if recent else self._ranks
        if not lines:
            return None
        ranks = len(lines[0].step_ms)
        first, last = np.array([line.iterations for line in lines]).T
        return RankLines(
            first=first,
            last=last,
            steps=_build_rank_table([line.steps for line in lines], ranks),
            step_ms=_build_rank_table([line.step_ms for line in lines], ranks),
            gpu_ms=_build_rank_table([line.gpu_ms for line in lines], ranks),
            phases_ms=_build_phase_tables([line.phases_ms for line in lines], ranks),
            gpu_phases_ms=_build_phase_tables([line.gpu_phases_ms for line in lines], ranks),
            own_backward_ms=_build_rank_table([line.own_backward_ms for line in lines], ranks),
            host_memory_bytes=_build_rank_table([line.host_memory_bytes for line in lines], ranks),
            peak_memory_bytes=_build_rank_table([line.peak_memory_bytes for line in lines], ranks),
            cpu_ms=_build_rank_table([line.cpu_ms for line in lines], ranks),
            core_wait_ms=_build_rank_table([line.core_wait_ms for line in lines], ranks),
            involuntary_switches=_build_rank_table([line.involuntary_switches for line in lines], ranks),
        )


def _take_numbers(records: list[StepRecord]) -> dict[str, Numbers]:
    """Columns of Steps, in the units of the records; NaN for what a record does not have."""
    losses = [NOT_GIVEN if record.loss is UNSET else record.loss for record in records]
    grad_norms = [None if record.grad_norm is UNSET else record.grad_norm for record in records]
    columns: dict[str, list[float | None]] = {
        "step_ms": [record.ms for record in records],
        "gpu_ms": [record.gpu_ms for record in records],
        "batch_sizes": [record.batch_size for record in records],
        "consumed_samples": [record.consumed_samples for record in records],
        "next_lrs": [record.next_lr for record in records],
        "losses": losses,
        "grad_norms": grad_norms,
        "loss_scale": [record.loss_scale for record in records],
        "host_memory_bytes": [record.host_memory_bytes for record in records],
        "peak_memory_bytes": [record.peak_memory_bytes for record in records],
        "compile_ms": [record.compile_ms for record in records],
        "cpu_ms": [record.cpu_ms for record in records],
        "core_wait_ms": [record.core_wait_ms for record in records],
        "involuntary_switches": [record.involuntary_switches for record in records],
        "busiest_experts": [_average(record.routing.busiest) if record.routing else None for record in records],
        "busiest_expert_ranks": [record.routing.busiest_ranks if record.routing else None for record in records],
        "dropped_shares": [_measure_dropped(record.routing) if record.routing else None for record in records],
    }
    return {name: np.array(values, float) for name, values in columns.items()}


def _average(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _measure_dropped(routing: RoutingRecord) -> float:
    """The share of assignments that were dropped."""
    kept = sum(routing.expert_tokens)
    return routing.dropped / max(routing.dropped + kept, 1)


def _take_flags(records: list[StepRecord]) -> dict[str, list[bool]]:
    """Columns of Steps, and which steps were slowed down beside a profile."""
    return {
        "skipped": [record.skipped is True for record in records],
        "profiled": [record.profiled for record in records],
        "beside_profile": [record.beside_profile for record in records],
        "compiling": [record.compiling for record in records],
    }


def _decode_ranks(text: bytes) -> RankInterval | None:
    with suppress(msgspec.MsgspecError, RecursionError):
        line = msgspec.json.decode(text, type=RankInterval)
        return line if line.step_ms else None
    return None


def _build_rank_table(rows: Iterable[RankNumbers], ranks: int) -> Numbers:
    """[line, rank] of a figure. NaN for a line that does not have a number for each rank."""
    unknown: RankNumbers = [None] * ranks
    complete = [row if len(row) == ranks else unknown for row in rows]
    return np.array(complete, float).reshape(-1, ranks)


def _build_phase_tables(lines: list[dict[str, RankNumbers]], ranks: int) -> dict[str, Numbers]:
    """[line, rank] of each phase that any line has."""
    names = dict.fromkeys(name for phases in lines for name in phases)
    return {name: _build_rank_table([phases.get(name, []) for phases in lines], ranks) for name in names}


def _read_damaged(text: bytes) -> StepRecord | Ranks | None:
    """The record of what in a line has the right type; None if that is too little, and of what is no JSON."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("kind") != StepRecord.__struct_config__.tag:
            return None
        sound: dict[str, Any] = {"phases_ms": {}}
        for name in TYPES.keys() & found.keys():
            with suppress(msgspec.ValidationError, OverflowError):
                sound[name] = msgspec.convert(found[name], TYPES[name])
        with suppress(TypeError):  # a field that every step has is missing
            return StepRecord(**sound)
    return None
