"""CUDA_DEVICE_MAX_CONNECTIONS=1 without tensor parallelism.

Meaning: the variable gives the device one queue for all streams, so that work starts in the order of its launches.
    Megatron-LM's tensor and sequence parallelism want that order. With data parallelism alone it can make collectives
    wait behind kernels that were launched before them, and the other way round: overlap is lost.
Measured: the variable as the run wrote it down, the plan's parallel sizes, and the communication that nothing hides.
Cost: at most that exposed communication; whether the variable is to blame, a run without it tells.
Do: unset it, or set 8 to 32, for pure data parallelism; compare the exposed communication.
Flags: CUDA_DEVICE_MAX_CONNECTIONS (many launch scripts export it); --tensor-model-parallel-size.
False alarm: GPUs from Blackwell on order launches otherwise; a single GPU has nothing to overlap.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.run_settings import argument, part, variables, whole
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.variables import MORE_QUEUES, QUEUES, has_needless_order

CODE, TITLE = "max-connections", "one hardware queue for all streams"


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    tensor, context = (whole(argument(facts, f"{kind}_parallel_size")) for kind in ("tensor_model", "context"))
    world, cost = whole(part(facts, "world", "size")), one.time.rows.get("exposed_communication", 0.0)
    if not has_needless_order(variables(facts).get(QUEUES), world or 1, tensor or 1, context or 1):
        return None
    text = f"the variable is 1, tensor parallel size 1, {world} ranks; nothing hides communication of"
    text += f" {of_step(cost, one)}"
    advice = f"unset {QUEUES} (or set 32) for pure data parallelism, and compare"
    return find_lost_time(one, cost, text, advice, flags=(MORE_QUEUES,), certain=False, cheap=True)
