"""Traces of torch.profiler: which steps they hold, what stands in them, and what becomes of them on a full disk."""

import contextlib
import gc
import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launch import Interrupts, flags, losses, plan_of, quietly, same, train
from support.paths import REPO
from support.traces import events, nested, spans, steps_of, trace, trace_files
from support.waiting import full_disk
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.config.args import ProfileArgs
from megatron_lite.formats.trace_header import CORES_IN_TRACE
from megatron_lite.instruments import torch_profiler
from megatron_lite.instruments.base import Instruments, Window
from megatron_lite.instruments.build_instruments import build_instruments
from megatron_lite.instruments.module_ranges import ModuleRanges, find_modules
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import (
    Found,
    TorchProfiler,
    enlarge_buffers,
    find_faults,
    inspect_trace,
    write_trace,
)
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT
from megatron_lite.parallel.layers import recomputed
from megatron_lite.phases import NOT_TRAINING, Phase

pytestmark = pytest.mark.usefixtures("process_group")

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
STEP_PHASES = [phase.value for phase in Phase if phase not in (*NOT_TRAINING, Phase.PIPELINE_WAIT)]
FORWARD = [(bool(part), f"layers.{i}{part} forward") for i in (0, 1) for part in ("", ".self_attention", ".mlp")]
UNDOING = r"(?!autograd::).*Backward0"
BACKWARD = [(bool(part), f"layers.{i}{part} backward") for i in (1, 0) for part in ("", ".mlp", ".self_attention")]


# --- the window


def test_the_trace_holds_the_window_and_its_phases(tmp_path):
    argv = flags("--train-iters 7 --global-batch-size 2", PROFILE, "--tensorboard-dir", tmp_path / "tb")
    _, out = quietly(argv, tmp_path / "run")
    found = trace(tmp_path / "tb")
    windows = spans(found, r"ProfilerStep#\d+")
    assert [span["name"] for span in windows] == ["ProfilerStep#3", "ProfilerStep#4"]
    twice = [name for name in STEP_PHASES[:4] for _ in range(2)]  # two micro-batches
    for window in windows:
        inside = [
            span["name"]
            for span in spans(found, "|".join(phase.value for phase in Phase))
            if window["ts"] <= span["ts"] and span["ts"] + span["dur"] <= window["ts"] + window["dur"]
        ]
        assert sorted(inside) == sorted([*twice, *STEP_PHASES[4:]])
    operators = {event["name"] for event in found if event.get("cat") == "cpu_op"}
    assert "aten::addmm" in operators or "aten::linear" in operators
    told = r"^profiled steps 3-4 of this run, rank 0: .*/tb/.*_rank0\.\d+\.pt\.trace\.json \("
    assert re.search(told, out, re.MULTILINE)
    assert wording("instruments/trace-of-rank") not in out  # it found in the trace what it meant to record


def test_a_run_that_fails_inside_the_window_writes_what_it_has(tmp_path):
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(said):
        train(flags("--train-iters 9", PROFILE, "--profile-step-end 8"), tmp_path, watchers=[Interrupts(5)])
    assert steps_of(tmp_path) == [3, 4, 5]
    assert wording("instruments/profiled-steps-of-this", 3, 5, 0) in said.getvalue()
    assert not torch.autograd._profiler_enabled()


def test_a_resumed_run_counts_its_own_steps_and_names_both_counts(tmp_path):
    common = ("--train-iters 9 --lr-decay-style constant",)
    quietly(flags(*common, "--exit-interval 5 --save", tmp_path / "save"), tmp_path / "first")
    resumed = flags(*common, "--profile --use-pytorch-profiler --load", tmp_path / "save")
    _, out = quietly([*resumed, "--profile-step-start", "2", "--profile-step-end", "99"], tmp_path / "second")
    assert steps_of(tmp_path / "second") == [2, 3, 4] and "be compared" in out
    assert wording("instruments/profiled-steps-of-this-run", 2, 4, 7, 9, 0) in out
    _, out = quietly([*resumed, "--profile-step-start", "6", "--profile-step-end", "8"], tmp_path / "third")
    assert out.count(wording("instruments/counts-this-run-own", "--profile-step-start", 6, 4)) == 1
    assert out.count(wording("instruments/was-never-reached-run", "--profile-step-start", 6, 4)) == 1
    assert (
        out.index(wording("instruments/counts-this-run-own-steps"))
        < out.index("] iteration ")
        < out.index(wording("instruments/was-never-reached"))
    )
    assert trace_files(tmp_path / "third") == []


