"""The recorder beside a training: last words, and what it dumps when a step is late, a signal comes or an error ends it."""

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.launch import alone
from support.paths import REPO
from support.waiting import LIMIT_S, wait_until
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing.spawn import ProcessExitedException

from megatron_lite import last_words, signal_pipe
from megatron_lite.formats.failure_record import RankAtFailure
from megatron_lite.last_words import is_late, read_words, remove_recordings, stands_still
from megatron_lite.signal_pipe import SignalPipe
from megatron_lite.watch import rank_recorder
from megatron_lite.watch.ended_children import find_exit_codes
from megatron_lite.watch.error_text import MAX_TOLD_CHARACTERS, describe_error, describe_error_stack, name_error
from megatron_lite.watch.flight_dump import FlightDump, remove_flight
from megatron_lite.watch.profiler import Profiler
from megatron_lite.watch.rank_recorder import RankRecorder, has_own_rank
from megatron_lite.watch.step_position import StepPosition

# numbers of files that select() takes
SELECTABLE_FILES = 1024


class Loop:
    """A loop that is where a test wants it."""

    is_recording = False
    position = StepPosition()

    def stand(self, **position):
        """Stand from now on in a step."""
        now = time.perf_counter()
        self.position = StepPosition(**{"step_since": now, "phase_since": now, "moved_at": now, **position})


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A recorder of this process, which is rank 3 of 4 and writes often."""
    monkeypatch.setattr(rank_recorder, "BEATS_APART_S", 0.02)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv(rank_recorder.WATCHED_RANK, raising=False)
    one = RankRecorder(tmp_path, Loop())
    yield one
    one.end()
    if one._thread is not None:
        one._thread.join()


def read_one(folder, name="3") -> RankAtFailure:
    return dict(read_words(folder))[name]


def test_a_rank_tells_where_it_is_until_it_ends(tmp_path, recorder):
    assert has_own_rank()
    recorder.start()
    assert not has_own_rank(), "what this process starts is no rank"
    wait_until(lambda: "3" in dict(read_words(tmp_path)))
    recorder._profiler.stand(step=6, phase="backward", usual_step_s=0.5)
    wait_until(lambda: read_one(tmp_path).phase == "backward")
    now = read_one(tmp_path)
    assert (now.rank, now.world_size, now.step, now.pid, now.left) == (3, 4, 6, os.getpid(), None)
    assert now.usual_step_s == 0.5
    recorder.end()
    ended = read_one(tmp_path)
    assert (ended.left, ended.step) == ("no error", 6) and ended.ended_at >= now.wall_time
    recorder.note_error(ValueError("too late"))
    assert read_one(tmp_path) == ended
    assert not list(tmp_path.glob("stacks/*")), "nobody has asked for stacks"


def test_a_late_step_is_looked_at_and_forgotten_when_it_goes_on(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(last_words, "MIN_LATE_STEP_S", 0.2)
    with alone():
        dist.all_reduce(torch.ones(2))
        recorder.start()
        recorder._profiler.stand(step=5, usual_step_s=0.001)
        flight, stacks = tmp_path / "flight" / "rank-0", tmp_path / "stacks" / "rank-0.txt"
        wait_until(lambda: flight.exists() and stacks.stat().st_size)
        recording = pickle.loads(flight.read_bytes())
        mine = [entry for entry in recording["entries"] if entry["profiling_name"] == "gloo:all_reduce"]
        assert any(frame["filename"] == __file__ for frame in mine[-1]["frames"])
        # of the rank that the group gave it, not of the launcher's
        assert any(__file__ in call for call in read_one(tmp_path, "0").stack)
        assert "3" not in dict(read_words(tmp_path)) or read_one(tmp_path).rank == 3
        monkeypatch.setattr(last_words, "MIN_LATE_STEP_S", 1000.0)
        wait_until(lambda: not flight.exists() and not stacks.stat().st_size)
        wait_until(lambda: read_one(tmp_path, "0").stack == ())
        monkeypatch.setattr(last_words, "MIN_LATE_STEP_S", 0.2)
        wait_until(lambda: flight.exists() and read_one(tmp_path, "0").stack)
        recorder.end()
        assert any(__file__ in call for call in read_one(tmp_path, "0").stack), "where it was when it was late"


def test_an_error_is_written_at_once_and_an_exit_at_the_end(tmp_path, recorder):
    recorder.start()
    recorder.note_exit(3, KeyError("no"))
    wait_until(lambda: "3" in dict(read_words(tmp_path)))
    assert read_one(tmp_path).left is None, "who calls sys.exit may think better of it"
    try:
        raise ValueError("bad batch") from OSError("disk")
    except ValueError as error:
        recorder.note_error(error)
    said = read_one(tmp_path)
    assert (said.left, said.error, said.exit_code) == ("ValueError: bad batch", "ValueError", 1)
    assert "OSError: disk" in said.message
    assert said.error_stack[0].startswith(f"test_an_error_is_written_at_once_and_an_exit_at_the_end ({__file__}:")


@pytest.mark.parametrize(
    ("code", "handled", "left", "number"),
    [
        (None, None, "no error", 0),
        (0, KeyError("no"), "no error", 0),
        (3, None, "exit code 3", 3),
        ("words", None, "exit code 1", 1),
        (5, KeyError("no"), "KeyError: 'no'", 5),
    ],
)
def test_exits(tmp_path, recorder, code, handled, left, number):
    recorder.start()
    recorder.note_exit(code, handled)
    recorder.end()
    assert (read_one(tmp_path).left, read_one(tmp_path).exit_code) == (left, number)


def test_a_process_that_does_not_train_tells_only_what_went_wrong(tmp_path, recorder, monkeypatch):
    monkeypatch.delenv("RANK")
    recorder.note_exit(0, None)
    recorder.end()
    assert not list(read_words(tmp_path))
    tmp_path.joinpath("flight").mkdir()
    recorder.note_error(ValueError("no"))
    recorder.end()
    assert dict(read_words(tmp_path))[f"pid-{os.getpid()}"].error == "ValueError"


def test_texts_of_errors():
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe_error(Broken()) == "Broken: "
    assert name_error(torch.OutOfMemoryError()) == "torch.OutOfMemoryError"
    assert describe_error_stack(ValueError()) == ()
    long = describe_error(ValueError("a" * MAX_TOLD_CHARACTERS + "b"), whole=True)
    assert long.startswith("aaa") and long.endswith("ab") and len(long) < MAX_TOLD_CHARACTERS + 20


def test_when_a_rank_is_late_and_when_it_stands():
    usual = RankAtFailure(usual_step_s=1.0, step_s=9.0, still_s=9.0)
    assert not is_late(usual) and is_late(RankAtFailure(usual_step_s=1.0, step_s=10.0))
    assert not is_late(RankAtFailure(usual_step_s=0.01, step_s=1.0)), "too short to be worth it"
    assert not is_late(RankAtFailure(step_s=70.0, still_s=1.0)) and is_late(RankAtFailure(still_s=70.0))
    assert not is_late(RankAtFailure(usual_step_s=1.0, step_s=10.0, left="no error"))
    assert stands_still(usual, 5.0) is False and stands_still(RankAtFailure(still_s=6.0), 5.0)


def test_recordings_of_a_run_before_are_removed(tmp_path):
    for name in ("last_words-3.json", "flight/rank-3", "stacks/rank-3.txt", "mine/rank-3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    assert not list(read_words(tmp_path)), "damaged"
    remove_recordings(tmp_path, ["2"])
    assert len(list(tmp_path.iterdir())) == 4
    remove_recordings(tmp_path, ["3"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


HANDLES = """
import ctypes, os, signal, sys, threading
from pathlib import Path
from megatron_lite.watch import rank_recorder
from megatron_lite.watch.profiler import Profiler
rank_recorder.BEATS_APART_S = 1000.0
os.environ["RANK"] = "0"
recorder = rank_recorder.RankRecorder(Path(sys.argv[1]), Profiler(sys.argv[1]))
recorder.start()
if sys.argv[2] == "own":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: (print("own"), ended.set()))
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.wait(900)
    # its own handler ends it before the other thread has heard
