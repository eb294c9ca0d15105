"""Part after part, each in a process of its own with a share of the time; then the table."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.training.process import environment_of, machine
from gpu_checks.outcome import LEFT_OUT, NOT_STARTED, Outcome, format_table, judge_tests, write_files
from gpu_checks.pytest_side import DEVICE_VARIABLE, KEEP_VARIABLE, OUTCOMES_VARIABLE
from gpu_checks.speed import judge_speed

GPU_TESTS = Path(__file__).resolve().parents[1]
REPO = GPU_TESTS.parents[1]
BAD, NO_DEVICE, INTERRUPTED = 1, 3, 130
MIN_MINUTES = 1
MIN_PART_S = 15  # importing torch and waking a GPU alone can take that long
LAST_S = 5  # for the table and the files
SECONDS_TO_LOOK = 120  # the first import of torch from a cold disk
SECONDS_TO_WRITE = 20  # the benchmark ends by itself that much before it would be ended
SECONDS_TO_END = 10  # after being asked to
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "gpu_checks.pytest_side")
TINY = (
    "--device cpu --work byte --precision fp32 --layers 1 --hidden 16 --heads 2 --sequence 16 --micro-batch 2 "
    "--steps 6 --warm-up 2 --rounds 1 --contestants ours"
)
# What torch sees of this machine, in a process of its own, so that nothing stays on the GPU.
LOOK = """
import json, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
    }
print(json.dumps(facts))
"""


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


SPEED = Part("speed", "tokens/s beside nanoGPT and Hugging Face", 250, packages=(), on_cpu=True)
PARTS = (
    Part("equal", "losses of the GPU and the CPU, of fp16, bf16 and fp32", 55, ("test_gpu_equal.py",), on_cpu=True),
    Part("syncs", "no wait of the host in a step", 80, ("test_gpu_train.py", "test_gpu_prefetch.py")),
    Part("explain", "a profiled run, its report, memory that runs out", 40, ("test_gpu_explain.py",), on_cpu=True),
    Part("terms", "what a step takes beside its products", 70, ("test_gpu_terms.py",), on_cpu=True),
    Part("memory", "snapshots, and the peaks that were foretold", 60, ("test_gpu_memory.py", "test_gpu_rehearsal.py")),
    Part("profile", "torch.profiler's traces", 35, ("test_gpu_torch_profiler.py",)),
    Part("timeline", "the GPU's own times, NCCL's records", 45, ("test_gpu_timeline.py", "test_gpu_faults.py")),
    Part("nsys", "Nsight Systems", 35, ("test_gpu_nsys.py",), program="nsys"),
    SPEED,  # last: what the others leave of their time is this one's
)


def main(argv: list[str], description: str) -> int:
    """Exit code: 0 all good, 1 something is not or was not started, 2 a mistake in the flags, 3 nothing can run here."""
    args = read_flags(argv, description)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the part that is going on
    found = look_at_torch()
    objection = None
    if found["torch"] is None:
        objection = f"{sys.executable}: cannot import torch ({found['why']}); start this with the Python that has it"
    elif args.device == "cuda" and found["device"] is None:
        objection = (
            f"torch {found['torch']} finds no CUDA device here; run this on a machine with a GPU, or rehearse it with "
            "--device cpu"
        )
    if objection:
        print(f"error: {objection}", file=sys.stderr)
        return NO_DEVICE
    facts = {"command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "torch": found, "machine": machine()}
    where = found["device"] if args.device == "cuda" else "CPU, a rehearsal"
    print(f"{where}, torch {found['torch']}; at most {args.minutes:g} minutes", flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name in args.parts]
    outcomes, interrupted = [], False
    with tempfile.TemporaryDirectory() as folder:
        try:
            for at, part in enumerate(parts):
                left_s = started + 60 * args.minutes - time.monotonic()
                outcomes.append(check_part(part, parts[at + 1 :], args, left_s, Path(folder)))
                print(outcomes[-1], flush=True)
        except KeyboardInterrupt:
            interrupted = True
            outcomes += [Outcome(part.name, NOT_STARTED, "interrupted") for part in parts[len(outcomes) :]]
        lines = format_table(outcomes, time.monotonic() - started)
        if args.out:
            lines += write_files(args.out, Path(folder), facts, outcomes)
    print("\n".join(lines))
    if interrupted:
        return INTERRUPTED
    return 0 if all(outcome.is_good for outcome in outcomes) else BAD


def read_flags(argv: list[str], description: str) -> argparse.Namespace:
    """The command's own flags; ends the process with code 2 and one line for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python tests/gpu", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, known = parser.add_argument, [part.name for part in PARTS]
    add("--minutes", type=float, default=9, help="for all of it [%(default)s]")
    files = "results.json, speed.json, log.txt and a trace, compressed"
    add("--out", type=Path, metavar="FOLDER", help=f"gets {files}: at most 8 files of 16 MiB; made if it is not there")
    add("--nanogpt", type=Path, metavar="FOLDER", help="a clone of nanoGPT, to compare speeds with")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal at tiny sizes [%(default)s]")
    parts = "; ".join(f"{part.name} ({part.what})" for part in PARTS)
    add("--parts", nargs="+", metavar="PART", default=known, help=f"only these: {parts}")
    args = parser.parse_args(argv)
    if args.minutes < MIN_MINUTES:
        parser.error(f"--minutes {args.minutes:g}: must be at least {MIN_MINUTES}")
    if unknown := [name for name in args.parts if name not in known]:
        parser.error(f"--parts {unknown[0]}: no such part; there are {', '.join(known)}")
    if args.out is not None and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out}: is there already and not an empty folder; name another")
    return args


