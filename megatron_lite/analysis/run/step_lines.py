"""Reading of steps.jsonl, line by line, into columns: what the trainer appended, and what of it can be read.

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
from megatron_lite.analysis.run.hardware import HardwareTally, RanksHardware
from megatron_lite.analysis.run.run_results import PhaseTimes, RankLines, Steps
from megatron_lite.formats.step_records import (
    MAX_STEP_LINE_BYTES,
    HardwareRecord,
    RankInterval,
    RankNumbers,
    RanksRecord,
    RoutingRecord,
    StepRecord,
)
from megatron_lite.phases import Phase
from megatron_lite.shared_files import open_foreign

TOO_LARGE = 2**32  # for an unsigned number of four bytes
NOT_GIVEN = -math.inf  # of a loss: null stands for one that is NaN or Inf
LINES_PER_BATCH = 500  # lines that are read before their numbers are moved into columns
MAX_KEPT_RANK_NUMBERS = 2**18  # of console lines that are kept; of longer runs evenly chosen lines
MIN_RANK_LINES = 32  # that are kept of any number of ranks before some are left out

MAX_RANKS_ALONE = 2**16  # whose hardware a line of its own may tell of: a damaged number takes no room
RECENT = 8  # console lines, as many as the trainer asks before it names a slow rank

Ranks = RanksRecord[msgspec.Raw]  # an interval is read where it is wanted
TYPES = {field.name: field.type for field in msgspec.structs.fields(StepRecord)}
# lists with a number per rank, beside those of phases
LISTS_OF_INTERVAL = len(set(RankInterval.__struct_fields__) - {"iterations", "phases_ms", "gpu_phases_ms", "hardware"})


class HardwareOfLine(msgspec.Struct):
    """The part of a console line that is read of each, also of those that are not kept."""

    step_ms: RankNumbers
    hardware: dict[str, RankNumbers] = {}


class Columns:
    """Columns of numbers that grow together; `missing` is what a row lacks, or a column before it first occurs.

    A column that has had one value only takes no room.
    """

    def __init__(self, missing: float, kind: str = "d"):
        self._missing = missing
        self._kind = kind  # array's code: "I" for whole numbers below 2**32, "d"
        self._length = 0
        self._constant: dict[str, float] = {}  # the first value of each column
        self._varying: dict[str, array[float]] = {}  # columns that have had others

    def append(self, rows: Mapping[str, NDArray[Any]], length: int) -> None:
        """Append `length` numbers to every column."""
        for name in dict.fromkeys((*self._constant, *rows)):
            values = rows[name] if name in rows else np.full(length, self._missing)
            if name not in self._constant:
                self._constant[name] = self._missing if self._length else values.flat[0]
            if name not in self._varying and not self._is_constant(name, values):
                self._expand(name)
            if name in self._varying:
                self._extend(name, values)
        self._length += length

    def _is_constant(self, name: str, values: NDArray[Any]) -> bool:
        """Whether all values are the only one that the column has had."""
        same = np.full(len(values), self._constant[name])
        return np.array_equal(values, same, equal_nan=True)

    def _expand(self, name: str) -> None:
        """Give a column room for values that differ."""
        value = self._constant[name]
        kind = "d" if value >= TOO_LARGE else self._kind
        so_far = np.full(self._length, value, kind)
        self._varying[name] = array(kind, so_far.tobytes())

    def _extend(self, name: str, values: NDArray[Any]) -> None:
        """Append values to a column that has room for them; whole numbers that are too large turn it into floats."""
        column = self._varying[name]
        if column.typecode == "I" and values.max() >= TOO_LARGE:
            column = array("d", column)
            self._varying[name] = column
        column.frombytes(values.astype(column.typecode).tobytes())

    def append_rows(self, rows: list[dict[str, float]]) -> None:
        """Append a number to each column of a row, times 1000: milliseconds become microseconds."""
        for names, group in groupby(rows, tuple):
            alike = list(group)  # with the same names in the same order
            count = len(alike)
            numbers = chain.from_iterable(map(dict.values, alike))
            flat = np.fromiter(numbers, float, count * len(names))
            table = np.rint(1000 * flat.reshape(count, len(names)))
            self.append(dict(zip(names, table.T)), count)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` rows."""
        for column in self._varying.values():
            del column[length:]
        self._length = length

    def read(self) -> dict[str, NDArray[Any]]:
        """The columns by name, without copying."""
        found: dict[str, NDArray[Any]] = {}
        for name, value in self._constant.items():
            if name in self._varying:
                column = self._varying[name]
                found[name] = np.frombuffer(column, column.typecode)
            else:
                found[name] = np.broadcast_to(value, self._length)
        return found


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
        """Whether the line still stands there."""
        file.seek(self.offset - len(self.text))
        return file.read(len(self.text)) == self.text


