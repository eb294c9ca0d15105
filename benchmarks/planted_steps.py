"""Trainings with a planted step, small enough for seconds each, that `megatron-lite replay` is to explain.

A training of a minute at most is made once, with checkpoints; each plant goes on from one of them in this process, and
so do the replays: all of the command but the processes of its ranks.
"""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite import app
from megatron_lite.cli import replay
from megatron_lite.cli.rank_processes import EndedRank
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.formats.replay_report import ReplayCause, ReplayReport
from megatron_lite.replay import rank_process
from megatron_lite.replay.examine_step import StepExaminer
from megatron_lite.replay.replayed_training import ReplayedTraining
from megatron_lite.run_planner import RUN_PLANNER
from megatron_lite.step_failure import describe_failure
from megatron_lite.train.step import TrainingStep

VOCABULARY = 127  # with the end of document 128 ids
LENGTH = 32  # tokens of a document, with its end, and of a sequence
DOCUMENTS = 4000
BATCH = 8
CHECKPOINTS = 20  # iterations between them
BASE_STEPS = 340
GOES_ON_FROM = 320
MODEL = [
    "--num-layers",
    "3",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "127",
    "--num-workers",
    "0",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--eval-iters",
    "0",
    "--log-interval",
    "1",
    "--split",
    "100,0,0",
    "--clip-grad",
    "1",
    "--lr-decay-style",
    "constant",
    "--swiglu",
    "--disable-bias-linear",
]
RATE = ["--lr", "3e-3"]


@dataclass(frozen=True)
class Planted:
    """A step, and what is to be said of it.

    Attributes:
        name: Of the plant.
        cause: The right answer.
        plant: Called with the base and an empty folder: trains there, and returns the iteration to replay.
        in_replay: Entered around the replay.
    """

    name: str
    cause: ReplayCause
    plant: Callable[["BaseRun", Path], int]
    in_replay: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass
class BaseRun:
    """A training without a plant, in one precision, that plants go on from.

    Attributes:
        folder: Of its checkpoints and data.
        precision: Flags.
    """

    folder: Path
    precision: tuple[str, ...] = ()
    _order: list[list[int]] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.folder / "documents"

    @property
    def save(self) -> Path:
        return self.folder / "save"

    def make(self) -> None:
        """Write the data and train."""
        self.folder.mkdir(parents=True)
        write_documents(self.data, {})
        train(self.flags(self.save, "--train-iters", str(BASE_STEPS)))

    def flags(self, save: Path | None, *others: str, data: Path | None = None) -> list[str]:
        """The flags of a training.

        Args:
            save: Folder of checkpoints, and of the run.
            others: Further flags.
            data: Documents in the place of the base's.
        """
        where = ["--data-path", str(data or self.data)]
        saving = ["--save", str(save), "--save-interval", str(CHECKPOINTS)] if save else []
        return [*MODEL, *RATE, *self.precision, *where, *saving, *others]

    def go_on(self, folder: Path, *others: str, data: Path | None = None, after: int = GOES_ON_FROM) -> None:
        """Train on from a checkpoint in a folder of its own.

        Args:
            folder: Of the run, which gets the checkpoint and what was logged before it.
            others: Further flags.
            data: Documents in the place of the base's.
            after: Iteration of the checkpoint.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"iter_{after:07d}"
        shutil.copytree(self.save / name, folder / name)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(after))
        lines = (self.save / "steps.jsonl").read_text().splitlines(keepends=True)
        logged = [line for line in lines if '"kind":"step"' in line]
        kept = [line for line in logged if msgspec.json.decode(line)["iteration"] <= after]
        (folder / "steps.jsonl").write_text("".join(kept))
        train(self.flags(folder, "--train-iters", str(BASE_STEPS), "--load", str(folder), *others, data=data))

    def find_documents(self, iteration: int) -> list[int]:
        """Find the documents that are most of a sequence of an iteration's batch."""
        from megatron_lite.config.command_line import read_command_line
        from megatron_lite.data.build import DataSpec, build_datasets
        from megatron_lite.data.sample_pieces import find_pieces

        args = read_command_line(self.flags(None, "--train-iters", str(BASE_STEPS))).args
        spec = DataSpec(args.data, (BASE_STEPS * BATCH, 0, 0), LENGTH, args.training.seed, VOCABULARY + 1)
        dataset = build_datasets(spec).train
        first = (iteration - 1) * BATCH
        found = []
        for sample in range(first, first + BATCH):
            pieces = find_pieces(dataset, sample)
            found.append(max(pieces, key=lambda piece: piece.tokens).sequence)
        return found


