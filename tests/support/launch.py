"""Runs of the trainer for tests: inside this process, as N gloo processes over one group, or as a user starts it."""

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.find import open_checkpoint
from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.instruments.base import Instrument, Instruments
from megatron_lite.instruments.build_instruments import build_instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.parallel.groups import make_groups
from megatron_lite.parallel.replica import Replica
from megatron_lite.planner.what_if import predict_peak
from megatron_lite.train.build_replica import build_model, build_replica
from megatron_lite.train.checkpoint_checks import require_checkpoint, reserve_save
from megatron_lite.train.console import set_up_logging
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.log import Log
from megatron_lite.train.real_backend import RealBackend
from megatron_lite.train.run import run
from megatron_lite.train.trackers import Charts
from support.forks import LAUNCHER, Fork
from support.paths import REPO, TESTS
from support.waiting import LIMIT_S

VOCABULARY = 127  # with the end of document 128 ids: no padding
EOD = VOCABULARY
ALONE = World()
CPU = torch.device("cpu")
RANK = TESTS / "run_rank.py"  # a file of its own, whose folder is what its imports are looked for in
END_OF_OUTPUT = 2000  # characters that a failure shows of each rank: a traceback comes last
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
MODEL = SMALL.split()
DATA = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), "--num-workers", "0"]
LENGTH = ["--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "6", "--lr", "1e-2"]
QUIET = ["--eval-iters", "0", "--log-interval", "1000"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
BASE = [*MODEL, *DATA, *LENGTH, *QUIET, *NO_DROPOUT]  # what is given later on a command line wins


def flags(*words: str | Path, data: Path | None = None) -> list[str]:
    """BASE, mock data or the files at `data`, then `words`: strings of several words, and paths."""
    source = ["--mock-data"] if data is None else ["--data-path", str(data)]
    extra = (part for word in words for part in (word.split() if isinstance(word, str) else [str(word)]))
    return [*BASE, *source, *extra]


def plan_of(argv: list[str], world: World = ALONE) -> Plan:
    line = read_command_line(argv)
    check(line, world)
    d = line.args.data
    tokenizer = make_tokenizer(d.tokenizer_type, vocab_file=None, merge_file=None, vocab_size=d.vocab_size)
    return resolve(line.args, world, tokenizer.vocab_size)


def build(plan: Plan, device: torch.device = CPU) -> Replica:
    """A rank's replica as a run builds it."""
    return build_replica(plan, make_groups(plan, device), RealBackend(device))


def build_bare(plan: Plan) -> torch.nn.Module:
    """A rank's model, whose gradients nobody adds up."""
    return build_model(plan, make_groups(plan, CPU), RealBackend(CPU))


def write_documents(prefix: Path, lengths, seed: int = 0) -> Path:
    """A .bin/.idx pair of documents that count upwards, an end of document after each; learnable."""
    random = np.random.default_rng(seed)
    with IndexedWriter(str(prefix), VOCABULARY + 1) as writer:
        for length in lengths:
            first, step = random.integers(VOCABULARY), random.integers(1, 4)
            writer.add_document([*((first + step * np.arange(length)) % VOCABULARY).tolist(), EOD])
    return prefix


@contextlib.contextmanager
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(argv: list[str], run_dir: Path, world: World = ALONE, watchers=()) -> str | None:
    """train.run.run with this process's group: everything of a run but its start and its end."""
    plan = plan_of(argv, world)
    run_dir.mkdir(parents=True, exist_ok=True)
    timeline = Timeline()
    set_up_logging(world.is_first)
    with (
        reserve_save(plan),
        Instruments([*build_instruments(plan, run_dir, timeline, print, predict_peak), *watchers], print) as watching,
    ):
        require_checkpoint(plan.args.checkpoint)
        with Charts(plan, run_dir) as charts:
            make_log = lambda metrics, progress: Log(plan, metrics, timeline, run_dir, progress, charts)
            return run(plan, DataStreams(plan), EOD, watching, make_log)


def quietly(argv: list[str], run_dir: Path, watchers=()) -> tuple[str | None, str]:
    """`train` without its output, which is returned after the reason for leaving early."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        reason = train(argv, run_dir, watchers=watchers)
    return reason, out.getvalue()


class Interrupts(Instrument):
    """Ctrl-C before a step: from the training itself, as far as other instruments can tell."""

    def __init__(self, step: int):
        self.step = step

    def begin(self, step):
        if step == self.step:
            raise KeyboardInterrupt


def steps(run_dir: Path) -> list[dict]:
    return [line for line in _lines(run_dir) if "ranks" not in line]


def intervals(run_dir: Path) -> list[dict]:
    """What was written of all ranks, one per console line."""
    return [line["ranks"] for line in _lines(run_dir) if "ranks" in line]


def _lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in steps(run_dir)]


def checkpoint(save: Path, iteration: int) -> dict:
    """The record of a checkpoint under "record", and all its tensors by name."""
    stored = open_checkpoint(save / f"iter_{iteration:07d}")
    tensors = {name: torch.empty(stored.size_of(name), dtype=stored.dtype_of(name)) for name in sorted(stored.names())}
    stored.read_into(tensors)
    return {"record": stored.record, **tensors}


def part(saved: dict, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


def same(a, b) -> bool:
    """Bitwise, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@dataclass
class Ended:
    """A process, or a launcher with its ranks, that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def figures(self) -> list[dict[str, str]]:
        """The fields of each iteration line."""
        lines = re.findall(r"^ \[[^\]]+\] iteration.*$", self.out, re.MULTILINE)
        return [_fields(line) for line in lines]


def _fields(line: str) -> dict[str, str]:
    head, *parts = [part.strip() for part in line.split("|") if part.strip()]
    return {"iteration": re.search(r"iteration +(\d+)/", head)[1]} | dict(part.rsplit(": ", 1) for part in parts)


def pretrain(argv: list[str], *args, seconds: float = LIMIT_S, **options) -> Ended:
    """A run from start to end, as `start` starts it."""
    started = time.monotonic()
    process = start(argv, *args, **options)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks and their loaders would live on
        raise
    return Ended(process.returncode, out, err, time.monotonic() - started)


def run_script(text: str, folder: Path) -> str:
    """Run Python in `folder`, its only argument, as a Fork; returns its output. It ends well."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(text)
        script.flush()
        ended = pretrain([str(folder)], script=script.name, cwd=folder)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


def start(
    argv: list[str],
    ranks: int = 0,
    script: Path | str = REPO / "pretrain_gpt.py",
    cwd=None,
    under: Sequence[str] = (),
    restarts: int = 0,
) -> subprocess.Popen:
    """As a user starts it, still running: torchrun for `ranks`, Python for none; both as a Fork.

    Args:
        under: a command that starts commands, and its options; then there is no Fork.
        restarts: how often torchrun starts failed ranks again.
    """
    words = [str(script), *argv]
    if ranks:
        options = f"--nproc_per_node {ranks} --max-restarts {restarts} --master_addr localhost --master_port"
        words = ["-m", LAUNCHER, *options.split(), str(free_port()), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd or REPO}
    if under:
        return subprocess.Popen([*under, sys.executable, *words], env=environment(), start_new_session=True, **pipes)
    return Fork(words, env=environment(), **pipes)


def environment() -> dict[str, str]:
    """This one's, on the CPU, without what a launcher around the tests may have set."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        inherited.pop(name, None)
    paths = [str(REPO), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Process ids of a torchrun's ranks; its first child is what they are forked from."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[1:]]


def send(pids: list[int], number: int = signal.SIGTERM):
    for pid in pids:
        os.kill(pid, number)


def on_ranks(function: Callable[..., None], folder: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Call function(world, *arguments) on `ranks` processes that share a gloo group; returns their output.

    Args:
        function: one at the top of a module, which each rank imports.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"store_{time.time_ns()}"
    paths = [folder / f"{name}.{rank}.out" for rank in range(ranks)]
    file = Path(inspect.getfile(function))
    module = file.stem if function.__module__ == "__main__" else function.__module__
    place = [str(file.parent), module, function.__name__]
    processes = []
    for rank, path in enumerate(paths):
        with open(path, "w") as out:
            words = [str(RANK), *place, name, str(rank), str(ranks), *arguments]
            processes.append(Fork(words, env=environment(), cwd=folder, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
    outputs = [path.read_text(errors="replace") for path in paths]
    ends = [
        f"rank {rank}, exit code {codes[rank]}: ...{outputs[rank][-END_OF_OUTPUT:]}"
        # others fail for the sake of one that a signal ended: it comes last, where a log that is cut has room for it
        for rank in sorted(range(ranks), key=lambda rank: (codes[rank] or 0) < 0)
    ]
    assert codes == [0] * ranks, "\n".join(ends)
    return outputs


def train_all(world: World, scenarios: str):
    """For on_ranks: train each of a JSON file's command lines, by name, into a folder of that name."""
    for name, argv in json.loads(Path(scenarios).read_text()).items():
        train(argv, Path(name), world)
        _leave_groups()


def write_no_tables():
    """For functions of on_ranks whose profiles nobody reads but as traces: torch averages operators longer than it trains."""
    TorchProfiler._write_table = lambda self, profiler: "no table"


def train_without_tables(world: World, scenarios: str):
    """train_all for runs that profile."""
    write_no_tables()
    train_all(world, scenarios)


def _leave_groups():
    """Close the groups of a run that is over; this process' own stays.

    Each gloo group keeps threads and connections: after 40 runs on 4 ranks they were 1,800 threads and 3,100 descriptors.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def run_rank(folder: str, module: str, function: str, store: str, rank: str, size: str, *arguments: str):
    """A rank's side of on_ranks: calls the function of a module that is on the path or in `folder`."""
    world = World(int(rank), int(size), int(rank), int(size))
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.abspath(store), world.size), rank=world.rank, world_size=world.size
    )
    sys.path.append(folder)
    getattr(importlib.import_module(module), function)(world, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # as megatron_lite/app.py: a thread of gloo that lets go of a tensor while the interpreter ends aborts the process
    os._exit(0)