class _Cursor:
    """Where reading stands: what LineEnd has, changed line by line."""

    __slots__ = ("last_step", "lines", "local", "offset", "text")

    def __init__(self, start: LineEnd):
        self.offset = start.offset
        self.text = start.text
        self.lines = start.lines
        self.last_step = start.last_step
        self.local = start.local

    def pass_line(self, text: bytes) -> None:
        """Move behind a line."""
        self.offset += len(text)
        self.text = text
        self.lines += 1

    def build_end(self, steps: int, local: bool = False) -> LineEnd:
        """The end of the last line, up to which so many steps of this start have been read."""
        return LineEnd(
            offset=self.offset,
            text=self.text,
            lines=self.lines,
            steps=steps,
            last_step=self.last_step,
            local=local,
        )


class StepLines:
    """Lines that the last start wrote, as far as its file has been read.

    The arrays that `read_steps` returns share memory with what the next `read` appends to: nobody may hold them then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        """Forget all that was read."""
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
        self._phases = Columns(0, "I")
        self._gpu_phases = Columns(0, "I")
        self._flags: dict[str, bytearray] = {}
        self._begin_ranks()

    def _begin_ranks(self) -> None:
        """Forget the console lines before."""
        self.rank_lines = 0  # how many there are
        self.every = 1  # each `every`-th of them is kept
        self._ranks: list[RankInterval] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self._hardware = HardwareTally()
        self._recent_alone: deque[HardwareRecord] = deque(maxlen=RECENT)

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
        """Forget what was read behind the line that is settled."""
        place = self._settled
        self._here = place
        for column in (self._iterations, *self._flags.values()):
            del column[place.steps :]
        for columns in (self._numbers, self._phases, self._gpu_phases):
            columns.cut(place.steps)
        self.unread = [number for number in self.unread if number <= place.lines]

    def _read_lines(self, file: BinaryIO) -> None:
        """Read on from where reading has stopped, to the end of the file or a line that is not complete."""
        decode = msgspec.json.Decoder(StepRecord | Ranks | HardwareRecord).decode
        pending: list[StepRecord] = []
        cursor = _Cursor(self._here)
        file.seek(cursor.offset)
        self.cut = False
        while text := file.readline(MAX_STEP_LINE_BYTES):
            line: StepRecord | Ranks | HardwareRecord | None
            try:
                line = decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                if not text.endswith(b"\n") and len(text) < MAX_STEP_LINE_BYTES:
                    self.cut = True
                    break
                line = read_damaged_line(text)
            if isinstance(line, StepRecord):
                begins = line.step <= cursor.last_step
                if begins or line.local:
                    self._settle(begins, line, pending, cursor)
                cursor.last_step = line.step
                cursor.local = line.local
                pending.append(line)
                if len(pending) >= LINES_PER_BATCH:
                    self._add_steps(pending)
                    pending.clear()
                cursor.pass_line(text)
                continue
            cursor.pass_line(text)
            if isinstance(line, HardwareRecord):
                self._add_hardware(line)
            elif line is not None and self._add_ranks(bytes(line.ranks)):
                self._settled = cursor.build_end(len(self._iterations) + len(pending))
            elif text.strip():
                self.unread.append(cursor.lines)
        self._add_steps(pending)
        if cursor.offset > self._here.offset:
            self._here = cursor.build_end(len(self._iterations), cursor.local)

    def _settle(
        self,
        begins: bool,  # the record counts again from the beginning: it is of a new start
        record: StepRecord,
        pending: list[StepRecord],  # those before it that are in no column yet
        cursor: _Cursor,  # before its line
    ) -> None:
        """Note up to where lines stay as they are: those of a new start, and from a local loss on, may change."""
        if begins:
            self._begin(record.step)
            self.starts += 1
            pending.clear()
            self._settled = LineEnd()
        elif not cursor.local:
            self._settled = cursor.build_end(len(self._iterations) + len(pending))

    def _add_steps(self, records: list[StepRecord]) -> None:
        """Move steps into columns."""
        if not records:
            return
        self._iterations.extend([record.iteration for record in records])
        self._numbers.append(_take_numbers(records), len(records))
        self._phases.append_rows([record.phases_ms for record in records])
        self._gpu_phases.append_rows([record.gpu_phases_ms for record in records])
        for name, flags in _take_flags(records).items():
            self._flags.setdefault(name, bytearray()).extend(flags)

    def _add_ranks(self, text: bytes) -> bool:
        """Take a console line; False if it is none."""
        if self.rank_lines % self.every == 0:
            line = _decode_ranks(text)
            if line is None:
                return False
            self._keep_ranks(line)
        self.rank_lines += 1
        self._recent.append(text)
        found = _decode_hardware(text)
        if found is not None:
            self._hardware.add_line(found.hardware, len(found.step_ms))
        return True

    def _add_hardware(self, record: HardwareRecord) -> None:
        """Take samples of one rank."""
        if record.rank < MAX_RANKS_ALONE:
            self._hardware.add_record(record.rank, record.figures)
            self._recent_alone.append(record)

    def _keep_ranks(self, line: RankInterval) -> None:
        """Keep a console line, and only every second of those before where they become too many."""
        ranks = len(line.step_ms)
        # lines of another number of ranks are no part of the same medians
        if self._ranks and len(self._ranks[0].step_ms) != ranks:
            self._begin_ranks()
        self._ranks.append(line)
        lists = LISTS_OF_INTERVAL + len(line.phases_ms) + len(line.gpu_phases_ms)
        most = MAX_KEPT_RANK_NUMBERS // (ranks * lists)
        if len(self._ranks) > max(most, MIN_RANK_LINES):
            del self._ranks[1::2]
            self.every *= 2

    def read_steps(self) -> Steps:
        """Build the steps' columns."""
        # columns of a file without steps are empty, and there all the same
        flags = {name: np.frombuffer(self._flags.get(name, b""), np.bool_) for name in _take_flags([])}
        numbers = _take_numbers([]) | self._numbers.read()
        slowed = flags["profiled"] | flags.pop("beside_profile") | flags["compiling"]
        undisturbed = ~slowed
        if self.first_step == 1:
            undisturbed[:1] = False
        losses = numbers["losses"]
        not_finite = np.isnan(losses)
        if NOT_GIVEN in losses:
            numbers["losses"] = np.where(losses == NOT_GIVEN, math.nan, losses)
        phases_ms = PhaseTimes(self._phases.read())
        none = np.zeros(len(losses))
        evaluating_ms = phases_ms.get(Phase.EVAL.value, none)
        saving_ms = phases_ms.get(Phase.SAVE.value, none)
        training_ms = numbers["step_ms"] - evaluating_ms - saving_ms
        evaluating = evaluating_ms > 0
        saving = saving_ms > 0
        columns: dict[str, Any] = {**flags, **numbers}
        return Steps(
            iterations=np.frombuffer(self._iterations, np.int64),
            training_ms=np.maximum(training_ms, 0.0),
            phases_ms=phases_ms,
            gpu_phases_ms=PhaseTimes(self._gpu_phases.read()),
            not_finite=not_finite & ~flags["skipped"],
            evaluating=evaluating,
            saving=saving,
            undisturbed=undisturbed,
            ordinary=undisturbed & ~evaluating & ~saving,
            **columns,
        )

    def read_hardware(self, recent: bool = False) -> RanksHardware:
        """Add up what the ranks' hardware did over all lines, or in the last few if `recent`."""
        if not recent:
            return self._hardware.build()
        tally = HardwareTally()
        for text in self._recent:
            found = _decode_hardware(text)
            if found is not None:
                tally.add_line(found.hardware, len(found.step_ms))
        for record in self._recent_alone:
            tally.add_record(record.rank, record.figures)
        return tally.build()

    def read_ranks(self, recent: bool = False) -> RankLines | None:
        """The console lines' tables, those of the last few if `recent`; None without any."""
        lines = self._ranks
        if recent:
            decoded = [_decode_ranks(text) for text in self._recent]
            lines = [line for line in decoded if line is not None]
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
        "busiest_experts": [_average_busiest(record.routing) for record in records],
        "busiest_expert_ranks": [record.routing.busiest_ranks if record.routing else None for record in records],
        "dropped_shares": [_measure_dropped(record.routing) for record in records],
    }
    return {name: np.array(values, float) for name, values in columns.items()}


