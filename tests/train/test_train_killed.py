"""Killed around its saves, a run goes on from the newest complete checkpoint, and ends where it would have ended."""

import subprocess
import sys

import pytest
from support.launch import environment
from support.paths import TESTS
from support.waiting import LIMIT_S


def killed(tmp_path, *words: str):
    script = TESTS / "killed_saves.py"
    command = [sys.executable, script, tmp_path / "runs", *words]
    ended = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save", "--ckpt-format torch"])
def test_at_random_moments(tmp_path, flags):
    """Of two ranks; one alone is killed at every change below."""
    killed(tmp_path, "5", "2", *flags.split())


@pytest.mark.slow
def test_before_every_change_of_the_folder(tmp_path):
    killed(tmp_path, "every", "1", "--save-interval", "2", "--save-retain-interval", "4")
