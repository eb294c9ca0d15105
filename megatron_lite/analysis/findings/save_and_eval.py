"""Training stands still for checkpoints and evaluations.

Meaning: while a checkpoint is written or the validation loss is computed, no step runs. On several ranks the slowest
    writer decides.
Measured: time of the phases save and eval in steps.jsonl over all steps of the run, spread over them.
Cost: that time per step. It is in no profile of a few steady steps.
Do: write in the background from a copy in host memory; save and evaluate less often, or on fewer batches.
Flags: --async-save, --save-interval, --eval-interval, --eval-iters.
False alarm: a short run, in which one checkpoint weighs more than it will in a long one; below 20 steps only what
    came three times counts.
"""

import math

from megatron_lite.analysis.findings.base import MATTERS, Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase

CODE, TITLE = "save-and-eval", "stalls for checkpoints and evaluations"
MIN_STEPS, MIN_TIMES = 20, 3  # one of both: a short run's only checkpoint says nothing of how often
SAVE, EVAL = Phase.SAVE.value, Phase.EVAL.value


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    whole_ms = _total(run.step_ms)
    times = {name: sum(value > 0 for value in run.phases_ms.get(name, ())) for name in (SAVE, EVAL)}
    known = [name for name, number in times.items() if run.steps >= MIN_STEPS or number >= MIN_TIMES]
    stalls = {name: total for name in known if (total := _total(run.phases_ms.get(name, ())))}
    if not whole_ms or sum(stalls.values()) < MATTERS * whole_ms:
        return None
    remedies = {
        SAVE: ("write in the background (--async-save)", "--async-save"),
        EVAL: ("evaluate less often (--eval-interval) or on less (--eval-iters)", "--eval-interval"),
    }
    if argument(facts, "async_save"):
        remedies[SAVE] = ("save less often (--save-interval)", "--save-interval")
    cost = sum(stalls.values()) / run.steps
    seen = (
        f"{name}: {times[name]} times, {in_ms(total / times[name])} each, {total / whole_ms:.0%} of the time of "
        f"the run's {run.steps} steps"
        for name, total in stalls.items()
    )
    advice = f"stand still less: {' and '.join(remedies[name][0] for name in stalls)}"
    flags = tuple(remedies[name][1] for name in stalls)
    return Finding(
        cost_ms=cost,
        evidence=tuple(Evidence(text, "steps.jsonl") for text in seen),
        advice=advice,
        flags=flags,
        gain_ms=cost,
    )


def _total(values) -> float:
    return math.fsum(value for value in values if not math.isnan(value))
