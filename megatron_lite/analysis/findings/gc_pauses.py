"""Python's garbage collector interrupts steps.

Meaning: collecting walks through all objects that Python holds, in the thread that launches kernels. Each rank pauses
    in a different step, and in each of them all others wait.
Measured: time in gc frames or events of the trace (with a GPU: idle time because of them), per steady step. This
    trainer's traces have them always, others with stacks.
Cost: the pause, on every rank for every rank's pause.
Do: collect at fixed steps, on all ranks in the same one; take a gc.collect() of the program's own out of the step,
    which no flag stops.
Flags: --manual-gc --manual-gc-interval 100.
False alarm: a single collection in a short window, which this mean makes look like every step's.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "gc-pauses", "pauses of Python's garbage collector"


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    cost = one.time.rows.get("garbage_collector", 0.0)
    advice, flags = "--manual-gc is on: a larger --manual-gc-interval", ()
    if not argument(facts, "manual_gc"):
        advice = "collect on all ranks in the same, rare steps: --manual-gc, without a gc.collect() in the step itself"
        flags = ("--manual-gc --manual-gc-interval 100",)
    text = f"garbage collection takes {of_step(cost, one)}"
    return find_lost_time(one, cost, text, advice, flags=flags, cheap=True)
