"""What ranks tell each other, who speaks, and what ends a process that cannot end by itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from support.launch import environment, on_ranks
from support.paths import TESTS
from support.waiting import LIMIT_S, wait_until

from megatron_lite import process_state
from megatron_lite.config.layout import Layout
from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.formats.failure_record import FailureRecord, RankAtFailure, encode_failure
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.build_instruments import WhereaboutsKeeper
from megatron_lite.parallel import hang_diagnosis, watchdog
from megatron_lite.parallel.hang_diagnosis import CLOSED, HangDiagnosis
from megatron_lite.parallel.rank_status import (
    FlightRecorder,
    RankStore,
    RunPosition,
    StageWait,
    describe_rank,
)
from megatron_lite.phases import Phase
from megatron_lite.postmortem.call_sites import find_call_site
from megatron_lite.postmortem.flight_recordings import build_recordings

RESET = RuntimeError(
    "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5537: Connection reset by peer. "
    "This is typically caused by a remote worker hanging"
)
LATE_ERROR = RuntimeError(
    "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"
)


class Recorder:
    """Says what a test wants of this rank's collectives."""

    def __init__(self, begun=5, finished=5):
        self.numbers = begun, finished

    def counts(self):
        return {"0": self.numbers}

    def has_unfinished(self):
        begun, finished = self.numbers
        return begun > finished

    def excerpt(self, stage_wait=None):
        return ""


def post(**more) -> RankAtFailure:
    return replace(describe_rank(RunPosition(), {"0": (5, 5)}), **more)


@pytest.fixture
def ranks(monkeypatch):
    """Makes rank 0's watchdog beside the posts of others, and stops it."""
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(hang_diagnosis, "ANSWER_SECONDS", 0.3)
    made = []

    def make(*others: RankAtFailure, recorder=None, limit_s=60.0, **more) -> watchdog.Watchdog:
        store = dist.HashStore()
        for rank, other in enumerate(others, start=1):
            RankStore(store, rank, 1 + len(others)).set_status(other)
        world = World(0, 1 + len(others), 0, 1 + len(others))
        made.append(watchdog.Watchdog(world, store, recorder or Recorder(), limit_s, **({"backstop": False} | more)))
        made[-1].start()
        return made[-1]

    yield make
    for one in reversed(made):
        one.stop()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ask(one: watchdog.Watchdog, error: Exception):
    with one.explain_failures():
        raise error


# --- posts, boards, processes


def test_the_first_to_ask_speaks_for_all():
    there, store = post(stack=("f (a:1)",), left="ValueError: no", phase="data", started_at=7), dist.HashStore()
    boards = [RankStore(store, rank, 3) for rank in range(3)]
    boards[2].set_status(there)
    assert boards[0].get_statuses([0, 1, 2]) == {2: there}
    first, second = (HangDiagnosis(World(rank, 3), boards[rank], 60.0, ends_record=False) for rank in (0, 1))
    said, repeated = first.diagnose(CLOSED, post(), ""), second.diagnose(CLOSED, post(), "")
    assert str(said) == str(repeated)
    assert str(said).startswith("Rank 2 ") and "ValueError: no" in str(said)
    assert (said.told, repeated.told, said.exit_code) == (False, True, 1)
    mine = boards[1].get_statuses([1])[1]
    assert mine.answers, "who waits for the verdict is not taken for silent"


def test_the_record_of_a_terminated_writer_is_ended_for_it(tmp_path):
    """run.json is the last rank's. One that got Ctrl-C writes it itself; SIGTERM leaves no time."""
    for left, status in (("SIGTERM", "failed: RanksError: Rank 1 "), ("KeyboardInterrupt: ", "running")):
        (tmp_path / "run.json").write_text('{"status": "running"}')
        store = dist.HashStore()
        RankStore(store, 1, 2).set_status(post(left=left, blameless=True))
        asking = HangDiagnosis(World(0, 2), RankStore(store, 0, 2), 60.0, ends_record=False)
        asking.run_dir = tmp_path
        assert asking.diagnose(CLOSED, post(), "", "Connection closed by peer").ended
        assert json.loads((tmp_path / "run.json").read_text())["status"].startswith(status)