def write_documents(prefix: Path, broken: dict[int, Sequence[int]]) -> None:
    """Write documents that count up from a random id by 1 to 3, an end after each.

    Args:
        prefix: Of the files.
        broken: Tokens of documents that are otherwise, by number.
    """
    random = np.random.default_rng(7)
    with IndexedWriter(str(prefix), VOCABULARY + 1) as writer:
        for number in range(DOCUMENTS):
            first = random.integers(VOCABULARY)
            step = random.integers(1, 4)
            tokens = ((first + step * np.arange(LENGTH - 1)) % VOCABULARY).tolist()
            tokens = list(broken.get(number, tokens))
            assert len(tokens) == LENGTH - 1
            writer.add_document([*tokens, VOCABULARY])


def train(argv: list[str]) -> str:
    """Train in this process. Returns what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        app.main(argv, RUN_PLANNER)
    return out.getvalue()


def replay_here(folder: Path, step: int, *options: str) -> ReplayReport:
    """Replay a step of a run of one rank in this process.

    Args:
        folder: Of the run.
        step: The iteration.
        options: Further ones of the command.
    """
    target = folder / "replay.json"

    def run_here(script: Sequence[str], *others: object) -> list[EndedRank]:
        return [EndedRank(rank_process.main(list(script[2:])), "")]

    with mock.patch.object(replay, "run_ranks", run_here), contextlib.redirect_stdout(io.StringIO()) as out:
        replay.run([str(folder), "--step", str(step), "--json", str(target), *options])
    (folder / "replay.txt").write_text(out.getvalue()[out.getvalue().find(" (confidence") - 20 :])
    return msgspec.json.decode(target.read_bytes(), type=ReplayReport)


def find_first_failure(folder: Path, after: int) -> int:
    """Find the first step of a run, after an iteration, that went wrong by what was logged."""
    from megatron_lite.cli.replayed_run import read_replayed_run

    logged = read_replayed_run(folder, BASE_STEPS).logged
    for number, step in enumerate(logged):
        if step.iteration > after and describe_failure(step, logged[:number]):
            return step.iteration
    raise LookupError(f"{folder}: no step went wrong")


# --- documents


def list_broken_tokens() -> dict[str, list[list[int]]]:
    """List kinds of broken documents: the tokens of each that is put into the batch."""
    random = np.random.default_rng(3)
    noise = lambda: random.integers(0, VOCABULARY, LENGTH - 1).tolist()
    places = np.arange(LENGTH - 1)
    up = (5 + 2 * places) % VOCABULARY
    return {
        "one token over and over": [[9] * (LENGTH - 1)],
        "the same, another token": [[101] * (LENGTH - 1)],
        "the end of document over and over": [[VOCABULARY] * (LENGTH - 1)],
        "random ids": [noise()],
        "random ids in two documents": [noise(), noise()],
        "counting down": [up[::-1].tolist()],
        "two tokens in turn": [[3, 77] * 15 + [3]],
        "steps of 40": [((11 + 40 * places) % VOCABULARY).tolist()],
        "squares": [((places * places) % VOCABULARY).tolist()],
        "random ids of a corner of the vocabulary": [random.integers(120, 127, LENGTH - 1).tolist()],
    }


def plant_documents(broken: Sequence[Sequence[int]], at: int) -> Callable[[BaseRun, Path], int]:
    """Plant broken documents in the batch of an iteration."""

    def plant(base: BaseRun, folder: Path) -> int:
        found = base.find_documents(at)
        data = folder / "documents"
        folder.mkdir(parents=True)
        write_documents(data, {found[2 + 3 * number]: tokens for number, tokens in enumerate(broken)})
        base.go_on(folder, data=data)
        return at

    return plant


# --- weights


@contextlib.contextmanager
def change_weights(iteration: int, change: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
    """Change the weights of a training behind the update of an iteration."""
    inner = TrainingStep.__call__

    def step(self: TrainingStep, batches: object, consumed: int, phase: object) -> object:
        result = inner(self, batches, consumed, phase)
        if consumed == (iteration - 1) * BATCH:
            masters = dict(zip(self.replica.names, self.optimizer.weights.masters, strict=True))
            with torch.no_grad():
                change(masters)
            self.optimizer.weights.write_back()
        return result

    with mock.patch.object(TrainingStep, "__call__", step):
        yield


def plant_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[BaseRun, Path], int]:
    """Plant weights that overflow in the step behind a checkpoint."""

    def plant(base: BaseRun, folder: Path) -> int:
        with change_weights(GOES_ON_FROM, change):
            base.go_on(folder, after=GOES_ON_FROM - CHECKPOINTS)
        return GOES_ON_FROM + 1

    return plant


def scale_values(layer: int, factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Make attention's values so many times larger and its projection smaller: the same function in real numbers."""

    def change(weights: dict[str, Tensor]) -> None:
        attention = f"decoder.layers.{layer}.self_attention"
        rows = weights[f"{attention}.linear_qkv.weight"].view(4, 3, 16, 64)
        rows[:, 2] *= factor
        weights[f"{attention}.linear_proj.weight"] /= factor

    return change


