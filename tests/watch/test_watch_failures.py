"""Watched jobs of two gloo ranks that fail or hang: what is recorded of them, and what is concluded."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import REPO
from support.waiting import wait_until

from megatron_lite.last_words import read_words
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude

pytestmark = pytest.mark.slow
JOB = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
what = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def misbehave():
    if what == "order":
        if rank == 0:
            dist.broadcast(torch.ones(4), 0)
        dist.all_reduce(torch.ones(4))
        if rank == 1:
            dist.broadcast(torch.ones(4), 0)
    if rank == 0:
        return
    if what == "killed":
        os.kill(os.getpid(), 9)
    if what == "hangs":
        time.sleep(10000)
    if what == "raises":
        raise ValueError("bad batch 17")

for step in range(8):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        if what == "terminated":
            time.sleep(10000)
        misbehave()
"""


def start(folder: Path, what: str, *options: str) -> "subprocess.Popen[str]":
    script = folder / "train.py"
    script.write_text(JOB)
    watch = [sys.executable, "-m", "megatron_lite", "watch", "--run-dir", str(folder / "run"), *options, "--"]
    job = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), what]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*watch, sys.executable, *job], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("what", "kind", "ranks", "options"),
    [
        ("killed", "DIED", (1,), ()),
        ("raises", "USER_EXCEPTION", (1,), ()),
        ("hangs", "NEVER_ENTERED", (1,), ("--hang-timeout", "6")),
        ("order", "OTHER_ORDER", (0, 1), ("--hang-timeout", "6")),
    ],
)
def test_a_job_that_fails_is_explained(tmp_path, what, kind, ranks, options):
    job = start(tmp_path, what, "--no-report", *options)
    _, error = job.communicate()
    assert job.returncode == 1, error
    found = conclude(collect_evidence([tmp_path / "run"]))
    assert (found.kind.name, found.ranks) == (kind, ranks), found.verdict
    words = dict(read_words(tmp_path / "run"))
    if what == "killed":
        assert (words["1"].exit_code, words["1"].left) == (-signal.SIGKILL, None)
    if what == "raises":
        assert words["1"].error_stack[0].startswith("misbehave (")
    if what == "order":
        last = {}
        for rank in (0, 1):
            calls = pickle.loads((tmp_path / "run" / "flight" / f"rank-{rank}").read_bytes())["entries"]
            last[rank] = calls[-1]["profiling_name"]
            assert any(frame["name"] == "misbehave" for frame in calls[-1]["frames"])
        assert last == {0: "gloo:broadcast", 1: "gloo:all_reduce"}
    if options:
        assert "--hang-timeout" in error and error.count("stands in") == 1
        # by py-spy where there is one, and faulthandler's without
        assert [path for path in (tmp_path / "run" / "stacks").glob("rank-1.*") if path.read_text().strip()]


def test_ranks_that_are_terminated_tell_where_they_were(tmp_path):
    run = tmp_path / "run"
    job = start(tmp_path, "terminated", "--no-report")
    wait_until(lambda: all(dict(read_words(run)).get(name) is not None for name in "01"))
    wait_until(lambda: all(words.begun > 6 and words.step > 5 for words in dict(read_words(run)).values()))
    for words in dict(read_words(run)).values():
        os.kill(words.pid, signal.SIGTERM)
    job.communicate()
    words = dict(read_words(run))
    for name in "01":
        assert (words[name].left, words[name].exit_code, words[name].blameless) == ("SIGTERM", -signal.SIGTERM, True)
        assert words[name].stack[0].startswith("<module> (") and (run / "flight" / f"rank-{name}").exists()
