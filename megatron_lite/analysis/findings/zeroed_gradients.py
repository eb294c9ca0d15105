"""Gradients are filled with zeros instead of let go.

Meaning: zero_grad(set_to_none=False), or an old PyTorch's default, writes zeros into every gradient, and backward
    then reads them to add to them. Let go (None), a gradient is simply written by the next backward.
Measured: aten::zero_ and its kin within the range of zero_grad; cost is their device time and the idle time while the
    host launches them, tensor by tensor. Without a GPU the operators' time.
Cost: that time, and as much again in backward, which is not counted here.
Do: optimizer.zero_grad(set_to_none=True), PyTorch's default since 2.0.
Flags: none here: this trainer lets gradients go.
False alarm: code that reads .grad of parameters that got no gradient.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.step_measurements import in_phases, per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "zeroed-gradients", "gradients filled with zeros"
ZEROES = ("aten::zero_", "aten::_foreach_zero_")
PHASES = ("Optimizer.zero_grad", "zero_grad")


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    rows = in_phases(one, rows_named(one, ZEROES.__contains__, Kind.OP), *PHASES)
    if not len(rows):
        return None
    cost = sum(phase.device_ms for phase in one.time.phases if phase.name in PHASES)
    cost += sum(site.idle_ms for site in one.time.hosts if site.phase in PHASES)
    text = f"{per_step(one, rows):,.0f} calls per step in zero_grad: {of_step(cost, one)}"
    advice = "let gradients go: optimizer.zero_grad(set_to_none=True)"
    return find_lost_time(one, cost, text, advice, row=rows[0], cheap=True)
