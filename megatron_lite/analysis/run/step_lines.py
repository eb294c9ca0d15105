"""steps.jsonl, line by line, into columns: what the trainer appended, and what of it can be read.

A run may have a million steps: a line is gone as soon as its numbers stand in columns of eight bytes each. A run that goes on
appends more: only that is read the next time.
"""

import json
import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Numbers
from megatron_lite.analysis.run.run_results import Phases, RankLines, Steps
from megatron_lite.phases import Phase
from megatron_lite.shared_files import open_foreign

CORES = ("cpu_ms", "core_wait_ms", "involuntary_switches")
LISTS = ("steps", "step_ms", "gpu_ms", "own_backward_ms", "host_memory_bytes", "peak_memory_bytes", *CORES)  # by rank
PHASES = ("phases_ms", "gpu_phases_ms")
NUMBERS = {  # columns of Steps: fields of a step's line
    "step_ms": "ms",
    "gpu_ms": "gpu_ms",
    "batch_sizes": "batch_size",
    "consumed_samples": "consumed_samples",
    "next_lrs": "next_lr",
    "losses": "loss",
    "grad_norms": "grad_norm",
    "loss_scale": "loss_scale",
    "host_memory_bytes": "host_memory_bytes",
    "peak_memory_bytes": "peak_memory_bytes",
    "compile_ms": "compile_ms",
    **{name: name for name in CORES},
}
FLAGS = ("skipped", "profiled", "beside_profile", "compiling")
MAX_NUMBER = 10**18  # no count, time or size of a run is larger; beyond it a file is damaged
NOT_GIVEN = -math.inf  # of a loss: null stands for one that is NaN or Inf
BATCH = 500  # lines that are read before their numbers are moved into columns
MAX_RANK_NUMBERS = 2**18  # of console lines that are kept; of longer runs evenly chosen lines
MIN_RANK_LINES = 32  # that are kept of any number of ranks before some are left out
RECENT = 8  # console lines, as many as the trainer asks before it names a slow rank

RankLists = Mapping[str, list[float | None]]
Count = Annotated[int, msgspec.Meta(gt=0, lt=MAX_NUMBER)]
Number = Annotated[float, msgspec.Meta(ge=0, lt=MAX_NUMBER)]


class RankLine(msgspec.Struct):
    """What all ranks said at a console line: lists with a number per rank, or null."""

    iterations: tuple[Count, Count]
    step_ms: list[Number | None]
    steps: list[Number | None] = []
    gpu_ms: list[Number | None] = []
    own_backward_ms: list[Number | None] = []
    host_memory_bytes: list[Number | None] = []
    peak_memory_bytes: list[Number | None] = []
    cpu_ms: list[Number | None] = []
    core_wait_ms: list[Number | None] = []
    involuntary_switches: list[Number | None] = []
    phases_ms: dict[str, list[Number | None]] = {}
    gpu_phases_ms: dict[str, list[Number | None]] = {}


class Line(msgspec.Struct):
    """Any line: of a step, or with `ranks` of all of them."""

    iteration: Count = 0
    step: Count = 0
    ms: Number = math.nan
    gpu_ms: Number = math.nan
    batch_size: Number = math.nan
    consumed_samples: Number = math.nan
    next_lr: Number = math.nan
    loss: Annotated[float, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)] | None = NOT_GIVEN
    grad_norm: Number | None = math.nan
    loss_scale: Number = math.nan
    host_memory_bytes: Number = math.nan
    peak_memory_bytes: Number = math.nan
    compile_ms: Number = math.nan
    cpu_ms: Number = math.nan
    core_wait_ms: Number = math.nan
    involuntary_switches: Number = math.nan
    phases_ms: dict[str, Number] = {}
    gpu_phases_ms: dict[str, Number] = {}
    skipped: bool = False
    profiled: bool = False
    beside_profile: bool = False
    compiling: bool = False
    local: bool = False
    ranks: msgspec.Raw = msgspec.Raw()  # a RankLine, which is read where it is wanted