# --- what is recorded


def test_every_detail_is_where_its_reader_looks_for_it(tmp_path):
    details = [f"--pytorch-profiler-collect-{what}" for what in ("shapes", "chakra", "memory", "flops", "callstack")]
    one_step = "--train-iters 4 --profile-gzip --profile-modules --profile-step-end 4"
    quietly(flags(PROFILE, one_step, *details), tmp_path)
    [path] = trace_files(tmp_path)
    assert path.name.endswith(".pt.trace.json.gz")  # what TensorBoard's plugin looks for
    found = events(path)
    assert steps_of(tmp_path) == [3]
    assert any("Input Dims" in event.get("args", {}) for event in found)
    assert any(event["name"] == "[memory]" for event in found)
    assert any(event.get("cat") == "python_function" and "loss_and_tokens" in event["name"] for event in found)
    assert spans(found, r"layers\.1\.mlp backward")
    [table] = tmp_path.glob("*.operators.txt")
    lines = table.read_text().splitlines()
    assert lines[0] == wording("instruments/step-of-this-run", 3, 0)
    head = next(line for line in lines if "Self CPU" in line)
    assert all(column in head for column in ("Input Shapes", "FLOPs", "Self CPU Mem"))
    shares = [float(share) for share in re.findall(r"^.{80,}?\s(\d+\.\d+)%", "\n".join(lines), re.MULTILINE)]
    assert len(shares) > 10 and shares == sorted(shares, reverse=True)
    [chakra] = (tmp_path / "chakra").iterdir()  # apart: whatever reads traces takes every .json for one
    assert chakra.name.endswith(".et.json.gz")


def test_large_traces_are_compressed_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.instruments.torch_profiler.COMPRESSED_FROM_BYTES", 100)
    small, large = ('{"traceEvents": [{"name": "ProfilerStep#7"}]}', '{"traceEvents": [' + " " * 100 + "]}")
    cases = ((small, None, "json"), (large, None, "gz"), (small, True, "gz"), (large, False, "json"))
    for text, compress, ending in cases:
        path, found = write_trace(tmp_path / "a.json", lambda name, text=text: Path(name).write_text(text), compress)
        assert path.name == ("a.json.gz" if ending == "gz" else "a.json") and list(tmp_path.iterdir()) == [path]
        whole = gzip.decompress(path.read_bytes()).decode() if ending == "gz" else path.read_text()
        assert whole == text and found.steps == ((7,) if text is small else ())
        path.unlink()
    for flag, compress in (("", None), ("--profile-gzip", True), ("--no-profile-gzip", False)):
        timeline = Timeline()
        profiler = build_instruments(plan_of(flags(PROFILE, flag)), tmp_path, timeline, print)[-2]
        assert profiler.compress is compress


def model(recompute: bool = False, dropout: float = 0.1) -> GPT:
    torch.manual_seed(1)
    shape = plan_of(flags(f"--hidden-dropout {dropout} --attention-dropout {dropout}")).shape
    gpt = GPT(shape, choose_attention("auto", shape, batch=1, device="cpu", dtype=torch.float32, masked=False))
    for layer in gpt.decoder.layers if recompute else ():
        layer.forward = recomputed(layer.forward)
    return gpt


def pass_through(gpt: GPT) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(2)
    tokens_BT = torch.arange(16)[None]
    loss = gpt(tokens_BT, tokens_BT).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in gpt.parameters()]
    gpt.zero_grad()
    return loss.detach(), gradients


