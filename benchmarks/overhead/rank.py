"""One rank of the trainer with its loop watched:  python -m benchmarks.overhead.rank KIND OUT FLAGS

KIND: empty, the whole trainer without model, optimizer and data; parts, that with a stopwatch on its parts; real, a
training, timed by the CPU time of the main thread, so that what else the machine does is not counted.
OUT.RANK.json gets the figures.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks.overhead.empty_step import empty_step, same_batch
from benchmarks.overhead.parts import Stopwatch
from megatron_lite import app, observers
from megatron_lite.instruments import timeline as timeline_module
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.build_instruments import build_instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.train import run
from megatron_lite.train.data_streams import DataStreams

WARM_UP = 20  # steps


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
    observers.build_instruments = lambda plan, run_dir, timeline, tell: [
        Watch(timeline, stopwatch.seconds, clock, path),
        *build_instruments(plan, run_dir, timeline, tell),
    ]
    if kind != "real":
        run.TrainingStep, DataStreams.training = empty_step, same_batch
    if kind == "parts":
        stopwatch.watch()
    return app.main(list(flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
