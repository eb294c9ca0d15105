"""Instruments watch and change nothing, whatever becomes of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from launch import DROPOUT, alone, checkpoint, flags, on_ranks, quietly, same, steps, train

from megatron_lite.instruments.base import Instrument, Instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.phases import Phase

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
STEP_PHASES = ["data", "data_to_device", "forward", "backward", "grad_sync", "unscale", "clip_grad", "optimizer_step", "log"]


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


def trace(folder: Path, rank: int = 0) -> list[dict]:
    [path] = folder.glob(f"*_rank{rank}.*.pt.trace.json")
    return json.loads(path.read_text())["traceEvents"]


def spans(events: list[dict], pattern: str) -> list[dict]:
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation" and re.fullmatch(pattern, e["name"])]
    return sorted(found, key=lambda event: event["ts"])


def names(folder: Path, rank: int = 0) -> list[str]:
    return [span["name"] for span in spans(trace(folder, rank), r"ProfilerStep#\d+")]


# --- on = off


@pytest.mark.parametrize("precision", ["", "--fp16 --initial-loss-scale 4096"])
def test_profiling_changes_no_bit(tmp_path, precision):
    argv = flags("--train-iters 6 --eval-interval 2 --eval-iters 1", precision, *DROPOUT)
    quietly([*argv, "--save", str(tmp_path / "off")], tmp_path / "off")
    quietly([*argv, "--save", str(tmp_path / "on"), *PROFILE.split(), "--pytorch-profiler-collect-shapes",
             "--pytorch-profiler-collect-callstack", "--timing-log-level", "2"], tmp_path / "on")
    off, on = (checkpoint(tmp_path / name, 6) for name in ("off", "on"))
    assert same(off["model"], on["model"]) and same(off["optimizer"], on["optimizer"])
    assert same(off["random_states"], on["random_states"])
    assert [s["loss"] for s in steps(tmp_path / "off")] == [s["loss"] for s in steps(tmp_path / "on")]


# --- a broken instrument


class Broken(Instrument):
    """Fails at one moment, and counts how often it was asked."""

    def __init__(self, moment: str):
        self.moment, self.asked = moment, 0

    def _maybe(self, moment: str):
        if moment == self.moment:
            self.asked += 1
            raise RuntimeError("out of ink")

    def open(self):
        self._maybe("open")

    def begin(self, step):
        self._maybe("begin")

    def end(self, step):
        self._maybe("end")

    def close(self, error):
        self._maybe("close")

    def phase(self, name):
        self._maybe("phase")
        return self if self.moment in ("entering", "leaving") else None

    def __enter__(self):
        self._maybe("entering")

    def __exit__(self, *error):
        self._maybe("leaving")


@pytest.mark.parametrize("moment", ["open", "begin", "end", "close", "phase", "entering", "leaving"])
def test_a_broken_instrument_is_switched_off_with_a_word(tmp_path, moment):
    broken = Broken(moment)
    _, out = quietly(flags("--train-iters 4", *DROPOUT), tmp_path / "broken", [broken])
    quietly(flags("--train-iters 4", *DROPOUT), tmp_path / "whole")
    assert broken.asked == 1
    assert len(re.findall(r"Broken\.\w+ failed and was switched off; training goes on: out of ink", out)) == 1
    one, other = (steps(tmp_path / name) for name in ("broken", "whole"))
    assert [s["loss"] for s in one] == [s["loss"] for s in other] and len(one) == 4


def test_a_failing_phase_hides_no_error_of_the_step():
    words = []
    watching = Instruments([Timeline(), Broken("leaving")], words.append)
    with pytest.raises(ZeroDivisionError), watching.phase(Phase.FORWARD):
        raise ZeroDivisionError
    assert len(words) == 1 and [type(member) for member in watching.members] == [Timeline]


def test_a_profiler_that_cannot_write_is_switched_off(tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    out = []
    watching = Instruments([TorchProfiler(range(1, 2), tmp_path / "file" / "tb", 0, False, False, out.append)], out.append)
    with watching, watching.step(1), watching.phase(Phase.FORWARD):
        torch.ones(2).sum()
    assert len(out) == 1 and "TorchProfiler.end failed and was switched off" in out[0]
    quietly(flags("--train-iters 4", PROFILE), tmp_path / "next")  # and no profiler is left running


# --- the trace


def test_the_trace_holds_the_window_and_its_phases(tmp_path):
    quietly(flags("--train-iters 7 --global-batch-size 2", PROFILE, "--tensorboard-dir", tmp_path / "tb"), tmp_path / "run")
    events = trace(tmp_path / "tb")
    windows = spans(events, r"ProfilerStep#\d+")
    assert [span["name"] for span in windows] == ["ProfilerStep#3", "ProfilerStep#4"]
    twice = [name for name in STEP_PHASES[:4] for _ in range(2)]  # two micro-batches
    for window in windows:
        inside = [span["name"] for span in spans(events, "|".join(phase.value for phase in Phase))
                  if window["ts"] <= span["ts"] and span["ts"] + span["dur"] <= window["ts"] + window["dur"]]
        assert sorted(inside) == sorted([*twice, *STEP_PHASES[4:]])
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    assert "aten::addmm" in operators or "aten::linear" in operators


def test_a_run_that_ends_inside_the_window_writes_what_it_has(tmp_path):
    quietly(flags("--train-iters 9 --exit-interval 4 --profile-step-end 8", "--profile --use-pytorch-profiler",
                  "--profile-step-start 3 --profile-step-end 8"), tmp_path / "left")
    assert names(tmp_path / "left") == ["ProfilerStep#3", "ProfilerStep#4"]
    quietly(flags("--train-iters 4 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 99"),
            tmp_path / "short")
    assert names(tmp_path / "short") == ["ProfilerStep#3", "ProfilerStep#4"]

    class Fails(Instrument):
        def begin(self, step):
            if step == 5:
                raise KeyboardInterrupt  # from the training itself, as far as the others can tell

    with pytest.raises(KeyboardInterrupt):
        quietly(flags("--train-iters 9 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 8"),
                tmp_path / "failed", [Fails()])
    assert names(tmp_path / "failed")[:2] == ["ProfilerStep#3", "ProfilerStep#4"]


def test_a_resumed_run_counts_its_own_steps(tmp_path):
    common = flags("--train-iters 9 --lr-decay-style constant")
    quietly([*common, "--exit-interval", "5", "--save", str(tmp_path / "save")], tmp_path / "first")
    quietly([*common, "--load", str(tmp_path / "save"), *PROFILE.split()], tmp_path / "second")
    assert names(tmp_path / "second") == ["ProfilerStep#3", "ProfilerStep#4"]


def train_profiled(world, words):
    for number, argv in enumerate(json.loads(words)):
        train(argv, Path(f"run{number}"), world)


def test_each_profiled_rank_has_its_own_trace(tmp_path):
    argvs = [flags("--train-iters 5", PROFILE, f"--profile-ranks {ranks}") for ranks in ("-1", "1", "0")]
    on_ranks("test_instruments_run:train_profiled", tmp_path, json.dumps(argvs))
    assert names(tmp_path / "run0", 0) == names(tmp_path / "run0", 1) == ["ProfilerStep#3", "ProfilerStep#4"]
    for run, rank in (("run1", 1), ("run2", 0)):
        assert len(list((tmp_path / run).glob("*.trace.json"))) == 1 and names(tmp_path / run, rank)


# --- the timeline


def test_phases_add_up_to_no_more_than_the_step(tmp_path):
    quietly(flags("--train-iters 12 --log-interval 3 --eval-interval 4 --eval-iters 1 --save-interval 5 --save",
                  tmp_path / "save"), tmp_path / "run")
    records = steps(tmp_path / "run")
    for record in records:
        assert 0.5 * record["ms"] < sum(record["phases_ms"].values()) <= record["ms"] + 0.01
        expected = {*STEP_PHASES, *(["eval"] if record["iteration"] % 4 == 0 else []),
                    *(["save"] if record["iteration"] % 5 == 0 else [])}
        assert set(record["phases_ms"]) == expected
