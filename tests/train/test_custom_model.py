"""--model: a module of the user's own trains as the GPT does, and one line for each that is not as it should be."""

import contextlib
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from support.finding_cases import CASES
from support.launch import (
    REPO,
    alone,
    flags,
    losses,
    on_ranks,
    plan_of,
    pretrain,
    quietly,
    train_all,
)
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.checkpoint.find import open_newest
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.instruments.memory_oom import list_remedies
from megatron_lite.planner.what_if import predict_peak

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn

class Own(nn.Module):
    """Gated convolutions over the past, tied embeddings; nothing of GPT."""

    def __init__(self, shape, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(nn.Conv1d(shape.hidden_size, 2 * shape.hidden_size, 3) for _ in range(shape.num_layers))
        self.input_layernorm = nn.LayerNorm(shape.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens, labels, positions=None, documents=None):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            past = F.pad(self.input_layernorm(hidden).mT, (2, 0))
            hidden = hidden + self.dropout(F.glu(layer(past).mT)) * self.scale
        logits = F.linear(hidden, self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

def build(shape):
    return Own(shape)

def quiet(shape):
    return Own(shape, dropout=0.0)

def returning(change):
    class Changed(Own):
        def forward(self, *inputs):
            return change(super().forward(*inputs))
    return Changed

mean = returning(lambda losses: losses.mean())
halves = returning(lambda losses: losses.half())
pair = returning(lambda losses: (losses, None))

class Three(Own):
    def forward(self, tokens, labels, positions):
        return super().forward(tokens, labels)

class Scalar(Own):
    def __init__(self, shape):
        super().__init__(shape)
        self.gain = nn.Parameter(torch.tensor(1.0))

class Unused(Own):
    def __init__(self, shape):
        super().__init__(shape)
        self.head = nn.Linear(2, 2)

class Counting(Own):
    def __init__(self, shape):
        super().__init__(shape)
        self.norm = nn.BatchNorm1d(3)

def frozen(shape):
    return Own(shape).requires_grad_(False)

def text(shape):
    return "a model"

def two(shape, more):
    pass

def own_error(shape):
    raise RuntimeError("out of order")

number = 7
'''


RANKED = {
    "fp32": ("", 5e-6),
    "fp16": ("--fp16 --initial-loss-scale 4096", 5e-3),
    "bf16": ("--bf16", 5e-3),
    "shared out": ("--use-distributed-optimizer", 5e-6),
    "shared out, bf16": ("--use-distributed-optimizer --bf16", 5e-3),
}
REFUSED = {
    "--tensor-model-parallel-size 2": "--tensor-model-parallel-size 2",
    "--context-parallel-size 2": "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2": "--pipeline-model-parallel-size 2",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--recompute-granularity selective": "--recompute-granularity selective",
    "--torch-compile": "--torch-compile layers",
    "--log-throughput": "--log-throughput",
    "--ckpt-format torch": "--ckpt-format torch",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(MODEL)
    return path


def argv(file: Path, function: str, *words: str | Path) -> list[str]:
    return flags("--model", f"{file}:{function}", *words)


def run(argv: list[str], folder: Path) -> str:
    with alone(), contextlib.redirect_stderr(io.StringIO()):
        return quietly(argv, folder)[1]


@pytest.fixture(scope="module")
def ranked(tmp_path_factory, file) -> Path:
    """Every scenario of RANKED on one rank and on two: folder 1 and folder 2."""
    folder = tmp_path_factory.mktemp("ranks")
    scenarios = {
        name: argv(file, "quiet", words, "--save", folder / "saves" / name) for name, (words, _) in RANKED.items()
    }
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    on_ranks(train_all, folder / "2", str(folder / "scenarios.json"))
    for name, line in scenarios.items():
        run(line[: line.index("--save")], folder / "1" / name)
    return folder


@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_are_one(ranked, name):
    one, two = (losses(ranked / ranks / name) for ranks in "12")
    assert len(one) == 6 and one[-1] < one[0]
    assert one == pytest.approx(two, rel=0, abs=RANKED[name][1])


def test_what_two_ranks_shared_out_one_goes_on_with(ranked, file, tmp_path):
    save = ranked / "saves" / "shared out"
    out = run(argv(file, "quiet", "--train-iters 8 --override-opt-param-scheduler --load", save), tmp_path / "one")
    whole = run(argv(file, "quiet", "--train-iters 8 --lr-decay-iters 6"), tmp_path / "whole")
    assert f"loaded iteration 6: {save}/iter_0000006" in out and "note: --load" not in out
    assert len(losses(tmp_path / "one")) == 2 and len(losses(tmp_path / "whole")) == 8 and whole
    assert losses(tmp_path / "one")[0] == pytest.approx(losses(tmp_path / "whole")[6], abs=5e-6)


@pytest.mark.parametrize("precision", ["", "--fp16 --initial-loss-scale 4096", "--bf16"])
def test_a_resumed_run_is_the_uninterrupted_one(file, tmp_path, precision):
    words = f"{precision} --eval-iters 1 --eval-interval 2"
    whole = run(argv(file, "build", words), tmp_path / "whole")
    half = argv(file, "build", words, "--save", tmp_path / "save", "--load", tmp_path / "save")
    run([*half, "--exit-interval", "3"], tmp_path / "half")
    resumed = run(half, tmp_path / "half2")
    assert losses(tmp_path / "whole")[3:] == losses(tmp_path / "half2") and len(losses(tmp_path / "half2")) == 3
    ends = [[line for line in out.splitlines() if "validation loss at iteration 6" in line] for out in (whole, resumed)]
    assert ends[0] == ends[1] != []


def test_another_file_is_told_and_another_model_refused(file, tmp_path):
    save = tmp_path / "save"
    run(argv(file, "build", "--save", save), tmp_path / "first")
    other = tmp_path / "other.py"
    other.write_text(MODEL + "\n# changed\n")
    out = run(argv(other, "build", "--load", save, "--skip-train"), tmp_path / "second")
    [note] = [line for line in out.splitlines() if "note: --load" in line]
    pattern = r".*: --model was \S+own.py:build \(SHA-256 (\w{64})\) and is \S+other.py:build \(SHA-256 (\w{64})\): its weights"
    assert len(set(re.match(pattern, note).groups())) == 2
    with pytest.raises(
        UserError, match=r"^--load \S+: holds the model of --model \S+own.py:build .*; give that flag.$"
    ):
        run(flags("--load", save), tmp_path / "gpt")
    with pytest.raises(UserError, match=r"^--load \S+: holds the model of .*; only training with it reads that.$"):
        open_newest(save)
    run(flags("--save", tmp_path / "gpt_save"), tmp_path / "gpt")
    with pytest.raises(UserError, match=r"^--load \S+: holds a GPT; drop --model.$"):
        run(argv(file, "build", "--load", tmp_path / "gpt_save"), tmp_path / "third")


def test_a_run_says_what_it_knows(file, tmp_path):
    """From start to end, profiled: console, run.json and report."""
    words = "--log-interval 3 --profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 6 --run-dir"
    ended = pretrain(argv(file, "build", words, tmp_path / "run"))
    assert ended.code == 0, ended.err
    assert wording("train/mfu-flops-and-memory", "--model", file) in ended.out and "predicted:" not in ended.out
    assert "tokens/s" in ended.out and "TFLOP/s per rank" not in ended.out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert record["model"] == {"function": f"{file}:build", "file": str(file), "sha256": digest}
    assert (record["parameters"], record["plan"]["shape"], record["status"]) == (None, None, "finished")
    facts = analyze([tmp_path / "run"]).facts
    assert facts.run.tokens_per_second > 0 and facts.run.model_tflops is None and facts.run.mfu_full is None
    assert any(wording("train/of-user-own-file") in note for note in facts.run.notes)
    assert facts.ranks_seen and "unexpected" not in ended.out and f"--model {file}:build" in ended.out


@pytest.mark.parametrize("words", REFUSED)
def test_what_knows_the_gpt_only_is_refused(words):
    line, world = read_command_line(flags("--model own.py:build", words)), World(0, 2, 0, 2)
    with pytest.raises(ConfigError) as caught:
        check(line, world)
    [mistake] = caught.value.mistakes
    assert mistake.startswith(wording("train/own-py-build-and", "--model", REFUSED[words]))


def test_the_pages_model_trains_with_the_pages_command(tmp_path):
    page = (REPO / "docs" / "custom_model.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [command] = re.findall(r"^    megatron-lite train (--model (?:.*\\\n)*.*)$", page, re.MULTILINE)
    (tmp_path / "convolutional.py").write_text(code)
    words = command.replace("\\\n", " ").split()
    short = [
        "--seq-length",
        "16",
        "--train-iters",
        "20",
        "--log-interval",
        "10",
        "--eval-iters",
        "0",
        "--num-workers",
        "0",
        "--run-dir",
        "run",
    ]
    ended = pretrain([*words, *short], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert wording("train/model-convolutional-py-build", "574,720") in ended.out
    first, last = (float(line["lm loss"]) for line in (ended.figures[0], ended.figures[-1]))
    assert last < first < 6.3


def test_findings_name_no_flag_that_is_refused(tmp_path):
    CASES["recompute-activations"][0](tmp_path)
    for own, flag in ((None, "--recompute-granularity full"), ({"function": "own.py:build"}, None)):
        record = json.loads((tmp_path / "run.json").read_text()) | {"model": own}
        (tmp_path / "run.json").write_text(json.dumps(record))
        [found] = [one for one in analyze([tmp_path]).findings if one.code == "recompute-activations"]
        assert (
            (flag in found.advice and flag in found.flags[0])
            if flag
            else ("--" not in found.advice and not found.flags)
        )


def test_remedies_against_lack_of_memory_promise_nothing(file):
    words = "--micro-batch-size 4 --bf16"
    known, unknown = (
        list_remedies(plan_of(line), predict_peak, {}, 1, 0) for line in (flags(words), argv(file, "build", words))
    )
    assert any("predicted peak" in one for one in known) and any("--recompute" in one for one in known)
    assert wording("train/instead-of-with-same", "--micro-batch-size", 2, 4, "--global-batch-size") in unknown
    assert not [one for one in unknown if "predicted" in one or "--recompute" in one]


def test_plan_says_that_it_cannot_know():
    with pytest.raises(
        UserError, match=r"^--model own.py:build: memory and speed of a model of your own are not known"
    ):
        planned_run(flags("--model own.py:build"), None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such", "FILE has no function no_such; check its name"),
        ("number", "FILE has no function number; check its name"),
        ("two", "cannot be called (missing a required argument: 'more'); let it take shape"),
        ("text", "returned a str; return a torch.nn.Module"),
        (
            "Three",
            "its module cannot be called (too many positional arguments); let it take tokens, labels, positions, doc",
        ),
        ("frozen", "its module has no parameter that requires a gradient; there is nothing to train"),
        ("Scalar", "its parameter gain has no dimension; give it the shape [1]"),
        (
            "Counting",
            "its buffer norm.running_mean would be in no checkpoint; register it with persistent=False, or make",
        ),
        (
            "Unused",
            "its module does not use its parameter head.weight for the losses; drop it, or freeze it: requires_g",
        ),
        ("mean", "its module returns losses of the shape []; return the loss of each token, [1, 16]"),
        ("halves", "its module returns losses in torch.float16; compute them in torch.float32, of logits.float()"),
        ("pair", "its module returns a tuple; return the loss of each token"),
    ],
)
def test_what_is_wrong_is_one_line(file, tmp_path, function, message):
    with pytest.raises(UserError) as caught:
        run(argv(file, function), tmp_path / "run")
    said = str(caught.value)
    assert said.startswith(f"--model {file}:{function}: {message.replace('FILE', str(file))}") and "\n" not in said


def test_a_missing_file_ends_a_run_before_it_begins(tmp_path):
    ended = pretrain(argv(Path("none.py"), "build", "--run-dir", tmp_path / "run"))
    assert ended.code == 2 and not (tmp_path / "run").exists()
    assert ended.err.strip().splitlines() == [wording("train/error-none-py-build", "--model")]


def test_an_error_of_the_users_own_keeps_its_traceback(file, tmp_path):
    with pytest.raises(RuntimeError, match="^out of order$"):
        run(argv(file, "own_error"), tmp_path / "run")
