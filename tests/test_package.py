"""What pip makes of the repository works by itself."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_lite"


def run(*command, cwd: Path, **environment) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_all_that_the_package_needs(tmp_path):
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    run("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    files = {str(path.relative_to(source)) for path in (source / PACKAGE).rglob("*") if path.is_file()}
    assert files == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{PACKAGE}/")}
    installed = tmp_path / "installed"
    run("-m", "pip", "install", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    elsewhere = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
    assert str(installed) in run("-c", f"import {PACKAGE}; print({PACKAGE}.__file__)", **elsewhere)
    words = "--mock-data --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --vocab-size 16"
    words += " --tokenizer-type NullTokenizer --micro-batch-size 1 --lr 1e-3 --train-iters 2 --save saved --run-dir run"
    assert "iteration        2/       2" in run("-m", "megatron_lite.cli.main", "train", *words.split(), **elsewhere)
    prompt = ("--prompt", "1 2 3", "--max-new-tokens", 4)
    assert run("-m", "megatron_lite.cli.main", "generate", "--load", "saved", *prompt, **elsewhere).startswith("1 2 3")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nlayer = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(layer.parameters())\n"
        "for _ in range(8):\n    layer(torch.ones(2)).sum().backward()\n    optimizer.step()\n"
    )
    options = ("--steps", "3:5", "--run-dir", "watched", "--no-report")
    run("-m", "megatron_lite.cli.main", "watch", *options, "--", sys.executable, script, **elsewhere)
    assert len((tmp_path / "watched" / "steps.jsonl").read_text().splitlines()) == 8
