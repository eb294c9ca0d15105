"""What only a GPU can show of torch.profiler's traces: kernels, under which ranges, and speed after the window."""

import contextlib
import io
import json
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import steps, train
from support.wording import wording

from megatron_lite.config.world import World

SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --log-interval 1000 "
    "--bf16 --num-workers 0 --torch-compile none --profile --use-pytorch-profiler"
)


pytestmark = pytest.mark.usefixtures("group")


def profiled(words: str, folder: Path) -> list[str]:
    """Train in this process; returns what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train([*SIZE.split(), *words.split()], folder, World(gpus=torch.cuda.device_count()))
    return out.getvalue().splitlines()


def events(folder: Path) -> list[dict]:
    [path] = folder.glob("*.pt.trace.json")
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("first", [1, 5])
def test_every_profiled_step_has_its_kernels(tmp_path, first):
    """Also the first step of a run, before which there is none to get ready in."""
    said = profiled(f"--train-iters {first + 4} --profile-step-start {first} --profile-step-end {first + 3}", tmp_path)
    assert not any(wording("instruments/trace-of-rank") in text for text in said), said
    found = events(tmp_path)
    spans = [e for e in found if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    marks = sorted((e for e in spans if re.fullmatch(r"ProfilerStep#\d+", e["name"])), key=lambda e: e["ts"])
    assert [e["name"] for e in marks] == [f"ProfilerStep#{first + i}" for i in range(3)]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in found
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = Counter()
    for kernel in (e for e in found if e.get("cat") == "kernel"):
        at = launches.get(kernel["args"]["correlation"])
        kernels.update(s["name"] for s in marks if at is not None and s["ts"] <= at < s["ts"] + s["dur"])
    counts = [kernels[mark["name"]] for mark in marks]
    assert counts[0] >= 0.9 * max(counts[1:]) > 0, kernels  # no beginning is lost; a run's first step may have more


def test_module_ranges_of_backward_stand_in_autograds_thread(tmp_path):
    profiled("--train-iters 6 --profile-step-start 3 --profile-step-end 5 --profile-modules", tmp_path)
    ranges = [e for e in events(tmp_path) if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    threads = {
        way: {e["tid"] for e in ranges if re.fullmatch(rf"layers\.\d+.* {way}", e["name"])}
        for way in ("forward", "backward")
    }
    assert len(threads["forward"]) == len(threads["backward"]) == 1 and threads["forward"] != threads["backward"]
    on_gpu = {e["name"] for e in events(tmp_path) if e.get("cat") == "gpu_user_annotation"}
    assert {"layers.0.mlp forward", "layers.0.mlp backward"} <= on_gpu


def test_the_table_sorts_by_device_time(tmp_path):
    profiled("--train-iters 6 --profile-step-start 3 --profile-step-end 5", tmp_path)
    [table] = tmp_path.glob("*.operators.txt")
    head = next(line for line in table.read_text().splitlines() if "Self CUDA" in line)
    columns = re.split(r"\s{2,}", head.strip())
    share = columns.index("Self CUDA %")
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.read_text().splitlines()]
    shares = [
        float(row[share].rstrip("%"))
        for row in rows
        if len(row) == len(columns) and row != columns and row[share].endswith("%")
    ]
    assert len(shares) > 10 and shares == sorted(shares, reverse=True)


def test_losses_are_the_same_and_steps_after_the_window_as_fast_as_before(tmp_path, deterministic):
    common = "--train-iters 60 --deterministic-mode --attention-backend unfused"
    profiled(f"{common} --profile-step-start 20 --profile-step-end 22 --profile-modules", tmp_path / "on")
    profiled(f"{common} --profile-step-start 61 --profile-step-end 62", tmp_path / "off")
    on, off = (steps(tmp_path / name) for name in ("on", "off"))
    assert [s["loss"] for s in on] == [s["loss"] for s in off]
    clean = [s for s in on[5:] if not s.get("profiled") and not s.get("beside_profile")]
    before, after = (statistics.median(s["ms"] for s in clean if (s["step"] < 20) == early) for early in (True, False))
    print(f"before {before:.2f} ms, after {after:.2f} ms")
    assert after < 1.3 * before


def test_a_run_that_ends_before_the_window_leaves_no_profiler_on(tmp_path):
    # step 4, in which the profiler gets ready, is the run's last one
    said = profiled("--train-iters 9 --exit-interval 4 --profile-step-start 5 --profile-step-end 7", tmp_path)
    assert not list(tmp_path.glob("*.trace.json*")) and any(
        wording("instruments/was-never-reached") in text for text in said
    )
    assert not torch.autograd._profiler_enabled()
    with contextlib.suppress(FileNotFoundError):
        assert not list((tmp_path / "chakra").iterdir())
