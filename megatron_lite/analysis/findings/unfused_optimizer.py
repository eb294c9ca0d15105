"""The optimizer updates tensor by tensor, or operation by operation.

Meaning: AdamW written as a loop launches about ten small kernels per parameter; foreach joins the
    parameters but still reads and writes them once per operation. A fused optimizer does all of
    it in one pass over memory.
Measured: names of the operators: aten::addcdiv_ in a loop, aten::_foreach_addcdiv_, or
    aten::_fused_adamw_; the cost is the time of the optimizer's phase (device time; without a GPU
    the host's).
Cost: up to that time; one pass over weights, gradients and moments remains.
Do: torch.optim.AdamW(..., fused=True), on a CPU too; apex or Transformer Engine's FusedAdam for
    Megatron-LM.
Flags: none here: this trainer's optimizers are fused.
False alarm: an optimizer of your own that has no fused form.
"""

import re

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MATTERS,
    covered,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

CODE = "unfused-optimizer"
TITLE = "optimizer that is not fused"
FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_|FusedAdam|fused_adam", re.IGNORECASE)
FOREACH, LOOP = "aten::_foreach_addcdiv_", "aten::addcdiv_"  # the last operation of an Adam update
OPTIMIZER_PHASE = re.compile(rf"{Phase.OPTIMIZER_STEP}$|Optimizer\.step#")
FEW = 4  # parameter tensors whose loop would not be worth a word


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or len(rows_named(one, FUSED.search, Kind.OP, Kind.KERNEL)):
        return None
    loops = rows_named(one, lambda name: name == LOOP, Kind.OP)
    joined = rows_named(one, lambda name: name == FOREACH, Kind.OP)
    per_step = len(loops) / steady_steps(one)
    cost = _phase_ms(one)
    if not len(joined) and per_step < FEW or share(cost, one) < MATTERS:
        return None
    how = "foreach" if len(joined) else f"a loop over {per_step:,.0f} tensors"
    row = (joined if len(joined) else loops)[0]
    evidence = Evidence(f"the update is {how}; the optimizer takes {of_step(cost, one)}", where(one, row))
    return Finding(
        cost_ms=cost,
        evidence=(evidence,),
        advice="a fused optimizer: torch.optim.AdamW(..., fused=True)",
        gain_ms=cost,
        certain=not len(joined),
        rank=one.time.rank,
    )


def _phase_ms(one: RankFacts) -> float:
    """Time of the optimizer: its phase's, else that of the range which PyTorch puts around step()."""
    phases = [phase.device_ms for phase in one.time.phases if OPTIMIZER_PHASE.search(phase.name)]
    if phases:
        return max(phases)
    ranges = rows_named(one, lambda name: name.startswith("Optimizer.step#"), Kind.ANNOTATION)
    return covered(one, ranges).length / 1e6 / steady_steps(one)
