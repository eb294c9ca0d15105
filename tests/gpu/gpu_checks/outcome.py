"""What a part found, and how it is told: a line, the table, the files of --out."""

import dataclasses
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpu_checks.pytest_side import MAX_BYTES, MAX_FILES

NOT_STARTED, LEFT_OUT, OUT_OF_TIME, FAILED, PASSED = "not started", "left out", "out of time", "failed", "passed"
NO_TESTS = 5  # pytest's exit code where there was none to run, as where files skip themselves
MAX_LOG_BYTES = 2**20  # the end of each part's output


@dataclass(frozen=True)
class Outcome:
    """`result`: one of the words above. `words`: the result for people."""

    part: str
    result: str
    words: str
    seconds: float = 0.0
    limit_s: float | None = None
    tests: list[dict] = field(default_factory=list)  # as pytest_side writes them
    remarks: list[str] = field(default_factory=list)  # under the table
    figures: dict = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.result in (PASSED, LEFT_OUT)

    def __str__(self) -> str:
        limit = "" if self.limit_s is None else f"{self.seconds:5.0f} s of {self.limit_s:.0f}"
        return f"{self.part:<9} {self.result:<12} {self.words:<42} {limit}".rstrip()


def judge_tests(part: str, found: Path, code: int | None, seconds: float, limit_s: float) -> Outcome:
    """From the file of pytest_side, a cut last line left out; `code`: None if the part's time was up."""
    lines = found.read_text(encoding="utf-8").split("\n")[:-1] if found.exists() else []
    tests = [json.loads(line) for line in lines]
    counts = Counter(test["outcome"] for test in tests)
    words = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
    result = FAILED if counts["failed"] else OUT_OF_TIME if code is None else PASSED
    if result == PASSED and code and not (code == NO_TESTS and counts["skipped"]):
        result, words = FAILED, f"{words or 'no test ran'}, exit code {code}"
    if result == PASSED and not counts["passed"]:
        result = LEFT_OUT
    if code is None:
        words = f"{words or 'no test was over'}, ended after its {limit_s:.0f} s"
    failed = [f"failed: {test['test']}: {test['message']}" for test in tests if test["outcome"] == "failed"]
    reasons = Counter(test["message"] for test in tests if test["outcome"] == "skipped")
    skipped = [f"skipped: {many} x {reason}" for reason, many in reasons.items()]
    measured = [
        f"{test['test']}: " + ", ".join(f"{name} {value}" for name, value in test["figures"].items())
        for test in tests
        if test["figures"]
    ]
    return Outcome(part, result, words or "nothing ran", seconds, limit_s, tests, [*failed, *skipped, *measured])


def format_table(outcomes: list[Outcome], seconds: float) -> list[str]:
    """The table, what stands under it, and a line for the whole."""
    bad = [outcome.part for outcome in outcomes if not outcome.is_good]
    remarks = [f"  {outcome.part}: {remark}" for outcome in outcomes for remark in outcome.remarks]
    verdict = f"not good: {', '.join(bad)}" if bad else "all that could run here passed"
    return ["", *map(str, outcomes), *(["", *remarks] if remarks else []), "", f"{verdict}; {seconds:.0f} s in all"]


def write_files(out: Path, scratch: Path, facts: dict, outcomes: list[Outcome]) -> list[str]:
    """Leave few and small files in `out`, which can be carried to another machine; a line for each left out."""
    everything = {**facts, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    with (out / "log.txt").open("wb") as log:
        for path in sorted(scratch.glob("*.log"), key=lambda path: path.stat().st_mtime):
            log.write(f"\n===== {path.stem}\n".encode() + path.read_bytes()[-MAX_LOG_BYTES:])
    for path in scratch.glob("*/speed.json"):
        shutil.copy(path, out)
    files = sorted(out.iterdir(), key=lambda path: path.stat().st_size)  # the smallest stay
    too_many = [path for at, path in enumerate(files) if at >= MAX_FILES or path.stat().st_size > MAX_BYTES]
    for path in too_many:
        path.unlink()
    return [
        f"{path.name} was left out of {out}: at most {MAX_FILES} files of {MAX_BYTES // 2**20} MiB" for path in too_many
    ]
