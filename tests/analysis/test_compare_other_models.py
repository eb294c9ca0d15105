"""Jobs of different models are not compared as if they did the same work; a changed run of one model is."""

import json
from pathlib import Path

import pytest
import torch
from support.training_maker import gpu, ordinary_steps
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.compare.models import object_to_models
from megatron_lite.cli.main import main
from megatron_lite.errors import ConfigError
from megatron_lite.watch.profiler import Profiler


def train_watched(folder: str, width: int, rate: float):
    """Steps of a loop that is not this trainer's."""
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with Profiler(folder, steps=range(3, 6)):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()


def write_run(folder: Path, parameters: int, ranks: int = 1) -> Path:
    """Of a watched script with steady steps of 10 ms."""
    folder.mkdir()
    record = {"schema": 1, "status": "finished", "command": ["x.py"]}
    record["updated"] = {"parameters": parameters, "ranks": ranks}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ordinary_steps(30)))
    return folder


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        ((1000, 1), (1000, 1), False),
        ((1000, 1), (1000, 8), False),
        ((1000, 1), (25_000, 1), True),
        ((1000, 1), (1500, 1), True),
        # shards of one model
        ((8000, 8), (1001, 8), False),
        ((4000, 2), (1000, 8), False),
        ((8000, 1), (1000, 1), True),
    ],
)
def test_numbers_of_parameters_tell_models_apart(tmp_path, a, b, differ):
    facts = [analyze([write_run(tmp_path / name, *given)]).facts for name, given in (("a", a), ("b", b))]
    assert bool(object_to_models(*facts)) is differ
    if differ:
        with pytest.raises(ConfigError, match="another model; --force"):
            compare(*facts)
        assert compare(*facts, force=True).forced
    else:
        assert not compare(*facts).forced


def write_trace(folder: Path, widths: list[int]) -> Path:
    """Of a model of linear layers of these widths."""
    forward = [("gemm", 50, "aten::linear", [[16, 64], [width, 64], [width]], ["float"] * 3) for width in widths]
    folder.mkdir()
    gpu(folder, 0, 1, forward=forward)
    return folder


@pytest.mark.parametrize(
    ("widths", "differ"),
    [
        ([64, 128, 256, 512], False),
        # another head
        ([64, 128, 256, 10], False),
        ([65, 129, 257, 513], True),
        # too few to say
        ([65], False),
    ],
)
def test_shapes_of_weights_tell_models_of_traces_apart(tmp_path, widths, differ):
    mine = analyze([write_trace(tmp_path / "a", [64, 128, 256, 512])]).facts
    theirs = analyze([write_trace(tmp_path / "b", widths)]).facts
    assert bool(object_to_models(mine, theirs)) is differ


def test_watched_loops_are_compared_if_they_train_the_same_model(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, width, rate in (("a", 16, 0.1), ("b", 16, 0.2), ("c", 32, 0.1)):
        train_watched(name, width, rate)
    capfd.readouterr()
    assert json.loads(Path("a/run.json").read_text())["updated"] == {"parameters": 8 * 16 + 16 + 16 * 8 + 8, "ranks": 1}
    assert main(["compare", "a", "b"]) == 0
    capfd.readouterr()
    assert main(["compare", "a", "c"]) == 2
    assert wording("analysis/another-model-compares-all", "--force") in capfd.readouterr().err
    assert main(["compare", "a", "c", "--force"]) == 0