def ranges_of(gpt: GPT, tmp_path: Path) -> tuple[list[tuple[int, str]], tuple]:
    """Ranges of one pass, and what it computed."""
    told = []
    ranges = ModuleRanges(told.append)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ranges.open()
        computed = pass_through(gpt)
        ranges.close()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert told == []
    return nested(spans(events(tmp_path / "trace.json"), r"layers\..*")), computed


# where a layer's own dropout is undone first, it calls for recomputing; else the MLP does, and what is computed ends in
# the middle of the MLP, by an exception
ATTENTION, MLP = ".self_attention", ".mlp"
AGAIN_FOR_DROPOUT = [
    (0, " backward"),
    *((1, f"{part} recompute") for part in (ATTENTION, MLP)),
    *((1, f"{part} backward") for part in (MLP, ATTENTION)),
]
AGAIN_FOR_MLP = [
    *((0, " backward"), (1, f"{MLP} backward")),
    *((2, f"{part} recompute") for part in (ATTENTION, MLP)),
    (1, f"{ATTENTION} backward"),
]


@pytest.mark.parametrize(("dropout", "again"), [(0.0, AGAIN_FOR_MLP), (0.1, AGAIN_FOR_DROPOUT)])
def test_module_ranges_nest_change_no_bit_and_show_what_is_computed_twice(tmp_path, dropout, again):
    plain = pass_through(model(dropout=dropout))
    gpt = model(dropout=dropout)
    ranges, computed = ranges_of(gpt, tmp_path)
    assert ranges == FORWARD + BACKWARD
    assert same(list(plain), list(computed))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gpt.modules())
    assert same(list(plain), list(pass_through(gpt)))  # and afterwards
    ranges, computed = ranges_of(model(recompute=True, dropout=dropout), tmp_path)
    assert same(list(plain), list(computed))
    assert ranges == FORWARD + [(depth, f"layers.{i}{name}") for i in (1, 0) for depth, name in again]
    found = events(tmp_path / "trace.json")
    undone = [e["ts"] for e in found if e.get("cat") == "cpu_op" and re.fullmatch(UNDOING, e["name"])]
    for span in spans(found, r".* recompute"):  # over before what it recomputed is undone
        assert not any(span["ts"] < at < span["ts"] + span["dur"] for at in undone)


@pytest.mark.parametrize("way", ["in place", "wrapped", pytest.param("forward", marks=pytest.mark.slow)])
def test_compiled_blocks_keep_their_ranges(tmp_path, way):
    """The three ways in which a block can be compiled; inside one there is nothing to put ranges around."""
    torch._dynamo.reset()
    compiling = {"backend": "aot_eager"}
    plain, gpt = model(dropout=0.0), model(dropout=0.0)
    for one in (plain, gpt):
        for i, layer in enumerate(one.decoder.layers):
            if way == "in place":
                layer.compile(**compiling)
            elif way == "wrapped":
                one.decoder.layers[i] = torch.compile(layer, **compiling)
            else:
                layer.forward = torch.compile(layer.forward, **compiling)
    expected = pass_through(plain)
    pass_through(gpt)  # compiles
    compilations = torch._dynamo.utils.counters["frames"]["total"]
    ranges, computed = ranges_of(gpt, tmp_path)
    assert ranges == [entry for entry in FORWARD + BACKWARD if entry[0] == 0]
    assert same(list(expected), list(computed))
    assert torch._dynamo.utils.counters["frames"]["total"] == compilations  # profiling compiles nothing, hooks neither


def test_a_model_compiled_as_a_whole_shows_no_layers():
    assert find_modules(torch.compile(model(), backend="eager")) == {}
    assert list(find_modules(model())) == [name.removesuffix(" forward") for _, name in FORWARD]


# --- what cannot be written, and what is missing


