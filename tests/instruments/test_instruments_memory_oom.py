"""Memory that runs out: the five lines, the snapshot of that moment, the exit."""

import copy
import re
import subprocess
import sys

import pytest
import torch
from support.launch import ALONE, environment, flags, plan_of
from support.paths import REPO
from support.snapshots import live_at_each_moment, protocol, read_snapshot, trace
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instruments, Window
from megatron_lite.instruments.build_instruments import build_memory_instruments
from megatron_lite.instruments.memory_oom import (
    EXPANDABLE,
    FULL_RECOMPUTE,
    LAST_RESORT,
    is_out_of_memory,
    list_remedies,
    read_asked_bytes,
)
from megatron_lite.instruments.memory_summary import (
    HELD_ACTIVATIONS,
    HELD_GRADIENTS,
    HELD_OPTIMIZER,
    HELD_WEIGHTS,
    list_held_memory,
    peak,
    sum_by_site,
)
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.what_if import predict_peak
from megatron_lite.units import GIB, size

REAL = REPO.parent / "shared" / "snapshots" / "cuda_gpt_24x1024_seq1024_bf16.pickle"
# torch is imported before the limit: a build for GPUs maps gigabytes
LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import megatron_lite.app
from megatron_lite.__main__ import train
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), -1))
sys.exit(train(sys.argv[3:]))
"""
TOO_MUCH = (
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 128 --global-batch-size 128 --hidden-size 128 "
    "--train-iters 3 --vocab-size 9000"
)


HELP = "  would help: --micro-batch-size 64 instead of 128, with the same --global-batch-size (predicted peak "
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")


def run_out(tmp_path, *words) -> list[str]:
    """What a run that may take 600 MiB says at its end."""
    argv = flags(TOO_MUCH, *words, "--run-dir", tmp_path / "run")
    command = [sys.executable, "-c", LIMITED, str(REPO), str(600 * 2**20), *argv]
    captured = {"capture_output": True, "text": True, "timeout": LIMIT_S}
    # on a busy machine glibc gives threads arenas of their own, 64 MiB of addresses each, which the limit counts
    one_arena = environment() | {"MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, env=one_arena, cwd=tmp_path, check=False, **captured)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    return ended.stdout[ended.stdout.index("error: ") :].splitlines()


@pytest.mark.slow
@linux
def test_a_cpu_run_that_runs_out_says_so_in_five_lines(tmp_path):
    path = tmp_path / "deep" / "s_oom_rank0.pickle"
    window = "--record-memory-history --profile-step-start 1 --profile-step-end 3 --memory-snapshot-path"
    said = run_out(tmp_path, window, tmp_path / "deep" / "s.pickle")
    amount = r"[\d.]+ [MG]iB"
    for pattern, line in zip(
        (
            (
                rf"error: out of memory on rank 0, (forward|backward) of step 1( in \S+)?: {amount} were asked for; tensors "
                rf"hold {amount}, {amount} are reserved, [\d.]+ GiB of [\d.]+ GiB are free$"
            ),
            rf"  held by: activations {amount}, optimizer ",
            rf"  largest: {amount} \w+ \((?:model|cpu_kernels)/\w+\.py:\d+\)",
            re.escape(HELP),
            re.escape(f"  snapshot: {path}; draw it at pytorch.org/memory_viz"),
        ),
        said,
        strict=True,
    ):
        assert re.match(pattern, line)
    snapshot = read_snapshot(path)
    asked = [event for event in trace(snapshot) if event["action"] == "oom"]
    assert protocol(path) == 4 and len(asked) == 1 and asked[0]["size"] > 2**20 and "addr" not in asked[0]
    assert list(live_at_each_moment(snapshot))[-1][0] is trace(snapshot)[-1] is asked[0]
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


@pytest.mark.slow
@linux
def test_a_cpu_run_that_does_not_record_says_it_in_two_lines(tmp_path):
    first, second = run_out(tmp_path)
    told = r"error: out of memory on rank 0: [\d.]+ [MG]iB were asked for; [\d.]+ GiB of [\d.]+ GiB are free$"
    assert re.match(told, first) and second.startswith(HELP)


class Allocator:
    """torch.cuda's side of memory history: what is called, and a recorded snapshot as the answer."""

    def __init__(self, monkeypatch, snapshot: dict):
        self.calls, self.observers, self.tags = [], [], []
        memory = torch.cuda.memory
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=0: 25 * GIB)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=0: (2 * GIB, 80 * GIB))
        monkeypatch.setattr(memory, "_record_memory_history", lambda **given: self.calls.append(given))
        monkeypatch.setattr(memory, "_snapshot", lambda: copy.copy(snapshot))
        monkeypatch.setattr(memory, "_set_memory_metadata", self.tags.append)
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self.observers.append, raising=False)


