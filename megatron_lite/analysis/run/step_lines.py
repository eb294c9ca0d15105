"""steps.jsonl, line by line: what the trainer appended, and what of it can be read."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.analysis.run.run_results import Interval
from megatron_lite.phases import Phase

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
            elif isinstance(record, dict) and (interval := read_interval(record.get("ranks"))):
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


def read_interval(record: object) -> Interval | None:
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


# --- the steps of a run as columns, and which of them are ordinary


EVAL, SAVE = Phase.EVAL.value, Phase.SAVE.value


@dataclass(frozen=True)
class Columns:
    """An entry per step; the names are those of Run."""

    iterations: tuple[int, ...]
    step_ms: tuple[float, ...]
    training_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    batch_sizes: tuple[float, ...]
    consumed_samples: tuple[float, ...]
    next_lrs: tuple[float, ...]
    losses: tuple[float, ...]
    not_finite: tuple[bool, ...]
    grad_norms: tuple[float, ...]
    loss_scale: tuple[float, ...]
    host_memory_bytes: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]
    skipped: tuple[bool, ...]
    profiled: tuple[bool, ...]
    compiling: tuple[bool, ...]
    compile_ms: tuple[float, ...]  # of it, in compiling steps
    evaluating: tuple[bool, ...]
    saving: tuple[bool, ...]
    undisturbed: tuple[bool, ...]  # neither the first nor profiled, beside a profile or compiling

    @property
    def ordinary(self) -> tuple[bool, ...]:
        """Undisturbed, and neither evaluating nor saving."""
        return tuple(
            quiet and not (evaluates or saves)
            for quiet, evaluates, saves in zip(self.undisturbed, self.evaluating, self.saving)
        )


def read_columns(steps: list[dict]) -> Columns:
    """Of lines that passed step_lines.is_step."""
    phases, step_ms = _columns_by_phase(steps, "phases_ms"), _numbers(steps, "ms")
    evaluating_ms, saving_ms = (phases.get(name, (0.0,) * len(steps)) for name in (EVAL, SAVE))
    marks = {name: _marks(steps, name) for name in ("profiled", "beside_profile", "compiling")}
    return Columns(
        iterations=tuple(step["iteration"] for step in steps),
        step_ms=step_ms,
        training_ms=tuple(
            max(ms - evaluating - saving, 0.0) for ms, evaluating, saving in zip(step_ms, evaluating_ms, saving_ms)
        ),
        gpu_ms=_numbers(steps, "gpu_ms"),
        phases_ms=phases,
        gpu_phases_ms=_columns_by_phase(steps, "gpu_phases_ms"),
        batch_sizes=_numbers(steps, "batch_size"),
        consumed_samples=_numbers(steps, "consumed_samples"),
        next_lrs=_numbers(steps, "next_lr"),
        losses=_numbers(steps, "loss"),
        not_finite=tuple(map(_is_lost, steps)),
        grad_norms=_numbers(steps, "grad_norm"),
        loss_scale=_numbers(steps, "loss_scale"),
        host_memory_bytes=_numbers(steps, "host_memory_bytes"),
        peak_memory_bytes=_numbers(steps, "peak_memory_bytes"),
        skipped=_marks(steps, "skipped"),
        profiled=marks["profiled"],
        compiling=marks["compiling"],
        compile_ms=_numbers(steps, "compile_ms"),
        evaluating=tuple(ms > 0 for ms in evaluating_ms),
        saving=tuple(ms > 0 for ms in saving_ms),
        undisturbed=tuple(step["step"] > 1 and not any(odd) for step, *odd in zip(steps, *marks.values())),
    )


def _is_lost(step: dict) -> bool:
    """An update whose loss was NaN or Inf, for which JSON has null."""
    return "loss" in step and step.get("skipped") is not True and not number(step["loss"]) >= 0


def _numbers(steps: list[dict], name: str) -> tuple[float, ...]:
    return tuple(number(step.get(name)) for step in steps)


def _marks(steps: list[dict], name: str) -> tuple[bool, ...]:
    return tuple(step.get(name) is True for step in steps)


def _columns_by_phase(steps: list[dict], name: str) -> dict[str, tuple[float, ...]]:
    """Milliseconds per step by phase, in the order in which phases first occur; 0 where a step has none."""
    rows = [row if isinstance(row := step.get(name), dict) else {} for step in steps]
    read = [{phase: ms for phase, value in row.items() if (ms := number(value)) >= 0} for row in rows]
    return {
        phase: tuple(row.get(phase, 0.0) for row in read) for phase in dict.fromkeys(p for row in read for p in row)
    }
