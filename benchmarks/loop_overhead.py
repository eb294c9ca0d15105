"""What the training loop costs beside model, optimizer and data: its log, instruments, reasons to leave, chores.

    python -m benchmarks.loop_overhead                        # about 4 minutes
    python -m benchmarks.loop_overhead --ranks 1 --log-intervals 100 --tensorboard --rounds 3

The whole trainer as a user starts it; counted is the time of a turn of the loop outside the phases of data, model and
optimizer, in three kinds of run. empty: a model of one number, no update, one batch over and over; the clock's time, with
all waiting for other ranks. parts: the same with a stopwatch on its parts. real: a training with steps of some 50 ms, whose
working memory drives the loop's out of the caches; CPU time of the main thread, without any waiting.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.overhead.figures import Figures, figures_of
from benchmarks.training.contestants import REPO
from benchmarks.training.process import cores, environment_of, load, machine

STEP_US = 50_000
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-layers 4 --hidden-size 192 "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
)
KINDS = ("empty", "parts", "real")
PARTS_SHOWN = 8


def main() -> int:
    """Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="[1 2]")
    add("--log-intervals", type=int, nargs="+", default=[1, 100], metavar="N", help="[1 100]")
    add("--rounds", type=int, default=3, help="runs of each kind [%(default)s]")
    add("--steps", type=int, default=600, help="of an empty run [%(default)s]")
    add("--real-steps", type=int, default=100, help="of a real one [%(default)s]")
    add("--tensorboard", action="store_true", help="write its event file, too; off by default, as in the trainer")
    add("--out", type=Path, metavar="FILE", help="everything as JSON")
    args = parser.parse_args()
    print(
        f"{machine()['cpu']}, {cores()} cores, load {load()}; per step, medians of {args.rounds} rounds and the least "
        f"of them; shares are of a step of {STEP_US / 1000:g} ms",
        flush=True,
    )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            for interval in args.log_intervals:
                runs = {
                    kind: [_run(kind, ranks, interval, args, Path(folder)) for _ in range(args.rounds)]
                    for kind in KINDS
                }
                if not all(all(many) for many in runs.values()):
                    return 1
                print("\n".join(_lines(ranks, interval, runs)), flush=True)
                figures = {kind: [asdict(one) for one in many] for kind, many in runs.items()}
                found.append({"ranks": ranks, "log_interval": interval, **figures})
    if args.out:
        everything = {"command": sys.argv, "machine": machine(), "configurations": found}
        args.out.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(kind: str, ranks: int, interval: int, args: argparse.Namespace, folder: Path) -> Figures | None:
    """None, with the run's last words on stderr, if it failed."""
    steps = args.real_steps if kind == "real" else args.steps
    lengths = f"--train-iters {steps} --log-interval {interval} --run-dir".split()
    flags = [*FLAGS.split(), *lengths, str(folder / "run")]
    if args.tensorboard:
        flags += ["--tensorboard-dir", str(folder / "tensorboard")]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, "-m", "benchmarks.overhead.rank", kind, str(folder / "out"), *flags]
    code, output = _on_terminal(command, environment_of("cpu", max(cores() // ranks, 1)))
    if code:
        print(f"{kind}, {ranks} ranks: exit code {code}\n{output[-2000:]}", file=sys.stderr)
        return None
    return figures_of(folder / "out", ranks)


def _on_terminal(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, output), with a terminal as stderr, where the progress line is drawn."""
    ours, theirs = os.openpty()
    drawn: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(ours, drawn), daemon=True)
    done = subprocess.Popen(
        command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    reader.start()
    output = done.communicate()[0]
    reader.join(timeout=5)
    os.close(ours)
    return done.returncode, output + b"".join(drawn).decode(errors="replace")


def _drain(terminal: int, into: list[bytes]):
    try:
        while found := os.read(terminal, 65536):
            into.append(found)
    except OSError:  # as Linux ends a terminal that nobody holds any longer
        return


def _lines(ranks: int, interval: int, runs: dict[str, list[Figures]]) -> list[str]:
    parts = [one.parts_us for one in runs["parts"]]
    medians = {name: median(one.get(name, 0.0) for one in parts) for name in parts[0]}
    real_ms = median(one.step_ms for one in runs["real"])
    lines = [
        f"\n{ranks} rank{'s' if ranks > 1 else ''}, --log-interval {interval}",
        f"  empty  {_amount([one.loop_us for one in runs['empty']])}",
        f"  real   {_amount([one.loop_us for one in runs['real']])}, beside {real_ms:.0f} ms, in CPU time of the main thread",
    ]
    return lines + [f"    {us:6.0f} us  {name}" for name, us in list(medians.items())[:PARTS_SHOWN]]


def _amount(microseconds: list[float]) -> str:
    return f"{median(microseconds):,.0f} us ({min(microseconds):,.0f}), {median(microseconds) / STEP_US:.2%}"


if __name__ == "__main__":
    sys.exit(main())