@pytest.fixture(scope="module")
def real():
    if not REAL.exists():
        pytest.skip(f"needs {REAL.name}, a recording of a GPU, in ../shared/snapshots")
    return read_snapshot(REAL)


@pytest.fixture
def allocator(monkeypatch, real):
    return Allocator(monkeypatch, real)


RECORD = "--record-memory-history --profile-step-start 3 --profile-step-end 5 --memory-snapshot-path"


def on_gpu(words: str, window=range(3, 5)):
    """(instruments of one GPU rank, what they said)."""
    said, plan = [], plan_of(flags(words), World(gpus=1))
    watched = Window(window, train_iters=plan.train_iters)
    return Instruments(build_memory_instruments(plan, watched, said.append), said.append), said


def run_steps(watching, last: int):
    for step in range(1, last + 1):
        with watching.step(step), watching.phase("forward"):
            pass


def run_out_on_gpu(words: str, *before) -> tuple[list[str], torch.OutOfMemoryError]:
    """(what is said, the error) of a first step that fails after `before` were called in its forward."""
    watching, said = on_gpu(words)
    with pytest.raises(torch.OutOfMemoryError) as failed, watching, watching.step(1), watching.phase("forward"):
        for act in before:
            act()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
    return said, failed.value


def test_a_gpu_records_from_the_start_and_its_file_holds_the_window(tmp_path, allocator, real):
    watching, said = on_gpu(f"--memory-history-events 300000 {RECORD} {tmp_path}/new/s.pickle")
    with watching:
        assert [(call["enabled"], call["max_entries"]) for call in allocator.calls] == [("all", 100_000)]
        run_steps(watching, 2)
        assert len(allocator.calls) == 1
        run_steps(watching, 6)
    rings = [(call["enabled"], call.get("max_entries"), call.get("clear_history")) for call in allocator.calls]
    assert rings == [("all", 100_000, True), ("all", 300_000, True), ("all", 100_000, True), (None, None, None)]
    # who frees is told in the window only
    assert [call["context"] for call in allocator.calls[:-1]] == ["alloc", "all", "alloc"]
    assert {call["stacks"] for call in allocator.calls[:-1]} == {"python"}
    assert {"step 3", "step 3/forward", "step 4/forward"} <= set(allocator.tags)
    written = read_snapshot(tmp_path / "new" / "s.pickle")
    assert protocol(tmp_path / "new" / "s.pickle") == 4 and written["device_traces"] == real["device_traces"]
    names = [a["name"] for a in written["external_annotations"]]
    assert "step 4" in names and "Optimizer.step#AdamW.step" in names  # ours beside torch's own
    assert (
        len(said) == 1
        and wording("instruments/holds-events-of-steps-of", f"{len(trace(real)):,}", 3, 4, 22.5) in said[0]
    )


def test_a_gpu_writes_at_the_runs_last_step_before_all_is_freed(tmp_path, allocator):
    watching, said = on_gpu(f"--train-iters 6 {RECORD} {tmp_path}/s.pickle", range(5, 9))
    with watching:
        run_steps(watching, 6)
        assert (tmp_path / "s.pickle").exists() and wording("instruments/of-steps-of-this", 5, 6) in said[0]
    assert len(said) == 1


