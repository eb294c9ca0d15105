"""What `watch` sees of ranks from outside: who was killed, is stopped or hangs, and where."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.waiting import wait_until

from megatron_lite.cli import rank_watch, stack_dumps
from megatron_lite.cli.rank_watch import RankWatch
from megatron_lite.cli.stack_dumps import dump_stacks
from megatron_lite.cli.watch import _choose_recording, _is_failure
from megatron_lite.formats.failure_record import RankAtFailure
from megatron_lite.last_words import read_words, words_path, write_words
from megatron_lite.process_state import pid_space, process_state

pytestmark = pytest.mark.skipif(pid_space() is None, reason="only Linux tells of processes")
NEVER = 10_000.0


@pytest.fixture
def children():
    """Starts processes that wait, as ranks do, and ends them."""
    started = []

    def start() -> int:
        started.append(subprocess.Popen(["sleep", "1000"]))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def tell(tmp_path):
    """Writes last words of a rank."""

    def write(name: str, pid: int, **more) -> RankAtFailure:
        number = None if name.startswith("pid") else int(name)
        usual = {
            "host": socket.gethostname(),
            "pids": pid_space(),
            "pid": pid,
            "rank": number,
            "wall_time": time.time(),
        }
        words = RankAtFailure(**(usual | more))
        write_words(words_path(tmp_path, name), words)
        return words

    return write


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(rank_watch, "LOOKS_APART_S", 0.02)


def test_how_ranks_ended_is_noted(tmp_path, children, tell):
    killed, left = children(), children()
    mine, others = tell("0", killed, step=7), tell("1", left, left="ValueError: no", error="ValueError", exit_code=1)
    tell("2", children(), host="elsewhere")
    with RankWatch(tmp_path, print) as watch:
        wait_until(lambda: "0" in watch._ends)
        assert set(watch.read_ranks()) == {"0", "1"}
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: dict(read_words(tmp_path))["0"].process_state == "dead")
    found = dict(read_words(tmp_path))
    assert (found["0"].exit_code, found["0"].step, found["0"].left) == (-signal.SIGKILL, 7, None)
    assert not found["0"].blameless
    assert found["0"].ended_at >= mine.wall_time and found["1"] == others and found["2"].process_state is None


def test_a_stopped_rank_is_called_that_and_ranks_that_stand_are_told_once(tmp_path, children, tell, monkeypatch):
    monkeypatch.setattr(rank_watch, "dump_stacks", lambda folder, processes: dumped.append(processes))
    told, dumped, stopped, waiting = [], [], children(), children()
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: process_state(stopped) == "stopped")
    tell("0", waiting, still_s=2.0, usual_step_s=0.1, step_s=2.0)
    tell("1", stopped, wall_time=time.time() - NEVER, usual_step_s=0.1)
    with RankWatch(tmp_path, lambda ranks: told.append(set(ranks))) as watch:
        wait_until(lambda: dict(read_words(tmp_path))["1"].process_state == "stopped")
        wait_until(lambda: dumped)
        assert not watch.stands and not told, "rank 0 goes on"
        tell("0", waiting, still_s=NEVER, usual_step_s=0.1, step_s=NEVER, wall_time=time.time() + NEVER)
        wait_until(lambda: told)
        assert watch.stands and watch.stands_s >= NEVER - 1
        tell("0", waiting, usual_step_s=0.1, wall_time=time.time() + NEVER)
        wait_until(lambda: not watch.stands)
        tell("0", waiting, still_s=NEVER, usual_step_s=0.1, step_s=NEVER, wall_time=time.time() + NEVER)
        wait_until(lambda: watch.stands)
        watch.end_all()
        wait_until(lambda: dict(read_words(tmp_path))["0"].exit_code == -signal.SIGKILL)
    assert told == [{"0", "1"}] * 2
    found = dict(read_words(tmp_path))
    assert found["0"].blameless and found["0"].process_state == "dead", "it hung, and was killed for it"
    assert dumped[0] == {"0": waiting, "1": stopped}


def test_a_shorter_standstill_is_told_where_it_matters(tmp_path, children, tell):
    """--hang-timeout 10 is not to wait for the usual half minute."""
    told = []
    tell("0", children(), still_s=12.0, usual_step_s=0.1, step_s=12.0, wall_time=time.time() + NEVER)
    with RankWatch(tmp_path, told.append, 10.0) as watch:
        wait_until(lambda: told)
        assert watch.stands_s >= 10.0


def test_stacks_of_ranks_that_go_on_are_forgotten(tmp_path, children, tell, monkeypatch):
    there = children()
    path = tmp_path / "stacks" / "rank-0.json"

    def dump(folder, processes):
        path.parent.mkdir(exist_ok=True)
        path.write_text("[]")

    monkeypatch.setattr(rank_watch, "dump_stacks", dump)
    tell("0", there, still_s=NEVER, wall_time=time.time() + NEVER)
    with RankWatch(tmp_path, lambda ranks: None):
        wait_until(path.exists)
        tell("0", there, wall_time=time.time() + NEVER)
        wait_until(lambda: not path.exists())


PY_SPY = """#!{python}
import sys
if ("--nonblocking" in sys.argv) is (sys.argv[-1] == "7"):
    print("[]", *sys.argv[1:])
else:
    sys.exit(1)
"""


def test_stacks_are_taken_by_py_spy_in_the_way_that_is_allowed(tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text(PY_SPY.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(stack_dumps, "find_py_spy", lambda: str(program))
    assert dump_stacks(tmp_path, {"0": 7, "1": 8})
    assert (tmp_path / "stacks" / "rank-0.json").read_text() == "[] dump --json --nonblocking --pid 7\n"
    assert (tmp_path / "stacks" / "rank-1.json").read_text() == "[] dump --json --pid 8\n"
    program.write_text(f"#!{sys.executable}\nraise SystemExit(1)")
    assert not dump_stacks(tmp_path, {"2": 9}) and not (tmp_path / "stacks" / "rank-2.json").exists()
    monkeypatch.setattr(stack_dumps, "find_py_spy", lambda: None)
    assert not dump_stacks(tmp_path, {"2": 9})


@pytest.mark.parametrize(
    ("code", "hung", "words", "failed"),
    [
        (0, False, [RankAtFailure(rank=0, left="no error")], False),
        (1, False, [], True),
        (130, False, [RankAtFailure(rank=0, error="KeyboardInterrupt", exit_code=1)], False),
        (130, True, [], True),
        (0, False, [RankAtFailure(rank=0, exit_code=-9)], True),
        (0, False, [RankAtFailure(error="ValueError", exit_code=1)], False),
    ],
)
def test_what_a_failure_is(code, hung, words, failed):
    assert _is_failure(code, hung, words) == failed


def test_what_the_user_set_for_the_flight_recorder_stays(tmp_path):
    chosen = _choose_recording({}, tmp_path)
    assert chosen["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight/rank-" and len(chosen) == 3
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"}
    assert set(_choose_recording(old, tmp_path)) == {"TORCH_NCCL_DUMP_ON_TIMEOUT"}
