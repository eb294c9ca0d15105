"""A memory snapshot, read: the curve worked out from the state at the end and the events before it, the peak, and what held
memory then."""

import itertools
import pickle
import re
from pathlib import Path

import numpy as np

from megatron_lite.analysis.memory.categories import (
    INDEX,
    Lives,
    assign_categories,
    find_lifetimes,
    held_bytes,
    passing_gradients,
    placed,
)
from megatron_lite.analysis.memory.memory_results import Growth, Held, Moment, OutOfMemory, Snapshot, StepMemory
from megatron_lite.analysis.memory.phases import PHASES, Phases, StepSpan, find_memory_phases
from megatron_lite.analysis.memory.record import OOM, Record, build_record
from megatron_lite.analysis.memory.sites import measure_fragmentation, reserved_bytes, sum_layers, sum_sites
from megatron_lite.errors import UserError
from megatron_lite.estimate.memory_categories import CATEGORIES
from megatron_lite.process_state import limit_memory
from megatron_lite.units import size

# --- reads a pickle that may be hostile: plain values only, and nothing is executed

MAX_MEMORY_PER_BYTE = 60  # a snapshot takes 10 to 30 times its file's size
FROM_TORCH = "write it again with torch.cuda.memory._dump_snapshot or --record-memory-history"


class _PlainValues(pickle.Unpickler):
    """Every way to code leads through one of these two."""

    def find_class(self, module, name):
        raise _Refused(f"names {module}.{name}")

    def persistent_load(self, pid):
        raise _Refused("refers to objects outside of itself")


class _Refused(Exception):
    pass


def plain_values(path: Path):
    """What the pickle at `path` holds. Raises UserError for one that is damaged, cut, or holds more than plain values."""
    try:
        with open(path, "rb") as file, limit_memory(path.stat().st_size, MAX_MEMORY_PER_BYTE):
            return _PlainValues(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file.") from None
    except _Refused as why:
        raise UserError(
            f"{path}: {_printable(str(why))}, but a memory snapshot holds plain values only; reading it could run "
            f"its code and is refused; {FROM_TORCH}."
        ) from None
    except MemoryError:
        raise UserError(
            f"{path}: asks for far more memory than its size explains; it is damaged: {FROM_TORCH}."
        ) from None
    except Exception as error:  # noqa: BLE001 - damaged pickles make the reader raise errors of many kinds
        raise UserError(
            f"{path}: is no readable pickle ({type(error).__name__}: {_printable(str(error))}), cut short or "
            f"damaged; {FROM_TORCH}."
        ) from None


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])


# --- memory that stays after each step

MIN_STEPS = 3
MIN_BYTES = 4096  # per step; counters and log values come and go
MOSTLY = 0.75  # of the steps must end higher than the one before


def find_growth(steps: tuple[StepSpan, ...], allocated: np.ndarray, sites_between) -> Growth | None:
    """allocated: int64 [n + 1], bytes before the first event and after each. sites_between(first, last): what is held after
    event `last` more than after event `first`. None where memory does not grow or too few steps are seen."""
    ends = np.array([step.last for step in steps], np.int64)
    if len(ends) < MIN_STEPS:
        return None
    change = np.diff(allocated[ends + 1])
    slope = float(np.median(change))
    if slope < MIN_BYTES or np.mean(change > 0) < MOSTLY:
        return None
    times = len(change)
    sites = sites_between(int(ends[0]), int(ends[-1]), times)
    return Growth(bytes_per_step=slope, steps=len(ends), sites=sites)


def step_memory(steps: tuple[StepSpan, ...], allocated: np.ndarray, time_us: np.ndarray) -> tuple[StepMemory, ...]:
    return tuple(
        StepMemory(
            step.name,
            int(time_us[step.first]),
            int(time_us[step.last]),
            int(allocated[step.last + 1]),
            int(allocated[step.first : step.last + 2].max()),
        )
        for step in steps
    )


# --- A memory snapshot, read: the curve worked out from the state at the end and the events before it, the peak, and what held

CURVE_POINTS = 800
MAX_UNKNOWN = 0.01  # of the peak, without origin, in a record that counts as complete
RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)


def read_snapshot(path: Path) -> Snapshot:
    """Raises UserError where `path` is no memory snapshot."""
    return analyze_snapshot(plain_values(Path(path)), Path(path))


def analyze_snapshot(raw, path: Path) -> Snapshot:
    """The same of what a file at `path` would hold. Raises UserError where that is no memory snapshot."""
    return _Reading(build_record(raw, path), path).snapshot()


