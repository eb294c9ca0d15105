"""Room for the events of a GPU, which Kineto limits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.instruments import torch_profiler as kineto_room
from megatron_lite.instruments.base import Window
from megatron_lite.instruments.torch_profiler import Details, TorchProfiler, make_room, record_is_full
from megatron_lite.instruments.trace_file import Found

PREPARE = """
import os
from megatron_lite.instruments.torch_profiler import make_room
from torch.profiler import ProfilerActivity, _KinetoProfile

import pytest
kept = make_room(os.environ) if {room} else None
profiler = _KinetoProfile(activities=[ProfilerActivity.CPU])
profiler.prepare_trace(); profiler.start_trace(); profiler.stop_trace()
"""


def kinetos_words(room: bool) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "KINETO_CONFIG"} | {"KINETO_LOG_LEVEL": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE.format(room=room)],
        capture_output=True,
        text=True,
        env=environ,
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_kineto_takes_the_room():
    assert "Max GPU buffer size: 128MB" in kinetos_words(room=False)
    assert "Max GPU buffer size: 2048MB" in kinetos_words(room=True)


def test_what_the_user_or_the_machine_says_stays(tmp_path, monkeypatch):
    environ = {"KINETO_CONFIG": "mine"}
    assert make_room(environ) is None and environ == {"KINETO_CONFIG": "mine"}
    system = tmp_path / "libkineto.conf"
    monkeypatch.setattr(kineto_room, "SYSTEM_FILE", system)
    for given, expected in (
        ("A=1", "A=1\nACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=2048\n"),
        ("ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=7",) * 2,
    ):
        system.write_text(given)
        environ = {}
        file = make_room(environ)
        assert Path(environ["KINETO_CONFIG"]).read_text() == expected
        file.close()
    system.write_bytes(b"\xff")
    assert make_room({}) is None


def test_a_full_record_is_told_of_instead_of_a_missing_one(tmp_path, monkeypatch):
    assert record_is_full() is False
    profiler = TorchProfiler(Window(range(3, 6)), tmp_path, 0, Details(cuda=True), print)
    profiler._last, profiler._full = 5, True
    [said] = profiler._complaints(Found((3, 4, 5), 0, True))
    assert said.startswith("the record of the GPU ends early: Kineto's room for events was full; profile fewer steps")
    monkeypatch.delattr(torch.autograd, "_is_kineto_stopped", raising=False)
    assert record_is_full() is False
