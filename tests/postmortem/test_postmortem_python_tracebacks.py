"""Tracebacks are taken out of the lines of a process: chained, handed on by loaders, with other lines in between."""

import pytest

from megatron_lite.postmortem.call_sites import find_program_frame
from megatron_lite.postmortem.evidence import StackFrame
from megatron_lite.postmortem.python_tracebacks import TracebackReader, parse_traceback

KEY_ERROR = "KeyError: 'k'"
FIRST = 'Traceback (most recent call last):\n  File "train.py", line 3, in load\n    x = d["k"]\n        ~^^^^^\n'


def read(text):
    reader = TracebackReader()
    for number, line in enumerate(text.splitlines(), start=1):
        reader.feed(number, line)
    reader.finish()
    return reader.found


def test_frames_are_innermost_first():
    text = FIRST + '  File "train.py", line 9, in inner\n    raise ValueError\nValueError: no\n'
    (found,) = read("before\n" + text + "after\n")
    assert (found.line, found.error, found.message) == (2, "ValueError", "no")
    assert found.frames == (StackFrame("inner", "train.py", 9), StackFrame("load", "train.py", 3))


@pytest.mark.parametrize(
    "link",
    [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ],
)
def test_a_chain_is_one_exception_that_names_the_one_before(link):
    (found,) = read(f"{FIRST}KeyError: 'k'\n\n{link}\n\n{FIRST}RuntimeError: late\n")
    assert found.error == "RuntimeError"
    assert found.message == f"late (after {KEY_ERROR})"


def test_a_chain_ends_where_another_exception_begins():
    chain = (
        f"{FIRST}KeyError\n\nDuring handling of the above exception, another exception occurred:\n\n{FIRST}OSError\n"
    )
    assert [one.message for one in read(chain + chain)] == ["(after KeyError)", "(after KeyError)"]


def test_two_exceptions_are_two():
    assert [one.error for one in read(f"{FIRST}KeyError: 'k'\n{FIRST}ValueError\n")] == ["KeyError", "ValueError"]


def test_an_error_in_a_loader_is_the_one_that_arose_there():
    text = (
        f"{FIRST}ValueError: Caught ValueError in DataLoader worker process 0.\n"
        'Original Traceback (most recent call last):\n  File "dataset.py", line 5, in __getitem__\n    a\nValueError: bad\n'
    )
    (found,) = read(text)
    assert found.frames[0] == StackFrame("__getitem__", "dataset.py", 5)
    assert found.message.startswith("bad")


def test_what_python_ignores_is_left_out():
    assert read(f"Exception ignored in: <function A.__del__ at 0x1>\n{FIRST}OSError: x\n") == []


def test_threads_and_spawned_processes_are_named():
    (thread,) = read(f"Exception in thread Thread-3 (run):\n{FIRST}OSError: x\n")
    assert thread.thread == "Thread-3 (run)"
    (process,) = read(f"\n-- Process 1 terminated with the following error:\n{FIRST}OSError: x\n")
    assert process.process == 1


def test_lines_of_others_in_between_do_not_break_it():
    text = FIRST.replace("    x =", "iteration 5 done\n    x =") + "torch.OutOfMemoryError: CUDA out of memory.\n"
    (found,) = read(text)
    assert found.error == "torch.OutOfMemoryError"


def test_a_traceback_that_breaks_off_is_none():
    assert read(FIRST) == []
    assert read(FIRST + "\n".join(f"line {number}" for number in range(200))) == []


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/usr/lib/python3.10/runpy.py", True),
        ("torch/distributed/distributed_c10d.py", True),
        ("threading.py", True),
        ("libtorch_cpu.so", True),
        ("libc.so.6", True),
        ("<frozen runpy>", True),
        ("", True),
        ("/home/user/job/train.py", False),
        ("train.py", False),
        ("megatron/training/training.py", False),
        ("/workspace/torch_stuff/train.py", False),
    ],
)
def test_files_of_libraries_are_told_from_the_programs_own(file, is_library):
    frame = StackFrame("f", file, 1)
    assert (find_program_frame([frame]) is None) is is_library


def test_a_text_without_a_traceback_has_none():
    assert parse_traceback("ValueError: x") is None