def look_at_torch() -> dict:
    """LOOK's facts; {"torch": None, "why": ...} where it cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK], check=False, capture_output=True, text=True, timeout=SECONDS_TO_LOOK
    )
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"torch": None, "why": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def find_lack(part: Part, device: str) -> str | None:
    """Why the part cannot run here at all; None if it can."""
    if device == "cpu" and not part.on_cpu:
        return "needs a GPU"
    if missing := [name for name in part.packages if importlib.util.find_spec(name) is None]:
        return f"needs the package {' and '.join(missing)}"
    if part.program and shutil.which(part.program) is None:
        return f"needs {part.program} on the PATH"
    return None


def share_time(part: Part, later: Sequence[Part], left_s: float) -> float:
    """Seconds that `part` may take: its share of what is left for it and all `later` ones; 0 where it is too little."""
    seconds = (left_s - LAST_S) * part.share / (part.share + sum(one.share for one in later))
    return seconds if seconds >= MIN_PART_S else 0


def check_part(part: Part, later: Sequence[Part], args: argparse.Namespace, left_s: float, scratch: Path) -> Outcome:
    """Run a part, if it can be run, for its share of the `left_s` seconds."""
    if reason := find_lack(part, args.device):
        return Outcome(part.name, LEFT_OUT, reason)
    limit_s = share_time(part, [one for one in later if not find_lack(one, args.device)], left_s)
    if not limit_s:
        return Outcome(part.name, NOT_STARTED, f"{max(left_s, 0):.0f} s of --minutes were left")
    folder = scratch / part.name
    folder.mkdir()
    found = folder / ("speed.json" if part is SPEED else "tests.jsonl")
    inherited = environment_of(args.device, threads=1)  # tiny models; the benchmark gives its contestants all cores
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join([inherited["PYTHONPATH"], str(GPU_TESTS)]),
        OUTCOMES_VARIABLE: str(found),
        DEVICE_VARIABLE: args.device,
        KEEP_VARIABLE: str(args.out.resolve()) if args.out else "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else is installed there
    }
    command = build_command(part, args, limit_s, found)
    code, seconds = run_limited(command, environment, limit_s, scratch / f"{part.name}.log")
    if part is SPEED:
        return judge_speed(part.name, found, args.device, code, seconds, limit_s)
    return judge_tests(part.name, found, code, seconds, limit_s)


def build_command(part: Part, args: argparse.Namespace, limit_s: float, found: Path) -> list[str]:
    """To be started in the repository; the benchmark writes `found` and may write beside it."""
    if part is not SPEED:
        return [sys.executable, *PYTEST, *(str(GPU_TESTS / file) for file in part.files)]
    sizes = TINY.split() if args.device == "cpu" else ["--device", "cuda"]
    beside = ["--nanogpt", str(args.nanogpt.resolve())] if args.nanogpt else []
    minutes = max(limit_s - SECONDS_TO_WRITE, limit_s / 2) / 60
    files = ["--scratch", str(found.parent), "--out", str(found)]
    return [sys.executable, "-m", "benchmarks.train", *sizes, "--minutes", f"{minutes:.2f}", *beside, *files]


def run_limited(command: list[str], environment: dict[str, str], limit_s: float, log: Path) -> tuple[int | None, float]:
    """Run `command` for at most `limit_s`, its output into the file `log`, and end all that it started.

    Returns: its exit code, None where the time was up; the seconds it took.
    """
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            family = find_descendants(process.pid)  # may have sessions of their own, and would keep the GPU's memory
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            for pid in {process.pid, *family, *find_descendants(process.pid)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return code, time.monotonic() - started


def find_descendants(pid: int) -> list[int]:
    """Process ids of children, theirs and so on; none where the system does not say."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text(encoding="ascii").split()):
                found += [child, *find_descendants(child)]
    return found