def test_a_real_recording_has_the_peak_that_torch_counted_and_the_users_lines(real):
    # 24,207,167,496 bytes of requests: shared/notes/memory.md; the site is that of the attention's softmax
    held = list_held_memory(real)
    assert peak(real).size == 24_207_167_496 and sum(piece.size for piece in held) < 7 * GIB
    name, size, pieces = sum_by_site(held)[0]
    assert re.fullmatch(r".+ \(.+/.+\.py:\d+\)|code without Python frames, such as backward", name)
    assert size > 0 and pieces > 0


@pytest.mark.parametrize("observed", [True, False])
def test_a_gpu_rank_that_runs_out_explains_itself(tmp_path, allocator, observed):
    file = tmp_path / "s_oom_rank0.pickle"

    def fail():
        assert allocator.observers[0](0, 3 * GIB, 80 * GIB, 2 * GIB) is None
        assert file.exists()  # while all still stands

    said, error = run_out_on_gpu(f"--micro-batch-size 4 {RECORD} {tmp_path}/s.pickle", *[fail] * observed)
    asked = "3.00 GiB were" if observed else "an unknown amount was"
    assert said[0].startswith(wording("instruments/error-out-of-memory", 0, 1, asked))
    assert said[0].endswith(" GiB, 25.00 GiB are reserved, 2.00 GiB of 80.00 GiB are free") and len(said) == 5
    assert EXPANDABLE in said[3] and said[4].startswith(f"  snapshot: {file};") and error.explained == said
    assert list(tmp_path.iterdir()) == [file]
    file.unlink()
    allocator.observers[0](0, GIB, 80 * GIB, 0)  # that of the next run in this process, say; torch forgets no observer
    assert list(tmp_path.iterdir()) == []


def test_shortages_that_somebody_caught_are_mentioned_once_and_the_last_is_explained(tmp_path, allocator):
    watching, said = on_gpu(f"{RECORD} {tmp_path}/s.pickle")
    with watching:
        for _ in range(5):
            allocator.observers[0](0, GIB, 80 * GIB, 0)
        run_steps(watching, 5)
    [line] = [text for text in said if "out of memory" in text]
    assert not line.startswith("error") and wording("instruments/run-went-on-snapshot") in line
    fail = [lambda: allocator.observers[1](0, 3 * GIB, 80 * GIB, 2 * GIB)] * 6
    said, _ = run_out_on_gpu(f"{RECORD} {tmp_path}/s.pickle", *fail)
    assert said[0].startswith(wording("instruments/error-out-of-memory-on", 0, 1, "3.00"))
    assert said[4] == wording("instruments/snapshot-is-of-earlier", tmp_path / "s_oom_rank0.pickle", 3)


def test_segments_that_can_grow_are_not_advised_twice(tmp_path, monkeypatch, real):
    Allocator(monkeypatch, {**real, "allocator_settings": {"expandable_segments": True}})
    said, _ = run_out_on_gpu(f"{RECORD} {tmp_path}/s.pickle")
    assert said[3].startswith("  would help: --recompute-granularity full") and EXPANDABLE not in said[3]