def test_a_full_disk_costs_the_trace_and_one_line(tmp_path):
    with full_disk(100_000):
        _, out = quietly(flags("--train-iters 6", PROFILE, "--pytorch-profiler-collect-chakra"), tmp_path / "full")
    quietly(flags("--train-iters 6"), tmp_path / "plain")
    assert losses(tmp_path / "full") == losses(tmp_path / "plain") and len(losses(tmp_path / "full")) == 6
    said = re.findall(r"^profile of steps 3-4 of this run, rank 0, is lost; training goes on: .*$", out, re.MULTILINE)
    assert len(said) == 1 and said[0].endswith(wording("instruments/trace-json-nothing-was")), out
    assert [path for path in (tmp_path / "full").rglob("*") if "trace" in path.name or "rank0" in path.name] == []
    assert "switched off" not in out


def profile_steps(kind, steps: range, last: int, folder: Path, inside=lambda: None, cuda=False, **options) -> list[str]:
    """Run steps under a profiler of that kind; returns what it said."""
    out = []
    profiler = kind(Window(steps), ProfileArgs(use_pytorch_profiler=True, **options), 0, cuda, folder, out.append)
    with Instruments([profiler], out.append) as watching:
        for step in range(1, last + 1):
            with watching.step(step), watching.phase(Phase.FORWARD):
                torch.ones(2).sum()
                inside()
            if kind is LikeOnAGpu:
                assert (profiler._profiler is not None) == (step in (2, 3))
    assert not torch.autograd._profiler_enabled() and profiler._profiler is None
    return out


def test_a_folder_that_is_in_the_way_costs_the_trace_and_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    [line] = profile_steps(TorchProfiler, range(1, 2), 1, tmp_path / "file" / "tb")
    assert line.startswith(wording("instruments/profile-of-step-of", 1, 0))


def test_collections_of_garbage_stand_in_the_trace_without_stacks(tmp_path):
    before = list(gc.callbacks)

    def collect():
        gc.collect(0)  # of the youngest objects: too short to be worth a range
        gc.collect()

    profile_steps(TorchProfiler, range(1, 5), 4, tmp_path, collect)
    assert gc.callbacks == before
    collections = spans(trace(tmp_path), "Python GC")
    assert len(collections) == 4
    time = analyze([tmp_path]).facts.critical.time
    assert [phase.name for phase in time.phases] == ["forward"]  # a collection is no phase
    collected_ms = [span["dur"] / 1000 for span in collections]
    # steps that took much longer than the others are left out
    assert min(collected_ms) <= time.rows["garbage_collector"] <= max(collected_ms)


class LikeOnAGpu(TorchProfiler):
    """Gets ready as for a GPU, and records the CPU."""

    def make_profiler(self):
        self.cuda = False
        profiler = super().make_profiler()
        self.cuda = True
        return profiler

    def _synchronize(self):
        pass

    def _write_table(self, profiler):
        self.cuda = False
        words = super()._write_table(profiler)
        self.cuda = True
        return words


@pytest.mark.parametrize(("last", "recorded"), [(5, (3, 4)), (2, None), (1, None)])
def test_the_step_before_the_window_gets_ready_and_is_not_recorded(tmp_path, last, recorded):
    chakra = {"pytorch_profiler_collect_chakra": True, "no_profile_gzip": True}
    out = profile_steps(LikeOnAGpu, range(3, 5), last, tmp_path, cuda=True, **chakra)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    if recorded is None:
        assert files == [] and out == []  # it was ready for nothing, and leaves nothing
    else:
        assert inspect_trace(*trace_files(tmp_path)).steps == recorded and len(files) == 3
        assert len(out) == 2 and "holds no GPU kernel" in out[1]


def test_a_profiler_is_off_even_if_stopping_it_fails(tmp_path, monkeypatch):
    """As after an error that leaves a GPU unusable: nothing can be waited for, and nothing be written."""

    def fail(*arguments):
        raise RuntimeError("an illegal memory access")

    def break_down():
        assert torch.autograd._profiler_enabled()
        monkeypatch.setattr(TorchProfiler, "_synchronize", fail)

    [said] = profile_steps(TorchProfiler, range(1, 9), 1, tmp_path, break_down)
    assert said.startswith(wording("instruments/torchprofiler-close-failed-and")) and said.endswith(
        "illegal memory access"
    )


