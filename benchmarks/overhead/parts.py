"""Where the loop's time goes: its parts' own time, without that of parts inside them."""

import functools
import time
from collections import Counter

from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.timeline import MemoryNow
from megatron_lite.train import log
from megatron_lite.train.console import ProgressLine
from megatron_lite.train.log import StepsFile
from megatron_lite.train.rank_stats import AnomalyWarnings
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_hooks import ExitConditions
from megatron_lite.train.step_metrics import StepMetrics
from megatron_lite.train.trackers import Charts

STEP = "step: its phases, and arithmetic on a model of one number"
PARTS = (
    (TrainingStep, "__call__", STEP),
    (BatchMaker, "__call__", "one batch taken apart"),
    (Instruments, "notify", "instruments, per step and phase"),
    (MemoryNow, "host_bytes", "host memory read"),
    (StepMetrics, "record", "figures of a step collected"),
    (StepMetrics, "take", "figures summed over ranks"),
    (log.IntervalTimer, "step", "time of clean steps"),
    (ProgressLine, "update", "progress line"),
    (log.Log, "_say_interval", "console line"),
    (StepsFile, "write", "steps.jsonl, a step"),
    (StepsFile, "write_ranks", "steps.jsonl, an interval of all ranks"),
    (StepsFile, "flush", "steps.jsonl, flushed"),
    (Charts, "step", "TensorBoard, a step"),
    (Charts, "ranks", "TensorBoard, an interval of all ranks"),
    (log, "gather", "figures of all ranks gathered"),
    (AnomalyWarnings, "of", "what is worth saying"),
    (ExitConditions, "reason", "reasons to leave"),
)


class Stopwatch:
    """Own time of each part, in seconds."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._inside = [0.0]  # of each open part: time of parts within it

    def watch(self):
        """Put it around all parts, for the rest of the process."""
        for owner, name, label in PARTS:
            setattr(owner, name, self._around(getattr(owner, name), label))

    def _around(self, function, label: str):
        @functools.wraps(function)
        def timed(*arguments, **named):
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - started
                self.seconds[label] += seconds - self._inside.pop()
                self._inside[-1] += seconds

        return timed