def test_every_ranks_last_status_is_written_down_whole(tmp_path):
    gone = post(left="ValueError: half a letter \udc80", stack=("f (\udc80.py:1)",), groups={"7": 2})
    asking = post(phase="forward", started_at=7, answers=True)
    store = dist.HashStore()
    RankStore(store, 1, 2).set_status(gone)
    diagnosis = HangDiagnosis(World(0, 2), RankStore(store, 0, 2), 60.0, ends_record=False, layout=Layout(tensor=2))
    diagnosis.run_dir = tmp_path
    line = str(diagnosis.diagnose(CLOSED, asking, ""))
    written = (tmp_path / "ranks.json").read_text()
    places = {0: "tp 0", 1: "tp 1"}
    written_ranks = ((0, asking), (1, gone))
    ranks = {str(rank): replace(status, place=places[rank]) for rank, status in written_ranks}
    assert written == encode_failure(FailureRecord(verdict=line, ranks=ranks))
    assert RankStore(store, 1, 2).wait_for_cause(0.0) == line
    record = msgspec.convert(json.loads(written), FailureRecord)
    assert record.ranks == ranks


def test_states_of_processes(tmp_path, monkeypatch):
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert process_state.process_state(child.pid) == "running"
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state.process_state(child.pid) == "stopped")
    finally:
        child.kill()
    wait_until(lambda: process_state.process_state(child.pid) == "dead")  # though nobody has asked for its exit code
    child.wait()
    assert process_state.process_state(child.pid) == "dead"
    monkeypatch.setattr(process_state, "PROC", tmp_path)
    assert process_state.process_state(1) is process_state.pid_space() is process_state.memory_kills() is None
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 3\n")
    assert process_state.memory_kills() == 3


@pytest.mark.skipif(process_state.pid_space() is None, reason="only Linux tells of processes")
def test_a_process_is_known_again_and_its_ids_next_owner_is_not_it(monkeypatch):
    me = process_state.identity()
    assert process_state.is_there(me) is True and json.loads(json.dumps(me)) == me
    assert process_state.is_there(me | {"started_ticks": me["started_ticks"] - 1}) is False
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert process_state.is_there(me | {"pid": child.pid}) is False
    for other in ({"host": "elsewhere"}, {"pids": "pid:[1]"}, {"pid": "x"}, {"started_ticks": None}):
        assert process_state.is_there(me | other) is None
    assert process_state.is_there({}) is None


def record_on_two_ranks(world):
    """For on_ranks: rank 0 begins what rank 1 joins only after rank 0 has looked."""
    recorder, store = FlightRecorder("gloo"), dist.distributed_c10d._get_default_store()
    half = dist.new_group([0, 1], group_desc="half")
    before = recorder.counts().get("0", (0, 0))
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    dist.all_reduce(torch.ones(2), group=half)
    wait_until(lambda: not recorder.has_unfinished())  # noted a moment after the collective
    if world.rank == 1:
        store.wait(["looked"])
    works = [dist.all_reduce(torch.ones(1000), async_op=True), dist.broadcast(torch.ones(8).bool(), 0, async_op=True)]
    if world.rank == 0:
        begun, finished = recorder.counts()["0"]
        print("counts", begun - before[0], finished - before[1], recorder.has_unfinished())
        waiting = StageWait(1, "the forward of micro-batch 3 from")
        [recording] = build_recordings(json.loads(recorder.excerpt(waiting)), "", 0).recordings
        for call in recording.calls:
            shape = call.input_shapes[0] if call.input_shapes else ()
            print("call", call.name, call.group, call.number, shape, call.has_ended, call.sender)
        print("groups", [(name, group.description, group.ranks) for name, group in sorted(recording.groups.items())])
        print("site", find_call_site(recording.calls[0].frames).rpartition(" in ")[2])
        store.set("looked", "")
    for work in works:
        work.wait()
    wait_until(lambda: not recorder.has_unfinished())


