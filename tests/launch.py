"""Runs of the trainer for tests: inside this process, as N gloo processes over one group, or as a user starts it."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from waiting import LIMIT_S

from megatron_lite.checkpoint.find import open_checkpoint
from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.build_instruments import choose
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.parallel.host_memory import libc_version, without_thread_cache
from megatron_lite.train.checkpoint import require_checkpoint, save_reserved
from megatron_lite.train.data_streams import Feed
from megatron_lite.train.run import run

REPO = Path(__file__).parent.parent
VOCABULARY = 127  # with the end of document 128 ids: no padding
EOD = VOCABULARY
ALONE = World()
MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
]
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
    say = print if world.is_first else _say_nothing
    with save_reserved(plan, say), Instruments([*choose(plan, run_dir, timeline, print), *watchers], print) as watching:
        require_checkpoint(plan)
        return run(plan, Feed(plan, say), EOD, timeline, watching, run_dir, say)


def quietly(argv: list[str], run_dir: Path, watchers=()) -> tuple[str | None, str]:
    """`train` without its output, which is returned after the reason for leaving early."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        reason = train(argv, run_dir, watchers=watchers)
    return reason, out.getvalue()


def _say_nothing(text: str):
    pass


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


def pretrain(
    argv: list[str],
    ranks: int = 0,
    script: Path | str = REPO / "pretrain_gpt.py",
    cwd=None,
    under=(),
    seconds: float = LIMIT_S,
    launcher: bool = False,
) -> Ended:
    """A run from start to end, as `start` starts it. Ranks are started without torchrun, unless `launcher`: a test of
    what torchrun does or says."""
    started = time.monotonic()
    if ranks and not launcher and not under:
        code, out, err = _run_forked_ranks(argv, ranks, script, cwd, seconds)
        return Ended(code, out, err, time.monotonic() - started)
    process = start(argv, ranks, script, cwd, under)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks and their loaders would live on
        raise
    return Ended(process.returncode, out, err, time.monotonic() - started)


def _run_forked_ranks(argv: list[str], ranks: int, script: Path | str, cwd, seconds: float) -> tuple[int, str, str]:
    """Exit code and output of ranks with the variables that a batch system sets; where one fails, the others are ended."""
    port = str(free_port())
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            Fork([str(script), *argv], stdout=out, stderr=err, cwd=cwd or REPO, env=start_environment(argv) | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost", "MASTER_PORT": port,
            })
            for rank in range(ranks)
        ]  # fmt: skip
        code = _wait_for_all(processes, seconds)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, *texts


def _wait_for_all(processes: list[subprocess.Popen], seconds: float) -> int:
    """0 if all end well; else 1, and those that live on are ended as torchrun does it."""
    end = time.monotonic() + seconds
    try:
        while (
            None in (codes := [process.poll() for process in processes]) and not any(codes) and time.monotonic() < end
        ):
            time.sleep(0.01)
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait(timeout=LIMIT_S)
        return int(any(process.returncode for process in processes))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # loaders too


def start(
    argv: list[str], ranks: int = 0, script: Path | str = REPO / "pretrain_gpt.py", cwd=None, under=()
) -> subprocess.Popen:
    """As a user starts it, still running: torchrun for `ranks`, a process of Python's (a Fork) for none.

    under: a command that starts commands, and its options.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd or REPO}
    if not ranks and not under:
        return Fork([str(script), *argv], env=start_environment(argv), **pipes)
    words = [str(script), *argv]
    if ranks:
        words = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(ranks),
            "--master_addr",
            "localhost",
            "--master_port",
            str(free_port()),
            *words,
        ]
    if not under:
        return Fork(words, env=environment(), **pipes)
    return subprocess.Popen([*under, sys.executable, *words], env=environment(), start_new_session=True, **pipes)


def start_environment(argv: list[str]) -> dict[str, str]:
    """`environment`, with what pretrain_gpt.py would start itself again for."""
    environ = environment()
    return "--use-pytorch-profiler" in argv and without_thread_cache(environ, libc_version()) or environ


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
    """Process ids of a torchrun's ranks."""
    return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]


def send(pids: list[int], number: int = signal.SIGTERM):
    for pid in pids:
        os.kill(pid, number)


