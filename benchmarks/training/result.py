"""What one run of one contestant gave."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.training.contestants import STEP_FILE, Contestant
from benchmarks.training.process import Watched
from megatron_lite.analysis.run.step_lines import read_step_lines
from megatron_lite.run_folder import STEPS_FILE


@dataclass(frozen=True)
class Result:
    """A run; lists have an entry per step."""

    contestant: str
    round: int  # from 1
    step_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    first_step_s: float | None = None  # from launch until its end was printed
    peak_bytes: int | None = None  # of the GPU's tensors; without a GPU, of the ranks' resident memory
    outside_s: float | None = None  # mean seconds of steps 2 to last, as their console lines say
    seconds: float = 0.0  # from launch to exit
    failure: str | None = None


def result_of(contestant: Contestant, round_number: int, run: Watched, folder: Path, steps: int) -> Result:
    """From what was watched, and the figures that the run wrote into `folder`."""
    failure = _failure(run)
    records = [] if failure else (_of_ours if contestant.is_ours else _of_yardstick)(folder)
    if not failure and len(records) != steps:
        failure = f"wrote {len(records)} of {steps} steps"
    peaks = [record["peak_memory_bytes"] for record in records if record.get("peak_memory_bytes")]
    whole = run.seen.get(steps), run.seen.get(1)
    return Result(
        contestant.name,
        round_number,
        step_s=[] if failure else [record["seconds"] for record in records],
        losses=[] if failure else [record["loss"] for record in records],
        first_step_s=run.seen.get(1),
        peak_bytes=max(peaks) if peaks else run.peak_bytes,
        outside_s=(whole[0] - whole[1]) / (steps - 1) if steps > 1 and None not in whole else None,
        seconds=run.seconds,
        failure=failure,
    )


def _failure(run: Watched) -> str | None:
    if run.exit_code is None:
        return "ended: the time of --minutes was up"
    return f"exit code {run.exit_code}: {run.last_words}" if run.exit_code else None


def _of_ours(folder: Path) -> list[dict]:
    """steps.jsonl as run_folder describes it; on a GPU its own time of a step, which the host runs ahead of."""
    steps = read_step_lines(folder / STEPS_FILE).steps if (folder / STEPS_FILE).exists() else []
    return [
        {
            "seconds": step.get("gpu_ms", step["ms"]) / 1000,
            "loss": step["loss"],
            "peak_memory_bytes": step.get("peak_memory_bytes"),
        }
        for step in steps
    ]


def _of_yardstick(folder: Path) -> list[dict]:
    path = folder / STEP_FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
