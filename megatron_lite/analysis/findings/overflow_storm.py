"""Many steps are skipped because gradients overflow.

Meaning: with fp16 a step whose gradients hold Inf or NaN is thrown away and the loss scale is lowered. A few at the
    beginning are how the scale finds its size; many later mean that values are truly too large.
Measured: skipped steps in steps.jsonl, those before the first good step left out; all of them where there is no good
    step.
Cost: each skipped step is computed for nothing.
Do: bf16, whose range is that of fp32; a smaller learning rate or longer warm-up; look at the layer whose values
    explode (logits, a norm in fp16).
Flags: --bf16 instead of --fp16; --lr, --lr-warmup-iters; --initial-loss-scale 65536 saves the steps at the beginning.
False alarm: one skip per --loss-scale-window: that is the scale trying a larger size.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, in_ms
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "overflow-storm", "steps thrown away because gradients overflow"
TOO_MANY = 0.05  # of the steps: dynamic scaling at Megatron's window of 1000 skips one in 500 at most
MIN_SKIPS = 4  # fewer may be a single bad batch


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None:
        return None
    never_good = all(run.skipped)
    settled = run.skipped if never_good else run.skipped[run.skipped.index(False) :]
    number = sum(settled)
    if number < MIN_SKIPS or number < TOO_MANY * len(settled):
        return None
    wasted = number / len(settled)
    cost = wasted * run.steady_step_ms if run.steady_step_ms else None
    text = f"{number} of {len(settled)} steps after the first good one were skipped ({wasted:.0%})"
    if never_good:
        text = f"all {number} steps were skipped: none has changed the weights"
    if cost:
        text += f": {in_ms(cost)} of every {in_ms(run.steady_step_ms)} are computed for nothing"
    seen = Evidence(text, "steps.jsonl")
    advice = "train in bf16 (--bf16), or lower --lr and lengthen --lr-warmup-iters"
    return Finding(cost_ms=cost, evidence=(seen,), advice=advice, flags=("--bf16",), gain_ms=cost)
