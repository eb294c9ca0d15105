"""The machine's own ceiling, measured beside the contestants."""

import subprocess
import sys

from benchmarks.training.contestants import REPO
from benchmarks.training.process import environment_of
from benchmarks.training.work import Work

SECONDS = 2
SECONDS_TO_START = 120


def ceiling_tflops(work: Work, threads: int, seconds: float = SECONDS) -> float | None:
    """TFLOP/s of the model's linear maps on the whole CPU, or on one GPU; None where that could not be measured."""
    shape = work.shape
    maps = [
        (shape.hidden_size, shape.qkv_width, shape.num_layers),
        (shape.attention_width, shape.hidden_size, shape.num_layers),
        (shape.hidden_size, shape.fc1_width, shape.num_layers),
        (shape.ffn_hidden_size, shape.hidden_size, shape.num_layers),
        (shape.hidden_size, shape.padded_vocab_size, 1),
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.yardsticks.matrix_products",
        "--device",
        work.device,
        "--precision",
        work.precision,
        "--seconds",
        str(seconds),
        "--rows",
        str(work.micro_batch * work.sequence),
        "--shapes",
        *("x".join(map(str, one)) for one in maps),
    ]
    try:
        done = subprocess.run(
            command,
            check=True,
            cwd=REPO,
            env=environment_of(work.device, threads),
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_START,
        )
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
