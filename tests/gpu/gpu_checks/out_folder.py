"""What is left behind in --out: few and small files, which can be carried to another machine."""

import dataclasses
import json
import shutil
from pathlib import Path

from gpu_checks.agreed import MAX_BYTES, MAX_FILES
from gpu_checks.outcome import Outcome
from gpu_checks.parts import SPEED_FILE

LOG_BYTES = 2**20  # the end of each part's output


def write(out: Path, scratch: Path, facts: dict, outcomes: list[Outcome]) -> list[str]:
    """Returns a line for each file that had to be left out."""
    everything = {**facts, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    with (out / "log.txt").open("wb") as log:
        for path in sorted(scratch.glob("*.log"), key=lambda path: path.stat().st_mtime):
            log.write(f"\n===== {path.stem}\n".encode() + path.read_bytes()[-LOG_BYTES:])
    for path in scratch.glob(f"*/{SPEED_FILE}"):
        shutil.copy(path, out)
    return _left_out(out)


def _left_out(out: Path) -> list[str]:
    """The smallest files stay."""
    files = sorted(out.iterdir(), key=lambda path: path.stat().st_size)
    too_many = [path for at, path in enumerate(files) if at >= MAX_FILES or path.stat().st_size > MAX_BYTES]
    for path in too_many:
        path.unlink()
    return [
        f"{path.name} was left out of {out}: at most {MAX_FILES} files of {MAX_BYTES // 2**20} MiB" for path in too_many
    ]
