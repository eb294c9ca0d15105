"""--torch-compile: the same losses and checkpoints, one compilation for all layers, steps that compile marked."""

import json
import os
import re
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from support.command_lines import mistakes
from support.launch import DROPOUT, checkpoint, flags, intervals, losses, on_ranks, quietly, steps, train
from support.model_variants import PLAIN, build, tokens
from support.wording import wording
from torch._dynamo.utils import counters

from megatron_lite.config import plan
from megatron_lite.config.plan import Compilation, choose_compilation
from megatron_lite.instruments.base import Instrument
from megatron_lite.model import gpt
from megatron_lite.model.attention import find_document_edges
from megatron_lite.parallel.layers import compile_layers

pytestmark = pytest.mark.usefixtures("process_group")

EAGER = "--torch-compile --torch-compile-backend aot_eager"
UNFUSED = "--attention-backend unfused"


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    limit, optimize = torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp
    yield
    torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp = limit, optimize


SLOW = pytest.mark.slow
VARIANTS = {
    "fp32, recomputing a layer": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "fp16, recomputing attention": f"--fp16 --initial-loss-scale 4096 --recompute-activations {UNFUSED}",
    "bf16, documents": "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --reset-attention-mask "
    "--reset-position-ids --eod-mask-loss",
}


def as_on_a_gpu(args, world) -> Compilation:
    """With the layers the loss."""
    found = choose_compilation(args, world)
    return replace(found, loss=found.layers)


@pytest.mark.parametrize(
    ("words", "with_loss"),
    [
        pytest.param("--bf16", False, id="bf16, as on a CPU"),
        *(pytest.param(words, True, id=name, marks=SLOW if "16" in name else ()) for name, words in VARIANTS.items()),
    ],
)
def test_nothing_changes_but_the_speed(tmp_path, monkeypatch, words, with_loss):
    if with_loss:
        monkeypatch.setattr(plan, "choose_compilation", as_on_a_gpu)
    argv = flags("--train-iters 5 --eval-interval 2 --eval-iters 1 --log-interval 2", words, *DROPOUT)
    quietly([*argv, "--save", str(tmp_path / "eager")], tmp_path / "eager")
    _, out = quietly([*argv, *EAGER.split(), "--save", str(tmp_path / "compiled")], tmp_path / "compiled")
    eager = pytest.approx(losses(tmp_path / "eager"), rel=2e-3 if "16" in words else 1e-6)
    assert losses(tmp_path / "compiled") == eager
    what = "each of 2 layers and the loss" if with_loss else "each of 2 layers"
    assert wording("train/compiling-with-aot-eager", what) in out and "expected" not in out
    # for all layers one for training and one for evaluating; for both the loss forward, and its gradients
    assert counters["stats"]["unique_graphs"] == 2 + (2 if with_loss else 0)
    saved, other = (checkpoint(tmp_path / name, 5) for name in ("compiled", "eager"))
    assert saved.keys() == other.keys()
    assert all(saved[name].shape == other[name].shape for name in saved if name != "record")


@pytest.mark.slow
def test_layers_that_know_their_number_are_all_compiled(tmp_path):
    """More than torch's limit of 8 variants, beyond which it would run eagerly without a word."""
    words = f"--num-layers 9 --fp16 --initial-loss-scale 4096 --apply-query-key-layer-scaling {UNFUSED} --train-iters 2"
    _, out = quietly(flags(words, EAGER), tmp_path)
    assert counters["stats"]["unique_graphs"] == 9 and "expected" not in out


def test_a_graph_serves_any_number_of_documents(monkeypatch):
    """A GPU's kernel takes as many places as there are documents."""
    monkeypatch.setattr(gpt, "find_document_edges", lambda *args: find_document_edges(*args).unique())
    model = build(PLAIN, "auto", masked=True)
    compile_layers(model.decoder.layers, "eager", 1)
    inputs = tokens(PLAIN)
    compiled = set()
    for documents in (2, 3, 5, 9):
        numbers = torch.arange(inputs.shape[1]) * documents // inputs.shape[1]
        model(inputs, inputs, documents_BT=numbers.expand(inputs.shape)).mean().backward()
        compiled.add(counters["stats"]["unique_graphs"])
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "words",
    ["--reset-attention-mask", pytest.param("--window-size 3,0 --window-attn-skip-freq 2", marks=pytest.mark.slow)],
)
def test_layers_that_call_a_flash_kernel_are_expected_in_pieces(tmp_path, words):
    _, out = quietly(flags("--train-iters 2 --eval-interval 2 --eval-iters 1", words, EAGER), tmp_path)
    assert counters["stats"]["unique_graphs"] > 2 and "expected" not in out


