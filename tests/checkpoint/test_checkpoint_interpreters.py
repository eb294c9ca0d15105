"""Every other Python 3.10 to 3.13 of this machine that has the packages: it trains, saves, goes on, converts, and reads what others wrote."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import alone, checkpoint, environment, flags, losses, quietly, same
from support.paths import REPO

from megatron_lite.run_folder import TRACKER_FILE

WORDS = "--train-iters 4 --lr-decay-style constant --seed 3"
MAIN = ["-m", "megatron_lite.cli.main"]
ASK = "import platform; print(platform.python_version()); import msgspec, numpy, regex, tensorboard, tiktoken, torch, yaml"


def find_interpreters() -> list[Path]:
    """On PATH, and where pyenv and its like keep several versions: in folders next to this one's; each of them once."""
    neighbors = sorted(Path(sys.base_prefix).parent.glob("*/bin"))
    folders = [Path(sys.executable).parent, *map(Path, os.get_exec_path()), *neighbors]
    found, own = {}, Path(sys.executable)
    for folder in folders:
        for name in ("python3.10", "python3.11", "python3.12", "python3.13", "python3"):
            if os.access(folder / name, os.X_OK):
                found.setdefault((folder.resolve(), (folder / name).resolve()), folder / name)
    found.pop((own.parent.resolve(), own.resolve()), None)  # all other tests are of this one
    return list(found.values())


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """What this interpreter trains, without a break."""
    folder = tmp_path_factory.mktemp("mine")
    with alone():
        quietly(flags(WORDS, "--save-interval 2 --save", folder / "save"), folder / "run")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("python", find_interpreters(), ids=str)
def test_a_run_and_its_checkpoints(python, mine, tmp_path):
    asked = subprocess.run(
        [python, "-c", ASK], check=False, capture_output=True, text=True, timeout=600, env=environment()
    )
    version = asked.stdout.strip() or "a Python that does not start"
    if asked.returncode or not "3.10" <= version[:4] <= "3.13":
        pytest.skip(f"{python} is {version}; {(asked.stderr.splitlines() or ['not 3.10 to 3.13'])[-1]}")

    def run(*words):
        ended = subprocess.run(
            [python, *words], check=False, capture_output=True, text=True, timeout=600, env=environment(), cwd=tmp_path
        )
        assert ended.returncode == 0, (version, words, ended.stdout[-2000:], ended.stderr[-2000:])

    def train(name, *words):
        run(REPO / "pretrain_gpt.py", *flags(WORDS, *words, "--run-dir", tmp_path / name))

    train("first", "--exit-interval 2 --save", tmp_path / "save")
    train("second", "--load", tmp_path / "save", "--save", tmp_path / "save")
    together = losses(tmp_path / "first") + losses(tmp_path / "second")
    assert together == pytest.approx(losses(mine / "run"), rel=1e-4) and len(together) == 4
    (mine / "save" / TRACKER_FILE).write_text("2")
    train("others", "--load", mine / "save")
    assert losses(tmp_path / "others") == pytest.approx(together[2:], rel=1e-4)
    run(*MAIN, "convert", "--load", tmp_path / "save", "--save-hf", tmp_path / "hf")
    run(*MAIN, "convert", "--load-hf", tmp_path / "hf", "--save", tmp_path / "back")
    saved = {name: value for name, value in checkpoint(tmp_path / "save", 4).items() if name.startswith("model.")}
    (tmp_path / "back" / "release").rename(tmp_path / "back" / "iter_0000000")
    assert same(saved, {name: value for name, value in checkpoint(tmp_path / "back", 0).items() if name != "record"})