def _average_busiest(routing: RoutingRecord | None) -> float | None:
    """The busiest expert's tokens over an even share, mean over layers; None of a step without experts."""
    if not routing or not routing.busiest:
        return None
    return sum(routing.busiest) / len(routing.busiest)


def _measure_dropped(routing: RoutingRecord | None) -> float | None:
    """The share of assignments that were dropped; None of a step without experts."""
    if not routing:
        return None
    assigned = routing.dropped + sum(routing.expert_tokens)
    return routing.dropped / max(assigned, 1)


def _take_flags(records: list[StepRecord]) -> dict[str, list[bool]]:
    """Columns of Steps, and which steps were slowed down beside a profile."""
    return {
        "skipped": [record.skipped is True for record in records],
        "profiled": [record.profiled for record in records],
        "beside_profile": [record.beside_profile for record in records],
        "compiling": [record.compiling for record in records],
    }


def _decode_ranks(text: bytes) -> RankInterval | None:
    """The figures of a console line; None of what has not the right types, or no rank."""
    with suppress(msgspec.MsgspecError, RecursionError):
        line = msgspec.json.decode(text, type=RankInterval)
        return line if line.step_ms else None
    return None


def _decode_hardware(text: bytes) -> HardwareOfLine | None:
    """Decode what a console line tells of the ranks' hardware; None for nothing, and for wrong types."""
    with suppress(msgspec.MsgspecError, RecursionError):
        line = msgspec.json.decode(text, type=HardwareOfLine)
        return line if line.hardware and line.step_ms else None
    return None


def _build_rank_table(rows: Iterable[RankNumbers], ranks: int) -> Numbers:
    """A figure's table of [line, rank]; NaN for a line that does not have a number for each rank."""
    unknown: RankNumbers = [None] * ranks
    complete = [row if len(row) == ranks else unknown for row in rows]
    return np.array(complete, float).reshape(-1, ranks)


def _build_phase_tables(lines: list[dict[str, RankNumbers]], ranks: int) -> dict[str, Numbers]:
    """A table of [line, rank] for each phase that any line has."""
    names = dict.fromkeys(name for phases in lines for name in phases)
    tables = {}
    for name in names:
        rows = [phases.get(name, []) for phases in lines]
        tables[name] = _build_rank_table(rows, ranks)
    return tables


def read_damaged_line(text: bytes) -> StepRecord | Ranks | None:
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