def scale_queries(layer: int, factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Make queries so many times larger and keys smaller: the same function in real numbers."""

    def change(weights: dict[str, Tensor]) -> None:
        rows = weights[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"].view(4, 3, 16, 64)
        rows[:, 0] *= factor
        rows[:, 1] /= factor

    return change


def scale_gated(layer: int, factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Make the linear half of an MLP's first layer larger and the second layer smaller: the same function."""

    def change(weights: dict[str, Tensor]) -> None:
        mlp = f"decoder.layers.{layer}.mlp"
        first = weights[f"{mlp}.linear_fc1.weight"]
        first[len(first) // 2 :] *= factor
        weights[f"{mlp}.linear_fc2.weight"] /= factor

    return change


def scale_one(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Make one weight so many times larger."""

    def change(weights: dict[str, Tensor]) -> None:
        weights[name] *= factor

    return change


# --- rates


def plant_rate(*words: str) -> Callable[[BaseRun, Path], int]:
    """Plant a learning rate from a checkpoint on."""

    def plant(base: BaseRun, folder: Path) -> int:
        base.go_on(folder, "--override-opt-param-scheduler", *words)
        return find_first_failure(folder, GOES_ON_FROM + 1)

    return plant


# --- bits


def flip_bit(tensor: Tensor, place: int, bit: int) -> Tensor:
    """A copy in which one bit of one number of 32 bits is flipped."""
    flipped = tensor.clone()
    bits = flipped.view(-1).view(torch.int32)
    bits[place % len(bits)] ^= 1 << bit
    return flipped


@contextlib.contextmanager
def flip_in_attempt(attempt: int, iteration: int, module: str, bit: int) -> Iterator[None]:
    """Flip a bit of what a module returns, in the first micro-batch of an iteration of one attempt only."""
    built: list[ReplayedTraining] = []
    build = StepExaminer._build

    def build_and_count(self: StepExaminer, *others: object) -> ReplayedTraining:
        training = build(self, *others)
        built.append(training)
        if len(built) == attempt:
            put_flip(training.replica.chunks[0], lambda: training.progress.iteration + 1 == iteration, module, bit)
        return training

    with mock.patch.object(StepExaminer, "_build", build_and_count):
        yield


def put_flip(model: nn.Module, is_due: Callable[[], bool], module: str, bit: int) -> None:
    """Flip a bit of what a module returns, once."""
    done = []

    def change(owner: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if done or not is_due():
            return None
        done.append(True)
        flipped = flip_bit(output.detach(), 17, bit)
        return output + (flipped - output.detach()) if flipped.isfinite().all() else output * flipped

    hook = model.get_submodule(module).register_forward_hook(change, prepend=True)
    assert hook is not None


def plant_nothing(at: int) -> Callable[[BaseRun, Path], int]:
    """A run without a plant."""

    def plant(base: BaseRun, folder: Path) -> int:
        base.go_on(folder)
        return at

    return plant


def plant_flip(at: int, module: str, bit: int) -> Callable[[BaseRun, Path], int]:
    """Flip a bit in the run itself."""

    def plant(base: BaseRun, folder: Path) -> int:
        prepare = TrainingStep.__init__

        def build(self: TrainingStep, plan: object, replica: object, *others: object) -> None:
            prepare(self, plan, replica, *others)
            seen = []
            replica.chunks[0].register_forward_pre_hook(lambda *_: seen.append(1))
            due = lambda: len(seen) == (at - GOES_ON_FROM - 1) * 4 + 1
            put_flip(replica.chunks[0], due, module, bit)

        with mock.patch.object(TrainingStep, "__init__", build):
            base.go_on(folder)
        return at

    return plant


# --- all of them

FP32 = ()
FP16 = ("--fp16", "--initial-loss-scale", "4096")
BF16 = ("--bf16",)


def list_planted() -> list[tuple[tuple[str, ...], Planted]]:
    """List the plants, each with the precision of its base."""
    found: list[tuple[tuple[str, ...], Planted]] = []
    add = lambda precision, *fields: found.append((precision, Planted(*fields)))
    for number, (name, broken) in enumerate(list_broken_tokens().items()):
        precision = BF16 if number % 5 == 4 else FP32
        add(precision, f"document: {name}", ReplayCause.DATA, plant_documents(broken, GOES_ON_FROM + 3 + number % 4))
    for layer in range(3):
        add(FP16, f"values of layer {layer} x 60000", ReplayCause.NUMERICS, plant_weights(scale_values(layer, 6e4)))
    for layer in range(2):
        add(FP16, f"queries of layer {layer} x 60000", ReplayCause.NUMERICS, plant_weights(scale_queries(layer, 6e4)))
    for layer in (0, 2):
        add(FP16, f"gated MLP of layer {layer} x 60000", ReplayCause.NUMERICS, plant_weights(scale_gated(layer, 6e4)))
    for name in ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.2.self_attention.linear_qkv.weight"):
        add(FP32, f"{name} x 1e25", ReplayCause.NUMERICS, plant_weights(scale_one(name, 1e25)))
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    add(BF16, f"{name} x 1e37", ReplayCause.NUMERICS, plant_weights(scale_one(name, 1e37)))
    for rate in ("0.02", "0.05", "0.1", "0.3", "1"):
        add(FP32, f"--lr {rate}", ReplayCause.RATE, plant_rate("--lr", rate))
    for rate in ("0.03", "0.2"):
        add(BF16, f"--lr {rate}, bf16", ReplayCause.RATE, plant_rate("--lr", rate))
    warmup = ("--lr-warmup-iters", "324", "--lr-warmup-init", "0")
    add(FP32, "--lr 0.1, warmup ends at 324", ReplayCause.RATE, plant_rate("--lr", "0.1", *warmup))
    add(FP32, "--lr 0.1 without clipping", ReplayCause.RATE, plant_rate("--lr", "0.1", "--clip-grad", "0"))
    add(FP16, "--lr 0.1, fp16", ReplayCause.RATE, plant_rate("--lr", "0.1"))
    flips = [
        (1, 323, "decoder.layers.0.mlp.linear_fc1", 30),
        (2, 323, "decoder.layers.1.mlp", 22),
        (2, 325, "decoder.layers.2.self_attention.linear_proj", 12),
        (1, 326, "decoder.final_layernorm", 3),
        (2, 321, "embedding.word_embeddings", 24),
        (2, 324, "decoder.layers.1.input_layernorm", 1),
    ]
    for attempt, iteration, module, bit in flips:
        enter = lambda attempt=attempt, iteration=iteration, module=module, bit=bit: flip_in_attempt(
            attempt, iteration, module, bit
        )
        title = f"bit {bit} of {module} at {iteration}, replay {attempt}"
        add(FP32, title, ReplayCause.HARDWARE, plant_nothing(326), enter)
    for at, module, bit in (
        (325, "decoder.layers.0.mlp.linear_fc1", 30),
        (326, "decoder.final_layernorm", 30),
        (324, "decoder.layers.2.mlp", 30),
        (327, "embedding.word_embeddings", 30),
    ):
        add(FP32, f"bit {bit} of {module} at {at}, the run itself", ReplayCause.HARDWARE, plant_flip(at, module, bit))
    for precision, at in ((FP32, 324), (BF16, 327), (FP16, 325), (FP32, 332)):
        title = f"nothing, step {at}, {' '.join(precision[:1]) or 'fp32'}"
        add(precision, title, ReplayCause.NOTHING, plant_nothing(at))
    return found
