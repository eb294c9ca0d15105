"""An open benchmark of tools that diagnose training runs: runs with known causes, and sound ones.

    python -m benchmarks.diagnosis make FOLDER [--only RUN ...] [--public FOLDER]   # FOLDER/runs/RUN: ordinary trace files
    python -m benchmarks.diagnosis run TOOL FOLDER [--python VENV/bin/python]       # FOLDER/answers/TOOL/RUN.json
    python -m benchmarks.diagnosis score FOLDER                                     # the tables of docs/diagnosis.md

--held-back: the runs of held_back.tsv, into a folder of their own.
What is there already is not made again. A tool of your own: write FOLDER/answers/NAME/RUN.json (claims.py) and score.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.diagnosis.answer import TOOLS, answer_runs
from benchmarks.diagnosis.claims import read_answer
from benchmarks.diagnosis.make import make_run, read_core_wait, read_truth
from benchmarks.diagnosis.manifest import HELD_BACK, KEY, Run, read_classes, read_manifest
from benchmarks.diagnosis.score import (
    RunScore,
    render_classes,
    render_mistakes,
    render_tools,
    score_run,
)


def make(runs: list[Run], folder: Path, public: Path | None) -> int:
    """Make the runs that are not there. Returns how many failed."""
    failed = 0
    for run in runs:
        target = folder / "runs" / run.name
        if target.exists():
            continue
        try:
            make_run(run, target, public)
        except RuntimeError as error:
            failed += 1
            print(f"not made: {error}", flush=True)
            continue
        measured = [] if run.is_sound else read_truth(run, folder)
        print(f"made {run.name}", *map(describe_truth, measured), flush=True)
    return failed


def describe_truth(truth: dict) -> str:
    """Write what a program measured: how much longer the step is than the twin's, and waits for cores."""
    share = 1.0 - truth["twin_ms"] / truth["step_ms"]
    return f"planted {share:.0%} of {truth['step_ms']:.0f} ms, {truth['core_wait_share']:.0%} without a core;"


def score(runs: list[Run], folder: Path) -> int:
    """Print the tables."""
    classes = read_classes()
    tools: dict[str, list[RunScore]] = {}
    for answers in sorted((folder / "answers").iterdir()):
        found = []
        for run in runs:
            path = answers / f"{run.name}.json"
            if path.exists():
                core_wait = read_core_wait(run, folder)
                found.append(score_run(run, read_answer(path), classes, core_wait))
        tools[answers.name] = found
    print("\n".join([*render_tools(tools), "", *render_classes(tools)]))
    for tool, scores in tools.items():
        print("\n".join(["", f"{tool}:", "", *render_mistakes(scores)]))
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--public", type=Path)
    scoring = commands.add_parser("score")
    scoring.add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("tool", choices=TOOLS)
    running.add_argument("folder", type=Path)
    running.add_argument("--python", default=sys.executable, help="of the environment that has the tool")
    for one in (making, scoring, running):
        one.add_argument("--only", nargs="+", default=[], help="names of runs")
        one.add_argument("--held-back", dest="key", action="store_const", const=HELD_BACK, default=KEY)
    given = parser.parse_args(words)
    runs = [run for run in read_manifest(given.key) if not given.only or run.name in given.only]
    if given.command == "make":
        return make(runs, given.folder.resolve(), given.public)
    if given.command == "run":
        return answer_runs(given.tool, runs, given.folder.resolve(), given.python)
    return score(runs, given.folder.resolve())


if __name__ == "__main__":
    sys.exit(main())
