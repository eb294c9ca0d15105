"""Plants 12 slow configurations on CPUs, and has `megatron-lite tune` mend them.

    python -m benchmarks.tune [--only PATTERN] [--keep FOLDER] [--minutes 3] [--stop-after SECONDS] [--findings]

Seven are of this package's trainer, five of plain scripts with a file of knobs (tune_scripts/). A configuration is mended
if the command that tune prints sets what was planted, and is faster in its comparison at the end. A row shows the step as
given and at the end, in that comparison; --keep keeps ledgers and what was printed. --findings only records each
configuration once, and lists what its report names.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.formats.tune_ledger import MeasuredRun, TuneOutcome, TuneTrial, decode_line, describe_settings

REPO = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "tune_scripts"
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 256 --tokenizer-type NullTokenizer --mock-data --lr 1e-4 --train-iters 1000 "
    "--hidden-dropout 0 --attention-dropout 0"
)
MODEL = f"{SMALL} --micro-batch-size 4 --global-batch-size 4"
RANKS = "--micro-batch-size 2 --global-batch-size 4"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SAVED = "--save SCRATCH/checkpoints --save-interval 1"
LOGGED = "--log-interval 1 --log-params-norm --log-num-zeros-in-grad"
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Planted:
    """A configuration with something slow.

    Attributes:
        name: What is slow.
        command: What trains, of trainer, loop and parallel; parallel ones have two ranks.
        flags: Of it.
        mends: Names of the settings that mend it: any of them.
        variables: Of its environment.
    """

    name: str
    command: str
    flags: str
    mends: tuple[str, ...]
    variables: str = ""


CONFIGURATIONS = (
    Planted("recomputation", "trainer", f"{MODEL} {RECOMPUTED} --num-layers 6", ("--recompute-granularity",)),
    Planted("evaluation in every step", "trainer", f"{MODEL} --eval-interval 1 --eval-iters 6", ("--eval-interval",)),
    Planted("checkpoint in every step", "trainer", f"{MODEL} {SAVED}", ("--async-save", "--save-interval")),
    Planted(
        "more threads than cores", "trainer 2", f"{SMALL} {RANKS}", ("OMP_NUM_THREADS",), f"OMP_NUM_THREADS={CORES}"
    ),
    Planted(
        "micro-batches of 1", "trainer", f"{SMALL} --micro-batch-size 1 --global-batch-size 8", ("--micro-batch-size",)
    ),
    Planted(
        "small buckets", "trainer 2", f"{SMALL} {RANKS} --num-layers 6 --ddp-bucket-size 500", ("--ddp-bucket-size",)
    ),
    Planted("norms logged in every step", "trainer", f"{MODEL} {LOGGED}", ("--log-interval", "--log-params-norm")),
    Planted("loader in the main process", "loop", "--read-ms 30 --workers 0", ("--workers",)),
    Planted("optimizer as a loop", "loop", "--layers 60 --optimizer for-loop", ("--optimizer",)),
    Planted("anomaly mode", "loop", "--detect-anomaly --layers 60", ("--detect-anomaly",)),
    Planted("collected garbage", "loop", "--collect-garbage", ("--collect-garbage",)),
    Planted("reduction per micro-batch", "parallel 2", "--accumulate 6", ("--no-sync",)),
)


@dataclass(frozen=True)
class Answer:
    """What tune did with a configuration.

    Attributes:
        outcome: Of its ledger; None where it printed an error.
        trials: What was tried.
        findings: Codes of the first report.
        printed: All that it printed.
    """

    outcome: TuneOutcome | None
    trials: list[TuneTrial]
    findings: list[str]
    printed: str


def main() -> None:
    """Tune the configurations, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--findings", action="store_true")
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="begin no further configuration; --keep goes on"
    )
    given = parser.parse_args()
    chosen = [one for one in CONFIGURATIONS if re.search(given.only, one.name)]
    print(f"{'planted':28} {'given ms':>8} {'end ms':>7} {'noise':>6} {'tried':>5} {'mended':>6}   settings")
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        for planted in chosen:
            if given.stop_after is not None and time.monotonic() - began > given.stop_after:
                break
            folder = (given.keep or Path(scratch)) / re.sub(r"\W+", "-", planted.name)
            folder.mkdir(parents=True, exist_ok=True)
            answer = tune(planted, folder, given.minutes, ["--trials", "0"] if given.findings else [])
            if given.findings:
                print(f"{planted.name:28} {', '.join(answer.findings) or answer.printed}", flush=True)
            else:
                show(planted, answer)


def tune(planted: Planted, folder: Path, minutes: float, more: list[str]) -> Answer:
    """Tune a configuration.

    Args:
        planted: the configuration.
        folder: for its ledger; one that is there already is gone on with.
        minutes: that its runs may take.
        more: options of tune.
    """
    ledger = folder / "tune.jsonl"
    options = ["--ledger", str(ledger), "--rounds", "2", "--steps", "80", "--time", str(minutes), *more]
    command = write_command(planted, folder)
    script = planted.command.split()[0]
    if script != "trainer":
        options += ["--knobs", str(SCRIPTS / f"{script}.yaml")]
    words = [sys.executable, "-m", "megatron_lite.cli.main", "tune", *options, "--", *command]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPO)}
    environment |= dict(setting.split("=") for setting in planted.variables.split())
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    shown = f"$ {planted.variables} megatron-lite tune {shlex.join(words[4:])}\n{printed}"
    (folder / "printed.txt").write_text(shown, encoding="utf-8")
    # none where the command was refused
    written = ledger.read_bytes() if ledger.exists() else b""
    lines = [decode_line(line) for line in written.splitlines()]
    outcomes = [line for line in lines if isinstance(line, TuneOutcome)]
    recorded = [line for line in lines if isinstance(line, MeasuredRun) and line.purpose == "record"]
    return Answer(
        outcome=outcomes[-1] if outcomes else None,
        trials=[line for line in lines if isinstance(line, TuneTrial)],
        findings=[finding.code for finding in recorded[0].findings] if recorded else [],
        printed=printed,
    )


def write_command(planted: Planted, folder: Path) -> list[str]:
    """Write the words of a configuration's command."""
    script, *ranks = planted.command.split()
    path = REPO / "pretrain_gpt.py" if script == "trainer" else SCRIPTS / f"{script}.py"
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", *ranks]
    return [*launcher, str(path), *planted.flags.replace("SCRATCH", str(folder)).split()]


def show(planted: Planted, answer: Answer) -> None:
    """Print the row of a configuration."""
    outcome = answer.outcome
    if outcome is None:
        print(f"{planted.name:28} {answer.printed.strip()[-200:]}", flush=True)
        return
    names = {setting.name for setting in outcome.settings}
    is_mended = "yes" if names & set(planted.mends) else "no"
    given_ms = f"{outcome.original_ms:.1f}" if outcome.original_ms else ""
    best_ms = f"{outcome.best_ms:.1f}" if outcome.best_ms else ""
    noise_ms = f"{outcome.noise_ms:.1f}" if outcome.noise_ms else ""
    settings = describe_settings(outcome.settings) or outcome.reason
    print(
        f"{planted.name:28} {given_ms:>8} {best_ms:>7} {noise_ms:>6} {len(answer.trials):5} {is_mended:>6}   {settings}",
        flush=True,
    )


if __name__ == "__main__":
    main()
