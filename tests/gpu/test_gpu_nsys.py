"""The Nsight Systems path on a GPU: CUDA's profiler calls, torch's NVTX, and a report of the real nsys."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.launch import plan_of
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instruments, Window
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.phases import Phase

ROOT = Path(__file__).resolve().parents[2]
SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --bf16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 12 --lr 1e-3 --mock-data --eval-iters 0 --log-interval 4 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --torch-compile none"
)


def test_the_profiler_starts_and_stops_around_the_window(monkeypatch):
    """All calls are CUDA's own; only that they were made is written down."""
    calls, words = [], []
    for name in ("start", "stop"):
        real = getattr(torch.cuda.profiler, name)
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name, real=real: (calls.append(name), real()))
    plan = plan_of([*SIZE.split(), "--record-shapes"], World(gpus=1, under_nsys=True))
    nsys = NsysRange(Window(range(2, 4)), plan.args.profile, plan.world, words.append)
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)
    with Instruments([nsys], words.append) as watching:
        for step in (1, 2, 3, 4):
            with watching.step(step), watching.phase(Phase.BACKWARD):
                (weight @ weight).sum().backward()
                calls.append(step)
    assert calls == [1, "start", 2, 3, "stop", 4]
    assert words == [wording("examples/marked-for-nsight-systems", 2, 3, 0)]


@pytest.mark.skipif(shutil.which("nsys") is None, reason="no nsys here")
@pytest.mark.parametrize("extra", [[], ["--record-shapes"]])
def test_a_report_holds_the_steps_and_their_kernels(tmp_path, extra):
    report, database = tmp_path / "report", tmp_path / "report.sqlite"
    record = "nsys profile -t cuda,nvtx -s none --capture-range=cudaProfilerApi --capture-range-end=stop --kill=none -o"
    window = "--profile --profile-step-start 5 --profile-step-end 7 --run-dir"
    trainer = [sys.executable, ROOT / "pretrain_gpt.py", *SIZE.split(), *window.split(), tmp_path / "run", *extra]
    done = subprocess.run(
        [*record.split(), report, *trainer],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and wording("gpu/steps-of-this-run", 5, 6, 0) in done.stdout, done.stdout + done.stderr
    if not report.with_suffix(".nsys-rep").exists():
        pytest.skip("this nsys has no importer")
    subprocess.run(
        ["nsys", "export", "--type", "sqlite", "--output", database, f"{report}.nsys-rep"], check=True, cwd=tmp_path
    )
    query = """SELECT coalesce(e.text, s.value), e.start, e.end FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId
        WHERE e.end IS NOT NULL AND coalesce(e.text, s.value) IS NOT NULL"""
    with closing(sqlite3.connect(database)) as rows:
        ranges = {text: (start, end) for text, start, end in rows.execute(query)}
        starts = [start for (start,) in rows.execute("SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL")]
    assert [name for name in sorted(ranges) if name.startswith("step ")] == ["step 5", "step 6"]
    begun, ended = ranges["profile"]
    assert starts and all(begun <= start <= ended for start in starts)
    assert {"forward", "backward", "optimizer_step"} <= ranges.keys()
    assert any("aten::" in name and "sizes" in name for name in ranges) == bool(extra)
