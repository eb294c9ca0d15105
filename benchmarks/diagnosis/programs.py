"""Trainings on a CPU as people write them, each with a planted cause, and sound ones. They know nothing of the tools that diagnose them.

    python -m benchmarks.diagnosis.programs NAME [--trace FOLDER | --traceml] [--steps N]

NAME may have other sizes than its class: "SavesEachStep:width=384,depth=7".
--trace: torch.profiler records steps, as a program would that its author profiles; before, the program and its twin without the
cause are timed, and truth.json beside the traces says how long their steps were and how long the process waited for cores.
--traceml: the loop marks its steps for TraceML, whose launcher starts it. Programs of two ranks are started by torchrun.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

TIMED, WARM_UP, RECORDED = 8, 4, 6
RANK = int(os.environ.get("RANK", "0"))


class Vectors(Dataset):
    """Samples that are made from their number."""

    def __init__(self, width: int, sleep_s: float = 0.0, loops: int = 0) -> None:
        self.width = width
        self.sleep_s = sleep_s
        self.loops = loops

    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        total = 0
        for part in range(self.loops):
            total += part * number
        generator = torch.Generator().manual_seed(number)
        return torch.randn(self.width, generator=generator), number % 16


class Stream(IterableDataset):
    """Batches of an iterator."""

    def __init__(self, batches: Iterator) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator:
        return self.batches


class Program:
    """A loop over batches of vectors, whose parts causes override."""

    ranks = 1
    width = 512
    depth = 5
    batch = 128
    threads = 1

    def __init__(self) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(self.threads)
        self.model = self.build_model()
        self.step_model = self.wrap(self.model)
        self.optimizer = self.build_optimizer()
        self.loader = self.build_loader()

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.depth):
            layers += [nn.Linear(self.width, self.width), nn.SiLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, 16))

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model) if self.ranks > 1 else model

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def build_loader(self) -> object:
        return self.keep_batches(8)

    def keep_batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Batches in memory."""
        return [(torch.randn(self.batch, self.width), torch.randint(0, 16, (self.batch,))) for _ in range(count)]

    def batches(self) -> Iterator:
        while True:
            yield from self.loader

    def loss(self, batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.step_model(x), y)

    def before_step(self, number: int) -> None: ...

    def after_step(self, number: int) -> None: ...

    def train_step(self, batch, number: int) -> None:
        self.before_step(number)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(batch).backward()
        self.optimizer.step()
        self.after_step(number)


class Gpt(Program):
    """A small GPT."""

    batch = 8
    length = 96
    width = 160
    depth = 4
    vocabulary = 384

    def build_model(self):
        layer = nn.TransformerEncoderLayer(
            self.width, 4, 4 * self.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        parts = {
            "embed": nn.Embedding(self.vocabulary, self.width),
            "body": nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False),
            "head": nn.Linear(self.width, self.vocabulary),
        }
        return nn.ModuleDict(parts)

    def wrap(self, model):
        return model

    def keep_batches(self, count):
        tokens = torch.randint(0, self.vocabulary, (count, self.batch, self.length + 1))
        return [(one[:, :-1], one[:, 1:]) for one in tokens]

    def loss(self, batch):
        x, y = batch
        mask = nn.Transformer.generate_square_subsequent_mask(self.length)
        hidden = self.model["body"](self.model["embed"](x), mask=mask, is_causal=True)
        return F.cross_entropy(self.model["head"](hidden).flatten(0, 1), y.flatten())


class Images(Program):
    """A small network of convolutions."""

    batch = 32

    def build_model(self):
        layers: list[nn.Module] = []
        for before, after in ((3, 24), (24, 48), (48, 48)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 16, 16))

    def keep_batches(self, count):
        return [(torch.randn(self.batch, 3, 32, 32), torch.randint(0, 16, (self.batch,))) for _ in range(count)]


class TwoRanks(Program):
    ranks = 2


# --- causes: input


class SlowSamples(Program):
    """A dataset that sleeps 1 ms for each sample, read by the training thread."""

    batch = 48

    def build_loader(self):
        return DataLoader(Vectors(self.width, sleep_s=0.001), batch_size=self.batch)


class OneSlowWorker(Program):
    """A worker that needs 60 ms for a batch."""

    batch = 48

    def build_loader(self):
        return DataLoader(Vectors(self.width, sleep_s=0.0013), batch_size=self.batch, num_workers=1)


class OwnReader(Program):
    """A generator of the program's own that reads slowly: no DataLoader."""

    def batches(self):
        ready = self.keep_batches(8)
        while True:
            for one in ready:
                time.sleep(0.035)
                yield one


class SlowReaderOnOneRank(TwoRanks):
    """Rank 1 reads 40 ms longer than rank 0."""

    batch = 40

    def build_loader(self):
        return DataLoader(Vectors(self.width, sleep_s=0.001 * RANK), batch_size=self.batch)


# --- causes: the host


class RemoteCall(Program):
    """Forward waits 30 ms for an answer of a service."""

    def loss(self, batch):
        time.sleep(0.03)
        return super().loss(batch)


