"""What watch wrote of a run."""

import json
from pathlib import Path

PHASES = {"data", "forward", "backward", "optimizer_step"}


def read_steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
