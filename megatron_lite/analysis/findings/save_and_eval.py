"""Training stands still for checkpoints and evaluations.

Meaning: while a checkpoint is written or the validation loss is computed, no step runs. On
    several ranks the slowest writer decides.
Measured: time of the phases save and eval in steps.jsonl over all steps of the run, spread over
    them.
Cost: that time per step. It is in no profile of a few steady steps.
Do: write in the background from a copy in host memory; save and evaluate less often, or on fewer
    batches.
Flags: --async-save, --save-interval, --eval-interval, --eval-iters.
False alarm: a short run, in which one checkpoint weighs more than it will in a long one; below 20
    steps only what came three times counts.
"""

import math

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.findings.step_measurements import MATTERS, in_ms
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase

CODE = "save-and-eval"
TITLE = "stalls for checkpoints and evaluations"
MIN_STEPS, MIN_TIMES = 20, 3  # one of both: a short run's only checkpoint says nothing of how often


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    whole_ms = _total(run.step_ms)
    stalls = {name: _total(run.phases_ms[name]) for name in (Phase.SAVE.value, Phase.EVAL.value) if _tells(run, name)}
    if not whole_ms or sum(stalls.values()) < MATTERS * whole_ms:
        return None
    cost = sum(stalls.values()) / run.steps
    return Finding(
        cost_ms=cost,
        evidence=tuple(_seen(run, name, total, whole_ms) for name, total in stalls.items() if total),
        advice=f"stand still less: {' and '.join(_ways(facts, stalls))}",
        flags=tuple(_flags(facts, stalls)),
        gain_ms=cost,
    )


def _tells(run: Run, name: str) -> bool:
    """Is it known how often that phase comes?"""
    return name in run.phases_ms and (run.steps >= MIN_STEPS or _times(run, name) >= MIN_TIMES)


def _times(run: Run, name: str) -> int:
    return sum(value > 0 for value in run.phases_ms[name])


def _total(values) -> float:
    return math.fsum(value for value in values if not math.isnan(value))


def _seen(run: Run, name: str, total: float, whole_ms: float) -> Evidence:
    times = _times(run, name)
    return Evidence(
        f"{name}: {times} times, {in_ms(total / times)} each, {total / whole_ms:.0%} of the time of "
        f"the run's {run.steps} steps",
        "steps.jsonl",
    )


def _ways(facts: Facts, stalls: dict[str, float]) -> list[str]:
    saving = (
        ("save less often (--save-interval)")
        if argument(facts, "async_save")
        else "write in the background (--async-save)"
    )
    ways = {
        Phase.SAVE.value: saving,
        Phase.EVAL.value: "evaluate less often (--eval-interval) or on less (--eval-iters)",
    }
    return [ways[name] for name, total in stalls.items() if total]


def _flags(facts: Facts, stalls: dict[str, float]) -> list[str]:
    saving = "--save-interval" if argument(facts, "async_save") else "--async-save"
    flags = {Phase.SAVE.value: saving, Phase.EVAL.value: "--eval-interval"}
    return [flags[name] for name, total in stalls.items() if total]
