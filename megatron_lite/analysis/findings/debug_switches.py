"""Switches for finding errors were left on.

Meaning: some environment variables make a run safer to debug and slower: launches that wait, timing events around
    every collective, checks of every collective on all ranks, memory without caching.
Measured: the variables as the run wrote them down.
Cost: not measured; some cost microseconds per call, CUDA_LAUNCH_BLOCKING=1 all overlap of host and device.
Do: unset them for runs whose speed matters.
Flags: CUDA_LAUNCH_BLOCKING, TORCH_NCCL_ENABLE_TIMING, TORCH_DISTRIBUTED_DEBUG, PYTORCH_NO_CUDA_MEMORY_CACHING,
    NCCL_DEBUG, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_IB_DISABLE.
False alarm: NCCL_..._DISABLE on a machine whose links are broken, where it is the remedy.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import local_ranks, on_gpu, part, variables, whole
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.variables import Place, switches_on

CODE, TITLE = "debug-switches", "switches for debugging left on"


def find(facts: Facts) -> Finding | None:
    ranks, local = whole(part(facts, "world", "size")) or 1, local_ranks(facts) or 1
    on = switches_on(variables(facts), Place(on_gpu(facts) is not False, ranks, local))
    if not on:
        return None
    seen = tuple(Evidence(f"{setting}: {cost}", "run.json") for setting, cost in on.items())
    advice = f"unset {', '.join(setting.partition('=')[0] for setting in on)}"
    return Finding(evidence=seen, advice=advice, certain=False)
