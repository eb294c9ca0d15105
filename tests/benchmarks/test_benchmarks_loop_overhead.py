"""benchmarks/loop_overhead.py: that what it counts is the loop's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import REPO
from support.waiting import LIMIT_S

sys.path.insert(0, str(REPO))

from benchmarks.overhead.figures import figures_of
from benchmarks.overhead.parts import Stopwatch


def test_phases_of_work_do_not_count_and_the_log_does(tmp_path):
    for rank, forward in enumerate((0.040, 0.030)):
        turns = [{"turn": 0.050, "data": 0.005, "forward": forward, "log": 0.002}] * 3
        figures = {"turns": turns, "cpu_s": 0.3, "parts_s": {"small": 3e-6, "large": 6e-6}}
        (tmp_path / f"out.{rank}.json").write_text(json.dumps(figures))
    found = figures_of(tmp_path / "out", ranks=2)
    assert found.loop_us == pytest.approx(15_000) and found.step_ms == pytest.approx(50)
    assert list(found.parts_us.items()) == [("large", pytest.approx(2.0)), ("small", pytest.approx(1.0))]


def test_a_part_inside_another_counts_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0])  # the outer part begins, the inner one begins and ends, the outer one ends
    monkeypatch.setattr("benchmarks.overhead.parts.time.perf_counter", lambda: next(now))
    stopwatch = Stopwatch()
    inner = stopwatch._around(lambda: None, "inner")
    stopwatch._around(inner, "outer")()
    assert stopwatch.seconds == {"inner": 2.0, "outer": 8.0}


@pytest.mark.slow
def test_the_whole_measurement(tmp_path):
    out = tmp_path / "figures.json"
    words = f"--ranks 2 --log-intervals 10 --rounds 1 --steps 40 --real-steps 24 --tensorboard --out {out}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loop_overhead", *words.split()],
        check=False,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(Path(out).read_text())["configurations"]
    empty, parts, real = (found[kind][0] for kind in ("empty", "parts", "real"))
    assert empty["loop_us"] > 0 and real["loop_us"] > 0 and not empty["parts_us"] and not real["parts_us"]
    assert real["step_ms"] > empty["step_ms"]
    assert parts["parts_us"]["TensorBoard, a step"] > 0 and parts["parts_us"]["console line"] > 0
