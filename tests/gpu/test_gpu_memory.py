"""Memory history of a real GPU's allocator."""

import contextlib
import io

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import flags, losses, train
from support.snapshots import protocol, read_snapshot
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.memory_summary import (
    HELD_ACTIVATIONS,
    HELD_WEIGHTS,
    category,
    list_held_memory,
    peak,
    sum_by_category,
)

# compiled layers would hide the modules inside them
MODEL = (
    "--torch-compile none --num-layers 4 --hidden-size 256 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 "
    "--global-batch-size 4 --train-iters 6 --deterministic-mode --attention-backend unfused --bf16"
)
RECORD = "--record-memory-history --profile-step-start 3 --profile-step-end 5"
ONE = World(gpus=1)


pytestmark = pytest.mark.usefixtures("deterministic", "group")


def run(argv: list[str], folder, watchers=()) -> list[str]:
    """What a run said of memory."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(argv, folder, ONE, watchers)
    return [line for line in out.getvalue().splitlines() if "memory" in line and not line.startswith("[Rank ")]


class Peak(Instrument):
    """What torch itself counts in the window."""

    requested = 0

    def begin(self, step):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def end(self, step):
        if step in (3, 4):  # the timeline sets peaks back after each step
            self.requested = max(self.requested, torch.cuda.memory_stats()["requested_bytes.all.peak"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder, count = tmp_path_factory.mktemp("gpu"), Peak()
    lines = run(flags(MODEL, RECORD, "--memory-snapshot-path", folder / "m" / "s.pickle"), folder / "on", [count])
    return folder, read_snapshot(folder / "m" / "s.pickle"), lines, count.requested


def test_the_file_holds_window_peak_phases_modules_and_stacks(recorded):
    folder, snapshot, lines, requested = recorded
    assert (
        protocol(folder / "m" / "s.pickle") == 4
        and len(lines) == 1
        and wording("gpu/of-steps-of-this", 3, 4) in lines[0]
    )
    # what backward's thread allocates before the first module's hook, a few scalars, has none in its first step
    tags = {event["user_metadata"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"} - {""}
    assert {tag.split("/")[0] for tag in tags} == {"step 3", "step 4"}
    assert abs(peak(snapshot).size - requested) < 0.01 * requested
    for phase in ("forward", "backward"):  # backward runs on a thread of its own
        assert {f"step 3/{phase}/decoder.layers.{n}.self_attention" for n in range(4)} <= tags
    held = list_held_memory(snapshot)  # weights keep their stacks, though the history begins at the window
    sizes = sum_by_category(held)
    assert sizes[HELD_WEIGHTS] > 2 * 3_000_000 and sizes.get(HELD_ACTIVATIONS, 0) < sizes[HELD_WEIGHTS]
    assert all(piece.frames for piece in held if category(piece) == HELD_WEIGHTS)


def test_recording_changes_no_bit(recorded, tmp_path):
    run(flags(MODEL), tmp_path)
    assert losses(tmp_path) == losses(recorded[0] / "on")


def test_memory_that_really_runs_out_is_explained(tmp_path):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * 2**30 / torch.cuda.mem_get_info()[1])
    argv = flags(
        MODEL, RECORD, "--micro-batch-size 64 --global-batch-size 64 --memory-snapshot-path", tmp_path / "s.pickle"
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(torch.OutOfMemoryError):
            train(argv, tmp_path / "run", ONE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    said = out.getvalue()[out.getvalue().index("error: ") :].splitlines()
    assert said[0].startswith(wording("gpu/error-out-of-memory-on", 0)) and "--micro-batch-size 32 instead" in said[3]
    snapshot = read_snapshot(tmp_path / "s_oom_rank0.pickle")
    assert any(event["action"] == "oom" for event in snapshot["device_traces"][0])
    assert [path.name for path in tmp_path.glob("*.pickle")] == ["s_oom_rank0.pickle"]