def test_the_recorder_knows_what_waits(tmp_path):
    """Its excerpt is torch's own form, with the ranks of groups and the stages' messages, which gloo leaves out."""
    first, _ = on_ranks(record_on_two_ranks, tmp_path)
    lines = first.splitlines()
    assert "counts 3 1 True" in lines
    assert [line for line in lines if line.startswith("call")] == [
        "call all_reduce 0 1 (3,) True None",
        "call all_reduce 1 1 (2,) True None",
        "call all_reduce 0 2 (1000,) False None",
        "call broadcast 0 3 (8,) False None",
        "call recv 0 4 () False 1",
    ]
    assert "groups [('0', 'default_pg', (0, 1)), ('1', 'half', (0, 1))]" in lines
    assert "site record_on_two_ranks" in lines


def test_whereabouts_keep_the_phase_that_failed():
    where = RunPosition()
    with pytest.raises(KeyError), Instruments([WhereaboutsKeeper(where)], print) as watching, watching.step(3):
        with watching.phase(Phase.DATA):
            assert (where.step, where.phase) == (3, "data")
        assert where.phase is None
        with watching.phase(Phase.FORWARD):
            raise KeyError
    assert (where.step, where.phase) == (3, "forward")


def test_a_rank_says_at_once_that_it_is_there_and_signals_do_not_silence_it(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.2)
    one = ranks(post())
    wait_until(lambda: one._store.get_statuses([0]))
    first = one._store.get_statuses([0])[0]
    assert not first.answers

    def is_newer() -> bool:
        one._signals.wake()
        return one._store.get_statuses([0])[0].wall_time > first.wall_time

    wait_until(is_newer, limit_s=60)


# --- a failed collective


def test_who_hangs_answers_with_its_stack(ranks, monkeypatch):
    """Two presences over one store: rank 1's thread answers while its trainer does something else."""
    monkeypatch.setattr(hang_diagnosis, "ANSWER_SECONDS", LIMIT_S)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", LIMIT_S)
    one = ranks(post(), recorder=Recorder(7, 6))
    other = watchdog.Watchdog(World(1, 2), one._store._store, Recorder(6, 6), 60.0, backstop=False)
    other._thread.start()  # as on another machine: signals are rank 0's in this process
    try:
        with pytest.raises(RanksError) as caught:
            ask(one, LATE_ERROR)
    finally:
        other._over = True
        other._thread.join()
    line = str(caught.value)
    assert line.startswith("Rank 1 ") and "#7" in line and "after collective #6" in line, line
    assert re.search(r"test_parallel_watchdog.py:\d+ in ask", line), line


@pytest.mark.parametrize(
    ("error", "said", "blameless"),
    [
        (ValueError("no\nmore"), "ValueError: no", False),
        (RanksError("other"), "RanksError: other", True),
        (None, "no error", True),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", True),
    ],
)
def test_farewells(ranks, error, said, blameless):
    one = ranks(post())
    one.leave(error)
    left = one._store.get_statuses([0])[0]
    assert (left.left, left.blameless) == (said, blameless)


def test_other_errors_pass(ranks):
    one, wrong_size = ranks(post(left="ValueError: no")), "op.preamble.length <= op.nbytes. 8 vs 4"
    enforced = RuntimeError(f"[enforce fail at /x/gloo/transport/tcp/pair.cc:446] {wrong_size}")
    for error in (ZeroDivisionError("Connection reset by peer"), RuntimeError("out of memory"), enforced):
        with pytest.raises(type(error)) as caught:
            ask(one, error)
        assert caught.value is error


