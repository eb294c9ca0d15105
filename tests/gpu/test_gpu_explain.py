"""As a user starts it: a profiled run whose trace and snapshot our own report reads, and one whose memory runs out."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpu_checks.pytest_side import checked_device, keep

DEVICE = checked_device()
if DEVICE is None:
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import REPO
from support.snapshots import read_snapshot
from support.wording import wording

from benchmarks.training.process import environment_of

SECONDS = 100
WIDTH = 256 if DEVICE == "cuda" else 64  # of everything
GPT = (
    f"--num-layers 4 --hidden-size {WIDTH} --num-attention-heads 4 --seq-length {WIDTH} --max-position-embeddings {WIDTH} "
    "--micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --mock-data --eval-iters 0 --log-interval 4 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0 --torch-compile none"
)
WATCHED = (
    "--train-iters 12 --profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --profile-step-start 5 "
    "--profile-step-end 9 --record-memory-history --no-report"
)
# 34 GB for the embedding's output alone: the first layers ask for more than any GPU has
TOO_MUCH = (
    "--num-layers 24 --hidden-size 1024 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8192 "
    "--global-batch-size 8192 --train-iters 2 --record-memory-history --attention-backend unfused"
)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@dataclass(frozen=True)
class Explained:
    """A run, what it said, its report.json and its snapshot."""

    folder: Path
    said: str
    report: dict
    snapshot: dict


def started(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, words)], check=False, cwd=REPO, env=environment_of(DEVICE, threads=1),
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> Explained:
    folder = tmp_path_factory.mktemp("explained")
    snapshot = folder / "snapshot.pickle"
    run = started(
        "pretrain_gpt.py", *GPT.split(), *WATCHED.split(), "--memory-snapshot-path", snapshot, "--run-dir", folder
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [trace] = folder.glob("*.pt.trace.json*")
    keep(trace, "trace.json")
    keep(snapshot, "snapshot.pickle")
    read = started("-m", "megatron_lite.cli.main", "report", folder, "--json", folder / "report.json")
    assert read.returncode == 0, read.stderr
    keep(folder / "report.json", "report.json")
    return Explained(folder, run.stdout, json.loads((folder / "report.json").read_text()), read_snapshot(snapshot))


def test_the_run_says_what_it_recorded(explained):
    assert wording("instruments/profiled-steps-of-this-run-rank", 5, 8, 0) in explained.said, explained.said
    assert wording("gpu/events-of-steps-of", 5, 8) in explained.said, explained.said
    assert wording("gpu/trace-of-rank", 0) not in explained.said  # what it would complain of: no kernel, missing steps


def test_the_report_reads_the_trace(explained, record_property):
    verdict, [rank] = explained.report["verdict"], explained.report["ranks_seen"]
    record_property("verdict", verdict["sentence"])
    time, kernels = rank["time"], rank["kernels"]
    assert verdict["sentence"] and kernels["rows" if DEVICE == "cuda" else "operators"], explained.report["gaps"]
    assert sum(time["rows"].values()) == pytest.approx(time["step_ms"], rel=0.01) and time["step_ms"] > 0
    assert (time["device"] is not None) == (DEVICE == "cuda")
    assert explained.report["run"]["status"] == "finished" and explained.report["run"]["steps"] == 12


def test_the_snapshot_has_every_phase(explained):
    tags = {
        event["user_metadata"].split("/")[1]
        for event in explained.snapshot["device_traces"][0]
        if event["action"] == "alloc" and event["user_metadata"].count("/")
    }
    assert {"forward", "backward", "optimizer_step"} <= tags
    [read] = explained.report["snapshots"]
    assert read["peak_bytes"] > 0 and read["oom"] is None
    assert read["peak_phase"] in ("forward", "backward", "optimizer_step")
    assert read["simulated"] == (DEVICE == "cpu")


def test_weights_and_moments_are_as_large_as_planned(explained, record_property):
    ledger = {row["category"]: row for row in explained.report["ledger"]}
    for category in ("parameters", "moments"):
        row = ledger[category]
        record_property(category, f"{row['measured_bytes']} of {row['formula_bytes']} bytes")
        # the allocator rounds each tensor up to 512 bytes
        assert row["measured_bytes"] == pytest.approx(row["formula_bytes"], rel=0.02)


@needs_gpu
def test_memory_that_runs_out_ends_in_five_lines_and_a_dump(tmp_path):
    words = [*GPT.split(), *TOO_MUCH.split(), "--memory-snapshot-path", tmp_path / "s.pickle"]
    run = started("pretrain_gpt.py", *words, "--run-dir", tmp_path / "run")
    output = run.stdout + run.stderr
    assert run.returncode == 1 and wording("gpu/error-out-of-memory", 0) in output and "Traceback" not in output, output
    assert "  would help: " in output and "  held by: " in output, output
    dump = tmp_path / "s_oom_rank0.pickle"
    keep(dump, "out_of_memory.pickle")
    assert any(event["action"] == "oom" for event in read_snapshot(dump)["device_traces"][0])
