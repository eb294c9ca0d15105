"""Switches for finding errors were left on.

Meaning: some environment variables make a run safer to debug and slower: launches that wait,
    timing events around every collective, checks of every collective on all ranks, memory without
    caching.
Measured: the variables as the run wrote them down.
Cost: not measured; some cost microseconds per call, CUDA_LAUNCH_BLOCKING=1 all overlap of host
    and device.
Do: unset them for runs whose speed matters.
Flags: CUDA_LAUNCH_BLOCKING, TORCH_NCCL_ENABLE_TIMING, TORCH_DISTRIBUTED_DEBUG,
    PYTORCH_NO_CUDA_MEMORY_CACHING, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_IB_DISABLE.
False alarm: NCCL_..._DISABLE on a machine whose links are broken, where it is the way out.
"""

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.seen.planned import variable

CODE = "debug-switches"
TITLE = "switches for debugging left on"
OFF = ("", "0", "OFF", "INFO", "FALSE")  # INFO of TORCH_DISTRIBUTED_DEBUG only logs at the start
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_NCCL_ENABLE_TIMING": "events around every collective, which hinder overlap",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked on all ranks first",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is a cudaMalloc and a cudaFree",
    "NCCL_P2P_DISABLE": "GPUs of one machine talk through host memory",
    "NCCL_SHM_DISABLE": "ranks of one machine talk over the network",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
}


def find(facts: Facts) -> Finding | None:
    values = {name: variable(facts, name) for name in SLOW}
    on = [name for name, value in values.items() if value is not None and value.upper() not in OFF]
    if not on:
        return None
    return Finding(
        code=CODE, title=TITLE,
        evidence=tuple(Evidence(f"{name}={values[name]}: {SLOW[name]}", "run.json") for name in on),
        advice=f"unset {', '.join(on)}", certain=False,
    )
