"""A run folder, read: run.json says what was meant to happen, steps.jsonl what did."""

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles

from megatron_lite.analysis.run.run_results import Growth, Interval, RankMedians, Run
from megatron_lite.analysis.run.step_lines import CORES, StepLines, number, read_columns, read_step_lines
from megatron_lite.config.flops import step_flops
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError
from megatron_lite.process_state import is_there
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, RUN_SCHEMA, STEPS_FILE
from megatron_lite.thresholds import GROWTH_PARTS, MIN_BEFORE, steady_growth

RUNNING = "running"  # as run.json says it from the start


def read_run(folder: Path) -> Run:
    """What the run in `folder` says of itself. UserError if there is nothing of a run to read."""
    record, notes = _read_record(folder)
    lines, more = _read_lines(folder)
    notes += more
    if not record and not lines.steps:
        raise UserError(f"{folder}: no run of megatron_lite can be read here; {' '.join(notes)}")
    if record.get("status") == RUNNING:
        # a process that was killed cannot write how it ended
        process = record.get("process")
        there = is_there(process) if isinstance(process, dict) else None
        states = {True: RUNNING, False: "killed or lost: its process is gone", None: "running, or killed"}
        record["status"] = states[there]
    plan = record.pop("plan", None)
    if record and not isinstance(plan, dict):
        notes.append(f"{RUN_FILE} holds no plan, so that the run's flags are unknown.")
    plan = plan if isinstance(plan, dict) else {}
    if lines.steps and _is_older(folder / STEPS_FILE, record):
        notes.append(
            f"{STEPS_FILE} was last written before the start that {RUN_FILE} describes: that start has no steps yet."
        )
    starts = max(lines.starts, 1 + len(list(folder.glob("run-*.json"))))
    if starts > 1 and lines.steps:
        span = f"{lines.steps[0]['iteration']} to {lines.steps[-1]['iteration']}"
        notes.append(f"The run was started {starts} times; figures are of the last start, iterations {span}.")
    columns = read_columns(lines.steps)
    speed, missing = compute_speed(plan, record, columns, bool(lines.steps) and lines.steps[0]["step"] == 1)
    ranks = rank_medians(lines.intervals, {at for at, is_plain in _pair(columns, "ordinary") if is_plain})
    return Run(
        folder=str(folder),
        plan=plan,
        record=record,
        steps=len(lines.steps),
        starts=starts,
        notes=(*notes, *missing),
        verdict_on_ranks=_read_verdict_on_ranks(folder, record),
        ranks=ranks,
        growths=find_growths(columns, ranks, "host_memory_bytes"),
        gpu_growths=find_growths(columns, ranks, "peak_memory_bytes"),
        **columns,
        **speed,
    )


def _pair(columns: dict, name: str) -> list[tuple]:
    """(iteration, the column's value) of each step."""
    return list(zip(columns["iterations"], columns[name]))


def _read_record(folder: Path) -> tuple[dict, list[str]]:
    """run.json and what is wrong with it."""
    try:
        record = json.loads((folder / RUN_FILE).read_bytes())
    except FileNotFoundError:
        return {}, [f"there is no {RUN_FILE}, so that the run's flags, hardware and end are unknown."]
    except OSError as error:
        return {}, [f"{RUN_FILE} cannot be opened ({error.strerror})."]
    except (ValueError, RecursionError):
        return {}, [f"{RUN_FILE} is damaged: it is no JSON."]
    if not isinstance(record, dict):
        return {}, [f"{RUN_FILE} is damaged: it is no JSON object."]
    schema = record.get("schema")
    if schema == RUN_SCHEMA:
        return record, []
    return record, [f"{RUN_FILE} has schema {schema!r}, and this reader knows {RUN_SCHEMA}: some of it may be misread."]


def _read_lines(folder: Path) -> tuple[StepLines, list[str]]:
    """steps.jsonl and what is wrong with it."""
    try:
        lines = read_step_lines(folder / STEPS_FILE)
    except FileNotFoundError:
        missing = f"there is no {STEPS_FILE}: the run has no step that is over, or another rank's folder has it."
        return StepLines(), [missing]
    except OSError as error:
        return StepLines(), [f"{STEPS_FILE} cannot be opened ({error.strerror})."]
    notes = []
    if lines.unread:
        some = ", ".join(map(str, lines.unread[:3])) + (", ..." if len(lines.unread) > 3 else "")
        notes.append(f"{len(lines.unread)} lines of {STEPS_FILE} cannot be read and are left out (line {some}).")
    if lines.cut:
        notes.append(f"{STEPS_FILE} ends within a line: the run was killed, or is still writing.")
    if not lines.steps:
        notes.append(f"{STEPS_FILE} holds no step.")
    return lines, notes


def _read_verdict_on_ranks(folder: Path, record: dict) -> str:
    """Which rank died, hung or failed in the start that run.json describes, as the others found out; '' for none."""
    try:
        told = json.loads((folder / RANKS_FILE).read_bytes())["verdict"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return "" if _is_older(folder / RANKS_FILE, record) or not isinstance(told, str) else told.strip()


def _is_older(path: Path, record: dict) -> bool:
    """Was it written before the start that run.json describes? A copy may make files younger, never older."""
    try:
        started = datetime.strptime(str(record.get("started")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        return path.stat().st_mtime < started
    except (ValueError, OSError):
        return False


# --- how fast a run went: ordinary steps against the first and the profiled ones; tokens per second; model FLOPs

MAX_COMPARED = 50  # steps before a window, as many as the trainer's own line about the profiler's slowdown
MIN_FOR_SPREAD = 4


def compute_speed(plan: dict, record: dict, columns: dict, starts_at_first: bool) -> tuple[dict, list[str]]:
    """(fields of Run, what is missing and why). starts_at_first: the columns begin with the start's very first step."""
    training, notes = columns["training_ms"], []
    ordinary = [row for row, plain in enumerate(columns["ordinary"]) if plain]
    plain_ms = [training[row] for row in ordinary]
    if training and not ordinary:
        notes.append(
            "No step is an ordinary one (each is the first, profiled, compiling, evaluating or saving): "
            "there is no steady step time."
        )
    # the profiled steps are compared with undisturbed ones before the first window and after the last
    inside = [row for row, profiled in enumerate(columns["profiled"]) if profiled]
    quiet = [row for row, plain in enumerate(columns["undisturbed"]) if plain] if inside else []
    before = [training[row] for row in quiet if row < inside[0]][-MAX_COMPARED:]
    after = [training[row] for row in quiet if row > inside[-1]][:MAX_COMPARED]
    sizes = columns["batch_sizes"]
    known = [row for row in ordinary if sizes[row] > 0]  # NaN is not
    known_ms = sum(training[row] for row in known)
    rate = sum(sizes[row] for row in known) / known_ms if known_ms > 0 else None  # samples per ms
    shape = read_shape(plan)
    if training and shape is None:
        notes.append("The model's shape is unknown: no tokens per second, no model FLOPs.")
    world, hardware = (part if isinstance(part, dict) else {} for part in (plan.get("world"), record.get("hardware")))
    ranks, peak = number(world.get("size")), number(hardware.get("peak_tflops"))
    causal = full = None
    if shape and rate is not None and ranks > 0:
        causal, full = (step_flops(shape, 1, convention) * rate * 1000 / 1e12 / ranks for convention in (True, False))
    spread = None
    if len(plain_ms) >= MIN_FOR_SPREAD:
        first, _, third = quantiles(plain_ms, n=4)
        spread = third - first
    return {
        "first_step_ms": training[0] if training and starts_at_first else None,
        "steady_step_ms": median(plain_ms) if plain_ms else None,
        "step_spread_ms": spread,
        "profiled_step_ms": median(training[row] for row in inside) if inside else None,
        "before_profile_ms": median(before) if len(before) >= MIN_BEFORE else None,
        "after_profile_ms": median(after) if len(after) >= MIN_BEFORE else None,
        "tokens_per_second": 1000 * rate * shape.seq_length if rate and shape else None,
        "model_tflops": causal,
        "model_tflops_full": full,
        "mfu_causal": causal / peak if causal and peak > 0 else None,
        "mfu_full": full / peak if full and peak > 0 else None,
    }, notes


def read_shape(plan: dict) -> ModelShape | None:
    """The model's shape from a plan; None where it is incomplete or no numbers."""
    given = plan.get("shape")
    if not isinstance(given, dict):
        return None
    known = {field.name: given[field.name] for field in dataclasses.fields(ModelShape) if field.name in given}
    try:
        shape = ModelShape(**known)
        return shape if 0 < step_flops(shape, 1, causal=True) < float("inf") and shape.seq_length > 0 else None
    except (TypeError, ValueError):
        return None


# --- every rank's usual step, from what the ranks said at each console line


def rank_medians(intervals: list[Interval], ordinary: set[int]) -> RankMedians | None:
    """Medians over the lines that have an ordinary iteration among theirs; over all lines if none has. None without lines."""
    if not intervals:
        return None
    alike = [interval for interval in intervals if len(interval.step_ms) == len(intervals[-1].step_ms)]
    good = [one for one in alike if any(at in ordinary for at in range(one.first, one.last + 1))] or alike
    medians: dict = {
        name: compute_medians([getattr(one, name) for one in good])
        for name in ("step_ms", "gpu_ms", "own_backward_ms", *CORES)
    }
    for name, values in medians.items():
        if name != "step_ms" and all(map(math.isnan, values)):
            medians[name] = ()
    for what in ("phases_ms", "gpu_phases_ms"):
        parts = [getattr(one, what) for one in good]
        names = dict.fromkeys(name for part in parts for name in part)
        medians[what] = {name: compute_medians([part[name] for part in parts if name in part]) for name in names}
    return RankMedians(
        **medians,
        host_memory_bytes=tuple(one.host_memory_bytes for one in alike),
        peak_memory_bytes=tuple(one.peak_memory_bytes for one in alike),
        intervals=tuple(good),
    )


def compute_medians(lists: list[tuple[float, ...]]) -> tuple[float, ...]:
    """By rank; NaN for a rank that has no number in any."""
    known = [[value for value in values if not math.isnan(value)] for values in zip(*lists)]
    return tuple(median(values) if values else math.nan for values in known)


# --- does memory grow over a run? Steadily or not at all: warming up and a single jump are no growth

MIN_STEPS = 3 * GROWTH_PARTS


def find_growths(columns: dict, ranks: RankMedians | None, what: str) -> tuple[Growth, ...]:
    """Of every rank, from a value per console line; else of the rank that writes, from a value per ordinary step.

    `what`: host_memory_bytes or peak_memory_bytes.
    """
    profiled, found = [at for at, was in _pair(columns, "profiled") if was], []
    for rank in range(len(ranks.step_ms) if ranks else 0):
        values = [(interval.last, getattr(interval, what)[rank]) for interval in ranks.intervals]
        rows = [(at, value) for at, value in values if value > 0]  # NaN is not
        found.append(_find_growth(rank, rows[1:], profiled, GROWTH_PARTS))  # the first line's steps fill caches
    if not any(found):
        values = zip(_pair(columns, what), columns["ordinary"])
        rows = [(at, value) for (at, value), plain in values if plain and value > 0]
        found = [_find_growth(None, rows, profiled, MIN_STEPS)]
    return tuple(growth for growth in found if growth)


def _find_growth(rank: int | None, rows: list[tuple], profiled: Sequence[int], fewest: int) -> Growth | None:
    """`rows`: (iteration, bytes); `fewest`: of them, at least GROWTH_PARTS. A profiled window divides them in two."""
    stretches = [list(stretch) for _, stretch in groupby(rows, lambda row: bisect_left(profiled, row[0]))]
    for part in (rows, max(stretches, key=len, default=[])):
        found = steady_growth(part) if len(part) >= fewest else None
        if found:
            return Growth(rank, round(found[0]), found[1], round(part[-1][1]))
    return None
