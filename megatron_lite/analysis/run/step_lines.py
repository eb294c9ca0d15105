"""steps.jsonl, line by line: what the trainer appended, and what of it can be read."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.analysis.run.run_results import Interval

CORES = ("cpu_ms", "core_wait_ms", "involuntary_switches")
LISTS = (
    "steps",
    "step_ms",
    "gpu_ms",
    "own_backward_ms",
    "host_memory_bytes",
    "peak_memory_bytes",
    *CORES,
)  # of a line of ranks
LARGEST = 1e18  # no count, time or size of a run; beyond it a file is damaged
NONE = math.nan


@dataclass
class StepLines:
    """What the last start wrote."""

    steps: list[dict] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    starts: int = 0  # that have steps
    unread: list[int] = field(default_factory=list)  # numbers of lines that are no JSON, or not of this format
    cut: bool = False  # the file ends within a line


def read_step_lines(path: Path) -> StepLines:
    """The last start's steps and intervals; a line that cannot be read is counted and left out. OSError as open raises it."""
    found, last_step = StepLines(), math.inf
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text, record in _records(file):
            if is_step(record):
                if record["step"] <= last_step:  # a start counts its own steps from 1
                    found.starts, found.steps, found.intervals = found.starts + 1, [], []
                last_step = record["step"]
                found.steps.append(record)
            elif isinstance(record, dict) and (interval := interval_of(record.get("ranks"))):
                found.intervals.append(interval)
            elif text.endswith("\n"):
                found.unread.append(number)
            else:
                found.cut = True
    return found


def _records(lines: Iterable[str]) -> Iterator[tuple[int, str, object]]:
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                yield number, text, json.loads(text)
            except (ValueError, RecursionError):
                yield number, text, None


def is_step(record: object) -> bool:
    """A line of one step with what no figure can do without."""
    if not isinstance(record, dict):
        return False
    counts = (record.get("iteration"), record.get("step"))
    return all(type(value) is int and 0 < value < LARGEST for value in counts) and number(record.get("ms")) > 0


def interval_of(record: object) -> Interval | None:
    """A line of ranks; None for what is not one."""
    if not isinstance(record, dict) or not isinstance(record.get("iterations"), list):
        return None
    bounds = [number(value) for value in record["iterations"]]
    lists = {name: numbers(record.get(name)) for name in LISTS}
    if len(bounds) != 2 or any(map(math.isnan, bounds)) or not lists["step_ms"]:
        return None
    ranks = len(lists["step_ms"])
    phases = {name: _by_phase(record.get(name), ranks) for name in ("phases_ms", "gpu_phases_ms")}
    even = {name: values if len(values) == ranks else (NONE,) * ranks for name, values in lists.items()}
    return Interval(int(bounds[0]), int(bounds[1]), **even, **phases)


def _by_phase(record: object, ranks: int) -> dict[str, tuple[float, ...]]:
    named = record.items() if isinstance(record, dict) else ()
    read = {name: numbers(values) for name, values in named}
    return {name: values for name, values in read.items() if len(values) == ranks}


def numbers(values: object) -> tuple[float, ...]:
    return tuple(map(number, values)) if isinstance(values, list) else ()


def number(value: object) -> float:
    """A number that a run can have said; NaN for everything else."""
    if type(value) not in (int, float) or not 0 <= value < LARGEST:  # NaN fails the comparison
        return NONE
    return float(value)
