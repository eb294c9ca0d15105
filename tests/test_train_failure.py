"""A rank that dies: the others end within seconds, and the launcher's summary tells what it died of."""

import json
import re

import pytest
from launch import flags, pretrain

SCRIPT = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
from megatron_lite import app
from megatron_lite.errors import DataError
from megatron_lite.train.step import TrainingStep

how, inner = sys.argv[1], TrainingStep.__call__

def step(self, batches, consumed, phase):
    if consumed == 8 and os.environ["RANK"] == "1":
        if how == "exception":
            raise ZeroDivisionError("a mistake in this rank only")
        if how == "user":
            raise DataError("--data-path x: only this rank's file is damaged; mend it.")
        os.kill(os.getpid(), 9)
    return inner(self, batches, consumed, phase)

def torn_down():
    import torch.distributed as dist
    print(f"rank {os.environ['RANK']} has a group: {dist.is_initialized()}", flush=True)

TrainingStep.__call__ = step
try:
    code = record(app.main)(sys.argv[2:])
finally:
    torn_down()
sys.exit(code)
"""
CAUSES = {
    "exception": ["ZeroDivisionError: a mistake in this rank only", r"exitcode +: 1 "],
    "user": ["--data-path x: only this rank's file is damaged; mend it.", r"exitcode +: 2 "],
    "killed": [r"Signal 9 \(SIGKILL\)", r"exitcode +: -9 "],
}


@pytest.mark.parametrize("how", ["exception", "user", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_dying_rank_ends_all_and_says_why(tmp_path, how):
    script = tmp_path / "dies.py"
    script.write_text(SCRIPT)
    ended = pretrain([how, *flags("--train-iters 1000000 --run-dir", tmp_path / "run")], ranks=2, script=script)
    assert ended.code != 0 and ended.seconds < 60, "minutes would be a collective's time-out"
    root = ended.err[ended.err.index("Root Cause (first observed failure)"):]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), root
    for cause in CAUSES[how]:
        assert re.search(cause, root), root
    if how == "user":
        assert "rank 1: error: --data-path x: only this rank's file is damaged; mend it.\n" in ended.err
    if how != "killed":  # run.json is the last rank's
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"].startswith("failed: ")
        assert "rank 1 has a group: False" in ended.out


def test_a_mistake_that_all_ranks_have_is_told_once(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    ended = pretrain(flags("--exit-on-missing-checkpoint --load", empty, "--run-dir", tmp_path / "run"), ranks=2)
    assert ended.code != 0
    assert len(re.findall(r"^(?:rank \d: )?error: ", ended.err, re.MULTILINE)) == 1
    assert str(empty) in ended.err[ended.err.index("Root Cause (first observed failure)"):]
