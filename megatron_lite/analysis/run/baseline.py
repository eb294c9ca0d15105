"""A run in one small file that can be committed: what a later run is compared with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.run_record import RUN_SCHEMA
from megatron_lite.formats.step_records import HardwareRecord, StepRecord
from megatron_lite.shared_files import read_foreign

BASELINE = "baseline"  # the field by which the file is known; its value is the format's number
BASELINE_SCHEMA = 1
MAX_BASELINE_STEPS = 60  # the last ordinary ones: enough for the noise of their medians
MAX_BASELINE_BYTES = 2**22  # a larger file is no baseline


def make_baseline(run: Run) -> dict[str, Any]:
    """Take down what the run was, and its last typical steps."""
    last = np.flatnonzero(run.ordinary)[-MAX_BASELINE_STEPS:]
    steps = []
    # numbered from 2, since the first step of a run is no ordinary one
    for number, at in enumerate(last.tolist(), 2):
        record_of_step = _build_record(run, at, number)
        steps.append(msgspec.to_builtins(record_of_step))
    samples = _build_samples(run, len(steps) + 1)
    if samples is not None:
        steps.append(msgspec.to_builtins(samples))
    # host and folders are nobody's business; the arguments of a watched script may hold what must not be committed
    command: list[str] | None = None if run.record.command is None else []
    record = msgspec.structs.replace(
        run.record,
        schema=RUN_SCHEMA,
        process=None,
        artefacts={},
        command=command,
    )
    known = {name: value for name, value in msgspec.to_builtins(record).items() if value is not None}
    return {BASELINE: BASELINE_SCHEMA, "run": known, "steps": steps}


def _build_record(run: Run, at: int, number: int) -> StepRecord:
    """The record of the step at index `at` of the run's columns, as step `number`."""
    record = StepRecord(
        iteration=int(run.iterations[at]),
        step=number,
        ms=float(run.training_ms[at]),
        batch_size=_to_whole(run.batch_sizes[at]),
        phases_ms=_take_phases(run.phases_ms, at),
        gpu_ms=_to_known(run.gpu_ms[at]),
        gpu_phases_ms=_take_phases(run.gpu_phases_ms, at),
        peak_memory_bytes=_to_whole(run.peak_memory_bytes[at]),
        # what of the time is the machine's, that a comparison counts as noise
        cpu_ms=_to_known(run.cpu_ms[at]),
        core_wait_ms=_to_known(run.core_wait_ms[at]),
        involuntary_switches=_to_whole(run.involuntary_switches[at]),
    )
    if not math.isnan(run.losses[at]):
        record.loss = float(run.losses[at])
    if not math.isnan(run.grad_norms[at]):
        record.grad_norm = float(run.grad_norms[at])
    return record


def _build_samples(run: Run, last: int) -> HardwareRecord | None:
    """The record of the GPU with the lowest clock, which sets the pace; of the first rank that was sampled elsewhere.

    Args:
        run: the run.
        last: number of the last step.
    """
    hardware = run.hardware
    sampled = np.flatnonzero(hardware.get("samples") > 0)
    if not len(sampled):
        return None
    clocks_mhz = np.nan_to_num(hardware.get("sm_clock_mhz")[sampled], nan=math.inf)
    rank = int(sampled[clocks_mhz.argmin()])
    known = {name: hardware.get_one(name, rank) for name in HardwareFigures.__struct_fields__}
    return HardwareRecord(iterations=(1, last), rank=rank, figures=HardwareFigures(**known))


def _take_phases(phases_ms: Mapping[str, Numbers], at: int) -> dict[str, float]:
    """The phases of one step, in whole microseconds."""
    return {name: round(float(ms[at]), 3) for name, ms in phases_ms.items()}


def _to_known(value: float) -> float | None:
    """The value; None for NaN."""
    return None if math.isnan(value) else float(value)


def _to_whole(value: float) -> int | None:
    """The value as a whole number; None for NaN."""
    return None if math.isnan(value) else int(value)


def unpack_baseline(path: Path, folder: Path) -> Path | None:
    """Make a run folder of the file's name in `folder`; None if the file is no baseline."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BASELINE_BYTES:
            return None
        text = read_foreign(path, MAX_BASELINE_BYTES)
        if not text.startswith(f'{{"{BASELINE}"'.encode()):  # before a trace is parsed for nothing
            return None
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get(BASELINE) != BASELINE_SCHEMA:
        return None
    made = folder / path.stem
    made.mkdir()
    (made / RUN_FILE).write_text(json.dumps(content.get("run")), encoding="utf-8")
    steps = content.get("steps")
    if not isinstance(steps, list):
        steps = []
    lines = [json.dumps(step) + "\n" for step in steps]
    (made / STEPS_FILE).write_text("".join(lines), encoding="utf-8")
    return made
