"""Scripts that know nothing of being watched: they do what they did, and their steps are seen."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from msgspec import UNSET
from support.traces import steps_of
from support.watched_runs import PHASES, read_steps
from support.wording import wording
from torch import nn

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.run.read import read_run
from megatron_lite.cli.main import main
from megatron_lite.watch.profiler import Profiler
from megatron_lite.watch.step_losses import StepLosses

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for number in range(int(sys.argv[1])):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{loss.item():.9f}")
if len(sys.argv) > 2:
    raise RuntimeError(sys.argv[2])
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_does_what_it_did_and_is_explained(tmp_path, script, capfd, monkeypatch):
    """Also where its environment has a sitecustomize of its own."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own sitecustomize')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setattr(sys, "argv", [str(script), "2"])
    runpy.run_path(str(script))
    alone = capfd.readouterr().out
    command, run = [sys.executable, str(script), "2"], tmp_path / "run"
    assert main(["watch", "--steps", "5:7", "--memory", "--run-dir", str(run), "--", *command]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"own sitecustomize\n{alone}")
    steps = read_steps(run)
    assert [one["step"] for one in steps] == [*range(1, 17)]
    assert [one["step"] for one in steps if one.get("profiled")] == [5, 6] == steps_of(run)
    assert all(set(one["phases_ms"]) == PHASES for one in steps[1:])
    assert [f"{one['loss']:.9f}" for one in steps[7::8]] == alone.splitlines()[-2:]
    assert all(sum(one["phases_ms"].values()) <= one["ms"] for one in steps)
    assert "memory snapshot" in err and (run / "memory.pickle").exists()
    assert "16 steps, finished" in out and wording("cli/where-step-goes") in out and str(run / "report.html") in out
    assert "--" not in out.split("Findings")[1].split("Phases")[0], "it has no flags of this trainer"
    assert "train.py:" in (run / "report.json").read_text() and "profiler.py:" not in (run / "report.json").read_text()


