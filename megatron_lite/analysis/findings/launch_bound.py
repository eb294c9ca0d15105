"""The device waits for the host to launch small kernels.

Meaning: kernels finish faster than Python and PyTorch's dispatch hand over new ones. The device is idle between them,
    and a faster device would not help.
Measured: idle time in which the next kernel's launch call had not begun, and gaps under 10 us; with the median kernel
    against the median interval between launches, and how long a launched kernel waits in the queue (hardly at all
    here).
Cost: all of that idle time. The profiler itself makes the host slower, so that without it the share is smaller.
Do: more work per kernel (a larger micro-batch instead of accumulation, if memory allows), fewer kernels
    (torch.compile, fused operators), CUDA graphs, less Python between operators.
Flags: --torch-compile; a larger --micro-batch-size at the same --global-batch-size; record without
    --pytorch-profiler-collect-callstack, which slows the host most.
False alarm: a trace with stacks or shapes of a run that is fine without them: compare with the step time outside the
    window.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.run_settings import compiles, suggest_micro_batch
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "launch-bound", "host too slow to launch small kernels"
MAX_SHOWN = 3


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    time, larger = one.time, suggest_micro_batch(facts)
    if not time.launch_bound:
        return None
    cost = time.rows.get("host", 0.0) + time.rows.get("launch", 0.0)
    text = (
        f"the device idles {of_step(cost, one)}: {time.launches:,.0f} kernels per step; medians: "
        f"{time.median_kernel_us:.1f} us per kernel, {time.median_launch_interval_us:.1f} us from launch to launch, "
        f"{time.median_queue_us:.1f} us in the queue"
    )
    sites = time.hosts[:MAX_SHOWN]
    shown = (Evidence(f"{in_ms(site.idle_ms)} while the host is in {site.what}", site.phase) for site in sites)
    advice = (
        f"more work per launch: {larger[1]}"
        if larger
        else "fewer and larger kernels: torch.compile, fused operators, CUDA graphs"
    )
    flags = (*(larger[:1] if larger else ()), *(() if compiles(facts) else ("--torch-compile",)))
    return find_lost_time(one, cost, text, advice, *shown, flags=flags, certain=not one.trace.with_stack, at_least=0.0)
