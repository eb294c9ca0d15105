"""Gradients are filled with zeros instead of let go.

Meaning: zero_grad(set_to_none=False), or an old PyTorch's default, writes zeros into every
    gradient, and backward then reads them to add to them. Let go (None), a gradient is simply
    written by the next backward.
Measured: aten::zero_ and its kin within the range of zero_grad; cost is their device time and the
    idle time while the host launches them, tensor by tensor. Without a GPU the operators' time.
Cost: that time, and as much again in backward, which is not counted here.
Do: optimizer.zero_grad(set_to_none=True), PyTorch's default since 2.0.
Flags: none here: this trainer lets gradients go.
False alarm: code that reads .grad of parameters that got no gradient.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    in_phases,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE = "zeroed-gradients"
TITLE = "gradients filled with zeros"
ZEROES = ("aten::zero_", "aten::_foreach_zero_")
PHASES = ("Optimizer.zero_grad", "zero_grad")


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None:
        return None
    rows = in_phases(one, rows_named(one, lambda name: name in ZEROES, Kind.OP), *PHASES)
    cost = _cost_ms(one)
    if not len(rows) or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    text = f"{len(rows) / steady_steps(one):,.0f} calls per step in zero_grad: {of_step(cost, one)}"
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, rows[0])),),
        advice="let gradients go: optimizer.zero_grad(set_to_none=True)",
        gain_ms=cost,
        rank=one.time.rank,
    )


def _cost_ms(one: RankFacts) -> float:
    working = sum(phase.device_ms for phase in one.time.phases if phase.name in PHASES)
    return working + sum(site.idle_ms for site in one.time.hosts if site.phase in PHASES)
