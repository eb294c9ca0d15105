"""Ends before the last iteration: divergence, intervals, the clock, signals."""

import contextlib
import json
import math
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launch import (
    DROPOUT,
    alone,
    checkpoint,
    flags,
    losses,
    on_ranks,
    part,
    plan_of,
    pretrain,
    quietly,
    ranks_of,
    send,
    start,
    steps,
    train,
)
from support.waiting import LIMIT_S, wait_for
from support.wording import wording

from megatron_lite import app
from megatron_lite.config.world import World
from megatron_lite.errors import DivergedError, InjectedError, UserError
from megatron_lite.instruments.base import Instrument
from megatron_lite.model.gpt import list_parameters
from megatron_lite.model.mlp import MLP
from megatron_lite.train import choose_kernels, step_hooks
from megatron_lite.train.error_injection import InjectingStep
from megatron_lite.train.nonfinite_gradients import order_backward

DIVERGING = "--lr 1e30 --lr-decay-style constant --clip-grad 0 --train-iters 8"
LINE = r"iteration (\d+): the loss on rank (.+?) is NaN or Inf; .*not saved.*--no-check-for-nan-in-loss-and-grad"


@pytest.fixture
def group():
    with alone():
        yield


# --- divergence


@pytest.mark.parametrize("words", ["--log-interval 1", "--log-interval 3 --bf16"])
def test_nan_stops_the_run_and_saves_nothing(group, tmp_path, words):
    with pytest.raises(DivergedError, match=LINE) as caught:
        quietly(flags(DIVERGING, words, "--save-interval 1 --save", tmp_path / "save"), tmp_path / "run")
    assert caught.value.exit_code == 16 and len(caught.value.lines) == 1
    iteration = int(str(caught.value).split(":")[0].removeprefix("iteration "))
    assert str(caught.value).startswith(wording("train/iteration-loss-on-rank", iteration, 0))
    told = steps(tmp_path / "run")  # what led to it is what explains it
    assert [record["iteration"] for record in told] == list(range(1, iteration + 1)) and told[-1]["skipped"]
    for folder in (tmp_path / "save").glob("iter_*"):
        saved = checkpoint(tmp_path / "save", int(folder.name[5:]))
        assert saved["record"].iteration < iteration
        assert all(weight.isfinite().all() for weight in part(saved, "model.").values())


def test_nan_goes_on_if_told_to(group, tmp_path):
    _, out = quietly(flags(DIVERGING, "--no-check-for-nan-in-loss-and-grad --log-interval 1"), tmp_path)
    assert len(steps(tmp_path)) == 8 and losses(tmp_path)[-1] is None
    assert "number of nan iterations:   1 |" in out


@pytest.mark.parametrize("precision", ["--bf16 --loss-scale 8", "--fp16 --loss-scale 8"])
def test_a_fixed_loss_scale_hides_no_nan_loss(group, tmp_path, precision):
    with pytest.raises(DivergedError, match=LINE):
        quietly(flags(DIVERGING, precision), tmp_path)


def test_a_fixed_loss_scale_skips_what_overflows(group, tmp_path):
    """Gradients beyond fp16's range with a finite loss: nothing is wrong with the model."""
    quietly(flags("--fp16 --loss-scale 1e8"), tmp_path)
    assert all(record["skipped"] for record in steps(tmp_path))


def test_fp16_counts_iterations_with_a_nan_loss(group, tmp_path):
    """Unlike an overflow of gradients, which a smaller scale mends."""
    _, out = quietly(flags(DIVERGING, "--fp16 --initial-loss-scale 1 --log-interval 8"), tmp_path)
    last = [line for line in out.splitlines() if "nan iterations:" in line][-1]
    assert int(last.split("nan iterations:")[1].split("|")[0]) >= 5, last
    _, calm = quietly(flags("--fp16 --log-interval 8 --train-iters 8"), tmp_path / "scale")
    assert "number of skipped iterations:   8 | number of nan iterations:   0 |" in calm


