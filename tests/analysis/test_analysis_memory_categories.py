"""Categories against what a training loop really holds, and without tags against with them."""

import copy
import dataclasses
import pickle
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support import medium_lm
from support.launch import ALONE, alone, flags, plan_of, quietly
from torch import nn
from torch.nn import functional

from megatron_lite.analysis.memory.ledger import build_ledger
from megatron_lite.analysis.memory.read import SnapshotReader, analyze_snapshot, read_snapshot
from megatron_lite.analysis.memory.record import build_record
from megatron_lite.analysis.memory.stacks import Code, Stacks
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import PlanRecord, Prediction, RunRecord
from megatron_lite.instruments.memory_summary import peak
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.planner.categories import predict_categories
from megatron_lite.planner.walk.walk_steps import walk
from megatron_lite.train.run_record import record_plan

WIDTH, VOCABULARY, TOKENS = 64, 512, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def num_bytes(tensors) -> int:
    """Of their storages, shared ones once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def loop(model, optimizer, steps: int) -> int:
    """Ordinary training; returns the bytes of all that autograd keeps for backward besides weights and tokens."""
    saved: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.dtype == torch.float32:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (TOKENS,))
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(saved.values())


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_foreign_loop_without_tags_to_the_byte(tmp_path, from_the_start):
    """Recorded from before the model is made, or as people do it, from some step on."""
    tracker = StorageTracker(StepMarks(), 100_000)
    if from_the_start:
        tracker.start()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    if not from_the_start:
        loop(model, optimizer, 1)
        tracker.start()
    try:
        kept = loop(model, optimizer, 3)
        snapshot = tracker.snapshot()
    finally:
        tracker.stop()
    path = tmp_path / "s.pickle"
    snapshot = without_tags(snapshot)
    path.write_bytes(pickle.dumps(snapshot if from_the_start else without_old_stacks(snapshot), protocol=4))
    found = read_snapshot(path)
    highest = {one.category: one.requested_bytes for one in found.highest}
    weights = num_bytes(model.parameters())
    moments = num_bytes(state for states in optimizer.state.values() for state in states.values())
    assert len(found.steps) == 3
    if from_the_start:
        assert highest["parameters"] == highest["gradients"] == weights
        assert highest["moments"] == moments
    else:  # frameless memory from before: told apart by counting sizes
        assert highest["gradients"] == weights
        assert abs(highest["parameters"] - weights) + abs(highest["moments"] - moments) < 0.01 * (weights + moments)
    logits = TOKENS * VOCABULARY * 4
    assert abs(highest["activations"] + logits - kept) < 0.03 * kept
    assert 2 * logits <= highest["logits and loss"] <= 3 * logits + 4096


# a schedule so long that a table of its rates would be larger than the moments
RECORD = (
    "--record-memory-history --profile-step-start 2 --profile-step-end 5 --train-iters 5000000 --exit-interval 5 "
    "--num-layers 3"
)
SHAPE = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2"
WAYS = {
    "fp32": "",
    "untied": "--untie-embeddings-and-output-weights",
    "bf16": "--bf16",
    "fp16, dropout": "--fp16 --hidden-dropout 0.1 --attention-dropout 0.1",
    "many words": "--vocab-size 4000",
    "many words, bf16": "--vocab-size 4000 --bf16",
    "recompute": "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


DEFAULT = ("many words, bf16", "fp16, dropout", "recompute")


@pytest.fixture(
    scope="module", params=[pytest.param(way, marks=() if way in DEFAULT else pytest.mark.slow) for way in WAYS]
)
def own(request, tmp_path_factory):
    """(path of a run's snapshot, what its run.json says)."""
    folder = tmp_path_factory.mktemp("own")
    line = flags(SHAPE, RECORD, WAYS[request.param], "--memory-snapshot-path", folder / "s.pickle")
    with alone():
        quietly(line, folder / "run")
    plan = plan_of(line, dataclasses.replace(ALONE, threads=torch.get_num_threads()))
    prediction = Prediction(categories=predict_categories(plan))
    return folder / "s.pickle", RunRecord(plan=record_plan(plan), prediction=prediction)


def without_tags(snapshot: dict) -> dict:
    """As a GPU's allocator writes it for anybody: no tags, no annotations, no operators, and a backward on a thread of its
    own where Python has no frames."""
    snapshot = copy.deepcopy(snapshot)
    snapshot["external_annotations"] = []
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for entry in [*snapshot["device_traces"][0], *blocks]:
        entry.pop("user_metadata", None)
        python = [frame for frame in entry["frames"] if frame["line"]]
        names = [frame["name"] for frame in python]
        entry["frames"] = python[: names.index("_engine_run_backward")] if "_engine_run_backward" in names else python
    return snapshot


def without_old_stacks(snapshot: dict) -> dict:
    """An allocator that begins to record knows no stack of what is there; the tracker knows who touched it first."""
    new = {event["addr"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"}
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["address"] not in new:
            block["frames"] = []
    return snapshot


def test_without_tags_as_with_them(own):
    path, _ = own
    raw = pickle.loads(path.read_bytes())  # our own, written a moment ago
    told, guessed = (SnapshotReader(build_record(part, path)) for part in (raw, without_tags(raw)))
    lives = told.lives
    assert np.array_equal(lives.begin, guessed.lives.begin) and np.array_equal(lives.num_bytes, guessed.lives.num_bytes)
    peak = lives.held_after(int(np.argmax(told.allocated)) - 1)
    pairs = list(zip(told.categories[peak].tolist(), guessed.categories[peak].tolist(), lives.num_bytes[peak].tolist()))
    wrong = {(CATEGORIES[a], CATEGORIES[b]) for a, b, _ in pairs if a != b}
    assert sum(size for a, b, size in pairs if a == b) >= 0.99 * told.allocated.max(), wrong


SHAPES = [(2, positions, 10_000) for positions in (64, 256)]
MORE_SHAPES = [(2, 1024, 10_000), *product((1, 4), (32, 128, 512), (1000, 50_000))]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("layers", "positions", "vocabulary"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in MORE_SHAPES)],
)
def test_the_phase_of_the_peak_without_tags_is_the_walks(monkeypatch, layers, positions, vocabulary, bf16):
    """Somebody's language model with a loss that chooses by gather. At 256 positions the end of forward is the highest moment in
    fp32, by some numbers; in bf16 it is backward, whose gradient is cast while it is held twice: by one tensor of logits."""
    for name, value in (("LAYERS", layers), ("VOCABULARY", vocabulary)):
        monkeypatch.setattr(medium_lm, name, value)
    monkeypatch.setattr(medium_lm.AdamW, "step", lambda self: None)
    walked = walk(lambda: medium_lm.prepare(positions, bf16), 1, "cuda")
    phase = peak(walked).tag.split("/")[1]
    found = [analyze_snapshot(raw, Path("walked")).peak_phase for raw in (walked, without_tags(walked))]
    assert found == [phase, phase]
    if (layers, positions) == (2, 256):
        assert phase == ("backward" if bf16 else "forward")


def test_the_ledger_agrees_with_what_was_measured(own):
    path, record = own
    rows = {row.category: row for row in build_ledger(read_snapshot(path), record)}
    for category in ("parameters", "gradients", "master weights"):
        assert abs(rows[category].difference_bytes) <= 64, rows[category]
    assert 0 <= rows["logits and loss"].difference_bytes <= 6 * 4 * 128  # and some numbers per token
    assert 0 <= rows["moments"].difference_bytes < 1024  # and a step counter per weight
    assert abs(rows["activations"].difference_bytes) < 0.03 * rows["activations"].formula_bytes
    for foreign in (
        RunRecord(),
        RunRecord(plan=PlanRecord(precision="bf16")),
        msgspec.structs.replace(record, prediction=None),
    ):
        assert build_ledger(read_snapshot(path), foreign) == ()


FUNCTION_APPLY = {"filename": "/lib/torch/autograd/function.py", "line": 581, "name": "apply"}
MODEL_FORWARD = {"filename": "/app/gpt.py", "line": 12, "name": "forward"}
SCRIPT = {"filename": "/app/train.py", "line": 90, "name": "<module>"}
ENGINE = {"filename": "/lib/torch/autograd/graph.py", "line": 869, "name": "_engine_run_backward"}


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([FUNCTION_APPLY, MODEL_FORWARD, SCRIPT], Code.FORWARD),
        ([FUNCTION_APPLY, SCRIPT], Code.FORWARD),
        ([FUNCTION_APPLY, ENGINE, SCRIPT], Code.BACKWARD),
        ([FUNCTION_APPLY, ENGINE, MODEL_FORWARD, SCRIPT], Code.BACKWARD),
        ([FUNCTION_APPLY], Code.BACKWARD),
    ],
)
def test_a_function_of_autograd_belongs_to_the_phase_that_runs_it(frames, phase):
    """torch's frame is called apply for a function's forward and for its backward."""
    stacks = Stacks()
    number = stacks.number(frames)
    _, inner = stacks.codes
    assert inner[number] == phase
