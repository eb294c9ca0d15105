"""Bundles of real runs: one of this trainer, one of a watched script with secrets, one of a script that fails."""

import os
import subprocess
import sys

import pytest
from support.bundle_check import find_secrets, make_bundle
from support.paths import REPO

SECRETS = ["zaphod", "moonshot", "sk-a1b2c3d4e5f6", "whispered", "magrathea"]
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def whispered_loss(model, x, y):
    with torch.profiler.record_function("magrathea batch of zaphod"):
        return torch.nn.functional.cross_entropy(model(x), y)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(480, 64), torch.randint(0, 8, (480,))), batch_size=16)
for step, (x, y) in enumerate(data):
    loss = whispered_loss(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 25 and "--fail" in sys.argv:
        raise ValueError("he whispered of magrathea")
"""


def watch(folder, *words):
    script = folder / "zaphod_train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(REPO), "WANDB_API_KEY": "sk-a1b2c3d4e5f6"}
    options = ["--run-dir", str(folder / "watched"), "--no-report", "--memory"]
    command = [sys.executable, "-m", "megatron_lite", "watch", *options, "--", sys.executable, str(script), *words]
    subprocess.run(command, env=environment, cwd=folder, check=False, capture_output=True, timeout=300)
    return folder / "watched"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--key", "sk-a1b2c3d4e5f6"), ("--fail",)], ids=["sound", "failed"])
def test_a_watched_script_tells_the_same_and_no_secret(words, tmp_path):
    place = tmp_path / "moonshot"
    place.mkdir()
    made, _ = make_bundle([watch(place, *words)], tmp_path / "made")
    assert find_secrets(made, SECRETS) == []
    assert list(made.glob("rank-0*.json.gz"))
