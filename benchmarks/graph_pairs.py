"""Makes the changes whose gain a dependency graph predicts, and shows predicted beside measured.

    python -m benchmarks.graph_pairs make FOLDER --round N [--pair PATTERN] [--beside-others]
    python -m benchmarks.graph_pairs show FOLDER [--pair PATTERN] [--path] [--held-back]

The protocol:

- A pair is a program before (A) and after a change (B), of graph_pairs_made.py. Each run is a start of its own: the trainer
  with its profiler, or graph_scripts/train.py under `megatron-lite watch`. Both sides are recorded alike.
- Nothing else runs on the machine: a run beside which other programs took more than 0.1 of a core is thrown away and
  made again. Each rank computes with one thread (OMP_NUM_THREADS=1), so that two ranks fit on two cores. Steps take 50
  to 200 ms.
- A round is A, then B; the rounds of a pair are made at other times, at least two of them: A B A B.
- A run has 72 steps. Steps 11 to 26 are recorded. Timed are steps 33 to 72, outside of the recorded window, by the run's
  steps.jsonl (the whole step on the host, saving included): the median of the means of five blocks of eight steps, since
  checkpoints and workers come in periods of two, four or eight steps.
- Measured change: (B - A) / A of a round. Predicted change: the trace of A, all ranks, becomes a graph; the replay with the
  pair's edit by the replay without. Nothing of B is read. What a checkpoint takes, and by how much recorded steps
  are longer than others, is read from A's steps.jsonl. Shown are medians over rounds, and their difference in percent of
  the step before.
- A sign is wrong where the measured change is more than 2% of the step and the prediction is on the other side of zero.
- A graph that claims nothing is named; its pair counts as off.
- Held back: the pairs of HELD_BACK. No edit was changed after their predictions had been looked at.

It was written before the first measurement, with 8 recorded steps. These were too few where two ranks share two cores:
recorded steps of one program were a quarter faster, or slower, than those around them. Since then 16 are recorded, a core
that the host of this machine gives to others counts as taken by another program, and all pairs were made anew; no round
of before is shown. The script's buckets of 25 MiB were held back, until an edit for buckets of one size was written, by what
was seen of them; two pairs with other sizes were added, and held back.

Not of the protocol: where the machine is not silent for long enough, runs are kept with --beside-others. They count only
for pairs that have no other round, and their rows say by how much others disturbed them. A pair whose steps took 26 ms,
for-loop to foreach, was replaced after its first round.
"""

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.graph import read_run, show_path
from benchmarks.graph_pairs_made import HELD_BACK, PAIRS, Pair, Recorded, Start, build, keep
from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.replay import check_replay, replay
from megatron_lite.analysis.run.read import read_run as read_record_of_run
from megatron_lite.formats.step_records import StepRecord

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "graph_scripts" / "train.py"
STEPS = 72
RECORDED = (11, 27)  # the first step, and the one behind the last
FIRST_TIMED = 33
BLOCK = 8  # steps
MAX_OTHERS = 0.1  # cores that other programs take beside a run
SILENT_SECONDS = 2
PATIENT_SECONDS = 120
BRIEF_SECONDS = 8
OTHERS_FILE = "others.txt"  # cores that other programs took beside a run
MIN_CHANGE = 0.02  # of the step: less has no sign


@dataclass(frozen=True)
class Round:
    """A pair's result of one round.

    Attributes:
        before_ms: The step before, measured.
        predicted: Change by the graph, as a share of the step before.
        measured: The same, measured.
        why_not: Why the graph claims nothing; "": it does.
        others: Cores that other programs took beside a run, of the more disturbed one.
    """

    before_ms: float
    predicted: float
    measured: float
    why_not: str
    others: float


def main() -> None:
    """Make the changes, or print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("make", "show"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--pair", default="", metavar="PATTERN")
    parser.add_argument("--path", action="store_true", help="list what the critical path is made of")
    parser.add_argument("--beside-others", action="store_true", help="keep runs beside other programs, and name them")
    parser.add_argument("--held-back", action="store_true", help="show these pairs, too")
    given = parser.parse_args()
    pairs = [pair for pair in PAIRS if is_chosen(pair, given)]
    if given.action == "make":
        for pair in pairs:
            make_round(pair, given.folder / f"round{given.round}", given.beside_others)
        return
    print(
        f"{'change':46} {'before ms':>9} {'predicted':>9} {'measured':>9} {'off':>6}   measured and predicted by round"
    )
    for pair in pairs:
        rounds = choose_rounds(list(read_rounds(pair, given.folder, given.path)))
        if rounds:
            show(pair, rounds)


def is_chosen(pair: Pair, given: argparse.Namespace) -> bool:
    """Whether a pair is to be made or shown; held back ones are shown only where asked for."""
    is_shown = given.action == "make" or given.held_back or pair.name not in HELD_BACK
    return is_shown and re.search(given.pair, pair.name) is not None


# --- runs


def make_round(pair: Pair, folder: Path, keeps: bool) -> None:
    """Run a pair before and after its change; what has been run is not run again.

    Args:
        pair: The change.
        folder: Of the round.
        keeps: Runs beside other programs are kept, and named.
    """
    for side, run in (("before", pair.before), ("after", pair.after)):
        place = folder / pair.folder / side
        if (place / "steps.jsonl").exists():
            continue
        wait_for_silence(BRIEF_SECONDS if keeps else PATIENT_SECONDS)
        place.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        busy_before = measure_busy()
        own_before = measure_own()
        start(run, place)
        seconds = time.perf_counter() - began
        others = (measure_busy() - busy_before - measure_own() + own_before) / seconds
        is_alone = others <= MAX_OTHERS or keeps
        mark = "" if is_alone else "   thrown away"
        print(
            f"{pair.name:54} {side:6} {measure_step(place):8,.1f} ms   {seconds:5.1f} s   others {others:5.2f} cores{mark}",
            flush=True,
        )
        (place / OTHERS_FILE).write_text(f"{others:.2f}", encoding="utf-8")
        if not is_alone:
            shutil.rmtree(place)


def wait_for_silence(seconds: int) -> None:
    """Wait until other programs have taken little of the cores for two seconds, for so many seconds at most."""
    silent = 0
    for _ in range(seconds):
        before = measure_busy()
        time.sleep(1)
        silent = silent + 1 if measure_busy() - before <= MAX_OTHERS else 0
        if silent >= SILENT_SECONDS:
            return


def measure_busy() -> float:
    """Seconds for which the machine's cores were busy since it started, or taken away by the machine's own host."""
    words = Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0].split()[1:]
    user, nice, system, _, _, interrupts, soft, stolen = (int(word) for word in words[:8])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def measure_own() -> float:
    """Seconds of the cores that this process and the ones it has waited for took."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


