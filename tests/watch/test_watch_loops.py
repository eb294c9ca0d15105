"""Loops that step no optimizer of torch, and processes that train without ranks."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from support.launch import run_script
from support.wording import wording
from torch import nn
from torch.utils.data import DataLoader

from megatron_lite.analysis.discover import discover_sources
from megatron_lite.analysis.run.read import read_run
from megatron_lite.process_folder import choose_process_folder, release_process_folder
from megatron_lite.process_state import identity
from megatron_lite.watch.profiler import Profiler

STEPS = 12


def read_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def backward(model, batches=1):
    for _ in range(batches):
        model(torch.randn(4, 8)).square().mean().backward()


def update(model, zero: bool):
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad
            weight.grad = None if not zero else weight.grad.zero_()


def drop_gradients(model):
    backward(model, 3)
    update(model, zero=False)


def zero_gradients(model):
    backward(model)
    update(model, zero=True)


def zero_before(model):
    model.zero_grad(set_to_none=False)
    backward(model, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad


def write_data(model):
    backward(model)
    for weight in model.parameters():
        weight.data.sub_(0.01 * weight.grad.data)
        weight.grad.data.zero_()


def ask_for_gradients(model):
    loss = model(torch.randn(4, 8)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients):
            weight -= 0.01 * gradient


def replace_weights(weights, keep: bool):
    def step(_):
        (torch.randn(4, 8) @ weights[-1]).square().mean().backward()
        new = (weights[-1] - 0.01 * weights[-1].grad).detach().requires_grad_()
        weights[:] = [*weights, new] if keep else [new]

    return step


WAYS = {
    "gradients are dropped": drop_gradients,
    "gradients are zeroed": zero_gradients,
    "gradients are zeroed before backward": zero_before,
    "weights are written through .data": write_data,
    "gradients are asked for": ask_for_gradients,
    "weights are new ones": replace_weights([torch.randn(8, 1, requires_grad=True)], keep=False),
    "weights are new ones, the old are kept": replace_weights([torch.randn(8, 1, requires_grad=True)], keep=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_updates_by_hand_end_steps(tmp_path, way, capfd):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with Profiler(tmp_path, steps=range(20, 21)):
        for _ in range(STEPS):
            WAYS[way](model)
    # the last step would end with the next pass
    assert STEPS - 2 <= len(read_steps(tmp_path)) <= STEPS - 1
    assert all({"forward", "backward"} >= set(one["phases_ms"]) for one in read_steps(tmp_path)[1:])
    assert "no torch.optim optimizer stepped" in capfd.readouterr().err
    assert any("No torch.optim optimizer stepped" in note for note in read_run(tmp_path).notes)


def test_updates_by_hand_beside_a_loader(tmp_path):
    """A step begins where its data are waited for."""
    model = nn.Linear(8, 1)
    with Profiler(tmp_path, steps=range(20, 21)):
        for batch in DataLoader(torch.randn(4 * STEPS, 8), batch_size=4):
            model(batch).square().mean().backward()
            update(model, zero=False)
    steps = read_steps(tmp_path)
    assert len(steps) == STEPS and all(next(iter(one["phases_ms"])) == "data" for one in steps[1:])


def test_weights_whose_memory_is_released_stop_no_loop(tmp_path):
    """As fully_shard releases gathered weights between forward and backward."""
    bias = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([bias], lr=0.1)
    with Profiler(tmp_path, steps=range(20, 21)):
        for _ in range(4):
            loss = (torch.randn(4, 8) + bias).sum()
            held = bias.untyped_storage().nbytes()
            bias.untyped_storage().resize_(0)
            loss.backward()
            bias.untyped_storage().resize_(held)
            optimizer.step()
    assert len(read_steps(tmp_path)) == 4


PLACES = {
    "backward": ("_begin_backward", 0),
    "the optimizer's step": ("_end_optimizer", 0),
    "the loader": ("_end_data", 0),
    "a later step": ("_end_optimizer", 5),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_of_watching_ends_no_script(tmp_path, place, monkeypatch, capfd):
    name, after = PLACES[place]
    method, calls = getattr(Profiler, name), []

    def fail(self, *arguments, **named):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("nobody foresaw it")
        return method(self, *arguments, **named)

    monkeypatch.setattr(Profiler, name, fail)
    original = torch.autograd.backward
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights, seen = model.weight.detach().clone(), 0
    with Profiler(tmp_path, steps=range(20, 21)):
        for batch in DataLoader(torch.randn(4 * STEPS, 8), batch_size=4):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    assert seen == STEPS and not torch.equal(weights, model.weight)
    assert torch.autograd.backward is original
    told = capfd.readouterr().err
    assert told.count("no longer watched: RuntimeError: nobody foresaw it") == 1
    if (tmp_path / "run.json").exists():
        assert json.loads((tmp_path / "run.json").read_text())["status"].startswith(wording("watch/no-longer-watched"))
    assert len(calls) <= after + 2


def test_gradients_that_are_added_up_are_no_steps(tmp_path, capfd):
    """Without an update no step ends, and that is said."""
    model = nn.Linear(8, 1)
    with Profiler(tmp_path, steps=range(20, 21)):
        backward(model, STEPS)
    assert read_steps(tmp_path) == []
    assert wording("watch/no-weight-update-was", STEPS) in capfd.readouterr().err


@pytest.mark.parametrize("skips", [0, 3])
def test_an_optimizer_of_torch_ends_steps_from_its_first_one_on(tmp_path, skips):
    """Also where the first updates are skipped, as a GradScaler skips them."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Profiler(tmp_path, steps=range(20, 21)):
        for number in range(STEPS):
            optimizer.zero_grad()
            backward(model, 2)
            if number >= skips:
                optimizer.step()
    assert len(read_steps(tmp_path)) == STEPS


