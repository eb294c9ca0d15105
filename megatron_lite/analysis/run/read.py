"""A run folder, read: run.json says what was meant to happen, steps.jsonl what did."""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.analysis.run.run_results import CounterGrowth, RankLines, RankMedians, Run, Steps
from megatron_lite.analysis.run.step_lines import StepLines
from megatron_lite.errors import UserError
from megatron_lite.formats.failure_record import FailureRecord
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import PlanRecord, RunRecord
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.shared_files import read_foreign
from megatron_lite.thresholds import GROWTH_PARTS, MAX_BEFORE, MIN_BEFORE, MIN_GROWTH_STEPS, steady_growth
from megatron_lite.units import counted


def read_run(folder: Path, lines: StepLines | None = None) -> Run:
    """Read what the run in `folder` says of itself.

    Args:
        folder: the run folder.
        lines: of a run that is followed, what has been read of its steps.jsonl already.

    Raises:
        UserError: there is nothing of a run to read.
    """
    found, notes = read_record(folder)
    record = found or RunRecord()
    lines = lines or StepLines(folder / STEPS_FILE)
    notes += _read_lines(lines)
    steps = lines.read_steps()
    said = lines.read_ranks()
    number_of_steps = len(steps.iterations)
    if found is None and not number_of_steps:
        raise UserError(f"{folder}: no run of megatron_lite can be read here; {' '.join(notes)}")
    if found is not None and found.plan is None and found.command is None:
        notes.append(f"{RUN_FILE} holds no plan, so that the run's flags are unknown.")
    if number_of_steps and _is_older(folder / STEPS_FILE, record):
        notes.append(
            f"{STEPS_FILE} was last written before the start that {RUN_FILE} describes: that start has no steps yet."
        )
    if record.steps_by_hand:
        notes.append(
            "No torch.optim optimizer stepped: a step ends where weights were updated between two backward passes."
        )
    starts = max(lines.starts, 1 + len(list(folder.glob("run-*.json"))))
    if starts > 1 and number_of_steps:
        span = f"{steps.iterations[0]} to {steps.iterations[-1]}"
        notes.append(f"The run was started {starts} times; figures are of the last start, iterations {span}.")
    speed, missing = compute_speed(record, steps, lines.first_step == 1)
    ranks = compute_rank_medians(said, steps.iterations[steps.ordinary]) if said else None
    return Run(
        **vars(steps),
        folder=str(folder),
        record=record,
        steps=number_of_steps,
        starts=starts,
        notes=(*notes, *missing),
        verdict_on_ranks=_read_verdict(folder / RANKS_FILE, record),
        ranks=ranks,
        hardware=lines.read_hardware(),
        growths=find_growths(steps, ranks, "host_memory_bytes"),
        gpu_growths=find_growths(steps, ranks, "peak_memory_bytes"),
        **speed,
    )


def _read_verdict(path: Path, record: RunRecord) -> str:
    """Read which rank died, hung or failed in the start that run.json describes, as the others found out.

    Returns the line of ranks.json, or "" where nobody wrote one that can be read.
    """
    try:
        values = json.loads(read_foreign(path))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(values, dict) or _is_older(path, record):
        return ""
    failure, _ = convert_sound(values, FailureRecord)
    return failure.verdict.strip()


def _read_lines(lines: StepLines) -> list[str]:
    """Further contents of steps.jsonl, and what is wrong with it."""
    try:
        lines.read()
    except FileNotFoundError:
        return [f"there is no {STEPS_FILE}: the run has no step that is over, or another rank's folder has it."]
    except OSError as error:
        return [f"{STEPS_FILE} cannot be opened ({error.strerror})."]
    notes = []
    if lines.unread:
        some = ", ".join(map(str, lines.unread[:MAX_NAMED_LINES]))
        if len(lines.unread) > MAX_NAMED_LINES:
            some += ", ..."
        notes.append(
            f"left out of {STEPS_FILE}: {counted(len(lines.unread), 'line')} that cannot be read (line {some})."
        )
    if lines.cut:
        notes.append(f"{STEPS_FILE} ends within a line: the run was killed, or is still writing.")
    if not lines.starts:
        notes.append(f"{STEPS_FILE} holds no step.")
    if lines.every > 1:
        kept = f"every {lines.every}th of the run's {lines.rank_lines:,} console lines"
        notes.append(f"Ranks are compared by {kept}: figures of all ranks in all of them are too many to hold.")
    return notes


