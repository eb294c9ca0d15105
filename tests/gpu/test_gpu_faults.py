"""NCCL's flight recorder, and a rank that never joins: its failures do not reach Python, so that a thread must speak."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.training.process import environment_of

TESTS = Path(__file__).parent.parent
GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
RECORD = """
import time
import torch
import torch.distributed as dist
from megatron_lite.parallel.rank_status import FlightRecorder

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
recorder = FlightRecorder("nccl")
for _ in range(3):
    dist.all_reduce(torch.ones(1000, device=device))
torch.cuda.synchronize()
time.sleep(1)  # the watchdog notes what is finished
print("finished", recorder.counts()["0"], recorder.has_unfinished())
torch.cuda._sleep(10**10)  # seconds: the next collective cannot start
dist.all_reduce(torch.ones(1000, device=device))
time.sleep(0.5)
print("waiting", recorder.counts()["0"], recorder.has_unfinished())
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def gpu_environment() -> dict[str, str]:
    environment = environment_of("cuda", threads=1)
    return environment | {"PYTHONPATH": os.pathsep.join([str(TESTS), environment["PYTHONPATH"]])}


def test_what_nccl_records():
    ended = subprocess.run(
        [sys.executable, "-c", RECORD], check=False, env=gpu_environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "finished (3, 3) False" in ended.stdout, ended.stdout
    assert "waiting (4, 3) True" in ended.stdout, ended.stdout


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("how", ["loop", "killed"])
def test_a_rank_that_fails_is_named_within_the_limit(tmp_path, how):
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --global-batch-size 4 --train-iters 1000000 "
        f"--lr 1e-3 --bf16 --eval-iters 0 --log-interval 1 --num-workers 0 --torch-compile none --run-dir {tmp_path}"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(TESTS / "faulty.py"), how, "10", *words.split()]
    ended = subprocess.run(command, check=False, env=gpu_environment(), capture_output=True, text=True, timeout=180)
    assert ended.returncode != 0
    said = {"loop": r"did not enter \w+ #\d+ .* in never_ends", "killed": "died"}[how]
    assert re.search(f"^error: Rank 1 {said}", ended.stderr, re.MULTILINE), ended.stderr
    assert "watchdog" not in ended.stderr.lower(), "NCCL's own must come too late"