class _Reading:
    """One record and the columns worked out from it; index 0 of a curve is before the first event."""

    def __init__(self, record: Record, path: Path):
        self.record, self.path = record, path
        self.lives: Lives = find_lifetimes(record)
        self.phases: Phases = find_memory_phases(record)
        self.categories = assign_categories(record, self.lives, self.phases)
        seen = placed(record, self.lives, self.phases)
        self.phase_of_life = seen.phase
        self.passing = passing_gradients(seen, self.categories)
        self.allocated = held_bytes(self.lives, len(record))
        self.reserved = reserved_bytes(record)
        self.peak = int(np.argmax(self.allocated)) - 1  # event after which most is held; -1: before the first

    def snapshot(self) -> Snapshot:
        record, lives = self.record, self.lives
        held = self._held()
        rows = lives.held_after(self.peak)
        layers, guessed = sum_layers(rows[self.categories[rows] == INDEX["activations"]], lives, self.phases)
        fragmentation, unreplayed = measure_fragmentation(record, lives, self.allocated, self.reserved)
        growth = find_growth(self.phases.steps, self.allocated, self._grown_sites)
        rank = RANK_IN_NAME.search(self.path.name)
        unknown = sum(one.num_bytes for one in held if one.category == "before the record")
        complete = unknown <= MAX_UNKNOWN * int(self.allocated[self.peak + 1])
        return Snapshot(
            source=self.path.name,
            rank=int(rank[1]) if rank else None,
            simulated=bool(record.settings.get("simulated")),
            peak_bytes=int(self.allocated[self.peak + 1]),
            peak_time_us=self._time(self.peak),
            peak_phase=self._peak_phase(),
            held=held,
            sites=self._sites(rows, lives.num_bytes[rows]),
            layers=layers,
            curve=self._curve(),
            steps=step_memory(self.phases.steps, self.allocated, record.time_us),
            growth=growth,
            fragmentation=fragmentation,
            oom=self._oom(),
            events=len(record),
            complete=complete,
            notes=(
                *record.notes,
                *self._notes(unknown, complete),
                *([unreplayed] if unreplayed else []),
                *(["layers are told apart by the order in which equal stacks allocate"] if guessed and layers else []),
            ),
            highest=self._highest(),
        )

    def _held(self) -> tuple[Held, ...]:
        rows = self.lives.held_after(self.peak)
        category = self.categories[rows]
        sums, requested = (
            np.bincount(category, weights=sizes[rows], minlength=len(CATEGORIES))
            for sizes in (self.lives.num_bytes, self.lives.requested)
        )
        blocks = np.bincount(category, minlength=len(CATEGORIES))
        return tuple(
            Held(CATEGORIES[at], int(sums[at]), int(blocks[at]), int(requested[at]))
            for at in np.argsort(-sums, kind="stable")
            if blocks[at]
        )

    def _highest(self) -> tuple[Held, ...]:
        found = []
        for number in np.unique(self.categories).tolist():
            mine = (self.categories == number) & ~self.passing
            held, requested, blocks = (
                int(held_bytes(self.lives, len(self.record), np.where(mine, sizes, 0)).max())
                for sizes in (self.lives.num_bytes, self.lives.requested, 1)
            )
            found.append(Held(CATEGORIES[number], held, blocks, requested))
        return tuple(sorted(found, key=lambda one: -one.num_bytes))

    def _sites(self, rows: np.ndarray, sizes: np.ndarray):
        return sum_sites(rows, sizes, self.record, self.lives, self.phases, self.categories, self.phase_of_life)

    def _grown_sites(self, first: int, last: int, times: int):
        """Per step: what was held after `last` and not after `first`, less what the same lines held before."""
        more, less = (
            np.setdiff1d(self.lives.held_after(a), self.lives.held_after(b)) for a, b in ((last, first), (first, last))
        )
        rows = np.concatenate([more, less])
        signed = np.concatenate([self.lives.num_bytes[more], -self.lives.num_bytes[less]])
        return tuple(site for site in self._sites(rows, signed / times) if site.num_bytes > 0)

    def _time(self, event: int) -> int:
        return int(self.record.time_us[event]) if event >= 0 else 0

    def _peak_phase(self) -> str:
        return PHASES[self.phases.of_event[max(self.peak, 0)]] if len(self.record) else ""

    def _curve(self) -> tuple[Moment, ...]:
        """Of every stretch of events the highest moment; the first, the last and the peak are in it."""
        n = len(self.allocated)
        edges = np.unique(np.linspace(0, n, min(n, CURVE_POINTS) + 1).astype(np.int64))
        highest = [int(start + np.argmax(self.allocated[start:end])) for start, end in itertools.pairwise(edges)]
        at = np.unique([0, *highest, self.peak + 1, n - 1])
        parts = np.stack(
            [
                held_bytes(self.lives, len(self.record), np.where(self.categories == number, self.lives.num_bytes, 0))[
                    at
                ]
                for number in range(len(CATEGORIES))
            ],
            axis=1,
        )
        return tuple(
            Moment(self._time(point - 1), allocated, reserved, tuple(part))
            for point, allocated, reserved, part in zip(
                at.tolist(), self.allocated[at].tolist(), self.reserved[at].tolist(), parts.tolist()
            )
        )

    def _oom(self) -> OutOfMemory | None:
        """The last failed allocation: earlier ones were survived."""
        failed = np.flatnonzero(self.record.action == OOM)
        if not len(failed):
            return None
        last = int(failed[-1])
        return OutOfMemory(
            requested_bytes=int(self.record.size[last]),
            device_free_bytes=int(self.record.device_free[last]),
            site=self.record.stacks.site(int(self.record.stack[last])),
        )

    def _notes(self, unknown: int, complete: bool):
        record = self.record
        if not len(record):
            yield (
                "no history was recorded: this is the state at the moment of the dump, no peak; call "
                "torch.cuda.memory._record_memory_history first"
            )
            return
        if not record.timed:
            yield "the file has no times: moments are counted in events"
        if not complete:
            yield (
                f"{size(unknown)} of the peak were there before the record began and nothing says what for: record from "
                "before the model is made, with a larger ring if it was full"
            )
        if len(self.phases.steps) < MIN_STEPS:
            yield f"growth from step to step needs {MIN_STEPS} steps; the record holds {len(self.phases.steps)}"
