"""Stacks of processes, as py-spy and faulthandler really print them, become records; the main thread is found."""

import random
from pathlib import Path

import pytest

from megatron_lite.errors import UserError
from megatron_lite.postmortem.call_sites import find_program_frame
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import StackFrame
from megatron_lite.postmortem.process_stacks import is_stack_file, parse_stacks, read_stack_file

DUMPS = Path(__file__).parent / "stacks"
WAITS = StackFrame("train_step", "hang.py", 9)
SLEEPS = StackFrame("train_step", "hang.py", 8)


def main_thread(stacks):
    (thread,) = [thread for thread in stacks.threads if thread.is_main]
    return thread


@pytest.mark.parametrize("path", sorted(DUMPS.iterdir()), ids=lambda path: path.name)
def test_every_dump_is_recognized_and_has_a_main_thread(path):
    found = collect_evidence([path])
    assert found.unread == () and len(found.read) == 1
    for stacks in found.stacks:
        assert main_thread(stacks).frames


@pytest.mark.parametrize(
    ("name", "frame", "outermost"),
    [
        ("pyspy.txt", WAITS, "<module>"),
        ("pyspy_locals.txt", SLEEPS, "<module>"),
        # below Python stands C's own first call
        ("pyspy_native.txt", WAITS, "0x7f515684524a"),
        ("pyspy.json", StackFrame("train_step", "/home/user/job/hang.py", 8), "<module>"),
    ],
)
def test_the_call_of_the_program_is_found_below_those_of_torch(name, frame, outermost):
    (stacks,) = read_stack_file(DUMPS / name).stacks
    thread = main_thread(stacks)
    assert find_program_frame(thread.frames) == frame
    assert (thread.name, thread.is_idle, thread.holds_interpreter) == ("MainThread", True, False)
    assert thread.frames[-1].function == outermost
    assert [other.name for other in stacks.threads if not other.is_main] == ["helper thread"]


def test_py_spy_tells_process_and_command():
    (stacks,) = read_stack_file(DUMPS / "pyspy.txt").stacks
    assert (stacks.pid, stacks.command) == (16898, "/opt/venv/bin/python -u hang.py")
    assert stacks.source.endswith("pyspy.txt:1")


def test_several_processes_in_one_dump_are_told_apart():
    found = read_stack_file(DUMPS / "pyspy_subprocesses.txt").stacks
    assert [stacks.pid for stacks in found] == [16876, 16898, 16899]
    assert [find_program_frame(main_thread(stacks).frames) for stacks in found][1:] == [WAITS, SLEEPS]


def test_a_process_that_crashed_has_its_end_and_stacks():
    found = read_stack_file(DUMPS / "faulthandler_segv.txt")
    (end,) = found.ends
    assert (end.exit_code, end.message) == (-11, "Segmentation fault")
    assert find_program_frame(end.frames) == StackFrame("inner", "/home/user/job/crash.py", 3)
    assert len(found.stacks[0].threads) == 2


@pytest.mark.parametrize("name", ["faulthandler_later.txt", "faulthandler_usr1.txt"])
def test_each_look_at_a_process_is_a_dump_of_its_own(name):
    found = read_stack_file(DUMPS / name)
    assert found.ends == ()
    assert len(found.stacks) == 2
    for stacks in found.stacks:
        assert main_thread(stacks).frames[-1].function == "<module>"


@pytest.mark.parametrize("folder", ["rank3", "rank_3", "stacks-rank-3", "attempt_0/3"])
def test_the_path_tells_the_rank(tmp_path, folder):
    path = tmp_path / folder / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text((DUMPS / "pyspy.txt").read_text())
    assert read_stack_file(path).stacks[0].rank == 3


def test_ranks_of_several_nodes_are_not_told_by_local_numbers(tmp_path):
    for run in ("job_a1", "job_b2"):
        path = tmp_path / run / "attempt_0" / "3" / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text((DUMPS / "faulthandler_segv.txt").read_text())
    found = read_stack_file(path)
    assert found.stacks[0].rank is None
    assert (found.ends[0].rank, found.ends[0].local_rank) == (None, 3)


def test_lines_with_ranks_in_front_are_put_together():
    dump = (DUMPS / "pyspy.txt").read_text().splitlines()
    other = (DUMPS / "pyspy_locals.txt").read_text().splitlines()
    lines = [f"[rank1]:{line}" if line else "" for line in other]
    lines += [f"[rank0]:{line}" if line else "" for line in dump]
    by_rank = {stacks.rank: stacks for stacks in parse_stacks("\n".join(lines), "x")}
    assert find_program_frame(main_thread(by_rank[0]).frames) == WAITS
    assert find_program_frame(main_thread(by_rank[1]).frames) == SLEEPS


def test_headers_between_dumps_tell_the_rank():
    dump = (DUMPS / "pyspy.txt").read_text()
    text = f"==> node1 rank 4 <==\n{dump}\n===== rank: 5 =====\n{dump}"
    assert [stacks.rank for stacks in parse_stacks(text, "x")] == [4, 5]


def test_threads_of_newer_pythons_have_names():
    text = (
        "Current thread 0x00007f01 [worker] (most recent call first):\n"
        '  File "a.py", line 3 in work\n\n'
        "Thread 0x00007f02 [MainThread] (most recent call first):\n"
        '  File "a.py", line 9 in main\n  ...\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/bin/python", at _Py_DumpStack+0x2d [0x5d]\n'
    )
    (stacks,) = parse_stacks(text, "x")
    assert [thread.name for thread in stacks.threads] == ["worker", "MainThread"]
    assert main_thread(stacks).frames == (StackFrame("main", "a.py", 9),)


@pytest.mark.parametrize("text", ["", "nothing\n", '[{"pid": 1, "thread_id": "x"}]', "[{", "[" * 10_000])
def test_a_file_without_stacks_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "dump"
    path.write_text(text)
    with pytest.raises(UserError):
        read_stack_file(path)


def test_damaged_dumps_raise_nothing_else(tmp_path):
    source = random.Random(7)
    path = tmp_path / "dump"
    for original in sorted(DUMPS.iterdir()):
        content = original.read_bytes()
        for _ in range(30):
            damaged = bytearray(content)
            for _ in range(source.randrange(1, 20)):
                damaged[source.randrange(len(damaged))] = source.randrange(256)
            path.write_bytes(damaged[: source.randrange(len(damaged))])
            is_stack_file(path.read_bytes(), path)
            try:
                read_stack_file(path)
            except UserError as error:
                assert "\n" not in str(error)


def test_logs_and_tables_are_no_stack_files():
    for text in (b"iteration 1\niteration 2\n", b"Process started\n", b'[{"pid": "x"}]', b"Thread pool of 4\n"):
        assert not is_stack_file(text, Path("x"))
