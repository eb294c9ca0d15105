"""steps.jsonl, line by line: what the trainer appended, what of it can be read, and the steps as columns."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.analysis.run.run_results import Interval
from megatron_lite.phases import Phase

CORES = ("cpu_ms", "core_wait_ms", "involuntary_switches")
LISTS = ("steps", "step_ms", "gpu_ms", "own_backward_ms", "host_memory_bytes", "peak_memory_bytes", *CORES)  # by rank
NUMBERS = {  # columns of Run: fields of a step's line
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
MAX_NUMBER = 1e18  # no count, time or size of a run is larger; beyond it a file is damaged


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
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            record = record if isinstance(record, dict) else {}
            counts = (record.get("iteration"), record.get("step"))
            if all(type(value) is int and 0 < value < MAX_NUMBER for value in counts) and number(record.get("ms")) > 0:
                if record["step"] <= last_step:  # a start counts its own steps from 1
                    found.starts, found.steps, found.intervals = found.starts + 1, [], []
                last_step = record["step"]
                found.steps.append(record)
            elif interval := read_interval(record.get("ranks")):
                found.intervals.append(interval)
            elif text.endswith("\n"):
                found.unread.append(line)
            else:
                found.cut = True
    return found


def read_interval(record: object) -> Interval | None:
    """A line of ranks; None for what is not one. A list that has not a number per rank counts as unknown."""
    if not isinstance(record, dict):
        return None
    bounds, ranks = read_numbers(record.get("iterations")), len(read_numbers(record.get("step_ms")))
    if len(bounds) != 2 or any(map(math.isnan, bounds)) or not ranks:
        return None
    lists, phases = {}, {}
    for name in LISTS:
        values = read_numbers(record.get(name))
        lists[name] = values if len(values) == ranks else (math.nan,) * ranks
    for name in ("phases_ms", "gpu_phases_ms"):
        given = record.get(name)
        read = {phase: read_numbers(ms) for phase, ms in given.items()} if isinstance(given, dict) else {}
        phases[name] = {phase: values for phase, values in read.items() if len(values) == ranks}
    return Interval(int(bounds[0]), int(bounds[1]), **lists, **phases)


def read_numbers(values: object) -> tuple[float, ...]:
    """() for what is no list."""
    return tuple(map(number, values)) if isinstance(values, list) else ()


def number(value: object) -> float:
    """A number that a run can have said; NaN for everything else."""
    if type(value) not in (int, float) or not 0 <= value < MAX_NUMBER:  # NaN fails the comparison
        return math.nan
    return float(value)


def read_columns(steps: list[dict]) -> dict:
    """The fields of Run that have an entry per step, of lines as read_step_lines keeps them."""
    columns: dict = {name: tuple(number(step.get(key)) for step in steps) for name, key in NUMBERS.items()}
    for name in ("phases_ms", "gpu_phases_ms"):
        columns[name] = _read_phases(steps, name)
    for name in ("skipped", "profiled", "beside_profile", "compiling"):
        columns[name] = tuple(step.get(name) is True for step in steps)
    disturbed = zip(columns["profiled"], columns.pop("beside_profile"), columns["compiling"])
    undisturbed = tuple(step["step"] > 1 and not any(odd) for step, odd in zip(steps, disturbed))
    none = (0.0,) * len(steps)
    evaluating_ms, saving_ms = (columns["phases_ms"].get(phase.value, none) for phase in (Phase.EVAL, Phase.SAVE))
    beside = [evaluating + saving for evaluating, saving in zip(evaluating_ms, saving_ms)]
    return columns | {
        "iterations": tuple(step["iteration"] for step in steps),
        "training_ms": tuple(max(ms - other, 0.0) for ms, other in zip(columns["step_ms"], beside)),
        # an update whose loss was NaN or Inf, for which JSON has null
        "not_finite": tuple(
            "loss" in step and not skipped and not number(step["loss"]) >= 0
            for step, skipped in zip(steps, columns["skipped"])
        ),
        "evaluating": tuple(ms > 0 for ms in evaluating_ms),
        "saving": tuple(ms > 0 for ms in saving_ms),
        "undisturbed": undisturbed,
        "ordinary": tuple(quiet and not other for quiet, other in zip(undisturbed, beside)),
    }


def _read_phases(steps: list[dict], name: str) -> dict[str, tuple[float, ...]]:
    """Milliseconds per step by phase, in the order in which phases first occur; 0 where a step has none."""
    rows = []
    for step in steps:
        given = step.get(name)
        read = {phase: number(ms) for phase, ms in given.items()} if isinstance(given, dict) else {}
        rows.append({phase: ms for phase, ms in read.items() if ms >= 0})
    phases = dict.fromkeys(phase for row in rows for phase in row)
    return {phase: tuple(row.get(phase, 0.0) for row in rows) for phase in phases}
