"""What a yardstick is told to train, and how it tells how that went."""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WORKS_OF_16_BITS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def read_task(description: str) -> argparse.Namespace:
    """The command line of every yardstick. Sizes are in tokens and sequences; `accumulation` is per rank."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "micro-batch", "accumulation", "steps"):
        add(f"--{name}", type=int, required=True)
    add("--precision", choices=("fp32", "bf16", "fp16"), required=True)
    add("--lr", type=float, required=True)
    add("--lr-warm-up", type=int, required=True, help="steps, linear from 0")
    add("--tokens", type=Path, required=True, help="token ids, one after another and nothing else")
    add("--token-type", default="uint16", help="numpy's name of their type")
    add("--step-file", type=Path, required=True, help="gets a JSON line per step")
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--seed", type=int, default=1234)
    add("--compile", action="store_true", help="torch.compile of the whole model")
    return parser.parse_args()


class RandomWindows:
    """`[i]` is int64 [sequence + 1], cut out of the file at a random place; the index is not looked at."""

    def __init__(self, task: argparse.Namespace, rank: int):
        self.tokens = np.memmap(task.tokens, dtype=task.token_type, mode="r")
        self.length = task.sequence + 1
        self.samples = task.steps * task.accumulation * task.micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
        self._random = np.random.default_rng((task.seed, rank))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        start = self._random.integers(len(self.tokens) - self.length + 1)
        return torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))


class StepLog:
    """A JSON line per step (seconds since the step before ended, tokens, loss), and a line to the console."""

    def __init__(self, task: argparse.Namespace, ranks: int):
        self._task = task
        self._tokens = task.sequence * task.micro_batch * task.accumulation * ranks
        self._file = open(task.step_file, "w", encoding="utf-8")
        self._times: list[float] = []
        self._ended = time.perf_counter()

    def end_of_step(self):
        """Take the time; on a GPU, when it has done the step."""
        if self._task.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._times.append(now - self._ended)
        self._ended = now

    def write(self, loss: float):
        """The step whose time was taken last, with its mean loss per token in nats."""
        number, record = len(self._times), {"seconds": self._times[-1], "tokens": self._tokens, "loss": loss}
        if self._task.device == "cuda":
            record["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self._file.write(json.dumps({"step": number, **record}) + "\n")
        self._file.flush()
        print(f"step {number}/{self._task.steps}: loss {loss:.4f}", flush=True)
