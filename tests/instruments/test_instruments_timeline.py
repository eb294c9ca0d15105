"""The step timeline: GPU times without waiting, memory, ranks side by side, what of it is worth a line, and its cost."""

import contextlib
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import Interrupts, alone, flags, intervals, on_ranks, quietly, steps, train
from support.training_maker import ordinary_steps, run
from support.wording import wording
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.modules.module import register_module_full_backward_hook

from megatron_lite.analysis.run.read import read_run
from megatron_lite.instruments.base import Instrument, Instruments
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.instruments.timeline import GpuTimes, MemoryNow, Timeline
from megatron_lite.model.gpt import TransformerLayer
from megatron_lite.process_state import CoreTime
from megatron_lite.train.rank_stats import (
    GROWING_INTERVALS,
    MIN_INTERVALS,
    SLOW_INTERVALS,
    AnomalyWarnings,
    RankFigures,
    gather,
    ordinary,
)
from megatron_lite.train.step_metrics import Readback

MIB = 2**20


# --- GPU times, on a GPU made of numbers


class Gpu:
    """A stream of events. `now` is how far the host has queued work (ms), `done` how far the GPU has come."""

    def __init__(self):
        self.now = self.done = 0.0
        self.events = self.waited = 0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu):
        self.gpu, self.at = gpu, None
        gpu.events += 1

    def record(self, stream):
        assert stream == wording("instruments/one-that-computes")
        self.at = self.gpu.now

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query(), "torch raises for events that have not passed"
        return other.at - self.at

    def synchronize(self):
        self.gpu.waited += 1
        self.gpu.done = max(self.gpu.done, self.at)


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def timeline(gpu):
    timeline = Timeline()
    timeline.gpu = GpuTimes(gpu.event, lambda: "the one that computes")
    return timeline


def refuse(text: str):
    raise AssertionError(text)


def run_step(timeline: Timeline, gpu: Gpu, step: int, forward: float = 3.0, wait: float | None = None):
    watching = Instruments([timeline], refuse)
    with watching.step(step):
        for last in (False, True):
            with watching.phase("data"):
                pass
            with watching.phase("forward"):
                gpu.now += forward
            with watching.phase("backward"):
                gpu.now += 7.0
                if last and wait is not None:
                    watching.gradients_computed()
                    gpu.now += wait
        gpu.now += 0.5  # outside of all phases


def test_gpu_times_arrive_when_the_gpu_has_passed(timeline, gpu):
    for step in (1, 2, 3):
        run_step(timeline, gpu, step, forward=step)
    gpu.done = 30.0  # in the middle of step 2
    first, second, third = timeline.take()
    assert first.gpu_seconds == pytest.approx(0.0165) and second.gpu_seconds is third.gpu_seconds is None
    assert first.gpu_phases == pytest.approx({"forward": 0.002, "backward": 0.014})  # no work of the GPU in "data"
    assert set(first.phases) == {"data", "forward", "backward"}
    assert gpu.waited == 0
    run_step(timeline, gpu, 4)
    times = timeline.take(wait=True)
    assert gpu.waited == 1 and [t.step for t in times] == [4]
    assert [t.gpu_seconds for t in (second, third, *times)] == pytest.approx([0.0185, 0.0205, 0.0205])


def test_waiting_for_other_ranks_is_told_apart_from_a_ranks_own_backward(timeline, gpu):
    for step, wait in ((1, 2.0), (2, 0.0), (3, None)):
        run_step(timeline, gpu, step, wait=wait)
    first, second, third = timeline.take(wait=True)
    assert first.gpu_phases["backward"] == pytest.approx(0.016) and first.gpu_reduce_wait == pytest.approx(0.002)
    assert third.reduce_wait is third.gpu_reduce_wait is third.own_backward is None
    assert first.own_backward == pytest.approx(0.014) == second.own_backward
    assert 0 <= first.reduce_wait < first.phases["backward"] and gpu.events < 50


