"""What a part found."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

NOT_STARTED, LEFT_OUT, OUT_OF_TIME, FAILED, PASSED = "not started", "left out", "out of time", "failed", "passed"
GOOD = (PASSED, LEFT_OUT)
NO_TESTS = 5  # pytest's exit code where there was none to run, as where files skip themselves


@dataclass(frozen=True)
class Outcome:
    """`result`: one of the words above. `words`: the result for people."""

    part: str
    result: str
    words: str
    seconds: float = 0.0
    limit_s: float | None = None
    tests: list[dict] = field(default_factory=list)  # as outcomes_plugin writes them
    remarks: list[str] = field(default_factory=list)  # under the table
    figures: dict = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.result in GOOD


def read_tests(path: Path) -> list[dict]:
    """Of the plugin's file; a last line that was cut off does not count."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def of_tests(part: str, tests: list[dict], code: int | None, seconds: float, limit_s: float) -> Outcome:
    """From the tests that were over when the process ended with `code`, None if its time was up."""
    counts = Counter(test["outcome"] for test in tests)
    words = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
    result = FAILED if counts["failed"] else OUT_OF_TIME if code is None else PASSED
    if result == PASSED and code and not (code == NO_TESTS and counts["skipped"]):
        result, words = FAILED, f"{words or 'no test ran'}, exit code {code}"
    if result == PASSED and not counts["passed"]:
        result = LEFT_OUT
    if code is None:
        words = f"{words or 'no test was over'}, ended after its {limit_s:.0f} s"
    return Outcome(part, result, words or "nothing ran", seconds, limit_s, tests, _remarks(tests))


def _remarks(tests: list[dict]) -> list[str]:
    failed = [f"failed: {test['test']}: {test['message']}" for test in tests if test["outcome"] == "failed"]
    reasons = Counter(test["message"] for test in tests if test["outcome"] == "skipped")
    skipped = [f"skipped: {many} x {reason}" for reason, many in reasons.items()]
    measured = [
        f"{test['test']}: " + ", ".join(f"{name} {value}" for name, value in test["figures"].items())
        for test in tests
        if test["figures"]
    ]
    return [*failed, *skipped, *measured]