def on_ranks(function: str, folder: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Call MODULE:FUNCTION(world, *arguments) on `ranks` processes that share a gloo group; returns their output."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"store_{time.time_ns()}"
    paths = [folder / f"{name}.{rank}.out" for rank in range(ranks)]
    processes = []
    for rank, path in enumerate(paths):
        with open(path, "w") as out:
            words = [function, name, str(rank), str(ranks), *arguments]
            processes.append(
                Fork([__file__, *words], env=environment(), cwd=folder, stdout=out, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
    outputs = [path.read_text(errors="replace") for path in paths]
    assert codes == [0] * ranks, "\n".join(
        f"rank {rank}: {code}: {out}" for rank, (code, out) in enumerate(zip(codes, outputs))
    )
    return outputs


def train_all(world: World, scenarios: str):
    """For on_ranks: train each of a JSON file's command lines, by name, into a folder of that name."""
    for name, argv in json.loads(Path(scenarios).read_text()).items():
        train(argv, Path(name), world)


def _run_rank(function: str, store: str, rank: str, size: str, *arguments: str):
    """A rank's side of on_ranks."""
    world = World(int(rank), int(size), int(rank), int(size))
    dist.init_process_group("gloo", store=dist.FileStore(store, world.size), rank=world.rank, world_size=world.size)
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(world, *arguments)
    dist.barrier()
    dist.destroy_process_group()


class Fork(subprocess.Popen):
    """A Python script and its arguments, or -m and a module and its, in a session of their own: Popen([sys.executable, *args]).

    It is forked from a process that has imported torch and the trainer: that takes longer than most runs of the tests. It
    is a child of this process all the same, has the streams, folder and environment it is given, and ends as Python ends.
    """

    def _execute_child(
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        *rest,
    ):
        server = _fork_server(tuple(sorted(item for item in env.items() if item[0].startswith(READ_AT_START))))
        request = json.dumps({"args": args, "cwd": os.fspath(cwd), "env": env}).encode()
        _adopt_orphans(True)
        try:
            streams = [given if given >= 0 else inherited for given, inherited in ((c2pwrite, 1), (errwrite, 2))]
            socket.send_fds(server, [request], streams)
            self.pid = int(server.recv(100))
            server.recv(100)  # by now it is a child of this process
        finally:
            _adopt_orphans(False)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


# Variables that libraries read while they are loaded: a fork would come too late for them.
READ_AT_START = ("CUDA", "GLIBC", "KINETO", "LD_", "MALLOC", "MKL", "OMP", "PYTHON", "TORCH")
FIRST_IMPORTS = {"KINETO_LOG_LEVEL": "6", "TEARDOWN_CUPTI": "1"}  # what pretrain_gpt.py sets before it imports torch


@functools.cache
def _fork_server(variables: tuple[tuple[str, str], ...]) -> socket.socket:
    """The link to a server with these of READ_AT_START; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {name: value for name, value in environment().items() if not name.startswith(READ_AT_START)}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**environ, **FIRST_IMPORTS, **dict(variables)},
        )  # fmt: skip
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def _adopt_orphans(on: bool):
    """Whether processes below whose parents end become children of this one: Linux's prctl(PR_SET_CHILD_SUBREAPER)."""
    assert ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0) == 0


def _serve(number: int) -> Callable | None:
    """The server's side of Fork: returns what to run in each process that is asked for, and None at its own end."""
    for name in ("megatron_lite.app", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard"):
        importlib.import_module(name)  # all that usual runs come to import
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # trainings collect garbage; what is imported is none
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is not whole"
    with socket.socket(fileno=number) as link:
        while True:
            text, streams, *_ = socket.recv_fds(link, 2**20, 2)
            if not text:
                return None
            if between := os.fork():
                os.waitpid(between, 0)  # whose end gives its child to the process that asks
                link.send(b"adopted")
                for stream in streams:
                    os.close(stream)
                continue
            between = os.getpid()
            if child := os.fork():
                link.send(str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            break
    return _become(streams, **json.loads(text))


def _become(streams: list[int], args: list[str], cwd: str, env: dict[str, str]) -> Callable:
    """Take on what a new process has of its own; returns what runs the script or module."""
    os.setsid()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-m":
        sys.argv, sys.path[0] = args[1:], cwd
        return functools.partial(runpy.run_module, args[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
    return functools.partial(runpy.run_path, args[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        _run_rank(*sys.argv[1:])
    elif (run_wanted := _serve(int(sys.argv[2]))) is not None:
        run_wanted()
