"""Python processes that begin with torch and the trainer imported: importing takes longer than most runs of the tests."""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER = "torch.distributed.run"
IMPORTED = (  # all that usual runs and their launchers come to import
    "megatron_lite.app",
    "megatron_lite.run_planner",
    "torch._dynamo",
    "megatron_lite.checkpoint.megatron_dist",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    LAUNCHER,
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)
# Variables that libraries read while they are loaded: a fork would come too late for them.
READ_AT_START = ("CUDA", "GLIBC", "KINETO", "LD_", "MALLOC", "MKL", "OMP", "PYTHON", "TORCH")
FIRST_IMPORTS = {"KINETO_LOG_LEVEL": "6", "TEARDOWN_CUPTI": "1"}  # what pretrain_gpt.py sets before it imports torch


class Fork(subprocess.Popen):
    """A Python script and its arguments, or -m and a module and its, in a session of their own: Popen([sys.executable, *args]).

    It is forked from a server that has imported IMPORTED, and is a child of this process all the same: it has the streams,
    folder and environment it is given, and ends as Python ends. A launcher starts its ranks as forks too.
    """

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
    ):
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:6]
        server = self._find_server(env)
        request = json.dumps({"args": args, "cwd": os.fspath(cwd or os.getcwd()), "env": env}).encode()
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

    @staticmethod
    def _find_server(env: dict[str, str]) -> socket.socket:
        return _start_server(tuple(sorted(item for item in env.items() if item[0].startswith(READ_AT_START))))


@functools.cache
def _start_server(variables: tuple[tuple[str, str], ...]) -> socket.socket:
    """The link to a server with these of READ_AT_START; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(READ_AT_START)}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**environ, **FIRST_IMPORTS, **dict(variables)},
        )
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def _adopt_orphans(on: bool):
    """Whether processes below whose parents end become children of this one: Linux's prctl(PR_SET_CHILD_SUBREAPER)."""
    assert ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0) == 0


def _import_all():
    gc.disable()  # of what is imported nothing is garbage, and each search would walk all of it
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # trainings collect garbage; what is imported is none
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is not whole"


def _serve(link: socket.socket) -> Callable | None:
    """The server's side of Fork: returns what to run in each process that is asked for, and None at its own end."""
    with link:
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


def _become(streams: list[int], args: list[str], cwd: str, env: dict[str, str]) -> Callable | None:
    """Take on what a new process has of its own; returns what runs the script or module."""
    os.setsid()
    # in a fork torch makes its pool of threads anew at the first call, in which no second thread may meet it
    sys.modules["torch"].set_num_threads(1)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        args = args[1:]
    if args[0] != "-m":
        sys.argv, sys.path[0] = args, str(Path(args[0]).resolve().parent)
        return functools.partial(runpy.run_path, args[0], run_name="__main__")
    if args[1] == LAUNCHER and (ours := _fork_server_of_ranks()) is not None:
        return _serve(ours)
    sys.argv, sys.path[0] = args[1:], cwd
    return functools.partial(runpy.run_module, args[1], run_name="__main__", alter_sys=True)


def _fork_server_of_ranks() -> socket.socket | None:
    """Let this process, a launcher, ask a child of it, its first, for its ranks; returns that child's link to it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.setsid()  # a signal to the launcher's group is none to it
        return theirs
    theirs.close()

    class Rank(Fork):
        """Popen([sys.executable, *args])"""

        def __init__(self, args, **options):
            super().__init__(args[1:], **options)

        @staticmethod
        def _find_server(env):
            return ours

    subprocess_handler.Popen = Rank
    return None


if __name__ == "__main__":
    _import_all()
    if (run_wanted := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run_wanted()
