"""A run that predicts further tokens tells their losses."""

import math

import pytest
from support.launch import alone, flags, steps, train

from megatron_lite.formats.file_names import STEPS_FILE


def test_losses_of_further_tokens_stand_on_the_console_and_in_the_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with alone():
        train(flags("--train-iters 3 --log-interval 3 --mtp-num-layers 2 --lr 0 --min-lr 0"), tmp_path / "run")
    recorded = [step["prediction_losses"] for step in steps(tmp_path / "run")]
    assert (tmp_path / "run" / STEPS_FILE).exists() and [len(losses) for losses in recorded] == [2, 2, 2]
    # random weights know nothing of any token
    uniform = math.log(128)
    assert all(loss == pytest.approx(uniform, abs=0.5) for losses in recorded for loss in losses)
    lines = [line for line in capfd.readouterr().out.splitlines() if "mtp_1 loss" in line]
    # the first step has a line of its own, and counts among those of the interval, too
    line = lines[-1]
    means = [sum(losses[depth] for losses in recorded) / 3 for depth in (0, 1)]
    assert f"mtp_1 loss: {means[0]:.6E} | mtp_2 loss: {means[1]:.6E}" in line
