"""steps.jsonl: one line per step, what it cost and what came out; and one per console line, of all ranks.

Steps between two console lines can be written ahead, for whom the process is killed before the second: what of them only the
console line brings, losses of all ranks, say, replaces them then.
"""

import json
import math
import os
from pathlib import Path

from megatron_lite.errors import UserError
from megatron_lite.phases import StepTime
from megatron_lite.run_folder import RANKS_KIND, STEP_KIND, STEPS_FILE
from megatron_lite.shared_files import open_regular
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.train.step_metrics import StepFigures


class StepsFile:
    """Appends, so that a resumed run goes on in the same file."""

    def __init__(self, run_dir: Path):
        try:
            self._file = open(run_dir / STEPS_FILE, "ab", opener=open_regular)
        except OSError as error:
            raise UserError(
                f"{run_dir / STEPS_FILE}: cannot be written ({error.strerror}); move it away, or give another "
                "--run-dir."
            ) from None
        self._kept: int | None = None  # bytes of the file before what was written ahead; None: nothing was

    def write(self, figures: StepFigures, time: StepTime):
        """One step, as run_folder says."""
        self._take_back()
        self._append(_record(figures, time))

    def write_ahead(self, figures: StepFigures, time: StepTime):
        """The same until something else is written."""
        if self._kept is None:
            self._kept = self._file.tell()
        self._append(_record(figures, time))

    def write_ranks(self, figures: RankFigures):
        """One interval of all ranks, as run_folder says."""
        self._take_back()
        self._append({"kind": RANKS_KIND, "ranks": figures.record()})

    def flush(self):
        """Everything so far to the operating system, which keeps it when this process is killed."""
        self._file.flush()

    def close(self):
        self._file.close()

    def _take_back(self):
        if self._kept is not None:
            self._file.truncate(self._kept)
            self._file.seek(0, os.SEEK_END)  # for the next tell
            self._kept = None

    def _append(self, record: dict):
        self._file.write(json.dumps(record).encode() + b"\n")


def _record(figures: StepFigures, time: StepTime) -> dict:
    record = {
        "kind": STEP_KIND,
        "iteration": figures.iteration,
        "step": time.step,
        "consumed_samples": figures.consumed,
        "batch_size": figures.batch_size,
        "ms": round(1000 * time.seconds, 3),
        "phases_ms": _milliseconds(time.phases),
        "loss": _finite(figures.loss),
        "grad_norm": None if figures.skipped else _finite(figures.grad_norm),
        "loss_scale": figures.loss_scale,
        "skipped": figures.skipped,
        "next_lr": figures.next_lr,
    }
    if time.gpu_seconds is not None:
        record |= {"gpu_ms": round(1000 * time.gpu_seconds, 3), "gpu_phases_ms": _milliseconds(time.gpu_phases)}
    waits = {"reduce_wait_ms": time.reduce_wait, "gpu_reduce_wait_ms": time.gpu_reduce_wait}
    record |= _milliseconds({name: seconds for name, seconds in waits.items() if seconds is not None})
    cores = {"cpu_ms": time.cpu_seconds, "core_wait_ms": time.core_wait_seconds}
    record |= _milliseconds({name: seconds for name, seconds in cores.items() if seconds is not None})
    if time.involuntary_switches is not None:
        record["involuntary_switches"] = time.involuntary_switches
    memory = {"host_memory_bytes": time.host_bytes, "peak_memory_bytes": time.peak_bytes}
    record |= {name: value for name, value in memory.items() if value is not None}
    marks = {
        "local": figures.local,
        "profiled": time.profiled,
        "beside_profile": time.beside_profile,
        "compiling": time.compiling,
    }
    if time.compiling:
        record["compile_ms"] = round(1000 * time.compile_seconds, 3)
    return record | {name: True for name, holds in marks.items() if holds}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _milliseconds(phases: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * seconds, 3) for name, seconds in phases.items()}