elif sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    # no handler in Python runs, as in C code that does not come back
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        ctypes.CDLL(None).pause()
recorder.end()
"""


@pytest.mark.parametrize(
    ("what", "out", "code", "left"),
    [
        pytest.param("own", "own", 0, "no error", marks=pytest.mark.slow),
        pytest.param("fork", "-15", 0, "no error", marks=pytest.mark.slow),
        ("default", "", -signal.SIGTERM, "SIGTERM"),
    ],
)
def test_signals_end_what_they_ended_before(tmp_path, what, out, code, left):
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    script = [sys.executable, "-c", HANDLES, str(tmp_path), what]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (code, out, "")
    words = read_one(tmp_path, "0")
    assert words.left == left and words.signal == (None if what == "fork" else signal.SIGTERM)
    if what == "default":
        assert any("<string>" in call for call in words.stack)
        assert "<string>" in (tmp_path / "stacks" / "rank-0.txt").read_text()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_signals_of_a_process_forked_from_another_thread_are_its_own():
    def fork():
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
        os.waitpid(child, 0)

    pipe = SignalPipe(lambda: None)
    pipe.open()
    try:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert pipe.wait(0.0) == b""
    finally:
        pipe.release_signals()
        pipe.close()


FORKS_BESIDE_A_PIPE = """
import os, signal
from megatron_lite.signal_pipe import SignalPipe

def blocks_sigterm():
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])