def test_own_backward_is_of_the_gpu_or_of_the_host_and_never_mixed():
    host = {"phases": {"backward": 0.5}, "reduce_wait": 0.1}
    arrived = StepTime(1, gpu_phases={"backward": 0.016}, gpu_reduce_wait=0.002, **host)
    late = StepTime(2, **host)
    for times, own_ms in (([arrived, late], 14.0), ([late], 400.0), ([StepTime(3)], None)):
        record = gather(times, 0, torch.device("cpu"), ranks=1).build_record()
        assert record.own_backward_ms == ([] if own_ms is None else [own_ms])


def test_events_are_used_again(timeline, gpu):
    for step in range(1, 200):
        run_step(timeline, gpu, step)
        gpu.done = gpu.now - 30.0  # the GPU is between one and two steps behind
    assert gpu.events <= 4 * 10 and gpu.waited == 0
    assert sum(t.gpu_seconds is not None for t in timeline.take()) >= 196


def test_a_failed_gpu_hides_no_error(timeline, gpu, monkeypatch):
    """Every call fails after a fatal error of the GPU; the times that the host has are still written."""
    run_step(timeline, gpu, 1)
    watching = Instruments([timeline], refuse)

    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(ZeroDivisionError), watching.step(2), watching.phase("forward"):
        for method in ("record", "query", "synchronize"):
            monkeypatch.setattr(Event, method, broken)
        raise ZeroDivisionError
    assert [(t.step, t.gpu_seconds) for t in timeline.take()] == [(1, None)]


# --- memory


