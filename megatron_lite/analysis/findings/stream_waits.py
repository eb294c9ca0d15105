"""Kernels wait for another stream.

Meaning: the next kernel was launched in time but had to wait for an event of another stream (a copy, a collective),
    or for a serialisation that the host asked for. The device is idle meanwhile.
Measured: gaps of 10 us and more in which the next kernel's launch call was already over.
Cost: all of that idle time.
Do: look at what the trace shows right before these gaps; start copies and collectives earlier, wait for them later.
Flags: CUDA_DEVICE_MAX_CONNECTIONS unset (a setting for tensor parallelism) if streams should run beside each other.
False alarm: gaps that the profiler itself makes while it writes its buffers.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "stream-waits", "kernels waiting for another stream"


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    cost = one.time.rows.get("dependency", 0.0)
    text = f"launched kernels wait while the device idles, {of_step(cost, one)}"
    advice = "start copies and collectives earlier and wait for them later; see the gaps in the trace"
    return find_lost_time(one, cost, text, advice, certain=False)
