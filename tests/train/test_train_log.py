"""What a run says and writes: console lines to Megatron-LM's formats, TensorBoard's names, steps.jsonl, run.json."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support import launch
from support.launch import alone, flags, plan_of, pretrain, quietly, steps, write_documents
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.instruments.hardware_sampler import HardwareSampler
from megatron_lite.instruments.host_counters import HostCounters
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.train import log
from megatron_lite.train import step_hooks as evaluation
from megatron_lite.train.console import compute_timers, evaluation_lines, timer_lines
from megatron_lite.train.log import StepsFile
from megatron_lite.train.loop import Progress

NUMBER = r"\d+\.\d{6}E[+-]\d\d"
ITERATION_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration [ \d]{7}\d/[ \d]{7}\d \| consumed samples: [ \d]{11}\d \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \| "
    rf"learning rate: {NUMBER} \| global batch size: [ \d]{{4}}\d \| (lm loss: {NUMBER} \| )?loss scale: \d+\.\d \| "
    r"(grad norm: \d+\.\d{3} \| )?(num zeros: \d+\.\d \| )?(params norm: \d+\.\d{3} \| )?"
    r"number of skipped iterations: [ \d]{2}\d \| number of nan iterations: [ \d]{2}\d \|$"
)
VALIDATION_LINE = re.compile(
    rf"^ validation loss at (.+?) \| lm loss value: ({NUMBER}) \| lm loss PPL: ({NUMBER}) \| $"
)
FP16 = (
    "--fp16 --train-iters 24 --log-interval 4 --eval-interval 10 --eval-iters 2 --lr-warmup-iters 3 --log-throughput "
    "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --log-timers-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --tensorboard-queue-size 5 "
    "--split 80,15,5 --lr-decay-style cosine --min-lr 1e-3"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run on two ranks that starts from a loss scale of 2**32."""
    folder = tmp_path_factory.mktemp("log")
    data = write_documents(folder / "data", [40, 25, 60, 33] * 100)
    ended = pretrain(flags(FP16, "--tensorboard-dir", folder / "tb", "--run-dir", folder / "run", data=data), ranks=2)
    assert ended.code == 0, ended.err
    return folder, ended


@pytest.fixture(scope="module")
def records(run):
    return steps(run[0] / "run")


