"""The fp16 loss scale has fallen to where gradients vanish.

Meaning: overflows keep halving the scale. Near 1, small gradients round to zero in fp16: training goes on without
    error, and learns little or nothing.
Measured: the loss scale of the last steps in steps.jsonl, and what it was before.
Cost: not time: trust in the run.
Do: stop and find what overflows: a learning rate too high, a layer that explodes, bad data. bf16 needs no scale.
Flags: --bf16; --min-loss-scale stops the fall and hides it; --lr, --clip-grad.
False alarm: a fixed --loss-scale 1, chosen on purpose.
"""

import math

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "scale-collapse", "loss scale that has collapsed"
TOO_SMALL = 16.0  # gradients of a healthy run bear scales of thousands; fp16's smallest number is 6e-8
FALLEN = 256.0  # times from its highest after the first good step
MIN_STEPS = 20


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or facts.plan.get("precision") not in (None, "fp16") or argument(facts, "loss_scale"):
        return None
    settled = run.loss_scale[run.skipped.index(False) :] if False in run.skipped else run.loss_scale
    known = [scale for scale in settled if not math.isnan(scale) and scale > 0]
    if len(known) < MIN_STEPS or known[-1] > TOO_SMALL or max(known) < FALLEN * known[-1]:
        return None
    skipped = f"{sum(run.skipped)} of {run.steps} steps were skipped"
    text = f"the loss scale fell from {max(known):,.0f} to {known[-1]:g} ({skipped})"
    seen = Evidence(text, "steps.jsonl")
    advice = "stop and find what overflows; --bf16 needs no loss scale"
    return Finding(evidence=(seen,), advice=advice, flags=("--bf16",))