def diverge_on_one_rank(world):
    """For on_ranks: rank 1 alone sees a NaN loss at iteration 3; both must stop there together."""
    calls, inner = [], choose_kernels.token_losses

    def losses(*inputs, **options):
        calls.append(1)
        third = len(calls) == 5  # 2 passes in a step
        return inner(*inputs, **options) * (math.nan if world.rank == 1 and third else 1.0)

    choose_kernels.token_losses = losses
    try:
        train(flags("--train-iters 9 --log-interval 9 --save", Path("save")), Path("run"), world)
    except DivergedError as error:
        print(f"refused: {error}")


def test_the_rank_is_named_and_all_stop(tmp_path):
    for output in on_ranks(diverge_on_one_rank, tmp_path):
        assert wording("train/refused-iteration-loss-on", 3, 1) in output, output
    assert list((tmp_path / "save").iterdir()) == []


def test_exit_code_16(tmp_path):
    ended = pretrain(flags(DIVERGING, "--run-dir", tmp_path))
    assert ended.code == 16
    [line] = [line for line in ended.err.splitlines() if line.strip()]
    assert line.startswith("error: iteration ") and "rank 0" in line
    assert json.loads((tmp_path / "run.json").read_text())["status"].startswith("failed: DivergedError: iteration")


@contextlib.contextmanager
def spoil_gradients(monkeypatch, layer, iteration, value):
    """From this iteration on, of 4 micro-batches each, a value is added to the gradient of what a layer's MLP returns."""
    calls = Counter()
    inner = MLP.forward

    def forward(mlp, hidden):
        out = inner(mlp, hidden)
        number = mlps.setdefault(id(mlp), len(mlps))
        calls[number] += 1
        if number == layer and calls[number] > 4 * (iteration - 1):
            out.register_hook(lambda gradient: gradient + value)
        return out

    mlps = {}
    with monkeypatch.context() as patch:
        patch.setattr(MLP, "forward", forward)
        yield


@pytest.mark.parametrize("words", ["", "--bf16", "--bf16 --loss-scale 8"])
def test_the_first_gradient_in_backward_is_named(group, tmp_path, monkeypatch, words):
    """Those of layer 0's MLP, of all before it, and none of layer 1's."""
    with spoil_gradients(monkeypatch, layer=0, iteration=3, value=math.nan):
        if "--loss-scale" in words:  # overflows of gradients alone are skipped, and not looked into
            quietly(flags(words), tmp_path)
            assert [step["skipped"] for step in steps(tmp_path)] == [False, False, True, True, True, True]
            return
        with pytest.raises(DivergedError) as caught:
            quietly(flags(words), tmp_path)
    assert caught.value.iteration == 3
    assert wording("train/first-gradient", "weight", "decoder.layers.0.mlp.linear_fc2", 0, 14, 28) in str(caught.value)


def spoil_a_stage(world, layout):
    """For on_ranks: the gradients of layer 0, which rank 0 alone has, are not finite."""
    with pytest.MonkeyPatch.context() as patch:
        layer = 0 if world.rank == 0 else None
        with spoil_gradients(patch, layer, iteration=2, value=math.inf):
            try:
                train(flags(layout), Path("run"), world)
            except DivergedError as error:
                print(f"refused: {error}")


@pytest.mark.slow
def test_the_rank_of_the_first_gradient_is_named(tmp_path):
    for output in on_ranks(spoil_a_stage, tmp_path, "--pipeline-model-parallel-size 2"):
        assert wording("train/first-gradient", "weight", "decoder.layers.0.mlp.linear_fc2", 0, 14, 28) in output, output


def test_parameters_in_the_order_of_backward():
    """Norms of queries and keys are computed before attention's projection, and listed behind it."""
    words = "--num-layers 1 --qk-layernorm --untie-embeddings-and-output-weights --disable-bias-linear"
    found = order_backward(list(list_parameters(plan_of(flags(words)).shape)))
    of_attention = [name.split(".")[-2] for name in found if ".self_attention." in name and name.endswith("weight")]
    assert of_attention == ["linear_proj", "k_layernorm", "q_layernorm", "linear_qkv"]
    assert found[0] == "output_layer.weight" and found[-1] == "embedding.word_embeddings.weight"
    assert found[1:3] == ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]


# --- intervals and the clock