at_first = []
# what is registered before the pipe runs before it in the child
os.register_at_fork(after_in_child=lambda: at_first.append(blocks_sigterm()))
pipe = SignalPipe(lambda: None)
pipe.open()
child = os.fork()
if child == 0:
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os._exit(0 if at_first == [True] and is_default and not blocks_sigterm() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not blocks_sigterm()
"""


def test_sigterm_waits_until_a_forked_process_has_its_own_way_with_it():
    """In a process of its own: another test's pipe would have been registered before."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS_BESIDE_A_PIPE], check=True, cwd=REPO, timeout=LIMIT_S)


def test_signals_are_heard_beside_thousands_of_open_files():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most <= SELECTABLE_FILES:
        pytest.skip("this system opens no more")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * SELECTABLE_FILES, most))
    try:
        with contextlib.ExitStack() as held:
            for _ in range(SELECTABLE_FILES):
                held.enter_context(open(os.devnull))
            pipe = SignalPipe(lambda: None)
            held.callback(pipe.close)
            assert pipe.wait(0.0) == b""
            pipe.wake()
            assert pipe.wait(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_a_rank_starts_writes_nothing_under_its_number(tmp_path, recorder, monkeypatch):
    monkeypatch.setenv(rank_recorder.WATCHED_RANK, "1")
    recorder.note_exit(3, None)
    tmp_path.joinpath("flight").mkdir()
    recorder.end()
    assert list(dict(read_words(tmp_path))) == [f"pid-{os.getpid()}"]


def test_crashes_are_written_where_the_script_wants_them(tmp_path):
    script = [sys.executable, "-c", CRASHES, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run(script, env=environment, capture_output=True, check=False)
    assert "Fatal Python error" in (tmp_path / "own.txt").read_text()


CRASHES = """
import faulthandler, os, sys
from pathlib import Path
from megatron_lite.watch import rank_recorder
from megatron_lite.watch.profiler import Profiler
folder = Path(sys.argv[1])
recorder = rank_recorder.RankRecorder(folder, Profiler(folder))
faulthandler.enable(open(folder / "own.txt", "w"))
os.environ["RANK"] = "0"
recorder.start()
faulthandler._sigabrt()
"""


def test_another_thread_may_begin_to_train(tmp_path, recorder):
    thread = threading.Thread(target=recorder.start)
    thread.start()
    thread.join()
    wait_until(lambda: "3" in dict(read_words(tmp_path)))


def test_launchers_tell_exit_codes_of_ranks(tmp_path, recorder):
    recorder.start()
    wait_until(lambda: "3" in dict(read_words(tmp_path)))
    mine = read_one(tmp_path)
    words_path = last_words.words_path
    for name, words in {
        "4": msgspec.structs.replace(mine, rank=4, pid=11),
        "5": msgspec.structs.replace(mine, rank=5, pid=12, exit_code=1),
        "6": msgspec.structs.replace(mine, rank=6, pid=13, host="elsewhere"),
    }.items():
        last_words.write_words(words_path(tmp_path, name), words)
    failures = {rank: ProcessFailure(rank, 7 + rank, -9, "") for rank in (4, 5, 6)}
    recorder.note_error(ChildFailedError("train.py", failures))
    assert [read_one(tmp_path, name).exit_code for name in "456"] == [-9, 1, None]
    assert read_one(tmp_path).blameless
    error = ProcessExitedException("no", error_index=1, error_pid=14, exit_code=-9, signal_name="SIGKILL")
    assert find_exit_codes(error) == {14: -9} and find_exit_codes(ValueError()) == {}


def test_a_profiler_tells_where_its_loop_is(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Profiler(tmp_path) as profiler:
        assert profiler.position == StepPosition()
        for _ in range(6):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        now = profiler.position
        assert now.step == 7 and now.phase == "forward" and 0 < now.step_since <= now.moved_at <= time.perf_counter()
        assert now.usual_step_s is not None and now.usual_step_s > 0


class MadeRecorder:
    """Stands for the recorder of a backend."""

    def __init__(self, dump: bytes):
        self._made = dump

    def counts(self):
        return {"0": (1, 1)} if self._made else {}

    def dump(self):
        return self._made


@pytest.mark.parametrize(
    ("nccl", "gloo", "files"),
    [
        (b"n", b"g", {"rank-0": b"n", "gloo-rank-0": b"g"}),
        (b"", b"g", {"rank-0": b"g"}),
        (b"n", b"", {"rank-0": b"n"}),
    ],
)
def test_recordings_of_two_backends_lie_beside_each_other(tmp_path, nccl, gloo, files):
    dump = FlightDump()
    dump._recorders = {"nccl": MadeRecorder(nccl), "gloo": MadeRecorder(gloo)}
    (tmp_path / "flight").mkdir()
    dump.write(tmp_path, "0")
    assert {path.name: path.read_bytes() for path in (tmp_path / "flight").iterdir()} == files
    remove_flight(tmp_path, "0")
    assert not list((tmp_path / "flight").iterdir())


def test_who_waits_goes_on_where_another_has_read_what_woke_both(monkeypatch):
    class Woken:
        def register(self, *_):
            pass

        def poll(self, _):
            return [True]

    pipe = SignalPipe(lambda: None)
    monkeypatch.setattr(signal_pipe.select, "poll", Woken)
    assert pipe.wait(1.0) == b""
    pipe.wake()
    assert pipe.wait(1.0) == signal_pipe.WAKE
    pipe.close()