def test_steps_that_compile_are_marked_and_not_averaged(tmp_path):
    _, out = quietly(flags("--train-iters 9 --log-interval 4 --eval-interval 6 --eval-iters 1", EAGER), tmp_path)
    records = steps(tmp_path)
    assert [r["iteration"] for r in records if r.get("compiling")] == [1, 6]  # a layer that evaluates is another
    assert [f["steps"] for f in intervals(tmp_path)] == [[2], [3], [1]]
    assert wording("train/time-and-throughput-are", 1) in out
    assert wording("train/time-and-throughput-leave", 1) in out
    said = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", out)]
    ordinary = [r["ms"] for r in records if not r.get("compiling")]
    assert said[0] > records[0]["ms"] / 2 and max(said[1:]) < 1.5 * max(ordinary)


def test_too_many_compilations_are_said(tmp_path):
    """Here something else that compiled code depends on changes between steps."""

    class Meddles(Instrument):
        def begin(self, step):
            torch.use_deterministic_algorithms(step % 3 == 1, warn_only=step % 3 == 2)

    try:
        _, out = quietly(flags("--train-iters 6", EAGER), tmp_path, [Meddles()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert re.search(r"--torch-compile compiled \d+ graphs, where 2 were expected: .*TORCH_LOGS=recompiles", out)


def test_without_a_compiler_it_is_refused(tmp_path, monkeypatch):
    line = ["--torch-compile"]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = (
        "--torch-compile: there is no C++ compiler (g++) on the PATH; install one, or name one in the variable CXX, or take "
        "--torch-compile none."
    )
    assert mistakes(line) == [said]
    assert mistakes([*line, "--torch-compile-backend", "aot_eager"]) == []
    compiler = tmp_path / "mine"
    compiler.write_text("#!/bin/sh\n")
    os.chmod(compiler, stat.S_IRWXU)
    monkeypatch.setenv("CXX", "mine")
    assert mistakes(line) == []
    monkeypatch.setenv("CXX", "theirs")
    assert mistakes(line) == [said.replace("g++", "theirs")]


@pytest.mark.slow
def test_ranges_lie_around_compiled_layers(tmp_path):
    """Hooks inside a compiled layer would have it compiled again."""
    recompute = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    window = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4 --profile-modules"
    quietly(flags("--train-iters 4", EAGER, recompute, window), tmp_path)
    [trace] = tmp_path.glob("*.pt.trace.json")
    names = Counter(event.get("name") for event in json.loads(trace.read_text())["traceEvents"])
    assert all(names[f"layers.{i} {way}"] == 4 for i in (0, 1) for way in ("forward", "backward"))
    assert not any(".mlp" in str(name) for name in names) and counters["stats"]["unique_graphs"] == 1


def on_two_ranks(world, folder):
    for name, words in (("eager", ""), ("compiled", EAGER)):
        train(flags("--train-iters 5 --bf16 --ddp-bucket-size 2000", words, *DROPOUT), Path(folder) / name, world)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Gradients are reduced by DistributedDataParallel, in fp32 by a hook of ours, in more than one bucket."""
    outputs = on_ranks(on_two_ranks, tmp_path, str(tmp_path))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=2e-3)
    assert not any("were expected" in out for out in outputs)


@pytest.mark.slow
def test_inductor(tmp_path):
    """In fp32: test_equal_curves.py."""
    words = "--bf16 --recompute-granularity full --recompute-method uniform"
    argv = flags("--num-layers 3 --train-iters 5 --eval-interval 2 --eval-iters 1", words)
    quietly(argv, tmp_path / "eager")
    _, out = quietly([*argv, "--torch-compile"], tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=5e-3)
    assert "expected" not in out and steps(tmp_path / "compiled")[0]["compiling"]