TYPES = get_type_hints(Line, include_extras=True)


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
class Place:
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
        self._here = self._settled = Place()  # steps between the two may be written anew
        self._begin(0)

    def _begin(self, first_step: int) -> None:
        """Forget the start before."""
        self.first_step = first_step
        self._iterations = array("q")
        self._numbers = Columns(math.nan)
        self._phases = {name: Columns(0, "I") for name in PHASES}  # whole microseconds
        self._flags = {name: bytearray() for name in FLAGS}
        self._begin_ranks()

    def _begin_ranks(self) -> None:
        self.rank_lines, self.every = 0, 1  # how many there are, and that each `every`-th of them is kept
        self._ranks: list[RankLine] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT)

    def read(self) -> bool:
        """Read what the file has more than the last time; False for nothing. OSError as open raises it.

        A line that cannot be read is counted and left out. If the file was cut back, because steps that were written ahead of
        their console line are written anew, it is read again from the console line before; another file from its beginning.
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
        for columns in (self._numbers, *self._phases.values()):
            columns.cut(place.steps)
        self.unread = [number for number in self.unread if number <= place.lines]

    def _read_lines(self, file: BinaryIO) -> None:
        """From where reading has stopped."""
        decode, steps, here = msgspec.json.Decoder(Line).decode, list[Line](), self._here
        offset, number, last, last_step, local = here.offset, here.lines, here.text, here.last_step, here.local
        file.seek(offset)
        self.cut = False
        for text in file:
            try:
                line = decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                if not text.endswith(b"\n"):
                    self.cut = True
                    break
                line = _read_damaged(text)
            if line.step and line.iteration and line.ms > 0:
                if line.step <= last_step:
                    self._begin(line.step)
                    self.starts, steps = self.starts + 1, []
                    self._settled = Place()
                elif line.local and not local:
                    self._settled = Place(offset, last, number, len(self._iterations) + len(steps), last_step)
                last_step, local = line.step, line.local
                steps.append(line)
                if len(steps) >= BATCH:
                    self._add_steps(steps)
                    steps = []
            elif line.ranks and self._add_ranks(line.ranks):
                known = len(self._iterations) + len(steps)
                self._settled = Place(offset + len(text), text, number + 1, known, last_step)
            elif text.strip():
                self.unread.append(number + 1)
            offset, number, last = offset + len(text), number + 1, text
        self._add_steps(steps)
        if offset > here.offset:
            self._here = Place(offset, last, number, len(self._iterations), last_step, local)

    def _add_steps(self, lines: list[Line]) -> None:
        if not lines:
            return
        self._iterations.extend(map(attrgetter("iteration"), lines))
        for line in lines:
            line.loss = math.nan if line.loss is None else line.loss
            line.grad_norm = math.nan if line.grad_norm is None else line.grad_norm
        self._numbers.append(
            _build_table(tuple(NUMBERS), map(attrgetter(*NUMBERS.values()), lines), len(lines)), len(lines)
        )
        for what, columns in self._phases.items():
            for names, rows in groupby(map(attrgetter(what), lines), tuple):
                alike = list(rows)  # with the same phases in the same order
                table = _build_table(names, map(dict.values, alike), len(alike))
                columns.append({name: np.rint(1000 * ms) for name, ms in table.items()}, len(alike))
        for name, flags in self._flags.items():
            flags.extend(map(attrgetter(name), lines))

    def _add_ranks(self, text: bytes) -> bool:
        """A console line; False if it is none. Lines of another number of ranks are no part of the same medians."""
        if self.rank_lines % self.every == 0:
            line = _decode_ranks(text)
            if line is None:
                return False
            if self._ranks and len(self._ranks[0].step_ms) != len(line.step_ms):
                self._begin_ranks()
            self._ranks.append(line)
            numbers = len(line.step_ms) * (len(LISTS) + len(line.phases_ms) + len(line.gpu_phases_ms))
            if len(self._ranks) > max(MAX_RANK_NUMBERS // numbers, MIN_RANK_LINES):
                del self._ranks[1::2]
                self.every *= 2
        self.rank_lines += 1
        self._recent.append(text)
        return True

    def read_steps(self) -> Steps:
        """The steps' columns."""
        flags: dict[str, Flags] = {name: np.frombuffer(flags, np.bool_) for name, flags in self._flags.items()}
        undisturbed = ~(flags["profiled"] | flags.pop("beside_profile") | flags["compiling"])
        if self.first_step == 1:
            undisturbed[:1] = False
        numbers: dict[str, Numbers] = dict.fromkeys(NUMBERS, np.array([])) | self._numbers.read()
        not_finite = np.isnan(numbers["losses"]) & ~flags["skipped"]
        if NOT_GIVEN in numbers["losses"]:
            numbers["losses"] = np.where(numbers["losses"] == NOT_GIVEN, math.nan, numbers["losses"])
        phases = {name: Phases(columns.read()) for name, columns in self._phases.items()}
        none = np.zeros(len(not_finite))
        evaluating_ms, saving_ms = (phases["phases_ms"].get(phase.value, none) for phase in (Phase.EVAL, Phase.SAVE))
        evaluating, saving = evaluating_ms > 0, saving_ms > 0
        columns: dict[str, Any] = {**flags, **numbers, **phases}
        return Steps(
            iterations=np.frombuffer(self._iterations, np.int64),
            training_ms=np.maximum(numbers["step_ms"] - evaluating_ms - saving_ms, 0.0),
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
        first, last = np.array([line.iterations for line in lines]).T
        lists: dict[str, Any] = _build_rank_tables(
            lines, [{name: getattr(line, name) for name in LISTS} for line in lines]
        )
        phases: dict[str, Any] = {
            name: _build_rank_tables(lines, [getattr(line, name) for line in lines]) for name in PHASES
        }
        return RankLines(first=first, last=last, **lists, **phases)


def _decode_ranks(text: bytes) -> RankLine | None:
    with suppress(msgspec.MsgspecError, RecursionError):
        line = msgspec.json.decode(text, type=RankLine)
        return line if line.step_ms else None
    return None


def _build_table(names: tuple[str, ...], rows: Iterable[Iterable[float]], length: int) -> dict[str, Numbers]:
    """A column for each name, of `length` rows of as many numbers."""
    table = np.fromiter(chain.from_iterable(rows), float, length * len(names)).reshape(length, len(names))
    return dict(zip(names, table.T))


def _build_rank_tables(lines: Sequence[RankLine], given: Sequence[RankLists]) -> dict[str, Numbers]:
    """[line, rank] for each name in `given`, which has the lists of each line. One that has not a number per rank counts as unknown."""
    width = len(lines[0].step_ms)
    unknown, names = [None] * width, dict.fromkeys(chain.from_iterable(given))
    rows = {name: [lists.get(name, unknown) for lists in given] for name in names}
    return {
        name: np.array([row if len(row) == width else unknown for row in rows[name]], float).reshape(-1, width)
        for name in names
    }


def _read_damaged(text: bytes) -> Line:
    """What of a line has the right type; nothing of what is no JSON."""
    line = Line()
    with suppress(ValueError, RecursionError):
        record = json.loads(text)
        for name in TYPES.keys() & record.keys() if isinstance(record, dict) else ():
            with suppress(msgspec.ValidationError, OverflowError):
                setattr(line, name, msgspec.convert(record[name], TYPES[name]))
    return line


def number(value: object) -> float:
    """A number that a run can have said; NaN for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if 0 <= value < MAX_NUMBER else math.nan  # NaN is not