class PythonMetrics(Program):
    """A confusion matrix in pure Python behind each step."""

    def after_step(self, number):
        counts: dict[tuple[int, int], int] = {}
        for index in range(120_000):
            key = (index % 16, index % 15)
            counts[key] = counts.get(key, 0) + 1


class LogsWeights(Program):
    """Weights are logged as text in each step."""

    def after_step(self, number):
        log = logging.getLogger("weights")
        log.propagate = False
        log.setLevel(logging.INFO)
        if not log.handlers:
            log.addHandler(logging.StreamHandler(io.StringIO()))
        for name, weight in self.model.named_parameters():
            for value in weight.flatten()[:1500].tolist():
                log.info("%s %.6f", name, value)


class CollectsGarbage(Program):
    """gc.collect() in each step, over a heap of a million objects."""

    def __init__(self):
        super().__init__()
        self.held = [[number] for number in range(700_000)]

    def after_step(self, number):
        gc.collect()


class Scan(torch.autograd.Function):
    """A function of autograd whose backward loops in Python."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        total = 0.0
        for row in range(ctx.rows):
            for column in range(2_500):
                total += row * column
        return gradient


class PythonInBackward(Program):
    """A custom autograd.Function with a loop in Python."""

    def loss(self, batch):
        x, y = batch
        return super().loss((Scan.apply(x.requires_grad_()), y))


class SavesEachStep(Program):
    """A checkpoint in each step."""

    def after_step(self, number):
        with open(Path(os.environ.get("TMPDIR", "/tmp")) / f"diagnosis_{os.getpid()}.pt", "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            os.fsync(file.fileno())


class Recompiles(Program):
    """A compiled model that gets another batch size in each step."""

    depth = 2

    def __init__(self):
        super().__init__()
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 512
        torch._dynamo.reset()
        self.step_model = torch.compile(self.model, backend="aot_eager", dynamic=False)

    def batches(self):
        size = 32
        while True:
            size += 1
            yield torch.randn(size, self.width), torch.randint(0, 16, (size,))


# --- causes: operations


class LoopingOptimizer(Program):
    """AdamW tensor by tensor, over 200 small tensors."""

    depth = 100
    width = 24
    batch = 16

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False, fused=False)


class SecondForward(Program):
    """The model runs once more under no_grad for an accuracy."""

    def loss(self, batch):
        with torch.no_grad():
            self.step_model(batch[0]).argmax(-1)
        return super().loss(batch)


class KeepsGraphs(Program):
    """Losses are kept with their graphs: memory grows."""

    batch = 512

    def __init__(self):
        super().__init__()
        self.kept: list[Tensor] = []

    def loss(self, batch):
        loss = super().loss(batch)
        x = batch[0].clone().requires_grad_()
        self.kept.append((self.model[0](x) * torch.ones(self.batch, self.width)).sum())
        return loss


class ManyThreads(Program):
    """32 threads on the cores that there are."""

    threads = 32
    depth = 8


# --- causes: between ranks


def keep_busy(seconds: float) -> None:
    """Run operations for a while, as on a slow core."""
    square = torch.ones(128, 128)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        square.sin()


class SlowRank(TwoRanks):
    """Rank 1 computes 35 ms longer in each forward."""

    def loss(self, batch):
        keep_busy(0.035 * RANK)
        return super().loss(batch)


class LateInTurns(TwoRanks):
    """Ranks take turns: 35 ms longer in every other step."""

    def before_step(self, number):
        if number % 2 == RANK:
            keep_busy(0.035)


class ReducesByHand(TwoRanks):
    """Gradients are reduced one by one behind backward."""

    depth = 10

    def wrap(self, model):
        return model

    def train_step(self, batch, number):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(batch).backward()
        for weight in self.model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= 2
        self.optimizer.step()


class ReducesEachMicroBatch(TwoRanks):
    """Six micro-batches without no_sync."""

    depth = 8
    batch = 24
    accumulated = True

    def train_step(self, batch, number):
        self.optimizer.zero_grad(set_to_none=True)
        for part in range(6):
            skipped = contextlib.nullcontext() if self.accumulated or part == 5 else self.step_model.no_sync()
            with skipped:
                (self.loss(batch) / 6).backward()
        self.optimizer.step()


class AccumulatesGradients(ReducesEachMicroBatch):
    """Six micro-batches, one reduction."""

    accumulated = False


class GathersObjects(TwoRanks):
    """Metrics travel as pickled objects, forty times a step."""

    def after_step(self, number):
        for part in range(40):
            found: list[object] = [None, None]
            dist.all_gather_object(found, {"part": part, "words": ["metric"] * 3000})


# --- sound ones


class Sound(Program):
    """Batches in memory."""


class SoundGpt(Gpt):
    """A small GPT."""


class SoundImages(Images):
    """Convolutions."""


class SoundLoader(Program):
    """A quick loader: samples are rows of a tensor."""

    width = 768
    batch = 256

    def build_loader(self):
        data = torch.utils.data.TensorDataset(torch.randn(4096, self.width), torch.randint(0, 16, (4096,)))
        sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), self.batch, False)
        return DataLoader(data, sampler=sampler, batch_size=None)


class SoundRanks(TwoRanks):
    """Two ranks."""

    batch = 512


class SoundSgd(Images):
    """SGD with momentum, and a loss that is read in each step, which costs a CPU nothing."""

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9, fused=True)

    def after_step(self, number):
        self.last = next(self.model.parameters()).flatten()[0].item()


TWINS: dict[str, type[Program]] = {
    "SlowSamples": type("QuickSamples", (SlowSamples,), {"build_loader": Program.build_loader}),
    "OneSlowWorker": type("NoWorker", (OneSlowWorker,), {"build_loader": Program.build_loader}),
    "SlowReaderOnOneRank": type("QuickReader", (SlowReaderOnOneRank,), {"build_loader": Program.build_loader}),
    "Recompiles": type("NotCompiled", (Program,), {"depth": 2, "batch": 48}),
    "LoopingOptimizer": type("FusedOptimizer", (LoopingOptimizer,), {"build_optimizer": Program.build_optimizer}),
    "ManyThreads": type("TwoThreads", (ManyThreads,), {"threads": 1}),
    "ReducesByHand": type("Overlapping", (TwoRanks,), {"depth": 10}),
    "ReducesEachMicroBatch": AccumulatesGradients,
    "KeepsGraphs": type("KeepsNothing", (Program,), {"batch": 512}),
}


def find_program(text: str) -> type[Program]:
    """Find a program by "Name" or "Name:attribute=number,attribute=number"."""
    name, sizes = read_sizes(text)
    return type(name, (globals()[name],), sizes)


def read_sizes(text: str) -> tuple[str, dict[str, int]]:
    """Read a program's name, and sizes that are other than its class has them."""
    name, _, settings = text.partition(":")
    pairs = [setting.split("=") for setting in settings.split(",")] if settings else []
    return name, {attribute: int(number) for attribute, number in pairs}


