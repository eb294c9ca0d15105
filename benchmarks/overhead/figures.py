"""What the loop of a run cost, from what its ranks have written."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from megatron_lite.phases import Phase

WORK = tuple(phase.value for phase in Phase if phase != Phase.LOG)


@dataclass(frozen=True)
class Figures:
    """One run; of several ranks, those of the one for which a figure is the largest. Means over steps."""

    step_ms: float  # median
    loop_us: float  # per step: all that is in no phase, and the log's
    cpu_us: float  # per step, of all threads of the process, for everything
    parts_us: dict[str, float]  # of the last rank, which speaks and writes; the largest first


def figures_of(out: Path, ranks: int) -> Figures:
    """Of OUT.RANK.json, as benchmarks.overhead.rank writes them."""
    found = [json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    steps = len(found[0]["turns"])
    parts = sorted(found[-1]["parts_s"].items(), key=lambda part: -part[1])
    return Figures(
        step_ms=max(1e3 * median(turn["turn"] for turn in one["turns"]) for one in found),
        loop_us=max(1e6 * fmean(_outside(turn) for turn in one["turns"]) for one in found),
        cpu_us=max(1e6 * one["cpu_s"] / steps for one in found),
        parts_us={name: 1e6 * seconds / steps for name, seconds in parts},
    )


def _outside(turn: dict[str, float]) -> float:
    return turn["turn"] - sum(turn.get(name, 0.0) for name in WORK)
