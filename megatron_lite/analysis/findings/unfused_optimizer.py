"""The optimizer updates tensor by tensor, or operation by operation.

Meaning: AdamW written as a loop launches about ten small kernels per parameter; foreach joins the parameters but
    still reads and writes them once per operation. A fused optimizer does all of it in one pass over memory.
Measured: names of the operators: aten::addcdiv_ in a loop, aten::_foreach_addcdiv_, or aten::_fused_adamw_; the cost
    is the time of the optimizer's phase (device time; without a GPU the host's).
Cost: up to that time; one pass over weights, gradients and moments remains.
Do: torch.optim.AdamW(..., fused=True), on a CPU too; apex or Transformer Engine's FusedAdam for Megatron-LM.
Flags: none here: this trainer's optimizers are fused.
False alarm: an optimizer of your own that has no fused form.
"""

import re

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.step_measurements import covered_ms, per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

CODE, TITLE = "unfused-optimizer", "optimizer that is not fused"
FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_|FusedAdam|fused_adam", re.IGNORECASE)
FOREACH, LOOP = "aten::_foreach_addcdiv_", "aten::addcdiv_"  # the last operation of an Adam update
RANGE = "Optimizer.step#"  # PyTorch's own, around step()
OPTIMIZER_PHASE = re.compile(rf"{Phase.OPTIMIZER_STEP}$|Optimizer\.step#")
FEW = 4  # parameter tensors whose loop would not be worth a word


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    loops, joined = rows_named(one, LOOP.__eq__, Kind.OP), rows_named(one, FOREACH.__eq__, Kind.OP)
    if not len(joined) and per_step(one, loops) < FEW or len(rows_named(one, FUSED.search, Kind.OP, Kind.KERNEL)):
        return None
    phases = [phase.device_ms for phase in one.time.phases if OPTIMIZER_PHASE.search(phase.name)]
    ranges = rows_named(one, lambda name: name.startswith(RANGE), Kind.ANNOTATION)
    cost = max(phases) if phases else covered_ms(one, ranges)
    how = "foreach" if len(joined) else f"a loop over {per_step(one, loops):,.0f} tensors"
    text = f"the update is {how}; the optimizer takes {of_step(cost, one)}"
    advice = "a fused optimizer: torch.optim.AdamW(..., fused=True)"
    return find_lost_time(one, cost, text, advice, row=(joined if len(joined) else loops)[0], certain=not len(joined))
