"""A run folder, read: run.json says what was meant to happen, steps.jsonl what did."""

import json
from datetime import datetime
from pathlib import Path

from megatron_lite.analysis.run.columns import columns_of
from megatron_lite.analysis.run.figures import Run
from megatron_lite.analysis.run.memory_growth import growths_of_ranks, growths_of_writer
from megatron_lite.analysis.run.rank_medians import rank_medians
from megatron_lite.analysis.run.speed import speed_of
from megatron_lite.analysis.run.step_lines import StepLines, read_step_lines
from megatron_lite.errors import UserError
from megatron_lite.process_state import is_there
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, RUN_SCHEMA, STEPS_FILE

RUNNING = "running"  # as run.json says it from the start


def read_run(folder: Path) -> Run:
    """What the run in `folder` says of itself. UserError if there is nothing of a run to read."""
    record, notes = _record(folder)
    lines, more = _lines(folder)
    notes += more
    if not record and not lines.steps:
        raise UserError(f"{folder}: no run of megatron_lite can be read here; {' '.join(notes)}")
    if record.get("status") == RUNNING:
        record["status"] = _still(record)
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
    return _run(folder, plan, record, lines, starts, notes)


def _still(record: dict) -> str:
    """What became of a run whose record has no end: a process that was killed cannot write one."""
    process = record.get("process")
    there = is_there(process) if isinstance(process, dict) else None
    return {True: RUNNING, False: "killed or lost: its process is gone", None: "running, or killed"}[there]


def _record(folder: Path) -> tuple[dict, list[str]]:
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
    if schema != RUN_SCHEMA:
        return record, [
            f"{RUN_FILE} has schema {schema!r}, and this reader knows {RUN_SCHEMA}: some of it may be misread."
        ]
    return record, []


def _lines(folder: Path) -> tuple[StepLines, list[str]]:
    """steps.jsonl and what is wrong with it."""
    try:
        lines = read_step_lines(folder / STEPS_FILE)
    except FileNotFoundError:
        return StepLines(), [
            f"there is no {STEPS_FILE}: the run has no step that is over, or another rank's folder has it."
        ]
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


def _verdict_on_ranks(folder: Path, record: dict) -> str:
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


def _run(folder: Path, plan: dict, record: dict, lines: StepLines, starts: int, notes: list[str]) -> Run:
    columns = columns_of(lines.steps)
    speed, missing = speed_of(plan, record, columns, bool(lines.steps) and lines.steps[0]["step"] == 1)
    plain = {at for at, is_plain in zip(columns.iterations, columns.ordinary) if is_plain}
    ranks = rank_medians(lines.intervals, plain)
    profiled = [at for at, was in zip(columns.iterations, columns.profiled) if was]
    growths = {
        what: growths_of_ranks(ranks, what, profiled)
        or growths_of_writer(columns.iterations, getattr(columns, what), columns.ordinary, profiled)
        for what in ("host_memory_bytes", "peak_memory_bytes")
    }
    return Run(
        folder=str(folder),
        plan=plan,
        record=record,
        steps=len(lines.steps),
        starts=starts,
        notes=(*notes, *missing),
        verdict_on_ranks=_verdict_on_ranks(folder, record),
        ordinary=columns.ordinary,
        ranks=ranks,
        growths=growths["host_memory_bytes"],
        gpu_growths=growths["peak_memory_bytes"],
        **vars(columns),
        **vars(speed),
    )
