"""Lets `megatron-lite prove` judge training scripts with planted errors, and clean ones.

python -m benchmarks.prove [--script PATTERN] [--plant PATTERN] [--keep FOLDER]

The errors stand in prove_scripts/PLANTED.tsv, with the kind that is right and where it shows. Without Megatron-Core, its
scripts are refused, and shown so.
"""

import argparse
import csv
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_lite.formats.prove_report import Difference, ProofReport

HERE = Path(__file__).parent / "prove_scripts"
TABLE = HERE / "PLANTED.tsv"
CLEAN = "equal"
MAX_SECONDS = 600


@dataclass(frozen=True)
class Planted:
    """A script, and what is to be said of it.

    Attributes:
        script: File and arguments.
        ranks: On which it runs.
        plant: Name of the error; "": none.
        kinds: Any of which is right; "equal": there is no error.
        where: Pattern of the module or parameter; "": any.
        against: Command of the reference; "": one rank of the same.
    """

    script: str
    ranks: int
    plant: str
    kinds: tuple[str, ...]
    where: str
    against: str


@dataclass(frozen=True)
class Answer:
    """What the command said.

    Attributes:
        difference: The first that was found; None: none.
        refusal: The last line of a command that compared nothing; "": it compared.
        coverage: How much of the model was compared.
        seconds: That it took.
    """

    difference: Difference | None
    refusal: str
    coverage: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", default="", metavar="PATTERN", help="of scripts, with their arguments")
    parser.add_argument("--plant", default="", metavar="PATTERN", help="of plants; ^$: those without one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the reports as JSON, and what was printed")
    options = parser.parse_args()
    chosen = [
        planted
        for planted in read_table()
        if re.search(options.script, planted.script) and re.search(options.plant, planted.plant)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print("| script | ranks | planted | right | said | where | seconds |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        verdicts = Counter(print_row(planted, folder) for planted in chosen)
    print()
    errors = sum(planted.kinds != (CLEAN,) for planted in chosen)
    print(f"Planted errors: {errors}; kind and place named {verdicts['named']}, ", end="")
    print(f"found under another kind or place {verdicts['found']}, missed {verdicts['missed']}, ", end="")
    print(f"refused {verdicts['refused']}.")
    print(f"Clean scripts: {len(chosen) - errors}; silent {verdicts['silent']}, ", end="")
    print(f"false alarms {verdicts['false alarm']}, refused {verdicts['refused clean']}.")


def read_table() -> list[Planted]:
    """Read the table of scripts and planted errors."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return [
        Planted(script, int(ranks), plant, tuple(kinds.split(",")), where, against)
        for script, ranks, plant, kinds, where, against in rows
    ]


def print_row(planted: Planted, folder: Path) -> str:
    """Run a script, print a row of the table, and return the verdict of it."""
    name = re.sub(r"\W+", "-", f"{planted.script} {planted.plant}").strip("-")
    answer = ask(planted, folder / f"{name}.json")
    verdict = judge(planted, answer)
    said, where = answer.refusal, ""
    if not answer.refusal:
        said, where = CLEAN, answer.coverage if answer.coverage != "whole" else ""
    if answer.difference is not None:
        said, where = answer.difference.kind.value, answer.difference.where
    right = " or ".join(planted.kinds)
    cells = (planted.script, planted.ranks, planted.plant, right, f"{verdict}: {said}", where, f"{answer.seconds:.0f}")
    print("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |", flush=True)
    return verdict


def ask(planted: Planted, file: Path) -> Answer:
    """Let `megatron-lite prove` compare the script with one rank, or with the command that the table names."""
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "megatron_lite", "prove", "--json", str(file)]
    if planted.against:
        words += ["--against", planted.against]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words += ["--", torchrun, "--nproc-per-node", str(planted.ranks), *shlex.split(planted.script)]
    if planted.plant:
        words += ["--plant", planted.plant]
    began = time.perf_counter()
    done = subprocess.run(words, check=False, cwd=HERE, capture_output=True, text=True, timeout=MAX_SECONDS)
    seconds = time.perf_counter() - began
    printed = done.stdout + done.stderr
    file.with_suffix(".txt").write_text(f"{shlex.join(words)}\n{printed}\nexit code {done.returncode}\n")
    if not file.exists():
        lines = printed.strip().splitlines()
        return Answer(None, lines[-1] if lines else f"exit code {done.returncode}", "nothing", seconds)
    report = msgspec.json.decode(file.read_bytes(), type=ProofReport)
    first = report.differences[0] if report.differences else None
    refusal = "nothing compared" if report.coverage == "nothing" and first is None else ""
    return Answer(first, refusal, report.coverage, seconds)


def judge(planted: Planted, answer: Answer) -> str:
    """Say how right an answer is."""
    is_clean = planted.kinds == (CLEAN,)
    if answer.refusal:
        return "refused clean" if is_clean else "refused"
    if answer.difference is None:
        return "silent" if is_clean else "missed"
    if is_clean:
        return "false alarm"
    is_kind = answer.difference.kind.value in planted.kinds
    is_place = bool(re.search(planted.where, answer.difference.where))
    return "named" if is_kind and is_place else "found"


if __name__ == "__main__":
    main()
