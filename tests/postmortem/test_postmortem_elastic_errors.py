"""torchelastic's error files tell which exception a process ended with, and where."""

import json
import random

import pytest

from megatron_lite.errors import UserError
from megatron_lite.postmortem.call_sites import find_program_frame
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.elastic_errors import read_error_file
from megatron_lite.postmortem.evidence import StackFrame

STACK = (
    "Traceback (most recent call last):\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", '
    "line 367, in wrapper\n    return f(*args, **kwargs)\n           ^^^^^^^^^^^^^^^^^^\n"
    '  File "/home/user/job/train.py", line 88, in main\n    loss = step(batch)\n'
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 12, in linear\n    return f(x)\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def test_an_exception_has_class_message_time_and_frames(tmp_path):
    told = {"message": "OutOfMemoryError: no room", "errorCode": -6}
    told["extraInfo"] = {"py_callstack": STACK, "timestamp": "1795872065"}
    path = write(tmp_path / "none_x1/attempt_0/3/error.json", {"message": told})
    (end,) = read_error_file(path).ends
    assert (end.rank, end.local_rank, end.exit_code, end.ended_at) == (3, 3, -6, 1795872065.0)
    assert (end.error, end.message) == ("torch.OutOfMemoryError", "no room")
    assert find_program_frame(end.frames) == StackFrame("main", "/home/user/job/train.py", 88)


@pytest.mark.parametrize(
    ("values", "error", "message", "code", "at"),
    [
        ({"message": "ValueError: bad", "timestamp": 100}, "ValueError", "bad", None, 100.0),
        ({"message": "SIGSEGV", "errorCode": 1, "timestamp": 100}, "", "SIGSEGV", 1, 100.0),
        ({"message": {"message": "x: y", "extraInfo": {"timestamp": "soon"}}}, "", "x: y", None, None),
        ({"message": {"message": None, "extraInfo": None, "errorCode": True}}, "", "", None, None),
    ],
)
def test_other_forms_are_read(tmp_path, values, error, message, code, at):
    (end,) = read_error_file(write(tmp_path / "error.json", values)).ends
    assert (end.error, end.message, end.exit_code, end.ended_at) == (error, message, code, at)


def test_a_renamed_error_file_is_recognized(tmp_path):
    write(tmp_path / "copied", {"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "5"}}})
    write(tmp_path / "error.json", {"message": "ValueError: x"})
    write(tmp_path / "other.json", {"message": "hello"})
    assert collect_evidence([tmp_path]).read == {"error files": 2}


@pytest.mark.parametrize("values", [[], {}, {"message": 3}, {"message": None}])
def test_what_is_no_error_is_refused_in_one_line(tmp_path, values):
    with pytest.raises(UserError):
        read_error_file(write(tmp_path / "error.json", values))


def test_damaged_error_files_raise_nothing_else(tmp_path):
    source = random.Random(3)
    told = {"message": "ValueError: x", "extraInfo": {"py_callstack": STACK, "timestamp": "1795872065"}}
    content = json.dumps({"message": told}).encode()
    path = tmp_path / "error.json"
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(source.randrange(1, 6)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        path.write_bytes(damaged)
        try:
            read_error_file(path)
        except UserError as error:
            assert "\n" not in str(error)