def test_host_memory_is_the_process_own(tmp_path):
    memory = MemoryNow(cuda=False)
    before = memory.host_bytes()
    # not from the C library, which may have as much left over from other tests
    own = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(own, dtype=np.uint8)
    held[:] = 1
    with_array = memory.host_bytes()
    assert 60 * MIB < with_array - before < 72 * MIB
    path = tmp_path / "data"
    held.tofile(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == len(held) // 4096
        assert abs(memory.host_bytes() - with_array) < 8 * MIB
    del held
    own.close()
    assert memory.host_bytes() < before + 8 * MIB
    memory.close()
    assert memory.host_bytes() is None and memory.peak_bytes() is None


# --- what is worth a line


RANKS, NAN = 4, float("nan")


def figures(**changes) -> RankFigures:
    per_rank = {"steps": 10.0, "step_ms": 100.0, "gpu_step_ms": NAN, "own_backward_ms": NAN}
    per_rank |= {"host_memory_bytes": 1e9, "peak_memory_bytes": NAN}
    host_ms = {"data": [0.1] * RANKS, "forward": [30.0] * RANKS, "backward": [60.0] * RANKS}
    usual = {name: [value] * RANKS for name, value in per_rank.items()}
    usual |= {"first": 11, "last": 20, "mean_ms": {}, "gpu_ms": {}, "host_ms": host_ms}
    return RankFigures(**usual | changes)


def forward(*ms: float, **changes) -> RankFigures:
    """Figures in which nothing but forward, and what changes, is told of the host."""
    return figures(host_ms={"forward": list(ms)}, **changes)


BUSY = {"core_wait_ms": [1.0, 2.0, 1.0, 30.0], "cpu_ms": [95.0] * 4, "involuntary_switches": [1.0] * 4}
SLOW = "   rank 3 is 18% slower than the median rank in forward (35.4 against 30.0 ms per step, iterations 11-20); the others"
NO_CORE = "   rank 3 waits for a CPU core for 30.0 of 100.0 ms per step (iterations 11-20); other programs"
STARVED = "   rank 2 waits 12.0 of 100.0 ms per step for data (iterations 11-20); more --num-workers"
IN_BACKWARD = "   rank 3 is 41% slower than the median rank in backward (58.0 against 41.0 ms per step"
GPU_MS = {"forward": [30.0, 50.0, 30.0, 30.0]}
OWN_BACKWARD = {"host_ms": {"backward": [60.0] * 4}, "own_backward_ms": [40.0, 42.0, 41.0, 58.0]}


@pytest.mark.parametrize(
    ("f", "line"),
    [
        (forward(30.0, 31.0, 29.0, 35.4), SLOW),
        (forward(40.0, 20.0, steps=[10.0] * 2, step_ms=[100.0] * 2), "   rank 0 is 100% slower"),
        (forward(10.0, 10.0, 10.0, 90.0, gpu_ms=GPU_MS), "   rank 1 is 67% slower"),  # the GPU's own time counts
        (figures(**OWN_BACKWARD), IN_BACKWARD),  # all ranks' backward takes the same time, since the others wait in it
        (figures(host_ms={"data": [0.1, 0.1, 12.0, 0.1]}), STARVED),
        (forward(30.0, 31.0, 29.0, 60.0, **BUSY), NO_CORE),  # on a busy machine no rank is called slow
        (forward(30.0, 31.0, 29.0, 60.0, **BUSY | {"core_wait_ms": [1.0] * 4}), "   rank 3 is 100% slower"),
        (figures(), None),
        (forward(30.0, 30.0, 30.0, 32.9), None),  # below 10%
        (forward(1.0, 1.0, 1.0, 2.9), None),  # below 2% of the step
        (figures(host_ms={"backward": [60.0, 60.0, 60.0, 90.0]}), None),  # whoever is fast waits there
        (forward(30.0, 30.0, 30.0, 60.0, steps=[10.0, 10.0, 10.0, 2.0]), None),
        (figures(steps=[5.0], step_ms=[100.0], host_ms={"forward": [60.0], "data": [9.0]}), None),
        (figures(step_ms=[5.0] * 4, host_ms={"data": [0.9] * 4}), None),
        (forward(30.0, 30.0, 30.0, 30.0, gpu_ms={"forward": [30.0, NAN, 50.0, 30.0]}), None),
    ],
)
def test_what_is_worth_a_line(f, line):
    """In as many intervals like this as it takes to say it."""
    worth = AnomalyWarnings()
    found = [said for _ in range(MIN_INTERVALS) for said in worth.of(f)]
    assert len(found) == (line is not None) and (not found or found[0].startswith(line)), found


def test_the_same_is_not_said_again_until_it_has_stopped():
    slow, worth = forward(30.0, 30.0, 30.0, 45.0), AnomalyWarnings()
    assert [len(list(worth.of(f))) for f in [slow] * 5 + [figures(), slow]] == [0, 0, 1, 0, 0, 0, 1]
    worth = AnomalyWarnings()  # one that becomes slow after a long time is named soon
    lines = [len(list(worth.of(f))) for f in [figures()] * 100 + [slow] * SLOW_INTERVALS]
    assert (sum(lines), lines.index(1)) == (1, 100 + 5)
    # on a busy machine now this rank is hit and now that one, each time by far: neither is slow
    hit, worth = [forward(180.0, 30.0, 30.0, 30.0), forward(30.0, 180.0, 30.0, 30.0)], AnomalyWarnings()
    assert [line for _ in range(20) for f in (*hit, *reversed(hit)) for line in worth.of(f)] == []
    assert list(worth.of(figures(steps=[NAN] * 4, step_ms=[NAN] * 4))) == []


@pytest.mark.parametrize("which", ["host_memory_bytes", "peak_memory_bytes"])
def test_growing_memory_is_said_and_counted_anew(which):
    worth, kind = AnomalyWarnings(), "host memory" if which.startswith("host") else "GPU memory"
    lines = [
        list(worth.of(figures(last=10 * i, **{which: [1e9, 1e9 + i * 32 * MIB, 1e9 - i, 1e9 + i]})))
        for i in range(2 * GROWING_INTERVALS + 2)
    ]
    assert [len(found) for found in lines] == [0, *([0] * (GROWING_INTERVALS - 1) + [1]) * 2, 0]
    told = f"   {kind} of rank 1 grows steadily: by 3.2 MiB per step since iteration 10, to 1.31 GiB"
    assert lines[GROWING_INTERVALS] == [told]


CREEP = [index / 100 for index in range(40)]
NO_GROWTH = {
    "caches that fill": ([300.0, 320.0, 340.0, 360.0, 380.0, *(400.0 + more for more in CREEP)], ()),
    "a single jump": ([*(300.0 + more for more in CREEP[:5]), *(500.0 + more for more in CREEP)], ()),
    "a profile's records": ([300.0] * 2 + [300.0 + 3 * index for index in range(20)] + [300.0] * 30, range(2, 22)),
    "up and down": ([300.0 + index % 2 * 40 for index in range(50)], ()),
}


@pytest.mark.parametrize("kind", NO_GROWTH)
def test_memory_of_which_the_audit_says_that_it_does_not_grow_is_not_called_growing(tmp_path, kind):
    """The console has a word for it only where the report has a finding."""
    (megabytes, disturbed), worth = NO_GROWTH[kind], AnomalyWarnings()
    for at, value in enumerate(megabytes):
        assert list(worth.of(figures(last=at, host_memory_bytes=[value * MIB] * 4), at in disturbed)) == []
    usual = {"steps": [1], "step_ms": [10.0], "phases_ms": {"forward": [9.0]}}
    told = [(at, value) for at, value in enumerate(megabytes) if at not in disturbed]
    ranks = [usual | {"iterations": [at, at], "host_memory_bytes": [value * MIB]} for at, value in told]
    run(tmp_path, ranks=ranks, steps=ordinary_steps(len(megabytes)), world=1)
    assert read_run(tmp_path).growths == ()


# --- runs


def test_a_run_says_its_memory_and_compares_its_one_rank(tmp_path):
    argv = flags("--train-iters 9 --log-interval 4 --eval-interval 3 --eval-iters 1")
    with alone():
        quietly(argv, tmp_path)
        quietly([*argv, "--no-step-timeline"], tmp_path / "off")
    records, found = steps(tmp_path), intervals(tmp_path)
    assert all(record["host_memory_bytes"] > 20 * MIB for record in records)
    assert [(f["iterations"], f["steps"]) for f in found] == [([1, 3], [3]), ([4, 7], [4]), ([8, 8], [1])]
    for f in found:
        mine = [r for r in records if f["iterations"][0] <= r["iteration"] <= f["iterations"][1]]
        forward = np.median([r["phases_ms"]["forward"] for r in mine])
        assert f["phases_ms"]["forward"] == [pytest.approx(forward, abs=0.002)]
        assert f["host_memory_bytes"] == [round(np.median([r["host_memory_bytes"] for r in mine]))]
        assert "gpu_ms" not in f and "peak_memory_bytes" not in f
    off = steps(tmp_path / "off")
    assert intervals(tmp_path / "off") == [] and [r["loss"] for r in off] == [r["loss"] for r in records]
    assert all("host_memory_bytes" not in r and set(r["phases_ms"]) <= {"eval"} and r["ms"] > 0 for r in off)
    assert [r["iteration"] for r in off if r["phases_ms"]] == [3, 6, 9]


class SlowForward(Instrument):
    """Lies inside the timeline: what it takes is the phase's time."""

    def begin_phase(self, name):
        if name == "forward":
            time.sleep(0.1)  # 2 micro-batches: 200 ms a step, since a busy machine delays ranks by tens of milliseconds


class SlowBackward(Instrument):
    """The second block's gradients take long on this rank."""

    def open(self):
        self.handle = register_module_full_backward_hook(self._dawdle)

    def close(self, error):
        self.handle.remove()

    @staticmethod
    def _dawdle(module, *gradients):
        if isinstance(module, TransformerLayer):
            time.sleep(0.05)  # 2 layers, 2 micro-batches: 200 ms a step


def one_of_two_is_slow(world, folder):
    argv = flags("--train-iters 13 --log-interval 4")
    board = "--timing-log-level 1 --log-timers-to-tensorboard --log-memory-to-tensorboard --tensorboard-dir"
    with_board = [*argv, *board.split(), f"{folder}/tb"]
    train(with_board, Path(folder, "forward"), world, [SlowForward()] if world.rank == 0 else [])
    train(argv, Path(folder, "backward"), world, [SlowBackward()] if world.rank == 1 else [])


def test_two_ranks_are_compared(tmp_path):
    *_, out = on_ranks(one_of_two_is_slow, tmp_path, str(tmp_path))
    _, of_forward, of_backward = out.split("iteration        1/")
    found = intervals(tmp_path / "forward")
    assert [f["steps"] for f in found] == [[3, 3], [4, 4], [4, 4], [1, 1]]
    for f in found:
        slow, fast = f["phases_ms"]["forward"]
        assert slow > 200 and slow > fast + 60
        assert f["step_ms"][1] > fast + 60  # the fast one waits for the slow one
        assert len(f["host_memory_bytes"]) == 2
    for f in intervals(tmp_path / "backward"):
        fast, slow = f["own_backward_ms"]
        assert slow > 200 and slow > fast + 60
        assert min(f["phases_ms"]["backward"]) > fast + 60  # what hides it
    assert all(0 <= r["reduce_wait_ms"] < r["phases_ms"]["backward"] for r in steps(tmp_path / "backward"))
    # once, unless this machine is too busy to tell
    for text, rank, phase in ((of_forward, 0, "forward"), (of_backward, 1, "backward")):
        named = re.findall(rf"rank {rank} is \d+% slower than the median rank in {phase}", text)
        assert len(named) == 1 or wording("instruments/waits-for-cpu-core") in text
    block = of_forward[of_forward.index("(min, max) time across ranks (ms):") :].splitlines()[1:5]
    timers = "forward-backward all-grads-sync optimizer-unscale-and-check-inf optimizer-clip-main-grad"
    assert [line.split()[0] for line in block] == timers.split()
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    least, most = (board.Scalars(name) for name in ("forward-time-min", "forward-time"))
    assert [event.step for event in most] == [4, 8, 12, 13]
    assert all(a.value + 0.1 < b.value for a, b in zip(least, most))
    assert min(event.value for event in board.Scalars("host-memory-bytes")) > 20 * MIB


def test_a_failed_run_writes_its_steps_without_the_ranks(tmp_path):
    """Nothing is gathered on the way out, since others may be gone."""
    with alone(), pytest.raises(KeyboardInterrupt):
        quietly(flags("--train-iters 9"), tmp_path, [Interrupts(6)])
    records = steps(tmp_path)
    assert [r["iteration"] for r in records] == [1, 2, 3, 4, 5] and intervals(tmp_path) == []
    assert all(r["loss"] > 0 and r["ms"] > 0 for r in records)  # also of the last two, which were still on their way


def test_figures_that_a_failed_gpu_still_owes_are_not_waited_for():
    class Late:
        def query(self):
            return False

    class Dead:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for event, raises in ((Late(), contextlib.nullcontext()), (Dead(), pytest.raises(RuntimeError))):
        readback, found = Readback(), []
        readback._waiting += [("first", torch.ones(1), None), ("second", torch.ones(1), event)]
        with raises:
            found += readback.arrived()
            assert found == [("first", [1.0])]


# --- what a rank gets of its cores


def test_a_step_has_the_cpu_time_of_its_process():
    timeline = Timeline()
    timeline.begin(1)
    before = time.process_time()
    while time.process_time() - before < 0.05:
        pass
    timeline.end(1)
    timeline.close(None)
    [step] = timeline.take()
    assert 0.05 <= step.cpu_seconds < 0.5 and step.involuntary_switches >= 0
    assert step.core_wait_seconds is None or 0 <= step.core_wait_seconds <= step.seconds
    record = gather([step], 0, torch.device("cpu"), ranks=1).build_record()
    assert record.cpu_ms[0] == pytest.approx(1000 * step.cpu_seconds, abs=0.001)
    assert record.involuntary_switches == [step.involuntary_switches]
    times = [StepTime(1, compiling=True), StepTime(2, profiled=True), StepTime(3)]
    assert ordinary(times) == times[2:] and ordinary(times[:2]) == times[:2]
    record = figures(steps=[10.0, NAN], gpu_step_ms=[NAN, NAN]).build_record()
    assert record.steps == [10, None] and record.gpu_ms == []


def test_a_thread_that_shares_its_core_says_how_long_it_waited():
    """Two busy processes on one core."""
    if not hasattr(os, "sched_setaffinity") or CoreTime().read()[2] is None:
        pytest.skip("the system does not tell of waiting for a core")
    core = min(os.sched_getaffinity(0))
    busy = f"import os, time; os.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    other, allowed, times = subprocess.Popen([sys.executable, "-c", busy]), os.sched_getaffinity(0), CoreTime()
    try:
        os.sched_setaffinity(0, {core})
        first, deadline = times.read(), time.monotonic() + 60
        while times.read()[2] - first[2] < 0.05 and time.monotonic() < deadline:
            pass
        last = times.read()
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
        times.close()
    assert last[2] - first[2] >= 0.05 and last[1] > first[1]
