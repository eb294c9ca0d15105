"""Checkpoints that must not be loaded, and saves that fail: one line, and no earlier checkpoint is lost."""

import io
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import DROPOUT, alone, checkpoint, environment, flags, losses, on_ranks, plan_of, quietly, steps, train

from megatron_lite.errors import CheckpointError
from megatron_lite.optim.optimizer import Optimizer

WHOLE = "--train-iters 8 --lr-decay-style constant --lr-warmup-iters 3 --lr-decay-iters 8 --eval-interval 3 --eval-iters 1"

CPU = torch.device("cpu")


def file_of(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoint of iteration 4 of an fp32 run of 8 iterations; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    quietly(flags(WHOLE, *DROPOUT, "--exit-interval 4 --save", folder / "save"), folder / "run")
    return folder / "save"


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def resumed(saved, tmp_path, *words) -> list[float]:
    quietly(flags(WHOLE, *DROPOUT, *words, "--load", saved), tmp_path / "resumed")
    return losses(tmp_path / "resumed")


# --- what is refused


def refusal(load, tmp_path, *words) -> str:
    with pytest.raises(CheckpointError) as caught:
        quietly(flags(WHOLE, *DROPOUT, *words, "--load", load), tmp_path / "refused")
    assert len(caught.value.lines) == 1 and "\n" not in caught.value.lines[0]
    assert str(load) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("words, fragments", [
    ("--hidden-size 64", ["--hidden-size is 64, the checkpoint's 32"]),
    ("--num-layers 3", ["--num-layers is 3, the checkpoint's 2"]),
    ("--untie-embeddings-and-output-weights", ["--untie-embeddings-and-output-weights", "False", "True"]),
    ("--swiglu", ["--swiglu", "gelu_tanh"]),
    ("--vocab-size 200", ["--vocab-size", "256", "128"]),
])
def test_another_shape(saved, tmp_path, words, fragments):
    message = refusal(saved, tmp_path, words)
    assert all(fragment in message for fragment in fragments), message


def test_another_optimizer(saved, tmp_path):
    message = refusal(saved, tmp_path, "--optimizer sgd")
    assert "--optimizer is sgd, the checkpoint's adam" in message and "--no-load-optim" in message
    resumed(saved, tmp_path, "--optimizer sgd --no-load-optim")


def test_another_schedule_needs_a_word(saved, tmp_path):
    other = "--lr 5e-3 --lr-decay-style cosine"
    message = refusal(saved, tmp_path, other)
    for fragment in ("--lr is 0.005, the checkpoint's 0.01", "--lr-decay-style is cosine, the checkpoint's constant",
                     "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert fragment in message
    rates = {}
    for word in ("", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        resumed(saved, tmp_path / (word or "same"), *([other, word] if word else []))
        rates[word] = [record["next_lr"] for record in steps(tmp_path / (word or "same") / "resumed")]
    assert rates["--use-checkpoint-opt-param-scheduler"] == rates[""] == [1e-2] * 4
    assert rates["--override-opt-param-scheduler"][0] == pytest.approx(5e-3 * 0.5 * 1.3090169943749475)
    resumed(saved, tmp_path / "no optimizer", other, "--no-load-optim")


def test_the_checkpoints_schedule_brings_its_weight_decay(saved):
    """Constant or growing: what the matrices lose in a step is what the followed schedule says."""
    plan = plan_of(flags(WHOLE, "--weight-decay 0"))
    growing = plan_of(flags(WHOLE, "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5"))
    constant = plan_of(flags(WHOLE, "--weight-decay 0.5"))
    for followed, in_engine, has_table in ((constant, 0.5, False), (growing, 0.0, True), (plan, 0.0, False)):
        for start in (plan, growing, constant):
            optimizer = Optimizer(start, [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))], CPU)
            optimizer.follow(followed.learning_rate)
            assert [group["weight_decay"] for group in optimizer.engine.param_groups] == [in_engine, 0.0]
            assert (optimizer._decay_table is not None) == has_table


def test_no_checkpoint_yet(tmp_path):
    _, out = quietly(flags(WHOLE, "--load", tmp_path / "nothing"), tmp_path / "run")
    assert "no checkpoint yet" in out and len(steps(tmp_path / "run")) == 8
    (tmp_path / "nothing").mkdir(exist_ok=True)
    message = refusal(tmp_path / "nothing", tmp_path, "--exit-on-missing-checkpoint")
    assert "--exit-on-missing-checkpoint" in message


def test_a_tracker_without_a_number(copy, tmp_path):
    (copy / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "latest_checkpointed_iteration.txt" in refusal(copy, tmp_path)


def test_a_tracker_that_names_nothing(copy, tmp_path):
    (copy / "latest_checkpointed_iteration.txt").write_text("6")
    assert "iteration 6" in refusal(copy, tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_truncated_file(copy, tmp_path, keep):
    path = file_of(copy, 4)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert "damaged" in refusal(copy, tmp_path)


def test_another_trainers_file(copy, tmp_path):
    torch.save({"args": "something", "model": {}}, file_of(copy, 4))
    assert "not a checkpoint of this trainer" in refusal(copy, tmp_path)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_file_that_would_run_code(copy, tmp_path, form):
    trap = tmp_path / "ran"
    path = file_of(copy, 4)
    if form == "torch":
        torch.save({"format": 1, "evil": Evil(trap)}, path)
    else:
        path.write_bytes(pickle.dumps({"format": 1, "evil": Evil(trap)}))
    assert "cannot be read" in refusal(copy, tmp_path)
    assert not trap.exists()
    torch.load(path, weights_only=False) if form == "torch" else pickle.loads(path.read_bytes())
    assert trap.exists(), "the trap works where code is run"


# --- saving that fails


def save_by(act):
    """torch.save for the checkpoint's own file replaced by `act`; torch pickles messages between ranks with it too."""
    inner = torch.save

    def save(state, file, **named):
        return inner(state, file, **named) if named or isinstance(file, io.BytesIO) else act(state, file)

    return save


def contents(folder: Path) -> dict:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_full_disk(copy, tmp_path):
    before = contents(copy)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            quietly(flags(WHOLE, *DROPOUT, "--save", copy, "--load", copy), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [line] = caught.value.lines
    assert "\n" not in line and f"--save {copy}" in line and "iteration 8" in line and "untouched" in line
    assert contents(copy) == before, "nothing half-written stays"
    resumed(copy, tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail] unexpected pos\nmore")])
def test_a_save_that_fails_in_torch(copy, tmp_path, monkeypatch, error):
    before = contents(copy)

    def fail(state, file):
        file.write(b"some of it")
        raise error

    monkeypatch.setattr(torch, "save", save_by(fail))
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        quietly(flags(WHOLE, *DROPOUT, "--save", copy, "--load", copy), tmp_path / "run")
    assert "\n" not in str(caught.value) and contents(copy) == before


def fail_to_save(world, save):
    """For on_ranks: the first rank cannot write; every rank must hear of it."""
    def fail(state, file):
        raise OSError(28, "No space left on device")

    torch.save = save_by(fail)
    try:
        train(flags(WHOLE, "--save", Path(save)), Path(f"rank {world.rank}"), world)
    except CheckpointError as error:
        print(f"refused: {error}")


def test_all_ranks_hear_of_a_failed_save(tmp_path):
    for output in on_ranks("test_train_checkpoint_safety:fail_to_save", tmp_path, str(tmp_path / "save")):
        assert output.count("refused: --save") == 1 and "No space left on device" in output
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("moment", ["torch.save", "os.replace", pytest.param("os.fsync", marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_saving(copy, tmp_path, moment):
    """kill -9 at the worst moments: the earlier checkpoint still loads, and the next save succeeds."""
    module, name = moment.split(".")
    script = tmp_path / "killed.py"
    script.write_text(f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from launch import alone, train
from test_train_checkpoint_safety import save_by
def dies(*arguments):
    if {moment!r} == "torch.save":
        arguments[1].write(b"half of it")
        arguments[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)
{module}.{name} = save_by(dies) if {moment!r} == "torch.save" else dies
with alone():
    train(sys.argv[2:], pathlib.Path(sys.argv[1]))
""")
    argv = flags(WHOLE, *DROPOUT, "--save", copy, "--load", copy)
    ended = subprocess.run([sys.executable, script, tmp_path / "run", *argv], env=environment(), capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr.decode()
    assert (copy / "latest_checkpointed_iteration.txt").read_text() == "4"
    quietly(argv, tmp_path / "again")
    assert (copy / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert not [name for name in contents(copy) if "unfinished" in name and "0000008" in name]
    assert checkpoint(copy, 8)["iteration"] == 8


def test_saving_the_same_iteration_again_never_leaves_a_gap(copy, tmp_path, monkeypatch):
    """The tracker names iteration 4 all the while; at every rename its file must be there, complete."""
    inner, seen = os.replace, []

    def watch(source, target):
        inner(source, target)
        seen.append(checkpoint(copy, 4)["iteration"])

    monkeypatch.setattr(os, "replace", watch)
    quietly(flags(WHOLE, *DROPOUT, "--train-iters 4 --lr-decay-iters 8", "--save", copy), tmp_path / "run")
    assert seen and set(seen) == {4}


def test_a_finished_run_that_is_started_again_keeps_its_checkpoint(copy, tmp_path):
    """With --no-load-optim it would else replace the moments by fresh ones."""
    before = (copy / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt").stat()
    quietly(flags(WHOLE, *DROPOUT, "--train-iters 4 --no-load-optim", "--save", copy, "--load", copy), tmp_path / "run")
    after = (copy / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