PROFILED_BY_ITSELF = """
import torch
from torch.profiler import profile, schedule
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(torch.ones(8)).sum().backward()
    optimizer.step()
for _ in range(BEGINS):
    train()
with profile(schedule=schedule(wait=2, warmup=1, active=2, repeat=1), on_trace_ready=lambda one: print(len(one.events()) > 0)) as own:
    for _ in range(10):
        train()
        own.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("begins", [0, 5])
def test_a_script_that_profiles_itself_keeps_its_profile(tmp_path, capfd, begins):
    """Two profilers of torch at a time crash the process, whichever begins first."""
    path = tmp_path / "train.py"
    path.write_text(PROFILED_BY_ITSELF.replace("BEGINS", str(begins)))
    options = ("--steps", "5:8", "--no-report", "--run-dir", str(tmp_path / "run"))
    assert main(["watch", *options, "--", sys.executable, str(path)]) == 0
    out, err = capfd.readouterr()
    assert out == "True\n" and err.count(wording("watch/script-uses-torch-profiler")) == 1
    assert len(read_steps(tmp_path / "run")) == 10 + begins
    assert len(list((tmp_path / "run").glob("*.pt.trace.json"))) == (begins == 5), "of what was recorded until then"


@pytest.mark.slow
def test_a_failing_script_fails_as_before(tmp_path, script, capfd):
    command, run = [sys.executable, str(script), "1", "no more data"], tmp_path / "run"
    assert main(["watch", "--run-dir", str(run), "--steps", "30:31", "--", *command]) == 1
    out, err = capfd.readouterr()
    assert "RuntimeError: no more data" in err and "RuntimeError: no more data" in out
    assert out.splitlines()[-1].startswith(f"megatron-lite report {run} ")
    assert wording("watch/run-ended-before-step", 30, 8) in err
    assert json.loads((run / "run.json").read_text())["status"] == "failed: RuntimeError: no more data"
    assert main(["watch", "--run-dir", str(run), "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert wording("watch/no-training-was-seen") in capfd.readouterr().err


def test_mistakes_are_one_line(tmp_path, capsys):
    for words, said in {
        "": "no command",
        "--steps 5:5 -- true": "--steps 5:5: give two numbers",
        "--steps 1:3 -- true": "the first is at least 2",
        "-- no-such-program": "no-such-program cannot be run",
        "train.py": "train.py cannot be run (No such file or directory)",
    }.items():
        assert main(["watch", *words.split()]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error


def train(steps: int, optimizers: list, model: nn.Module, closure: bool = False, accumulated: int = 1):
    """Without a loader."""

    def compute():
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(accumulated):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
        return loss

    for _ in range(steps):
        if not closure:
            compute()
        for optimizer in optimizers:
            optimizer.step(*([compute] if closure else []))


@pytest.mark.parametrize("kind", ["plain", "closure", "accumulated", "two optimizers", "made before"])
def test_steps_are_those_of_the_first_optimizer(tmp_path, kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    before = (torch.autograd.backward, torch.optim.Optimizer.profile_hook_step)

    def make():
        second = [torch.optim.Adagrad(model[1].parameters())] if kind == "two optimizers" else []
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), *second]

    made = make() if kind == "made before" else []
    with Profiler(tmp_path, steps=range(3, 5)):
        optimizers = made or make()
        train(6, optimizers, model, closure=kind == "closure", accumulated=3 if kind == "accumulated" else 1)
    assert before == (torch.autograd.backward, torch.optim.Optimizer.profile_hook_step)
    train(2, optimizers, model)
    steps = read_steps(tmp_path)
    assert [one["step"] for one in steps] == [*range(1, 7)] and steps_of(tmp_path) == [3, 4]
    assert all(set(one["phases_ms"]) == PHASES - {"data"} for one in steps[1:])
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished" and record["command"] == sys.argv and record["plan"] is None


@pytest.mark.parametrize("kind", ["an optimizer's", "several updates", "of no optimizer"])
def test_a_loop_may_say_itself_where_steps_end(tmp_path, kind):
    model = nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] * {"an optimizer's": 1, "several updates": 3}.get(
        kind, 0
    )
    with Profiler(tmp_path, steps=range(3, 5)) as profiler:
        for _ in range(6):
            with profiler.phase("encode"):
                inputs = torch.randn(4, 8)
                loss = model(inputs).sum()
            for optimizer in optimizers:
                loss.backward(retain_graph=True)
                optimizer.step()
            profiler.step()
            with profiler.phase("eval"):
                model(inputs).sum().backward()
    steps = read_steps(tmp_path)
    more = 2 if kind == "several updates" else 0  # of the first step, which the optimizer ended three times
    assert [one["step"] for one in steps] == [*range(1, 7 + more)] and steps_of(tmp_path) == [3, 4]
    for one in steps[1 + more :]:
        found = {"backward", "forward", "optimizer_step"} if optimizers else set()
        assert set(one["phases_ms"]) == {"encode", "eval"} | found


def test_the_loss_of_a_step_is_what_backward_is_called_on(tmp_path):
    """Of several micro-batches their sum, before a GradScaler; none where that is no one loss."""
    torch.manual_seed(1)
    model, other = nn.Linear(8, 1), nn.Linear(8, 1)
    optimizer, second = (torch.optim.SGD(one.parameters(), lr=1e-4) for one in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def compute(one: nn.Module = model) -> torch.Tensor:
        return one(torch.randn(4, 8)).square().mean()

    def train(*losses: torch.Tensor, by=optimizer, **settings) -> float:
        for loss in losses:
            loss.backward(**settings)
        by.step()
        return sum(float(loss.detach().sum()) for loss in losses)

    def train_scaled(scaler=scaler) -> float:
        loss = compute()
        train(scaler.scale(loss))
        return loss.item()

    def train_scaled_by_another() -> float:
        class ShardedGradScaler(torch.amp.GradScaler):
            """As FSDP's, which is imported later and scales by itself."""

            def scale(self, outputs):
                return outputs * 4

        return train_scaled(ShardedGradScaler("cpu"))

    def train_both():
        train(compute(other), by=second)
        train(compute())

    def call_twice():
        optimizer.step(lambda: [compute().backward() for _ in range(2)])

    kinds = {
        "accumulated": lambda: train(compute(), compute()),
        "negative": lambda: train(-compute()),
        "scaled": train_scaled,
        "scaled by another": train_scaled_by_another,
        "scaled otherwise": lambda: (train(scaler.scale(compute()) / 2), "unknown")[1],
        "given gradients": lambda: (train(model(torch.randn(4, 8)), gradient=torch.ones(4, 1)), "unknown")[1],
        "of some weights": lambda: (train(compute(), inputs=[model.weight]), "unknown")[1],
        "closure called twice": lambda: (call_twice(), "unknown")[1],
        "two models": lambda: (train_both(), "unknown")[1],
        "not finite": lambda: (train(compute() * math.nan), None)[1],
    }
    for name, kind in kinds.items():
        with Profiler(tmp_path / name, steps=range(50, 51)):
            train(torch.zeros((), requires_grad=True))  # so that its optimizer is the one that counts
            expected = [0.0, *(kind() for _ in range(3))]
        found = [one.get("loss", "unknown") for one in read_steps(tmp_path / name)]
        assert found == [one if one in (None, "unknown") else pytest.approx(one, rel=1e-6) for one in expected], name
    assert read_run(tmp_path / "negative").losses.min() < 0 == len(read_run(tmp_path / "negative").notes) - 1


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    model = nn.Linear(8, 1)
    with Profiler(tmp_path / "file" / "run"):
        train(2, [torch.optim.SGD(model.parameters(), lr=0.1)], model)
    assert wording("watch/megatron-lite-this-process") in capsys.readouterr().err


def test_another_rank_writes_no_steps_and_keeps_none(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("megatron_lite.watch.profiler.MAX_SILENCE_S", -1)
    model = nn.Linear(8, 1)
    with Profiler(tmp_path, steps=range(3, 4)) as profiler:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(1, [optimizer], model)
        # not its thread's turn, which the machine chooses
        profiler._hardware.sample()
        train(5, [optimizer], model)
        assert profiler._timeline.so_far() == []
    assert steps_of(tmp_path, rank=1) == [3] and not (tmp_path / "steps.jsonl").exists()
    [one] = analyze([tmp_path]).facts.ranks_seen
    assert one.trace.hardware.samples >= 1


def test_another_thread_is_left_alone(tmp_path):
    model = nn.Linear(8, 1)
    with Profiler(tmp_path) as profiler:
        profiler._thread += 1
        train(3, [torch.optim.SGD(model.parameters(), lr=0.1)], model)
    assert not (tmp_path / "run.json").exists()


def test_a_loss_that_arrives_after_its_step_was_written_is_dropped():
    losses = StepLosses()
    losses.add(1, torch.tensor(2.0), in_optimizer=False)
    losses._steps[1].underway = 1  # as on a GPU that has not told it yet
    assert losses.take(1, wait=False) is UNSET
    losses._readback.push(1, [torch.tensor(2.0)])
    losses.add(2, torch.tensor(3.0), in_optimizer=False)
    assert losses.take(2, wait=False) == 3.0