@pytest.mark.parametrize(
    ("found", "full", "said"),
    [
        (Found((3, 4, 5), 7, True), False, None),
        (Found((3, 4), 7, True), False, "holds the steps 3, 4, not 3, 4, 5 as it should."),
        (Found((), 7, True), False, "holds the steps none, not 3, 4, 5 as it should."),
        (Found((3, 4, 5), 0, True), False, "holds no GPU kernel. CUPTI, which reports them, serves one tool per"),
        (Found((3, 4, 5), 0, True), True, "the record of the GPU ends early: Kineto's room for events was full; "),
    ],
)
def test_a_trace_is_compared_with_what_was_meant(found, full, said):
    lines = list(find_faults(found, range(3, 6), cuda=True, full=full))
    assert len(lines) == (said is not None) and all(line.startswith(said) for line in lines)


def test_a_look_into_a_trace_counts_what_lies_across_its_pieces(tmp_path, monkeypatch):
    event = {"ph": "X", "cat": "kernel", "name": "gemm"}
    whole = {"traceEvents": [{"name": "ProfilerStep#12"}, *[event] * 500, {"name": "ProfilerStep#13"}]}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(whole))
    for size in (100, 101, 333, 1 << 20):
        monkeypatch.setattr("megatron_lite.instruments.torch_profiler.READ_BYTES", size)
        monkeypatch.setattr("megatron_lite.instruments.torch_profiler.OVERLAP", 60)
        assert inspect_trace(path) == Found((12, 13), 500, True)
    path.write_text(json.dumps(whole)[:-20])
    assert not inspect_trace(path).whole


# --- room for the events of a GPU, which Kineto limits

PREPARE = """
import os
from megatron_lite.instruments.torch_profiler import enlarge_buffers
from torch.profiler import ProfilerActivity, _KinetoProfile

kept = enlarge_buffers(os.environ) if {room} else None
profiler = _KinetoProfile(activities=[ProfilerActivity.CPU])
profiler.prepare_trace(); profiler.start_trace(); profiler.stop_trace()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("room", "megabytes"), [(False, 128), (True, 2048)])
def test_kineto_takes_the_room(room, megabytes):
    environ = {name: value for name, value in os.environ.items() if name != "KINETO_CONFIG"} | {"KINETO_LOG_LEVEL": "0"}
    command = [sys.executable, "-c", PREPARE.format(room=room)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=REPO, check=True)
    assert f"Max GPU buffer size: {megabytes}MB" in done.stdout + done.stderr


def test_what_the_user_or_the_machine_says_stays(tmp_path, monkeypatch):
    environ = {"KINETO_CONFIG": "mine"}
    assert enlarge_buffers(environ) is None and environ == {"KINETO_CONFIG": "mine"}
    system = tmp_path / "libkineto.conf"
    monkeypatch.setattr(torch_profiler, "SYSTEM_FILE", system)
    key = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"
    for given, expected in (("A=1", f"A=1\n{key}=2048\n"), (f"{key}=7", f"{key}=7")):
        system.write_text(given)
        environ = {}
        with enlarge_buffers(environ):
            assert Path(environ["KINETO_CONFIG"]).read_text() == expected
    system.write_bytes(b"\xff")
    assert enlarge_buffers({}) is None


def test_the_header_tells_what_the_rank_got_of_the_cores(tmp_path):
    quietly(
        flags("--train-iters 7 --global-batch-size 2", PROFILE, "--tensorboard-dir", tmp_path / "tb"), tmp_path / "run"
    )
    [path] = trace_files(tmp_path / "tb")
    told = json.loads(path.read_text())[CORES_IN_TRACE]
    assert told["steps"] == 2 and told["ms"] > 0 and told["cpu_ms"] > 0 and told["involuntary_switches"] >= 0
    [one] = analyze([path]).facts.ranks_seen
    assert one.trace.cores.step_ms == told["ms"] and one.trace.cores.is_known
