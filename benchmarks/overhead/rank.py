"""One rank of the trainer with its loop watched:  python -m benchmarks.overhead.rank KIND OUT FLAGS

KIND: empty, the whole trainer without model, optimizer and data; parts, that with a stopwatch on its parts; real, a
training, timed by the CPU time of the main thread, so that what else the machine does is not counted.
OUT.RANK.json gets the figures.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks.overhead.parts import Stopwatch
from megatron_lite import observers
from megatron_lite.__main__ import train
from megatron_lite.config.plan import Plan
from megatron_lite.instruments import timeline as timeline_module
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.build_instruments import build_instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.optim.optimizer import GradientNorms, Update
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.phases import Phase
from megatron_lite.train import run
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.step import TrainingStep

WARM_UP = 20  # steps


class NoModel:
    """Stands in for a DataParallel: losses that hang on one number, so that backward has something to do."""

    def __init__(self, plan: Plan, device: torch.device):
        self.number = nn.Parameter(torch.ones(1, 1, device=device))
        self.pipeline = Pipeline(plan.stage)
        self.stage_group = None
        self.chunks: list[nn.Module] = []

    def __call__(self, tokens_BT: Tensor, *_) -> Tensor:
        return self.number.expand(tokens_BT.shape)

    def backward(self, last: bool):
        return contextlib.nullcontext()

    def gradients(self) -> list[Tensor]:
        return [self.number.grad]

    def list_mixtures(self) -> list:
        return []

    def clear(self):
        self.number.grad = None


class NoUpdate:
    """Stands in for an Optimizer: goes through its phases."""

    def __init__(self, device: torch.device):
        self.loss_scale, self._norm = torch.ones((), device=device), torch.ones((), device=device)
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)

    def step(self, gradients: list[Tensor], samples: int, phase, divisor=None) -> Update:
        for part in (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP):
            with phase(part):
                pass
        norms = GradientNorms(self._norm.reshape(1), places=[0])
        return Update(self._norm, self._skipped, self.loss_scale, self.loss_scale, next_lr=self._norm, norms=norms)


def empty_step(plan, replica, optimizer, make, computed=None) -> TrainingStep:
    """In place of TrainingStep(...)."""
    return TrainingStep(plan, NoModel(plan, make.device), NoUpdate(make.device), make, computed)


def same_batch(feed, progress):
    """In place of DataStreams.training: one micro-batch over and over."""
    t, sequence = feed.plan.args.training, feed.plan.shape.seq_length
    return itertools.repeat(torch.zeros(t.micro_batch_size, sequence + 1, dtype=torch.int64))


class Watch(Instrument):
    """How long each turn of the loop takes, from one step's beginning to the next one's, and its phases."""

    def __init__(self, timeline: Timeline, parts_s, clock, out: Path):
        self._timeline, self._parts_s, self._clock, self._out = timeline, parts_s, clock, out
        self._last = self._cpu_before = 0.0
        self._turns: list[dict[str, float]] = []  # {"turn": seconds, phase: seconds}

    def begin(self, step: int):
        now = self._clock()
        if step > WARM_UP:  # the timeline lies further in, and still has the step before
            self._turns.append({"turn": now - self._last, **self._timeline.current.phases})
        else:
            self._cpu_before = time.process_time()
            self._parts_s.clear()
        self._last = now

    def close(self, error: BaseException | None):
        cpu_s = time.process_time() - self._cpu_before
        figures = {"turns": self._turns, "cpu_s": cpu_s, "parts_s": self._parts_s}
        self._out.write_text(json.dumps(figures), encoding="utf-8")


def main(kind: str, out: str, *flags: str) -> int:
    """Returns the trainer's exit code."""
    stopwatch, path = Stopwatch(), Path(f"{out}.{os.environ.get('RANK', '0')}.json")
    clock = time.thread_time if kind == "real" else time.perf_counter
    timeline_module.time = SimpleNamespace(perf_counter=clock)
    observers.build_instruments = lambda plan, run_dir, timeline, tell, predict_peak: [
        Watch(timeline, stopwatch.seconds, clock, path),
        *build_instruments(plan, run_dir, timeline, tell, predict_peak),
    ]
    if kind != "real":
        run.TrainingStep, DataStreams.training = empty_step, same_batch
    if kind == "parts":
        stopwatch.watch()
    return train(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
