"""The real Nsight Systems, started by the script, on the CPU: which steps are in its reports."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import DATA, MODEL, NO_DROPOUT, write_documents
from support.nsys_report import NSYS, Report, why_not
from support.paths import REPO
from support.traces import steps_of
from support.waiting import LIMIT_S
from support.wording import wording

PHASES = {"data", "data_to_device", "forward", "backward", "grad_sync", "unscale", "clip_grad", "optimizer_step", "log"}
TRAINER = """
import os, sys, time
from megatron_lite.__main__ import train
from megatron_lite.train.step import TrainingStep

train, calls = TrainingStep.__call__, []

def train_or_fail(self, *arguments):
    calls.append(1)
    if len(calls) == int(os.environ.get("FAIL_AT", 0)):
        raise RuntimeError("the wheels came off")
    result = train(self, *arguments)
    if os.environ.get("SLOW_RANK") == os.environ.get("RANK", "0"):
        time.sleep(0.5)
    return result

TrainingStep.__call__ = train_or_fail
sys.exit(train(sys.argv[1:]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Place:
    """A copy of the start script with a trainer that can fail, and data; in a folder with odd characters."""

    def __init__(self, folder: Path):
        self.folder, self.last = folder / "a $place at 100%h", 0
        shutil.copytree(REPO / "examples", self.folder / "examples")
        (self.folder / "pretrain_gpt.py").write_text(TRAINER)
        for name in ("vocab.json", "merges.txt"):
            (self.folder / name).touch()
        write_documents(self.folder / "data", [40] * 400)

    def train(
        self, *words: str, window=(3, 5), iterations: int = 8, ranks: int = 1, code: int = 0, save=None, **environment
    ):
        """Run the script; returns what it said, and the report if there is one."""
        self.last += 1
        names = (save or f"save{self.last}", f"board{self.last}", "vocab.json", "merges.txt", "data")
        script = self.folder / "examples" / "gpt3" / "train_gpt3_857m_distributed.sh"
        usual = (
            f"--bf16 --global-batch-size 8 --train-iters {iterations} --eval-iters 0 --log-interval 4 --lr-decay-iters 8 "
            f"--profile-step-start {window[0]} --profile-step-end {window[1]}"
        )
        argv = ["bash", script, *(self.folder / name for name in names), "--nsys", "--", *MODEL, *DATA, *NO_DROPOUT]
        paths = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NSYS": NSYS}
        env |= {"SLURM_JOB_ID": str(self.last), "PYTHONPATH": paths, "GPUS_PER_NODE": str(ranks)}
        env |= {"A_SECRET": "correct horse battery staple"} | environment
        argv = [*map(str, argv), *usual.split(), *words]
        run = subprocess.run(argv, env=env, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        assert run.returncode == code, run.stdout + run.stderr
        report = self.folder / "nsight_profile" / f"gpt3_857m_job{self.last}_node0.nsys-rep"
        return run.stdout + run.stderr, Report(report) if report.exists() else None


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("nsys"))


def test_one_rank(place):
    said, report = place.train("--use-pytorch-profiler")
    assert report.steps == [["step 3", "step 4"]] and report.marks == [
        wording("examples/rank-of-window-steps", 0, 1, 3, 4)
    ]
    assert report.phases("step 3") == report.phases("step 4") == PHASES
    assert wording("examples/marked-for-nsight-systems", 3, 4, 0) in said
    # and nsys did not end it
    assert "note: --use-pytorch-profiler left out" in said and "iteration        8/       8" in said
    assert f"Nsight Systems report: {report.path} (steps 3-4, " in said
    assert "note: A_SECRET" in said and not any("correct horse" in text for text in report.strings)
    told = ""
    for name in ("nvtx_sum", "nvtxsum"):  # the report of that name differs by version
        command = [NSYS, "stats", "--report", name, report.path]
        empty = report.path.with_name(f"{report.path.stem}.empty")
        told += subprocess.run(command, check=False, cwd=empty, capture_output=True, text=True).stdout
    assert len(re.findall(r"PushPop +:?step 4", told)) == 1


def test_two_ranks(place):
    _, report = place.train("--profile-ranks", "1", ranks=2)
    assert report.steps == [["step 3", "step 4"]] and report.marks == [
        wording("examples/rank-of-window-steps", 1, 2, 3, 4)
    ]
    _, report = place.train("--profile-ranks", "-1", "--log-interval", "8", ranks=2, SLOW_RANK="1")
    assert report.steps == [["step 3", "step 4"]] * 2
    assert report.marks == [
        wording("examples/rank-of-window-steps", 0, 2, 3, 4),
        wording("examples/rank-of-window-steps", 1, 2, 3, 4),
    ]
    texts = [text for text, *_ in report.events]
    assert texts.count("optimizer_step") == 4 and texts.count("log") == 4  # the slow rank lost nothing of its end


def test_a_resumed_run(place):
    place.train("--exit-interval", "4", save="resumed")
    said, report = place.train("--override-opt_param-scheduler", save="resumed")
    assert report.steps == [["step 3", "step 4"]]
    assert report.marks == [wording("examples/rank-of-window-steps-of", 0, 1, 3, 4, 7, 8)]
    assert wording("examples/rank-of-window-steps-of-this", 0, 1, 3, 4, 7, 8) in said


def test_a_run_that_ends_inside_the_window(place):
    said, report = place.train("--exit-interval", "4", window=(3, 9))
    assert report.steps == [["step 3", "step 4"]] and wording("examples/marked-for-nsight-systems-steps", 3, 4) in said


def test_an_exception_inside_the_window(place):
    said, report = place.train(code=1, window=(3, 7), FAIL_AT="5")
    assert wording("examples/wheels-came-off") in said
    assert report.steps == [["step 3", "step 4", "step 5"]]  # the last one, in which it failed, is there too


def test_a_window_that_is_not_reached(place):
    said, report = place.train(code=3, window=(50, 52))
    assert report is None and wording("examples/no-nsight-systems-report-though", 0) in said


def test_a_request_before_the_window_is_torchs_and_the_window_is_nsyss(place):
    board = place.folder / f"board{place.last + 1}"
    board.mkdir()
    (board / "profile.now").write_text("2")
    said, report = place.train(window=(20, 22), iterations=24)
    assert report.steps == [["step 20", "step 21"]]  # nsys collects once: the request must not have used that up
    first, second = steps_of(board)
    assert second == first + 1 < 20 and wording("examples/taken-profiling-steps-of", first, second) in said