def build_twin(text: str) -> Program:
    """Build the program without its cause."""
    name, sizes = read_sizes(text)
    kind = globals()[name]
    plain = TWINS.get(name) or next(one for one in kind.__mro__ if one in (TwoRanks, Images, Gpt, Program))
    # its threads are what ManyThreads plants
    sizes.pop("threads", None)
    return type("Twin", (plain,), sizes)()


class Marks:
    """How a loop's steps are marked: not at all, or for TraceML."""

    def __init__(self, traceml: bool) -> None:
        self.traceml = None
        if traceml:
            import traceml_ai

            traceml_ai.init(mode="auto")
            self.traceml = traceml_ai

    def step(self, model: nn.Module) -> contextlib.AbstractContextManager:
        return self.traceml.trace_step(model) if self.traceml else contextlib.nullcontext()


def time_steps(program: Program, count: int = TIMED) -> float:
    """Measure the median step in milliseconds without waits for a core, the first two left out."""
    batches = program.batches()
    taken = []
    for number in range(count):
        began = time.perf_counter() - read_wait_s()
        program.train_step(next(batches), number)
        taken.append(1e3 * (time.perf_counter() - read_wait_s() - began))
    return statistics.median(taken[2:])


def read_wait_s() -> float:
    """Read how long the process' main thread has waited for a core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def record(name: str, folder: Path) -> None:
    """Time program and twin, and record the program."""
    twin_ms = time_steps(build_twin(name))
    program = find_program(name)()
    step_ms = time_steps(program)
    path = folder / f"rank{RANK}.1759000000000000000.pt.trace.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    schedule = torch.profiler.schedule(wait=WARM_UP - 2, warmup=2, active=RECORDED)
    batches = program.batches()
    profiler = torch.profiler.profile(
        schedule=schedule,
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=lambda ended: ended.export_chrome_trace(str(path)),
    )
    waited = 0.0
    began = 0.0
    with profiler:
        for number in range(WARM_UP + RECORDED):
            if number == WARM_UP:
                waited = read_wait_s()
                began = time.perf_counter()
            program.train_step(next(batches), number)
            if number == WARM_UP + RECORDED - 1:
                share = (read_wait_s() - waited) / (time.perf_counter() - began)
            profiler.step()
    truth = {"step_ms": step_ms, "twin_ms": twin_ms, "core_wait_share": share}
    (folder / f"truth_rank{RANK}.json").write_text(json.dumps(truth))


def train(name: str, steps: int, traceml: bool) -> None:
    """Train without a profiler."""
    marks = Marks(traceml)
    program = find_program(name)()
    batches = program.batches()
    if traceml and not isinstance(program.loader, DataLoader):
        # TraceML sees the wait for a batch in a DataLoader alone
        batches = iter(DataLoader(Stream(batches), batch_size=None))
    for number in range(steps):
        batch = next(batches)
        with marks.step(program.model):
            program.train_step(batch, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--traceml", action="store_true")
    parser.add_argument("--steps", type=int, default=26)
    given = parser.parse_args()
    if find_program(given.name).ranks > 1:
        dist.init_process_group("gloo")
    if given.trace:
        record(given.name, given.trace)
    else:
        train(given.name, given.steps, given.traceml)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
