"""What `megatron-lite watch` costs a training script per step, outside of the profiled window and inside:

    python -m benchmarks.watch_overhead --steps 20:23 -- python train.py ...

CPU time of the training thread inside of the profiler's own functions, as they run between the script's operations, medians over steps:
comparing two runs cannot tell so little on a busy machine.
"""

import argparse
import atexit
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_lite.variables import prepend_python_path

RESULT = "WATCH_OVERHEAD_FILE"
PROFILER = "megatron_lite.watch.profiler"
CALLED = (
    "_begin_data",
    "_end_data",
    "_begin_backward",
    "_end_backward",
    "_move",
    "_end_optimizer",
    "_end_step",
    "step",
)
REPOSITORY = Path(__file__).parents[1]
IN_CHILD = (
    "import benchmarks.watch_overhead as overhead\nimport sys\nsys.meta_path.insert(0, overhead.AfterProfiler())\n"
)
FIRST = 5  # steps that warm up


class AfterProfiler:
    """Measures what the profiler's functions take, from its import on."""

    def find_spec(self, name, path=None, target=None):
        if name != PROFILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_measure(module):
            execute(module)
            measure_calls(module.Profiler)

        spec.loader.exec_module = execute_and_measure
        return spec


def measure_calls(kind: type):
    """CPU time in the outermost of these calls, microseconds by step, into a file at the process's end."""
    steps: list[float] = [0.0]
    depth = 0

    def measure(function):
        @functools.wraps(function)
        def call(*arguments, **named):
            nonlocal depth
            depth, began = depth + 1, time.thread_time_ns()
            try:
                return function(*arguments, **named)
            finally:
                depth -= 1
                if depth == 0:
                    steps[-1] += (time.thread_time_ns() - began) / 1000
                if function.__name__ == "_end_step":
                    steps.append(0.0)

        return call

    for name in CALLED:
        setattr(kind, name, measure(getattr(kind, name)))
    if os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: len(steps) > 1 and Path(os.environ[RESULT]).write_text(json.dumps(steps)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="20:23", help="to profile")
    at = sys.argv.index("--")
    window, command = parser.parse_args(sys.argv[1:at]).steps, sys.argv[at + 1 :]
    first, stop = map(int, window.split(":"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(IN_CHILD)
        environment = prepend_python_path(prepend_python_path(os.environ, REPOSITORY), folder)
        words = [
            "-m",
            "megatron_lite.cli.main",
            "watch",
            "--no-report",
            "--steps",
            window,
            "--run-dir",
            f"{name}/run",
            "--",
        ]
        environment |= {RESULT: f"{name}/us.json", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run([sys.executable, *words, *command], env=environment, check=False)
        us = json.loads((folder / "us.json").read_text())
        records = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
        lines = [one for one in records if one["kind"] == "step"]
    outside = [one for one in lines if one["step"] > FIRST and not first - 1 <= one["step"] <= stop]
    own_us = statistics.median(us[one["step"] - 1] for one in outside)
    inside = [one for one in lines if one.get("profiled")]
    cpu_ms, inside_cpu_ms = (statistics.median(one["cpu_ms"] for one in of) for of in (outside, inside))
    print(f"outside: {own_us:.0f} us of a step of {cpu_ms:.1f} ms of CPU time: {own_us / cpu_ms / 10:.2f}%")
    print(f"inside: x {inside_cpu_ms / cpu_ms:.2f} of CPU time; {len(lines)} steps; exit code {done.returncode}")


if __name__ == "__main__":
    main()