def test_a_folder_is_of_one_process_at_a_time(tmp_path):
    assert choose_process_folder(tmp_path) == tmp_path == choose_process_folder(tmp_path)
    (tmp_path / ".process").write_text(json.dumps(identity(os.getppid())))
    assert choose_process_folder(tmp_path) == tmp_path / f"process-{os.getpid()}"
    gone = identity(os.getppid()) | {"started_ticks": 1}
    for text in (json.dumps(gone), "damaged", "[]", ""):
        (tmp_path / ".process").write_text(text)
        assert choose_process_folder(tmp_path) == tmp_path
    release_process_folder(tmp_path)
    assert not (tmp_path / ".process").exists()


HOGWILD = """
import multiprocessing, sys, torch
from megatron_lite.watch.profiler import Profiler
model = torch.nn.Linear(8, 1)
meet = multiprocessing.Barrier(2)
def train(number):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 0:
            meet.wait()
    meet.wait()
    if number:
        raise ValueError("planted")
with Profiler(sys.argv[1], steps=range(3, 5)):
    processes = [multiprocessing.get_context("fork").Process(target=train, args=(number,)) for number in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
"""


SCALED_IN_A_FORK = """
import multiprocessing, sys, torch
from megatron_lite.watch.profiler import Profiler
model = torch.nn.Linear(8, 1)
def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        loss = (0 * model(torch.ones(4, 8)) + 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
with Profiler(sys.argv[1], steps=range(30, 31)):
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_process_tells_its_losses_before_they_are_scaled(tmp_path):
    run_script(SCALED_IN_A_FORK, tmp_path)
    assert [one["loss"] for one in read_steps(tmp_path)] == [2.0] * 6


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_processes_without_ranks_do_not_write_over_each_other(tmp_path):
    run_script(HOGWILD, tmp_path)
    beside = [one for one in tmp_path.iterdir() if one.name.startswith("process-")]
    folders = [tmp_path, *beside]
    assert len(beside) == 1
    assert [[one["step"] for one in read_steps(folder)] for folder in folders] == [[*range(1, 7)]] * 2
    statuses = sorted(json.loads((folder / "run.json").read_text())["status"] for folder in folders)
    assert statuses == ["failed: ValueError: planted", "finished"]
    sources = discover_sources([tmp_path])
    assert sources.run_folders == (tmp_path,) and [one.parent for one in sources.traces] == [tmp_path]
    assert any(wording("watch/processes-without-ranks-trained", 2) in why for _, why in sources.ignored)
    assert discover_sources(beside).run_folders == (beside[0],)
