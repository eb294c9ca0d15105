"""Reports know the trainer by its marks and span names: a trainer whose files are all called something else gets the same report."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import DROPOUT, flags, pretrain
from support.paths import REPO
from support.waiting import LIMIT_S

from megatron_lite.cli.main import main

TRAINER = ("model", "optim", "parallel", "train", "instruments", "data", "checkpoint")
WATCHED = "--micro-batch-size 2 --bf16 --record-memory-history --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 6"


@pytest.fixture(scope="module")
def renamed(tmp_path_factory) -> Path:
    """A copy of the project in which every file of the trainer's folders has another name."""
    root = tmp_path_factory.mktemp("renamed")
    shutil.copytree(REPO / "megatron_lite", root / "megatron_lite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pretrain_gpt.py", root)
    moved = [
        path for folder in TRAINER for path in (root / "megatron_lite" / folder).glob("*.py") if path.stem != "__init__"
    ]
    for path in moved:
        path.rename(path.with_name(f"renamed_{path.name}"))
    names = {f"megatron_lite.{path.parent.name}.{path.stem}" for path in moved}
    folders = "|".join(TRAINER)
    dotted = re.compile(rf"\b(megatron_lite\.(?:{folders}))\.(\w+)")
    together = re.compile(rf"^from (megatron_lite\.(?:{folders})) import (.+)$", re.MULTILINE)
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        text = dotted.sub(lambda m: f"{m[1]}.renamed_{m[2]}" if m[0] in names else m[0], text)
        text = together.sub(
            lambda m: f"from {m[1]} import " + ", ".join(f"renamed_{n} as {n}" for n in m[2].split(", ")), text
        )
        path.write_text(text, encoding="utf-8")
    return root


def train(root: Path, run: Path):
    folders = ("--run-dir", run, "--tensorboard-dir", run, "--memory-snapshot-path", run / "s.pickle")
    argv = flags(WATCHED, *DROPOUT, *folders)
    if root == REPO:
        assert pretrain(argv).code == 0
        return
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, str(root / "pretrain_gpt.py"), *argv],
        cwd=root, check=True, timeout=LIMIT_S, capture_output=True,
        env=environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )  # fmt: skip


def read_report(run: Path) -> dict:
    """What a report says that does not hang on the clock: memory, its phases and categories; the parts of a step."""
    assert main(["report", str(run), "--json", str(run / "report.json"), "--no-html"]) == 0
    report = json.loads((run / "report.json").read_text())
    [snapshot] = report["snapshots"]
    [rank] = report["ranks_seen"]
    return {
        "held": snapshot["held"],
        "phase": snapshot["peak_phase"],
        "peak": snapshot["peak_bytes"],
        "ledger": report["ledger"],
        "rows": sorted(rank["time"]["rows"]),
        "phases": sorted(phase["name"] for phase in rank["time"]["phases"]),
    }


@pytest.mark.slow
def test_a_trainer_with_other_names_gets_the_same_report(renamed, tmp_path):
    for root, run in ((REPO, tmp_path / "run"), (renamed, tmp_path / "renamed")):
        train(root, run)
    assert read_report(tmp_path / "renamed") == read_report(tmp_path / "run")