def start(run: Start, place: Path) -> None:
    """Run one side, which leaves traces and steps.jsonl in a folder."""
    launcher = [sys.executable]
    if run.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "localhost:0"]
    first, last = RECORDED
    flags = run.flags.replace("PLACE", str(place)).split()
    if run.is_trainer:
        command = [*launcher, str(ROOT / "pretrain_gpt.py"), *flags, "--run-dir", str(place)]
        command += ["--train-iters", str(STEPS), "--profile-step-start", str(first), "--profile-step-end", str(last)]
    else:
        watch = [sys.executable, "-m", "megatron_lite", "watch", "--no-report"]
        watch += ["--run-dir", str(place), "--steps", f"{first}:{last}", "--"]
        command = [*watch, *launcher, str(SCRIPT), "--steps", str(STEPS), *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **run.environ}
    with open(place / "output.txt", "w", encoding="utf-8") as output:
        done = subprocess.run(command, check=False, env=environ, stdout=output, stderr=output)
    if done.returncode:
        raise RuntimeError((place / "output.txt").read_text(encoding="utf-8")[-3000:])


def read_others(place: Path) -> float:
    """Read how many cores other programs took beside a run; 0 of one that was kept because they took none."""
    file = place / OTHERS_FILE
    return float(file.read_text(encoding="utf-8")) if file.exists() else 0.0


def read_steps(place: Path) -> dict[int, StepRecord]:
    """Read the steps of a run by their numbers."""
    lines = (place / "steps.jsonl").read_bytes().splitlines()
    of_steps = [line for line in lines if msgspec.json.decode(line)["kind"] == "step"]
    steps = [msgspec.json.decode(line, type=StepRecord) for line in of_steps]
    return {one.step: one for one in steps}


def measure_step(place: Path) -> float:
    """The step of a run, ms: the median of the means of blocks."""
    steps = read_steps(place)
    means = []
    for first in range(FIRST_TIMED, STEPS + 1, BLOCK):
        block = [steps[step].ms for step in range(first, first + BLOCK)]
        means.append(statistics.fmean(block))
    return statistics.median(means)


# --- predicted beside measured


def read_rounds(pair: Pair, folder: Path, with_path: bool) -> Iterator[Round]:
    """Read the rounds of a pair that were made, and predict each by its own trace.

    Args:
        pair: The change.
        folder: Of all rounds.
        with_path: Also print what the critical path is made of, before and after the edit.
    """
    for place in sorted(folder.glob(f"round*/{pair.folder}")):
        before = place / "before"
        after = place / "after"
        if not all((side / "steps.jsonl").exists() for side in (before, after)):
            continue
        [(_, ranks)] = read_run(before)
        recorded = Recorded(ranks, read_record_of_run(before))
        graph = build(recorded)
        changed_graph = pair.edit(graph, recorded)
        unchanged = replay(graph)
        changed = replay(changed_graph)
        assert unchanged is not None and changed is not None
        if with_path:
            show_path(graph)
            print("    after the edit:")
            show_path(changed_graph)
        before_ms = measure_step(before)
        yield Round(
            before_ms=before_ms,
            predicted=changed.step_ns / unchanged.step_ns - 1,
            measured=measure_step(after) / before_ms - 1,
            why_not=check_replay(build_graph(ranks)).why_not,
            others=max(read_others(before), read_others(after)),
        )


def choose_rounds(rounds: list[Round]) -> list[Round]:
    """Choose the rounds beside which no other programs ran; all where there is none of them."""
    alone = [one for one in rounds if one.others <= MAX_OTHERS]
    return alone or rounds


def show(pair: Pair, rounds: list[Round]) -> None:
    """Print the row of a pair."""
    before_ms = statistics.median(one.before_ms for one in rounds)
    predicted = statistics.median(one.predicted for one in rounds)
    measured = statistics.median(one.measured for one in rounds)
    each = ", ".join(f"{one.measured:+.1%} {one.predicted:+.1%}" for one in rounds)
    is_wrong = abs(measured) > MIN_CHANGE and measured * predicted <= 0
    sign = " WRONG SIGN" if is_wrong else ""
    if pair.edit is keep:
        sign = " NOTHING CLAIMED"
    print(
        f"{pair.name:46} {before_ms:9,.1f} {predicted:+9.1%} {measured:+9.1%} {predicted - measured:+6.1%}   {each}{sign}",
        flush=True,
    )
    others = max(one.others for one in rounds)
    if others > MAX_OTHERS:
        print(f"    beside other programs, which took up to {others:.1f} cores")
    for one in rounds:
        if one.why_not:
            print(f"    a round claims nothing: {one.why_not}")


if __name__ == "__main__":
    main()
