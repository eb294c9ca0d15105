"""steps.jsonl: one line per step, what it cost and what came out."""

import json
import math
from pathlib import Path

from megatron_lite.instruments.timeline import StepTime
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.train.meter import StepFigures


class StepsFile:
    """Appends, so that a resumed run goes on in the same file."""

    def __init__(self, run_dir: Path):
        self._file = open(run_dir / STEPS_FILE, "a", encoding="utf-8")

    def write(self, figures: StepFigures, time: StepTime):
        """One step. Milliseconds, nats, samples; null for what a skipped step has not; "local" if a failure
        came before losses were summed over ranks."""
        record = {
            "iteration": figures.iteration,
            "step": time.step,
            "consumed_samples": figures.consumed,
            "batch_size": figures.batch_size,
            "ms": round(1000 * time.seconds, 3),
            "phases_ms": {name: round(1000 * seconds, 3) for name, seconds in time.phases.items()},
            "loss": _finite(figures.loss),
            "grad_norm": None if figures.skipped else _finite(figures.grad_norm),
            "loss_scale": figures.loss_scale,
            "skipped": figures.skipped,
            "next_lr": figures.next_lr,
        }
        if figures.local:
            record["local"] = True
        self._file.write(json.dumps(record) + "\n")

    def flush(self):
        """Everything so far to disk."""
        self._file.flush()

    def close(self):
        self._file.close()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