@pytest.mark.parametrize(("words", "saved"), [("", [4]), ("--save-interval 2", [2, 4])])
def test_exit_interval(group, tmp_path, words, saved):
    """On a save interval it saves once."""
    reason, out = quietly(flags("--exit-interval 4 --train-iters 9", words, "--save", tmp_path / "save"), tmp_path)
    assert reason == wording("train/exiting-program-at-iteration", 4) and len(steps(tmp_path)) == 4
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [int(number) for number in re.findall(r"  saved iteration (\d+):", out)] == saved


def test_exit_duration(group, tmp_path, monkeypatch):
    """The clock jumps by half an hour in the fourth step."""

    class Clock:
        def monotonic(self):
            return 1800.0 * (len(done) >= 4)

    done = []
    monkeypatch.setattr(step_hooks, "time", Clock())

    class Count(Instrument):
        def begin(self, step):
            done.append(step)

    argv = flags("--exit-duration-in-mins 30 --train-iters 20 --save", tmp_path / "save")
    reason, _ = quietly(argv, tmp_path, watchers=[Count()])
    assert reason == wording("train/exiting-program-after-minutes", 30)
    assert len(steps(tmp_path)) == 4  # on a GPU it is two more
    done.clear()
    assert quietly(flags("--exit-duration-in-mins 31 --train-iters 9"), tmp_path / "longer")[0] is None


# --- signals


def test_sigterm_on_two_ranks_saves_once_and_ends_well(tmp_path):
    """Both ranks get it twice at once, as when a batch system signals every process and torchrun passes its own on."""
    argv = flags("--train-iters 100000 --exit-signal-handler --log-interval 20 --save", tmp_path / "save", *DROPOUT)
    with start(argv, ranks=2) as launcher:
        head = wait_for(launcher, " iteration       20/")
        send(ranks_of(launcher))
        time.sleep(0.05)
        send(ranks_of(launcher))
        out, err = launcher.communicate(timeout=LIMIT_S)
    out = head + out
    assert launcher.returncode == 0, err
    assert out.count("saved iteration") == 1
    assert wording("train/exiting-program-after-receiving") in out
    iteration = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    records = steps(tmp_path / "save")
    assert [record["iteration"] for record in records] == list(range(1, iteration + 1))
    ended = json.loads((tmp_path / "save" / "run.json").read_text())
    assert ended["status"] == wording("train/exiting-program-after-receiving-sigterm")


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ctrl_c_ends_two_ranks_at_once_and_says_where_to_go_on(tmp_path, times):
    """As from a terminal, which sends it to all processes. Several times: a rank may be within a reduction or not."""
    for number in range(times):
        save = tmp_path / f"save{number}"
        words = "--train-iters 100000 --log-interval 20 --save-interval 10"
        argv = flags(words, "--save", save, "--run-dir", save, *DROPOUT)
        with start(argv, ranks=2) as launcher:
            head = wait_for(launcher, " iteration       20/")
            os.killpg(launcher.pid, signal.SIGINT)
            out, err = launcher.communicate(timeout=LIMIT_S)
        assert "forcefully" not in err, f"the launcher waited 30 s: {err}"
        latest = int((save / "latest_checkpointed_iteration.txt").read_text())
        assert wording("train/interrupted-goes-on-from-iter", "--load", save, f"{latest:07d}") in head + out
        assert json.loads((save / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError, MemoryError])
