"""Lets `megatron-lite replay` judge planted steps, in this process.

python -m benchmarks.replay [--only PATTERN] [--keep FOLDER]
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.planted_steps import BaseRun, list_planted, replay_here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", default="")
    parser.add_argument("--keep", metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return _judge_all(Path(options.keep or name), options.only)


def _judge_all(folder: Path, only: str) -> int:
    bases: dict[tuple[str, ...], BaseRun] = {}
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    misleading = 0
    for number, (precision, planted) in enumerate(list_planted()):
        if not re.search(only, planted.name):
            continue
        if precision not in bases:
            bases[precision] = BaseRun(folder / f"base{'-'.join(precision)}", precision)
            if not bases[precision].folder.exists():
                bases[precision].make()
        began = time.monotonic()
        target = folder / f"case{number}"
        cause = planted.cause.value
        total[cause] += 1
        try:
            step = planted.plant(bases[precision], target)
            with planted.in_replay():
                report = replay_here(target, step)
        except Exception as error:  # noqa: BLE001 - the table goes on
            print(f"ERROR  {planted.name}: {type(error).__name__}: {error}", flush=True)
            continue
        is_right = report.cause is planted.cause
        right[cause] += is_right
        misleading += not is_right and report.confidence == "high"
        said = f"{report.cause.value} ({report.confidence})"
        seconds = time.monotonic() - began
        print(
            f"{'right' if is_right else 'WRONG':6} {planted.name:62} step {step:3} {said:24} {seconds:5.1f} s\n"
            f"       {report.sentence}",
            flush=True,
        )
    for cause, number in total.items():
        print(f"{cause:14} {right[cause]} of {number}")
    print(f"{sum(right.values())} of {sum(total.values())} right; {misleading} wrong with high confidence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
