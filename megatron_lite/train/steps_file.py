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
    """The line of a step. What is not known of it is left out, but for its loss and its norm."""

    def to_ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(1000 * seconds, 3)

    def to_finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    on_gpu = time.gpu_seconds is not None
    record = {
        "kind": STEP_KIND,
        "iteration": figures.iteration,
        "step": time.step,
        "consumed_samples": figures.consumed,
        "batch_size": figures.batch_size,
        "ms": to_ms(time.seconds),
        "phases_ms": {name: to_ms(seconds) for name, seconds in time.phases.items()},
        "loss": to_finite(figures.loss),
        "grad_norm": None if figures.skipped else to_finite(figures.grad_norm),
        "loss_scale": figures.loss_scale,
        "skipped": figures.skipped,
        "next_lr": figures.next_lr,
    }
    known = {
        "gpu_ms": to_ms(time.gpu_seconds),
        "gpu_phases_ms": {name: to_ms(seconds) for name, seconds in time.gpu_phases.items()} if on_gpu else None,
        "reduce_wait_ms": to_ms(time.reduce_wait),
        "gpu_reduce_wait_ms": to_ms(time.gpu_reduce_wait),
        "cpu_ms": to_ms(time.cpu_seconds),
        "core_wait_ms": to_ms(time.core_wait_seconds),
        "involuntary_switches": time.involuntary_switches,
        "host_memory_bytes": time.host_bytes,
        "peak_memory_bytes": time.peak_bytes,
        "compile_ms": to_ms(time.compile_seconds) if time.compiling else None,
        "local": figures.local or None,
        "profiled": time.profiled or None,
        "beside_profile": time.beside_profile or None,
        "compiling": time.compiling or None,
    }
    return record | {name: value for name, value in known.items() if value is not None}