def test_a_rank_ends_before_what_its_error_holds_is_taken_apart(monkeypatch, error):
    """That waits for gloo's threads, which may wait for Python, for ever."""
    happened = []

    class Replica:
        def __del__(self):
            happened.append("taken apart")

    def fail(*_):
        replica = Replica()  # noqa: F841
        raise error("a reason")

    def leave(code):
        happened.append(code)
        raise SystemExit

    monkeypatch.setattr(app, "_run", fail)
    monkeypatch.setattr(app, "read_world", lambda *_: World(0, 2))
    monkeypatch.setattr(app, "LauncherWatch", lambda _: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        app.main([], planner=None)
    assert happened[0] in (130, 2, 1)


# none, and of a checkpoint that is gone
@pytest.mark.parametrize("tracker", [None, pytest.param("7", marks=pytest.mark.slow)])
def test_ctrl_c_without_a_checkpoint(tmp_path, tracker):
    words = "--train-iters 100000 --log-interval 20 --save-interval 100000 --run-dir"
    save = tmp_path / "save"
    save.mkdir()
    with start(flags(words, tmp_path, "--save", save)) as process:
        wait_for(process, " iteration       20/")
        if tracker is not None:
            (save / "latest_checkpointed_iteration.txt").write_text(tracker)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert wording("train/interrupted-there-is-no") in out


def test_a_second_signal_means_now(group, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGUSR1)
    ended, now = [], [100.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(step_hooks.time, "monotonic", lambda: now[0])
    try:
        plan = plan_of(flags("--exit-signal-handler --exit-signal SIGUSR1"))
        step_hooks.ExitConditions(plan.args.training, torch.device("cpu"), None, async_save=False)
        for seconds in (0, 1, 3):
            now[0] = 100.0 + seconds
            os.kill(os.getpid(), signal.SIGUSR1)
        assert ended == [], "the launcher passing it on is no second wish"
        now[0] = 120.0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended == [128 + signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_sigterm_without_a_handler_kills(tmp_path):
    with start(flags("--train-iters 100000 --log-interval 20 --save", tmp_path / "save")) as process:
        wait_for(process, " iteration       20/")
        process.terminate()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize(("kind", "code"), [("transient_error", 17), ("persistent_error", 16), ("correct_result", 16)])
def test_an_injected_error_ends_the_run_as_megatron_does(kind, code, tmp_path):
    """Of each rank's micro-batches one in three is wrong."""
    words = f"--train-iters 40 --error-injection-rate 3 --error-injection-type {kind}"
    save = tmp_path / "save"
    said = r"^iteration \d+: a result of rank 0 counts as wrong \(--error-injection-rate 3"
    with alone(), pytest.raises(InjectedError, match=said) as caught:
        quietly(flags(words, "--save", save), tmp_path / "run")
    assert caught.value.exit_code == code
    done = len(losses(tmp_path / "run"))
    wrong = int(re.match(r"iteration (\d+)", str(caught.value))[1])
    assert wrong == done + 1 and 1 <= done < 40
    newest = save / "latest_checkpointed_iteration.txt"
    assert newest.read_text() == str(done)
    # it goes on with other errors
    with alone(), pytest.raises(InjectedError, match="there is no --save"):
        quietly(flags(words, "--load", save), tmp_path / "again")


def test_an_injected_error_waits_for_a_save_in_the_background(tmp_path):
    words = "--train-iters 40 --error-injection-rate 3 --async-save"
    with alone(), pytest.raises(InjectedError, match="--save has the weights before it"):
        quietly(flags(words, "--save", tmp_path / "save"), tmp_path / "run")
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == str(len(losses(tmp_path / "run")))


def test_no_error_is_injected_into_steps_that_do_not_run(tmp_path):
    """The run ends before them, or they are left out."""
    words = "--train-iters 4 --error-injection-rate 1 --iterations-to-skip 2 3 4"
    with alone():
        quietly(flags(words), tmp_path / "left out")
        quietly(flags("--train-iters 4 --error-injection-rate 1 --exit-interval 1"), tmp_path / "ended")
    assert len(losses(tmp_path / "left out")) == len(losses(tmp_path / "ended")) == 1


@pytest.mark.parametrize("mode", ["disabled", "report_stats"])
def test_no_error_is_injected_unless_results_are_validated(mode, tmp_path):
    with alone():
        quietly(flags("--train-iters 3 --error-injection-rate 1 --rerun-mode", mode), tmp_path)
    assert len(losses(tmp_path)) == 3


def test_all_ranks_draw_the_same_errors(tmp_path):
    plans = [plan_of(flags("--error-injection-rate 5"), World(rank=rank, size=2)) for rank in range(2)]
    found = []
    for plan in plans:
        step = InjectingStep(None, plan, saving=None, progress=SimpleNamespace(iteration=1, started_at=0))
        found.append([step.find_wrong_rank(consumed=0) for _ in range(20)])
    assert found[0] == found[1] and {None, 0, 1} == set(found[0])