@pytest.fixture(scope="module")
def board(run):
    events = EventAccumulator(str(run[0] / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def lines(run) -> list[str]:
    found = [line for line in run[1].out.splitlines() if re.match(r" \[.*\] iteration ", line)]
    assert found
    return found


def test_iteration_lines_are_megatrons(run):
    for line in lines(run):
        assert ITERATION_LINE.match(line), line
    assert [figures["iteration"] for figures in run[1].figures] == ["1", "4", "8", "12", "16", "20", "24"]
    assert [int(figures["consumed samples"]) for figures in run[1].figures] == [4, 16, 32, 48, 64, 80, 96]


def test_an_interval_of_skipped_steps_has_no_loss(run, records):
    for figures, interval in zip(run[1].figures[1:], intervals(records)):
        losses = [record["loss"] for record in interval if not record["skipped"]]
        assert int(figures["number of skipped iterations"]) == sum(record["skipped"] for record in interval)
        assert ("lm loss" in figures) == bool(losses)
        if losses:
            assert float(figures["lm loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert ("grad norm" in figures) == (not interval[-1]["skipped"])
    assert "lm loss" not in run[1].figures[0] and "lm loss" in run[1].figures[-1]


def intervals(records) -> list[list[dict]]:
    return [records[first : first + 4] for first in range(0, 24, 4)]


def test_rate_and_scale_are_the_next_steps(run, records):
    """As Megatron prints both after its update."""
    for figures in run[1].figures:
        now = int(figures["iteration"])
        assert float(figures["learning rate"]) == pytest.approx(records[now - 1]["next_lr"], rel=1e-6)
        if now < 24:
            assert float(figures["loss scale"]) == records[now]["loss_scale"]


def test_validation_lines_are_megatrons(run):
    out = run[1].out.splitlines()
    found = [(i, VALIDATION_LINE.match(line)) for i, line in enumerate(out) if VALIDATION_LINE.match(line)]
    places = ["10", "20", "24 on validation set", "24 on test set"]
    assert [match[1] for _, match in found] == [f"iteration {place}" for place in places]
    for i, match in found:
        assert set(out[i - 1]) == set(out[i + 1]) == {"-"} and len(out[i - 1]) > len(out[i])
        assert float(match[3]) == pytest.approx(math.exp(float(match[2])), rel=1e-4)


def test_timers_have_megatrons_names(run):
    block = run[1].out[run[1].out.index("(min, max) time across ranks (ms):") :].splitlines()[1:]
    found = [
        re.match(r"^    ([\w-]+) \.+: \(\d+\.\d\d, \d+\.\d\d\)$", line)
        for line in block[: block.index(next(line for line in block if not line.startswith("    ")))]
    ]
    optimizer = "optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-inner-step optimizer"
    detailed = "batch-generator forward-compute backward-compute data forward log"
    assert [match[1] for match in found] == f"forward-backward all-grads-sync {optimizer} {detailed}".split()


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
@pytest.mark.parametrize("level", [1, 2])
def test_timer_lines_are_megatron_cores(option, level):
    """Its own Timers, given the same times of two ranks, print the same block."""
    phases = {"data": [1.0, 2.0], "data_to_device": [0.5, 0.5], "forward": [3.0, 4.0], "backward": [6.0, 5.0]}
    phases |= {
        "grad_sync": [math.nan, 1.0],
        "unscale": [0.1, 0.1],
        "clip_grad": [0.2, 0.3],
        "optimizer_step": [2.0, 2.0],
    }
    found = {name: times for name, times in compute_timers(phases, level).items() if name not in ("data", "forward")}
    expected = {"forward-backward": [10.5, 12.5], "all-grads-sync": [0.0, 1.0]}
    expected |= {"optimizer-unscale-and-check-inf": [0.1, 0.1], "optimizer-clip-main-grad": [0.2, 0.3]}
    expected |= {"optimizer-inner-step": [2.0, 2.0], "optimizer": [2.3, 2.4]}
    if level == 2:
        expected |= {"batch-generator": [1.5, 2.5], "forward-compute": [4.5, 6.5], "backward-compute": [6.0, 5.0]}
    assert {name: pytest.approx(times) for name, times in expected.items()} == found
    timers = pytest.importorskip("megatron.core.timers").Timers(level, option)
    elapsed_s = lambda names, reset, barrier: torch.tensor([expected[name] for name in names]).T / 1000
    timers._get_elapsed_time_all_ranks = elapsed_s
    with patch("torch.distributed.get_world_size", lambda: 2):
        assert timer_lines(option, found) == timers.get_all_timers_string(list(expected))


def test_lines_name_their_kind(run, records):
    lines = [json.loads(line) for line in (run[0] / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["ranks" if "ranks" in line else "step" for line in lines]
    assert all(record["loss"] > 0 for record in records) and any(record["skipped"] for record in records)


def test_every_step_is_in_the_file_once(records):
    assert [record["iteration"] for record in records] == list(range(1, 25))
    assert all(record["batch_size"] == 4 and record["ms"] > 0 for record in records)


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_what_was_written_ahead_is_replaced(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(log, "SECONDS_AHEAD", seconds)
    ahead = []
    write = StepsFile.write_ahead

    def note(self, figures, time):
        ahead.append(figures.iteration)
        write(self, figures, time)

    monkeypatch.setattr(StepsFile, "write_ahead", note)
    save = f"--train-iters 20 --log-interval 5 --save {tmp_path}/save"
    for words in ("--exit-interval 11", f"--load {tmp_path}/save"):
        with alone():
            quietly(flags(save, words), tmp_path / "run")
    assert [record["iteration"] for record in steps(tmp_path / "run")] == list(range(1, 21))
    assert not any("local" in record for record in steps(tmp_path / "run")) and len(set(ahead)) == len(ahead)
    assert bool(ahead) == (seconds == 0.0)


def test_tensorboard_has_megatrons_names(board, records):
    tags = set(board.Tags()["scalars"])
    stepwise = ["learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm", "world-size"]
    evaluations = ["lm loss validation", "lm loss validation ppl", "lm loss test", "lm loss test ppl"]
    for name in ("lm loss", *stepwise, *evaluations):
        assert {name, f"{name} vs samples"} <= tags, name
    timers = "iteration forward-backward forward-compute backward-compute batch-generator optimizer optimizer-inner-step data log"
    assert {"throughput", *(f"{name}-time" for name in timers.split())} <= tags
    spent = [event.value for event in board.Scalars("forward-backward-time")]
    assert 0 < max(spent) < max(record["ms"] for record in records) / 500, "seconds, as Megatron's"
    assert "micro_batch_size/text_summary" in board.Tags()["tensors"]
    losses = {event.step: event.value for event in board.Scalars("lm loss")}
    assert losses == pytest.approx({r["iteration"]: r["loss"] for r in records}, rel=1e-6)
    assert any(r["skipped"] for r in records), "whose loss is there too, as in Megatron"
    norms = {event.step: event.value for event in board.Scalars("params-norm")}
    assert list(norms) == list(range(1, 25)) and norms[24] != norms[23] > 1
    assert [event.step for event in board.Scalars("params-norm vs samples")] == [4 * i for i in norms]
    assert [event.step for event in board.Scalars("lm loss vs samples")] == [4 * i for i in losses]
    assert [event.step for event in board.Scalars("lm loss validation")] == [10, 20, 24, 24], "of the test set last"
    assert board.Scalars("lm loss test")[0].value == board.Scalars("lm loss validation")[-1].value
    assert {event.value for event in board.Scalars("world-size")} == {2.0}


def test_run_json(run):
    record = json.loads((run[0] / "run" / "run.json").read_text())
    assert record["status"] == "finished" and record["ended"] >= record["started"]
    assert record["parameters"] == 30080 and record["plan"]["world"]["size"] == 2
    assert record["plan"]["args"]["watch"]["log_interval"] == 4


@pytest.mark.slow
def test_a_resumed_run_keeps_the_first_ones_story(tmp_path):
    argv = flags("--train-iters 4 --lr-decay-style constant --save", tmp_path / "save")
    first = pretrain([*argv, "--exit-interval", "2"])
    second = pretrain([*argv, "--load", str(tmp_path / "save")])
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert [record["iteration"] for record in steps(tmp_path / "save")] == [1, 2, 3, 4]
    assert len(list((tmp_path / "save").glob("run*.json"))) == 2


def test_the_end_evaluates_on_the_next_samples_even_where_an_interval_ends(monkeypatch):
    losses, said = iter([3.0, 2.0, 1.0]), []
    monkeypatch.setattr(evaluation, "evaluate", lambda *given: next(losses))
    log = SimpleNamespace(
        metrics=SimpleNamespace(settle=lambda: None), say=said.append,
        evaluation=lambda title, which, loss: said.append(evaluation_lines(title, loss)),
    )  # fmt: skip
    plan = plan_of(flags("--eval-iters 2"))
    replica = SimpleNamespace(pipeline=Pipeline(plan.stage))
    validation = evaluation.Evaluation(plan, replica, None, plan.evaluation_samples, None, log)
    progress = Progress(iteration=40)
    validation.run(progress)
    validation.report_at_the_end(progress)
    progress.iteration = 45
    validation.report_at_the_end(progress)
    assert progress.consumed_valid == 24, "of three evaluations"
    assert [(found[1], float(found[2])) for text in said if (found := VALIDATION_LINE.match(text.splitlines()[1]))] == [
        ("iteration 40", 3.0), ("iteration 40 on validation set", 2.0), ("iteration 45 on validation set", 1.0),
    ]  # fmt: skip


def test_samples_before_an_error_are_written_and_those_of_a_line_once(tmp_path, monkeypatch):
    sampler = HardwareSampler(None, HostCounters(tmp_path, tmp_path))
    monkeypatch.setattr(launch, "Log", partial(log.Log, hardware=sampler))
    words = flags("--train-iters 9 --log-interval 2 --global-batch-size 2")
    with alone(), pytest.raises(KeyboardInterrupt):
        quietly(words, tmp_path / "run", watchers=[sampler, launch.Interrupts(6)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    [last] = [line for line in lines if line["kind"] == "hardware"]
    # the thread samples once more at the end, whatever it has done before
    assert (last["iterations"], last["rank"]) == ([5, 5], 0) and last["figures"]["samples"] >= 1
    assert lines[-1] is last