def test_an_explanation_that_fails_takes_nothing_with_it(tmp_path, allocator, monkeypatch):
    def broken():
        raise ValueError("no snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    said, _ = run_out_on_gpu(f"{RECORD} {tmp_path}/s.pickle")
    assert said == [wording("instruments/error-out-of-memory-on-rank", 0, 1)]


def test_a_gpu_rank_that_does_not_record_explains_itself_too(monkeypatch, real):
    segments = [
        {**segment, "frames": [], "blocks": [{**block, "frames": []} for block in segment["blocks"]]}
        for segment in real["segments"]
    ]  # as torch gives them where nothing was recorded
    no_history = {**real, "segments": segments, "device_traces": [[] for _ in real["device_traces"]]}
    allocator = Allocator(monkeypatch, no_history)
    said, _ = run_out_on_gpu("")
    assert len(said) == 5 and allocator.calls == []
    assert said[1] == wording("instruments/held-by-tensors-what", 885, "--record-memory-history")
    assert re.fullmatch(r"  largest: [\d.]+ MiB( x \d+)?; [\d.]+ MiB( x \d+)?; [\d.]+ MiB( x \d+)?", said[2])
    assert EXPANDABLE in said[3]
    assert said[4] == wording("instruments/snapshot-none-writes-one", "--record-memory-history")


def test_cpu_ranks_that_do_not_record_are_left_alone():
    assert build_memory_instruments(plan_of(flags("")), Window(), print) == []
    for rank, number in ((0, 3), (1, 0)):
        plan = plan_of(flags("--record-memory-history"), World(rank, 2, rank, 2))
        assert len(build_memory_instruments(plan, Window(), print)) == number


BATCH, SUMS = "--micro-batch-size {} instead of {}", "--grad-reduce-in-bf16"
NO_SUMS = "no --accumulate-allreduce-grads-in-fp32"


@pytest.mark.parametrize(
    ("words", "held", "unused", "found"),
    [
        ("--micro-batch-size 4", {HELD_ACTIVATIONS: 9}, 0, [BATCH.format(2, 4), FULL_RECOMPUTE, "--bf16"]),
        ("--bf16 --micro-batch-size 2", {HELD_ACTIVATIONS: 9}, 0, [BATCH.format(1, 2), FULL_RECOMPUTE, SUMS]),
        ("--bf16", {HELD_OPTIMIZER: 9}, 0, [SUMS, FULL_RECOMPUTE]),
        (f"--bf16 {SUMS}", {HELD_OPTIMIZER: 9, HELD_GRADIENTS: 3}, 0, [FULL_RECOMPUTE]),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {HELD_WEIGHTS: 9}, 0, [NO_SUMS, FULL_RECOMPUTE]),
        (f"--fp16 {FULL_RECOMPUTE}", {HELD_WEIGHTS: 9}, 0, [LAST_RESORT]),
        (f"--fp16 {FULL_RECOMPUTE} --recompute-method block", {HELD_ACTIVATIONS: 9}, 0, ["--recompute-num-layers 2 "]),
        ("--fp16", {HELD_ACTIVATIONS: 9}, 100, [EXPANDABLE, FULL_RECOMPUTE]),
    ],
)
def test_only_flags_that_help_are_advised(words, held, unused, found):
    told = list_remedies(
        plan_of(flags(words), World(gpus=1) if unused else ALONE), predict_peak, held, asked=100, unused=unused
    )
    assert len(told) == len(found) and all(flag in text for text, flag in zip(told, found))


def test_what_is_advised_tells_the_peak_that_it_leads_to():
    plan = plan_of(flags("--micro-batch-size 4 --bf16"), World(gpus=1))
    now = predict_memory(plan).peak.num_bytes
    smaller = predict_memory(plan_of(flags("--micro-batch-size 2 --bf16"), World(gpus=1))).peak.num_bytes
    told = list_remedies(plan, predict_peak, {HELD_ACTIVATIONS: 9}, asked=1, unused=0)[0]
    assert told.endswith(f"(predicted peak {size(smaller)})") and smaller < now

    def fail(plan, **changes):
        raise ZeroDivisionError

    for unknown in (fail, None):  # whatever happens in there must not hide the error
        told = list_remedies(plan, unknown, {HELD_ACTIVATIONS: 9}, asked=1, unused=0)
        assert told[0].endswith(wording("instruments/with-same", "--global-batch-size"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (MemoryError(), True),
        (RuntimeError("The size of tensor a must match"), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_a_shortage_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected
    assert read_asked_bytes(error) == (8 if "8 bytes" in str(error) else None)
