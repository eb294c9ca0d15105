"""What is checked, in order: each part a process of its own, with a share of the time."""

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

GPU_TESTS = Path(__file__).resolve().parents[1]
REPO = GPU_TESTS.parents[1]
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "gpu_checks.outcomes_plugin")
SPEED = "speed"
SPEED_FILE = "speed.json"
TINY = (
    "--device cpu --work byte --precision fp32 --layers 1 --hidden 16 --heads 2 --sequence 16 --micro-batch 2 "
    "--steps 6 --warm-up 2 --rounds 1 --contestants ours plain"
)
SECONDS_TO_WRITE = 20  # the benchmark ends by itself that much before it would be ended


@dataclass(frozen=True)
class Part:
    """`share`: of the time, against the other parts' shares; guesses, in seconds of nine minutes. `on_cpu`: something of
    it can run without a GPU."""

    name: str
    what: str
    share: int
    files: tuple[str, ...] = ()  # of tests/gpu
    packages: tuple[str, ...] = ("pytest",)
    program: str = ""
    on_cpu: bool = False


PARTS = (
    Part("equal", "losses of the GPU and the CPU, of fp16, bf16 and fp32", 55, ("test_gpu_equal.py",), on_cpu=True),
    Part("syncs", "no wait of the host in a step", 80, ("test_gpu_train.py", "test_gpu_prefetch.py")),
    Part("explain", "a profiled run, its report, memory that runs out", 40, ("test_gpu_explain.py",), on_cpu=True),
    Part("memory", "snapshots, and the peaks that were foretold", 60, ("test_gpu_memory.py", "test_gpu_rehearsal.py")),
    Part("profile", "torch.profiler's traces", 35, ("test_gpu_torch_profiler.py",)),
    Part("timeline", "the GPU's own times, NCCL's records", 45, ("test_gpu_timeline.py", "test_gpu_faults.py")),
    Part("nsys", "Nsight Systems", 35, ("test_gpu_nsys.py",), program="nsys"),
    # last: what the others leave of their time is this one's
    Part(SPEED, "tokens/s beside plain PyTorch and Hugging Face", 200, packages=(), on_cpu=True),
)


def lacks(part: Part, device: str) -> str | None:
    """Why the part cannot run here at all, in words; None if it can."""
    if device == "cpu" and not part.on_cpu:
        return "needs a GPU"
    missing = [name for name in part.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs the package {' and '.join(missing)}"
    if part.program and shutil.which(part.program) is None:
        return f"needs {part.program} on the PATH"
    return None


def command_of(part: Part, device: str, limit_s: float, folder: Path) -> list[str]:
    """To be started in the repository. `folder`: of this part alone, where it may write."""
    if part.name != SPEED:
        return [sys.executable, *PYTEST, *(str(GPU_TESTS / file) for file in part.files)]
    sizes = TINY.split() if device == "cpu" else ["--device", "cuda"]
    minutes = max(limit_s - SECONDS_TO_WRITE, limit_s / 2) / 60
    return [
        sys.executable,
        "-m",
        "benchmarks.train",
        *sizes,
        "--minutes",
        f"{minutes:.2f}",
        "--scratch",
        str(folder),
        "--out",
        str(folder / SPEED_FILE),
    ]
