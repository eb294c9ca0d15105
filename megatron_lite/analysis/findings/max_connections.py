"""CUDA_DEVICE_MAX_CONNECTIONS=1 without tensor parallelism.

Meaning: the variable gives the device one queue for all streams, so that work starts in the order
    of its launches. Megatron-LM's tensor and sequence parallelism want that order. With data
    parallelism alone it can make collectives wait behind kernels that were launched before them,
    and the other way round: overlap is lost.
Measured: the variable as the run wrote it down, the plan's parallel sizes, and the communication
    that nothing hides.
Cost: at most that exposed communication; whether the variable is to blame, a run without it
    tells.
Do: unset it, or set 8 to 32, for pure data parallelism; compare the exposed communication.
Flags: CUDA_DEVICE_MAX_CONNECTIONS (many launch scripts export it); --tensor-model-parallel-size.
False alarm: GPUs from Blackwell on order launches otherwise; a single GPU has nothing to overlap.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument, part, variable, whole
from megatron_lite.analysis.findings.step_measurements import MIN_SHARE_SHOWN, of_step, share, where
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.variables import MORE_QUEUES, QUEUES, has_needless_order

CODE = "max-connections"
TITLE = "one hardware queue for all streams"


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    tensor, context = (whole(argument(facts, f"{kind}_parallel_size")) for kind in ("tensor_model", "context"))
    world, cost = whole(part(facts, "world", "size")), one.time.rows.get("exposed_communication", 0.0)
    needless = has_needless_order(variable(facts, QUEUES), world or 1, tensor or 1, context or 1)
    if not needless or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    text = (
        f"the variable is 1, tensor parallel size 1, {world} ranks; nothing hides communication of {of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one)),),
        advice=f"unset {QUEUES} (or set 32) for pure data parallelism, and compare",
        flags=(MORE_QUEUES,),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )
