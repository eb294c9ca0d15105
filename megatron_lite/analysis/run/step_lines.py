"""steps.jsonl, line by line, into columns: what the trainer appended, and what of it can be read.

A run may have a million steps: a line is gone as soon as its numbers stand in columns of eight bytes each.
"""

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.run.run_results import Flags, Numbers, Phases, RankLines, Steps
from megatron_lite.phases import Phase

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
}
FLAGS = ("skipped", "profiled", "beside_profile", "compiling")
MAX_NUMBER = 10**18  # no count, time or size of a run is larger; beyond it a file is damaged
NOT_GIVEN = -math.inf  # of a loss: null stands for one that is NaN or Inf
BATCH = 500  # lines that are read before their numbers are moved into columns

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
    phases_ms: dict[str, Number] = {}
    gpu_phases_ms: dict[str, Number] = {}
    skipped: bool = False
    profiled: bool = False
    beside_profile: bool = False
    compiling: bool = False
    ranks: RankLine | None = None


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

    def read(self) -> dict[str, NDArray[Any]]:
        """Without copying."""
        varying = {name: np.frombuffer(column, column.typecode) for name, column in self._varying.items()}
        return {name: np.broadcast_to(value, self._length) for name, value in self._constant.items()} | varying


class StepLines:
    """What the last start wrote."""

    def __init__(self) -> None:
        self.starts = 0  # that have steps
        self.unread: list[int] = []  # numbers of lines that are no JSON, or not of this format
        self.cut = False  # the file ends within a line
        self.begin(0)

    def begin(self, first_step: int) -> None:
        """Forget the start before."""
        self.first_step = first_step
        self._iterations = array("q")
        self._numbers = Columns(math.nan)
        self._phases = {name: Columns(0, "I") for name in PHASES}  # whole microseconds
        self._flags = {name: bytearray() for name in FLAGS}
        self._begin_ranks(0)

    def _begin_ranks(self, width: int) -> None:
        self._width = width  # ranks
        self._bounds: list[tuple[int, int]] = []
        self._ranks = {name: Columns(math.nan) for name in ("", *PHASES)}

    def add_steps(self, lines: list[Line]) -> None:
        """Lines of one start, in order."""
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

    def add_ranks(self, lines: list[RankLine]) -> None:
        """Console lines of as many ranks each. A list that has not a number per rank counts as unknown."""
        width = len(lines[0].step_ms)
        if width != self._width:  # lines of another number of ranks are no part of the same medians
            self._begin_ranks(width)
        self._bounds.extend(line.iterations for line in lines)
        unknown = [None] * width
        for what, columns in self._ranks.items():
            given = [getattr(line, what) if what else {name: getattr(line, name) for name in LISTS} for line in lines]
            rows = {}
            for name in dict.fromkeys(chain.from_iterable(given)):
                lists = [of_line.get(name, unknown) for of_line in given]
                rows[name] = np.array([one if len(one) == width else unknown for one in lists], float).ravel()
            columns.append(rows, len(lines) * width)

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

    def read_ranks(self) -> RankLines | None:
        """The console lines' tables; None without any."""
        if not self._bounds:
            return None
        shape = (len(self._bounds), self._width)
        lists, *phases = (
            {name: values.reshape(shape) for name, values in columns.read().items()} for columns in self._ranks.values()
        )
        first, last = np.array(self._bounds).astype(np.int64).T
        lists = {name: lists.get(name, np.full(shape, math.nan)) for name in LISTS}
        return RankLines(first=first, last=last, phases_ms=phases[0], gpu_phases_ms=phases[1], **lists)


def read_step_lines(path: Path) -> StepLines:
    """The last start's lines; one that cannot be read is counted and left out. OSError as open raises it."""
    found, decode, last_step = StepLines(), msgspec.json.Decoder(Line).decode, math.inf
    steps: list[Line] = []
    ranks: list[RankLine] = []
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                line = _read_damaged(text)
            if line.step and line.iteration and line.ms > 0:
                if line.step <= last_step:  # a start counts its own steps from 1
                    found.begin(line.step)
                    found.starts, steps, ranks = found.starts + 1, [], []
                last_step = line.step
                steps.append(line)
                if len(steps) >= BATCH:
                    found.add_steps(steps)
                    steps = []
            elif line.ranks and line.ranks.step_ms:
                if ranks and (
                    len(ranks) >= BATCH // len(ranks[0].step_ms) or len(ranks[0].step_ms) != len(line.ranks.step_ms)
                ):
                    found.add_ranks(ranks)
                    ranks = []
                ranks.append(line.ranks)
            elif text.endswith(b"\n") and text.strip():
                found.unread.append(number)
            elif text.strip():
                found.cut = True
    if steps:
        found.add_steps(steps)
    if ranks:
        found.add_ranks(ranks)
    return found


def _build_table(names: tuple[str, ...], rows: Iterable[Iterable[float]], length: int) -> dict[str, Numbers]:
    """A column for each name, of `length` rows of as many numbers."""
    table = np.fromiter(chain.from_iterable(rows), float, length * len(names)).reshape(length, len(names))
    return dict(zip(names, table.T))


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
