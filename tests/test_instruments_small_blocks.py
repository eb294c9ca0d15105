"""Profiled steps on a CPU reuse freed memory: what a profiler keeps has a place of its own."""

import ctypes
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launch import REPO, alone, environment, flags, plan_of, pretrain

from megatron_lite.instruments import build_instruments as small_blocks
from megatron_lite.instruments.base import Window
from megatron_lite.instruments.build_instruments import RoomForNames, build_instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.parallel import host_memory
from megatron_lite.parallel.host_memory import NO_THREAD_CACHE, SmallBlocks, libc_version, without_thread_cache

GLIBC = pytest.mark.skipif(not (libc_version() or "").startswith("glibc"), reason="another C library")
FIRST, LAST, MIB = 5, 8, 2**20
# large enough that lost blocks show; about half a second per step
WORK = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 128 --max-position-embeddings 128 "
    f"--micro-batch-size 4 --global-batch-size 8 --train-iters {LAST + 1} --no-report"
)
PROFILE = f"--profile --use-pytorch-profiler --profile-step-start {FIRST} --profile-step-end {LAST + 1}"


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def free_blocks() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("glibc before 2.33 cannot count its blocks")
    mallinfo2.restype = Mallinfo2
    now = mallinfo2()
    return now.ordblks + now.smblks


def free_blocks_with_and_after(count: int) -> tuple[int, int]:
    """How many more there are with `count` kept apart, and after they were given back."""
    blocks, before = SmallBlocks(), free_blocks()
    blocks.add(count)
    apart = free_blocks() - before
    blocks.close()
    return apart, free_blocks() - before


def free_blocks_of_runs() -> tuple[int, int]:
    """How many more there are after a run has begun, and another one in the same process."""
    before = free_blocks()
    host_memory.keep_freed_memory()
    first = free_blocks() - before
    host_memory.keep_freed_memory()
    return first, free_blocks() - before


def of_a_process(call: str) -> tuple[int, ...]:
    """What `call` of a function here prints in a process of its own: this one's heap has free small blocks of others."""
    code = f"import {__name__} as here; print(*here.{call})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(map(int, ended.stdout.split()))


@GLIBC
def test_a_run_makes_room_for_what_is_small_once():
    first, second = of_a_process("free_blocks_of_runs()")
    assert 0.8 * host_memory.SMALL_BLOCKS < first < 1.1 * host_memory.SMALL_BLOCKS
    assert abs(second - first) < 1_000


@GLIBC
def test_small_blocks_stay_free_and_apart_until_they_are_given_back():
    apart, after = of_a_process("free_blocks_with_and_after(10_000)")
    assert 8_000 < apart < 11_000
    assert after < 0.6 * apart  # some lay beside each other, and are one now


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory, "libc_version", lambda: None)
    blocks = SmallBlocks()
    blocks.add(10)
    blocks.close()
    assert not host_memory.keep_freed_memory()


@pytest.mark.parametrize(
    ("tunables", "libc", "expected"),
    [
        (None, "glibc 2.36", NO_THREAD_CACHE),
        ("glibc.malloc.hugetlb=1", "glibc 2.31", "glibc.malloc.hugetlb=1:" + NO_THREAD_CACHE),
        ("glibc.malloc.tcache_count=7", "glibc 2.36", None),  # the user has said something about it, or it is done
        (None, "glibc 2.39", None),
        (None, "glibc 2.41", None),
        (None, None, None),
        (None, "", None),
    ],
)
def test_a_profiled_run_starts_again_only_where_the_library_has_the_bug(tunables, libc, expected):
    environ = {"A": "1"} | ({"GLIBC_TUNABLES": tunables} if tunables else {})
    again = without_thread_cache(environ, libc)
    assert again == (expected and {"A": "1", "GLIBC_TUNABLES": expected})


def test_starting_again_keeps_the_command(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *all_of_it: started.append(all_of_it))
    monkeypatch.setattr(host_memory, "libc_version", lambda: "glibc 2.36")
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "pretrain_gpt.py", "--bf16"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    runpy.run_path(str(REPO / "pretrain_gpt.py"))["start_again_for_profiling"]()
    ((program, argv, environ),) = started
    assert (program, argv) == (sys.executable, [sys.executable, "-u", "pretrain_gpt.py", "--bf16"])
    assert environ == {**os.environ, "GLIBC_TUNABLES": NO_THREAD_CACHE}


class Counted:
    def __init__(self):
        self.added, self.closed = [], 0

    def add(self, count: int):
        self.added.append(count)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(("shapes", "times"), [(False, 1), (True, 2)])
def test_room_is_made_before_the_first_profiled_step_and_given_back_after_the_last(monkeypatch, shapes, times):
    monkeypatch.setattr(small_blocks, "SmallBlocks", Counted)
    room = RoomForNames(Window(range(3, 5)), layers=6, passes=2, chunks=100, shapes=shapes)
    for step in (1, 2, 3, 4):
        room.begin(step)
        assert room._blocks.closed == 0
        room.end(step)
    room.begin(5)
    assert room._blocks.added == [2 * times * (8_192 + 12 * 1_024 + 200 * 24)] and room._blocks.closed == 1


@pytest.mark.parametrize(("ways", "rooms"), [(PROFILE, 1), ("--no-profile-on-demand", 0), ("", 1)])
def test_it_is_there_where_torch_may_record(tmp_path, ways, rooms):
    with alone():
        members = build_instruments(plan_of(flags(ways)), tmp_path, Timeline(), print)
    assert [type(member) for member in members].count(RoomForNames) == rooms


@GLIBC
@pytest.mark.slow
def test_profiled_steps_reuse_freed_memory(tmp_path):
    ended = pretrain(
        flags(WORK, PROFILE, "--run-dir", tmp_path, "--tensorboard-dir", tmp_path), under=["env"]
    )  # no fork: a heap of its own
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    resident = {line["step"]: line["host_memory_bytes"] for line in lines if "step" in line}
    # cured 1 to 2 MiB per step; with room but the thread's cache 10 and more, without both about 41
    assert (resident[LAST] - resident[FIRST - 1]) / (LAST - FIRST + 1) < 5 * MIB
