"""Makes the runs of the answer key: one folder each, with ordinary trace files."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.diagnosis.made.causes import build_training
from benchmarks.diagnosis.manifest import Run

REPO = Path(__file__).parents[2]
LIMIT_S = 240
PROGRAMS = "benchmarks.diagnosis.programs"
HERE_PROGRAMS = Path(__file__).parent / "programs.py"
# the trainer of this repository, profiled by its own flags
TRAINER_FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --train-iters 26 --eval-iters 0 --log-interval 5 --profile --use-pytorch-profiler --profile-ranks -1 "
    "--profile-step-start 15 --profile-step-end 21 --no-report"
)


def make_run(run: Run, folder: Path, public: Path | None) -> None:
    """Make a run.

    Args:
        run: What to make.
        folder: Of the run; made, and removed again if the run fails.
        public: Folder with the public traces, each in a folder of its recipe's name.

    Raises:
        RuntimeError: The run failed, or its files are not here.
    """
    if run.kind == "made":
        training = build_training(run.workload, run.recipe.split(), run.ranks, seed=sum(run.name.encode()))
        training.simulate()
        for rank in training.ranks:
            rank.write(folder)
    elif run.kind == "program":
        start(run, build_program_command(run, ["--trace", str(folder)]), folder)
        move_truth(run, folder)
    elif run.kind == "trainer":
        words = [*TRAINER_FLAGS.split(), *run.recipe.format(folder=folder).split()]
        words += ["--run-dir", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
        start(run, [*build_launcher(run.ranks), str(REPO / "pretrain_gpt.py"), *words], folder)
    else:
        copy_public(run, folder, public)


def copy_public(run: Run, folder: Path, public: Path | None) -> None:
    """Copy a public run's files.

    Args:
        run: The run.
        folder: Where to.
        public: Folder with the public traces.

    Raises:
        RuntimeError: They are not here.
    """
    if public is None or not (public / run.recipe).is_dir():
        raise RuntimeError(f"{run.name}: give --public FOLDER, with {run.source} in FOLDER/{run.recipe}")
    shutil.copytree(public / run.recipe, folder)


def build_launcher(ranks: int, python: str = sys.executable) -> list[str]:
    """Build the command that starts a Python file on so many ranks."""
    if ranks == 1:
        return [python]
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def build_program_command(run: Run, words: Sequence[str], python: str = sys.executable) -> list[str]:
    """Build the command of a program.

    Args:
        run: Of the answer key.
        words: Further arguments.
        python: The interpreter.
    """
    launcher = build_launcher(run.ranks, python)
    # both launchers take a module
    return [*launcher, "-m", PROGRAMS, run.recipe, *words]


def start(run: Run, command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command in the repository. Returns what it printed.

    Args:
        run: Named where it fails.
        command: The command.
        folder: Removed where it fails.

    Raises:
        RuntimeError: It failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=REPO, check=False
    )
    if ended.returncode:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{run.name}: exit code {ended.returncode}: {ended.stderr[-1500:]}")
    return ended.stdout


def move_truth(run: Run, folder: Path) -> None:
    """Move what a program measured away from its traces: some tools take every JSON file for one."""
    for path in folder.glob("truth_rank*.json"):
        target = find_truth(run, folder.parents[1])
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)


def find_truth(run: Run, folder: Path) -> Path:
    """Find the folder with what a run's programs measured, in the benchmark's folder."""
    return folder / "truth" / run.name


def read_core_wait(run: Run, folder: Path) -> float:
    """Read for which share of the steps a run's process waited for a core, as its recorder measured; 0 where it did not.

    Args:
        run: Of the answer key.
        folder: Of the benchmark.
    """
    shares = [truth["core_wait_share"] for truth in read_truth(run, folder)]
    lines = (folder / "runs" / run.name / "steps.jsonl").read_text().splitlines() if run.kind == "trainer" else []
    steps = [step for step in map(json.loads, lines) if "core_wait_ms" in step and "ms" in step]
    if steps:
        shares.append(statistics.median(step["core_wait_ms"] / step["ms"] for step in steps))
    return max(shares, default=0.0)


def read_truth(run: Run, folder: Path) -> list[dict]:
    """Read what a run's programs measured, a record per rank; none for runs that are no programs."""
    return [json.loads(path.read_text()) for path in sorted(find_truth(run, folder).glob("truth_rank*.json"))]
