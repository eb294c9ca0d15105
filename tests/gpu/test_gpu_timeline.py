"""What only a GPU can show of the step timeline: its own times, peaks of every step, no waiting, and the cost."""

import statistics
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import intervals, steps, train

from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.timeline import GpuTimes, MemoryNow, Timeline
from megatron_lite.phases import Phase

SIZE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1023 --eval-iters 0 --log-interval 10 --bf16 --num-workers 0 --torch-compile none"
)


pytestmark = pytest.mark.usefixtures("group")


def trained(words: str, folder: Path) -> tuple[list[dict], list[dict]]:
    """(steps, intervals of the one rank) of a run in this process."""
    train([*SIZE.split(), *words.split()], folder, World(gpus=torch.cuda.device_count()))
    return steps(folder), intervals(folder)


def test_every_step_has_the_gpus_times_and_peak(tmp_path):
    records, found = trained("--train-iters 35", tmp_path)
    assert len(records) == 35
    for r in records:
        gpu = r["gpu_phases_ms"]
        assert set(gpu) == {str(phase) for phase in Phase} - {"data", "log", "eval", "save", "pipeline_wait"}
        assert sum(gpu.values()) <= r["gpu_ms"] + 0.05 and min(gpu["forward"], gpu["backward"]) > 0
        assert r["peak_memory_bytes"] > 2**20
    # steps follow each other on the GPU as they do on the host: in the long run both say the same
    host, own = (sum(r[name] for r in records[5:]) for name in ("ms", "gpu_ms"))
    assert own == pytest.approx(host, rel=0.1)
    assert [f["iterations"] for f in found] == [[1, 9], [10, 19], [20, 29], [30, 34]]
    assert all(f["gpu_phases_ms"]["forward"][0] > 0 and f["peak_memory_bytes"][0] > 2**20 for f in found)


def test_switching_it_off_changes_nothing_else(tmp_path):
    # Where several attention kernels race, the fastest of each run drops out elements of its own.
    same = "--train-iters 12 --attention-backend flash"
    on, _ = trained(same, tmp_path / "on")
    off, found = trained(f"{same} --no-step-timeline", tmp_path / "off")
    assert [r["loss"] for r in on] == pytest.approx([r["loss"] for r in off], rel=1e-3) and found == []
    assert not any("gpu_ms" in r or "peak_memory_bytes" in r for r in off)


def test_a_span_is_what_the_gpu_took():
    times, matrix = GpuTimes(), torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    started = time.perf_counter()
    times.begin("step")
    first = times.edge()
    for _ in range(20):
        matrix @ matrix
    times.span("forward", first)
    times.end()
    assert list(times.arrived()) == []  # still running: nobody waited
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    [(key, whole, phases)] = times.arrived()
    assert key == "step" and 0.5 * seconds < phases["forward"] <= whole <= seconds


def test_nothing_waits():
    times, x = GpuTimes(), torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            list(times.arrived())
            times.begin(step)
            first = times.edge()
            x.add_(1)
            times.span("forward", first)
            times.end()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peaks_are_each_steps_own_and_the_runs_is_kept():
    memory = MemoryNow(cuda=True)
    memory.peak_bytes()
    base = torch.cuda.memory_allocated()
    for mib in (64, 8, 32):
        held = torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
        del held
        assert memory.peak_bytes() - base == pytest.approx(mib * 2**20, abs=2**20)
    assert memory.stats()["allocated_bytes.all.peak"] >= base + 64 * 2**20
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] < base + 2**20
    memory.close()


def test_the_hosts_cost_of_a_step():
    """Phases of a step with four micro-batches, without any work: below 0.5% of 50 ms."""
    timeline, seconds = Timeline(), []
    timeline.set_up(detailed=True, cuda=True)
    watching = Instruments([timeline], print)
    for step in range(1, 200):
        started = time.perf_counter()
        with watching.step(step):
            for _ in range(16):
                with watching.phase("forward"):
                    pass
        seconds.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    print(f"{1e6 * statistics.median(seconds):.0f} us per step")
    assert statistics.median(seconds) < 0.005 * 0.050


def test_compiled_layers_learn_the_same(tmp_path):
    torch._dynamo.reset()
    eager, _ = trained("--train-iters 8 --hidden-dropout 0 --attention-dropout 0", tmp_path / "eager")
    compiled, _ = trained(
        "--train-iters 8 --hidden-dropout 0 --attention-dropout 0 --torch-compile layers", tmp_path / "compiled"
    )
    assert [r["loss"] for r in compiled] == pytest.approx([r["loss"] for r in eager], rel=5e-3)
    assert [r["iteration"] for r in compiled if r.get("compiling")] == [1]
