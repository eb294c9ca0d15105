"""Memory is taken from and given back to the driver inside steps.

Meaning: PyTorch's allocator keeps memory and hands it out again; a steady step needs nothing new.
    cudaMalloc and cudaFree inside steps mean that it could not: memory is nearly full, sizes
    change from step to step, or caching is off.
Measured: idle time of the device while the host was inside cudaMalloc, cudaFree, cudaHostAlloc
    and their kin, and their number per steady step.
Cost: cudaFree waits for all work on the device, and the queue runs empty.
Do: leave more room (smaller micro-batch, recomputation), keep sizes constant, or let segments
    grow.
Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; --recompute-granularity full or a smaller
    --micro-batch-size.
False alarm: a window at the run's beginning, while the allocator still grows; profile later
    steps.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE = "allocator-stalls"
TITLE = "cudaMalloc and cudaFree inside the step"
CALLS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cuMem", "hipMalloc", "hipFree", "hipHostMalloc")


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    cost = one.time.rows.get("allocator", 0.0)
    if share(cost, one) < MIN_SHARE_SHOWN:
        return None
    rows = rows_named(one, lambda name: name.startswith(CALLS), Kind.RUNTIME)
    return Finding(
        cost_ms=cost,
        evidence=(_seen(one, rows, cost),),
        advice="leave the allocator more room, or let its segments grow: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        flags=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
        gain_ms=cost,
        rank=one.time.rank,
    )


def _seen(one: RankFacts, rows, cost: float) -> Evidence:
    text = f"{len(rows) / steady_steps(one):.3g} calls per step; the device idles because of them {of_step(cost, one)}"
    return Evidence(text, where(one, rows[0] if len(rows) else None))
