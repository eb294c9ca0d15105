"""This trainer under the real Nsight Systems, exported by it and read here."""

import subprocess
import sys
import time

import pytest
from support.launch import DATA, MODEL, NO_DROPOUT
from support.nsys_report import NSYS, REPO, import_report, under_nsys, why_not
from support.waiting import LIMIT_S

from megatron_lite.analysis.trace.read import read_traces

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def test_the_trainer_under_nsys(tmp_path):
    steps = "--micro-batch-size 1 --lr 1e-3 --train-iters 6 --eval-iters 0 --mock-data"
    window = "--profile --profile-step-start 3 --profile-step-end 5"
    command = [sys.executable, REPO / "pretrain_gpt.py", *MODEL, *DATA, *NO_DROPOUT, *steps.split(), *window.split()]
    command = [*under_nsys(tmp_path / "report"), *map(str, command), "--run-dir", str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, cwd=tmp_path)
    database = tmp_path / "report.sqlite"
    report = import_report(tmp_path / "report")
    export = [NSYS, "export", "--type", "sqlite", "--output", database, report]
    subprocess.run(export, check=True, capture_output=True, cwd=tmp_path)
    [trace] = read_traces(database)
    assert (trace.rank, trace.world_size, trace.writer) == (0, 1, "nsys")
    e = trace.events
    spans = list(zip(map(trace.name_of, range(len(e))), e.start_ns.tolist(), e.end_ns.tolist()))
    steps = [span for span in spans if span[0].startswith("step ")]
    assert [name for name, *_ in steps] == ["step 3", "step 4"]
    for _, start, end in steps:
        inside = {name for name, begun, ended in spans if start <= begun and ended <= end}
        assert {"data", "forward", "backward", "optimizer_step"} <= inside
    assert trace.base_ns == pytest.approx(time.time_ns(), abs=600 * 10**9)