def _is_older(path: Path, record: RunRecord) -> bool:
    """Whether a file was written before the start that run.json describes.

    A copy may make files younger, never older.
    """
    try:
        started = datetime.strptime(str(record.started), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        return path.stat().st_mtime < started
    except (ValueError, OSError):
        return False


# --- how fast a run went: typical steps against the first and the profiled ones; tokens per second; model FLOPs

MIN_FOR_SPREAD = 4
MAX_NAMED_LINES = 3  # lines that cannot be read


def compute_speed(record: RunRecord, steps: Steps, starts_at_first: bool) -> tuple[dict[str, Any], list[str]]:
    """Compute how fast the run went.

    Args:
        record: the run's record.
        steps: its steps by columns.
        starts_at_first: the columns begin with the start's very first step.

    Returns:
        Fields of Run, and what is missing and why.
    """
    training_ms = steps.training_ms
    typical_ms = training_ms[steps.ordinary]
    notes = []
    if len(training_ms) and not len(typical_ms):
        notes.append(
            "No step is a typical one (each is the first, profiled, compiling, evaluating or saving): "
            "there is no steady step time."
        )
    length = _find_sample_length(record)
    if len(training_ms) and record.sample_flops_causal is None:
        notes.append(_explain_unknown_flops(record, length))
    samples_per_ms = _compute_rate(steps)
    return {
        "first_step_ms": float(training_ms[0]) if starts_at_first else None,
        "steady_step_ms": float(np.median(typical_ms)) if len(typical_ms) else None,
        "step_spread_ms": _compute_spread(typical_ms),
        **_compare_profiled_steps(steps),
        "tokens_per_second": 1000 * samples_per_ms * length if samples_per_ms and length else None,
        **_compute_model_tflops(record, samples_per_ms),
    }, notes


def _find_sample_length(record: RunRecord) -> int | None:
    """Tokens of a sample: the model's, or of a model of the user's own file, by the flags."""
    plan = record.plan or PlanRecord()
    if plan.shape is not None:
        return plan.shape.seq_length
    return plan.settings.seq_length if record.model is not None else None


def _explain_unknown_flops(record: RunRecord, length: int | None) -> str:
    if record.model is not None:
        return "The model is of the user's own file, its FLOPs are unknown: no TFLOP/s, no MFU."
    if length is None:
        return "The model's shape is unknown: no tokens per second, no model FLOPs."
    return "The model's FLOPs are not recorded: no TFLOP/s, no MFU."


def _compute_rate(steps: Steps) -> float | None:
    """Samples per ms of the typical steps whose batch size is known; None without any."""
    known = steps.ordinary & (steps.batch_sizes > 0)  # NaN is not
    known_ms = math.fsum(steps.training_ms[known])
    return math.fsum(steps.batch_sizes[known]) / known_ms if known_ms > 0 else None


def _compute_spread(typical_ms: Numbers) -> float | None:
    """The range of the middle half of the typical steps; None where they are too few."""
    if len(typical_ms) < MIN_FOR_SPREAD:
        return None
    first, third = np.quantile(typical_ms, (0.25, 0.75), method="weibull").tolist()
    return float(third - first)


def _compare_profiled_steps(steps: Steps) -> dict[str, float | None]:
    """Medians of the profiled steps, and of undisturbed ones before the first window and after the last."""
    training_ms = steps.training_ms
    inside = np.flatnonzero(steps.profiled)
    if not len(inside):
        return {"profiled_step_ms": None, "before_profile_ms": None, "after_profile_ms": None}
    quiet = np.flatnonzero(steps.undisturbed)
    before = quiet[quiet < inside[0]][-MAX_BEFORE:]
    after = quiet[quiet > inside[-1]][:MAX_BEFORE]
    return {
        "profiled_step_ms": float(np.median(training_ms[inside])),
        "before_profile_ms": _compute_usual_step(training_ms[before]),
        "after_profile_ms": _compute_usual_step(training_ms[after]),
    }


def _compute_usual_step(steps_ms: Numbers) -> float | None:
    """The median of steps beside a window; None where they are too few."""
    return float(np.median(steps_ms)) if len(steps_ms) >= MIN_BEFORE else None


def _compute_model_tflops(record: RunRecord, samples_per_ms: float | None) -> dict[str, float | None]:
    """TFLOP/s and MFU of each rank, with half of the attention's scores (causal) and with all of them (full)."""
    ranks = record.plan.world.size if record.plan else None
    peak = record.hardware.peak_tflops
    causal: float | None = None
    full: float | None = None
    if samples_per_ms is not None and ranks:
        samples_per_s = 1000 * samples_per_ms
        causal = _compute_tflops(record.sample_flops_causal, samples_per_s, ranks)
        full = _compute_tflops(record.sample_flops_full, samples_per_s, ranks)
    return {
        "model_tflops": causal,
        "model_tflops_full": full,
        "mfu_causal": causal / peak if causal and peak else None,
        "mfu_full": full / peak if full and peak else None,
    }


def _compute_tflops(sample_flops: float | None, samples_per_s: float, ranks: int) -> float | None:
    return None if sample_flops is None else sample_flops * samples_per_s / 1e12 / ranks


# --- every rank's usual step, from what the ranks said at each console line


def compute_rank_medians(said: RankLines, ordinary: NDArray[np.int64]) -> RankMedians:
    """Medians over the lines that have one of the `ordinary` iterations among theirs; over all lines if none has."""
    before_first = np.searchsorted(ordinary, said.first)
    up_to_last = np.searchsorted(ordinary, said.last, side="right")
    good = before_first < up_to_last
    lines = said.take(good) if good.any() else said
    return RankMedians(
        step_ms=_compute_medians(lines.step_ms),
        gpu_ms=_compute_known_medians(lines.gpu_ms),
        phases_ms=_compute_phase_medians(lines.phases_ms),
        gpu_phases_ms=_compute_phase_medians(lines.gpu_phases_ms),
        own_backward_ms=_compute_known_medians(lines.own_backward_ms),
        cpu_ms=_compute_known_medians(lines.cpu_ms),
        core_wait_ms=_compute_known_medians(lines.core_wait_ms),
        involuntary_switches=_compute_known_medians(lines.involuntary_switches),
        host_memory_bytes=said.host_memory_bytes,
        peak_memory_bytes=said.peak_memory_bytes,
        intervals=lines,
    )


def _compute_known_medians(table: Numbers) -> tuple[float, ...]:
    """Medians by rank of a table of [line, rank]; () if no rank has a number."""
    return () if np.isnan(table).all() else _compute_medians(table)


def _compute_phase_medians(tables: dict[str, Numbers]) -> dict[str, tuple[float, ...]]:
    """Medians by rank of each phase that some rank has."""
    return {name: _compute_medians(table) for name, table in tables.items() if not np.isnan(table).all()}


def _compute_medians(table: Numbers) -> tuple[float, ...]:
    """Medians by rank of a table of [line, rank]; NaN for a rank that has no number in any line."""
    medians = []
    for of_rank in table.T:
        known = of_rank[~np.isnan(of_rank)]
        medians.append(float(np.median(known)) if len(known) else math.nan)
    return tuple(medians)


# --- does memory grow over a run? Steadily or not at all: warming up and a single jump are no growth


def find_growths(steps: Steps, ranks: RankMedians | None, what: str) -> tuple[CounterGrowth, ...]:
    """Find the growth of every rank, from a value per console line; else of the rank that writes, from its steps.

    Args:
        steps: the steps of the rank that writes.
        ranks: what the ranks said; None where they did not.
        what: host_memory_bytes or peak_memory_bytes.
    """
    profiled = steps.iterations[steps.profiled]
    growths = []
    if ranks:
        last = ranks.intervals.last
        for rank, of_lines in enumerate(getattr(ranks.intervals, what).T):
            # the first line's steps fill caches
            known = np.flatnonzero(of_lines > 0)[1:]
            growths.append(_find_growth(rank, last[known], of_lines[known], profiled, GROWTH_PARTS))
    if not any(growths):
        of_steps = getattr(steps, what)
        known = np.flatnonzero(steps.ordinary & (of_steps > 0))
        growths = [_find_growth(None, steps.iterations[known], of_steps[known], profiled, MIN_GROWTH_STEPS)]
    return tuple(growth for growth in growths if growth)


def _find_growth(
    rank: int | None,
    iterations: NDArray[np.int64],  # [v]
    values: Numbers,  # [v], bytes
    profiled: NDArray[np.int64],  # iterations, which divide the values in two
    fewest: int,  # values, at least GROWTH_PARTS
) -> CounterGrowth | None:
    """Find steady growth of all values, or of the longer part before or after a profiled window."""
    if len(iterations) < fewest:
        return None
    stretch = np.searchsorted(profiled, iterations)
    longest = stretch == np.bincount(stretch).argmax()
    for part in (np.ones_like(longest), longest):
        if part.sum() < fewest:
            continue
        grown = steady_growth(iterations[part], values[part])
        if grown:
            num_bytes, bytes_per_step = grown
            return CounterGrowth(
                rank=rank,
                num_bytes=round(num_bytes),
                bytes_per_step=bytes_per_step,
                at_end=round(values[part][-1]),
            )
    return None
