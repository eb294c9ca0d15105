"""Kernels wait for another stream.

Meaning: the next kernel was launched in time but had to wait for an event of another stream (a
    copy, a collective), or for a serialisation that the host asked for. The device is idle
    meanwhile.
Measured: gaps of 10 us and more in which the next kernel's launch call was already over.
Cost: all of that idle time.
Do: look at what the trace shows right before these gaps; start copies and collectives earlier,
    wait for them later.
Flags: CUDA_DEVICE_MAX_CONNECTIONS unset (a setting for tensor parallelism) if streams should run
    beside each other.
False alarm: gaps that the profiler itself makes while it writes its buffers.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import MATTERS, of_step, share, where
from megatron_lite.analysis.run_facts import Facts

CODE = "stream-waits"
TITLE = "kernels waiting for another stream"


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    cost = one.time.rows.get("dependency", 0.0)
    if share(cost, one) < MATTERS:
        return None
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(f"launched kernels wait while the device idles, {of_step(cost, one)}", where(one)),),
        advice="start copies and collectives earlier and wait for them later; see the gaps in the trace",
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )
