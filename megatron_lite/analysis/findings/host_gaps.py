"""The host comes too late in places.

Meaning: the device runs out of work at certain points, although kernels are large enough on the
    whole: Python between phases, a slow call, building of inputs.
Measured: idle time in which the next kernel's launch call had not begun, without what other rows
    explain (loader, synchronisation, allocator, garbage collector), by what the host did
    meanwhile. Runs without a GPU show Python's time between operators in their breakdown, where
    other processes' use of the cores counts too: no finding is made of it.
Cost: that time, without what the profiler added to the step where the run's own clock tells it.
Do: move work of the host out of the step, or into a thread; launch work before waiting for
    anything.
Flags: --pytorch-profiler-collect-callstack shows which lines; record once without it for the true
    size.
False alarm: a trace with stacks, which slow Python several times.
"""

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings import tiny_micro_batches
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.seen.steady import in_ms, of_step, share, where
from megatron_lite.analysis.run.figures import Run

CODE = "host-gaps"
TITLE = "host late in places"
TOO_MUCH = 0.10  # of the step; the profiler alone makes a few percent
MOST_SHOWN = 4


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    if one.time.launch_bound or tiny_micro_batches.find(facts):  # they name the cause
        return None
    seen = one.time.rows.get("host", 0.0)
    cost = seen - added_by_profiler_ms(facts.run)
    if share(cost, one) < TOO_MUCH:
        return None
    sites = [Evidence(f"{in_ms(site.idle_ms)} in {site.what}", site.phase) for site in one.time.hosts[:MOST_SHOWN]]
    return Finding(
        code=CODE, title=TITLE, cost_ms=cost,
        evidence=(Evidence(f"the device idles {of_step(seen, one)} because of the host", where(one)), *sites),
        advice="take Python work out of the step; profile with stacks to see the lines",
        flags=() if one.trace.with_stack else ("--pytorch-profiler-collect-callstack",), gain_ms=cost, certain=False,
        rank=one.time.rank,
    )


def added_by_profiler_ms(run: Run | None) -> float:
    """What recording made of a step: in the host's time, since the device works as before. 0 where it is not known."""
    if run is None or not run.profiled_step_ms or not run.before_profile_ms:
        return 0.0
    return max(0.0, run.profiled_step_ms - run.before_profile_ms)