def test_a_store_that_fails_or_hangs_is_told(ranks, monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "VERDICT_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "there")
    monkeypatch.setenv("MASTER_PORT", "99")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for broken in (lambda *_: time.sleep(1), lambda *_: (_ for _ in ()).throw(dist.DistNetworkError("gone"))):
        one = ranks(post())
        one._diagnosis.diagnose = broken
        told = "MASTER_ADDR:MASTER_PORT there:99: the store there .* rank 0, which holds it, died, is stopped"
        with pytest.raises(RanksError, match=told):
            ask(one, RESET)


# --- processes that cannot end by themselves


def test_the_backstop_tells_and_ends_the_process(ranks, monkeypatch):
    ended, told, now = [], [], [0.0]
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: (ended.append(code), setattr(one, "_over", True)))
    monkeypatch.setattr(watchdog, "tell_error", lambda error, world: told.append(error))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    recorder = Recorder(5, 5)
    one = ranks(post(answers=True), recorder=recorder, limit_s=0.4, backstop=True)

    def advance(seconds: float):
        """Move the clock on, and wait until the thread has looked at it twice: it looks once for each post."""
        for _ in range(2):
            before = last_post()
            now[0] += seconds / 2
            wait_until(lambda before=before: last_post() > before)

    def last_post() -> float:
        return max((status.wall_time for status in one._store.get_statuses([0]).values()), default=0.0)

    for _ in range(20):
        advance(0.1)
    assert ended == [], "nothing waits"
    for finished in range(6, 12):  # one collective waits at any time, but not one for long
        recorder.numbers = finished + 1, finished
        advance(0.15)
    assert ended == []
    now[0] += 0.4
    wait_until(lambda: ended)
    assert ended == [1] and str(told[0]).startswith("Rank 1 ") and "#12" in str(told[0]), told


def test_nobody_outlives_the_verdict(ranks, monkeypatch):
    ended = []
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: (ended.append(code), setattr(one, "_over", True)))
    one = ranks(post())
    board = RankStore(one._store._store, 1, 2)
    board.claim_speaker()
    time.sleep(0.6)
    assert ended == [], "no verdict yet"
    board.publish_cause("rank 0 hangs")
    wait_until(lambda: ended)
    assert ended == [1]


TERMINATED = """
import ctypes, os, sys
import torch.distributed as dist
from msgspec.structs import replace
from megatron_lite.config.world import World
from megatron_lite.parallel.rank_status import RankStore
from megatron_lite.parallel.rank_status import RunPosition, describe_rank
from megatron_lite.parallel.watchdog import Watchdog
from test_parallel_watchdog import Recorder

store, pid = dist.HashStore(), int(sys.argv[1])
RankStore(store, 1, 2).set_status(replace(describe_rank(RunPosition(), {"0": (5, 5)}), pid=pid))
ranks = Watchdog(World(0, 2, 0, 2), store, Recorder(6, 5), 60.0, backstop=False)
ranks.start()
print("ready", flush=True)
while True:
    ctypes.CDLL(None).pause() if sys.argv[2] == "C" else sum(range(1000))
"""


@pytest.mark.slow
def test_sigterm_tells_of_a_dead_neighbor_and_kills_as_ever(tmp_path):
    """While the trainer's thread is inside C or in Python; with a neighbor that lives there is nothing to tell."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    script = tmp_path / "terminated.py"
    script.write_text(TERMINATED)
    path = os.pathsep.join([environment()["PYTHONPATH"], str(TESTS), os.path.dirname(__file__)])
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment() | {"PYTHONPATH": path}}
    processes = {
        pid: subprocess.Popen([sys.executable, str(script), str(pid), busy_in], text=True, **settings)
        for pid, busy_in in ((gone.pid, "C"), (os.getpid(), "Python"))
    }
    for pid, process in processes.items():
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        said = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == -signal.SIGTERM
        assert (
            said.startswith("error: Rank 1 died") and f"process {pid} on " in said if pid == gone.pid else said == ""
        ), said
