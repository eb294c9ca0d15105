"""Memory is taken from and given back to the driver inside steps.

Meaning: PyTorch's allocator keeps memory and hands it out again; a steady step needs nothing new. cudaMalloc and
    cudaFree inside steps mean that it could not: memory is nearly full, sizes change from step to step, or caching is
    off.
Measured: idle time of the device while the host was inside cudaMalloc, cudaFree, cudaHostAlloc and their kin, and
    their number per steady step.
Cost: cudaFree waits for all work on the device, and the queue runs empty.
Do: leave more room (smaller micro-batch, recomputation), keep sizes constant, or let segments grow.
Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; --recompute-granularity full or a smaller --micro-batch-size.
False alarm: a window at the run's beginning, while the allocator still grows; profile later steps.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.step_measurements import per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "allocator-stalls", "cudaMalloc and cudaFree inside the step"
CALLS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cuMem", "hipMalloc", "hipFree", "hipHostMalloc")
FLAG = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    cost = one.time.rows.get("allocator", 0.0)
    rows = rows_named(one, lambda name: name.startswith(CALLS), Kind.RUNTIME)
    text = f"{per_step(one, rows):.3g} calls per step; the device idles because of them {of_step(cost, one)}"
    advice = f"leave the allocator more room, or let its segments grow: {FLAG}"
    return find_lost_time(one, cost, text, advice, row=rows[0] if len(rows) else None, flags=(FLAG,), cheap=True)
