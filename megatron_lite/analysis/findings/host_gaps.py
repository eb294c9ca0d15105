"""The host comes too late in places.

Meaning: the device runs out of work at certain points, although kernels are large enough on the
    whole: Python between phases, a slow call, building of inputs. On a CPU the same time passes
    between operators.
Measured: idle time in which the next kernel's launch call had not begun, without what other rows
    explain (loader, synchronisation, allocator, garbage collector), by what the host did
    meanwhile. Without a GPU: time in which no operator ran, by phase; stretches of a millisecond
    and more are the program's own, shorter ones the price of calling operators.
Cost: that time, without what the profiler added to the step where the run's own clock tells it.
Do: move work of the host out of the step, or into a thread; launch work before waiting for
    anything; where operators are small for the price of calling them, give each more to do.
Flags: --pytorch-profiler-collect-callstack shows which lines; record once without it for the true
    size.
False alarm: a trace with stacks, which slow Python several times; a CPU whose cores other
    processes use.
"""

from megatron_lite.analysis.findings import log_stalls, tiny_micro_batches
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import in_ms, of_step, share, where
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import Stretch

CODE = "host-gaps"
TITLE = "host late in places"
TITLE_ON_CPU = "Python between operators"
TOO_MUCH = 0.10  # of the step; the profiler alone makes a few percent
TOO_MUCH_CALLING = 0.30  # of a CPU's step in short stretches: a small model has no less
MAX_SHOWN = 4
STACKS = "--pytorch-profiler-collect-callstack"
LARGER_OPERATORS = ("--micro-batch-size", "--torch-compile")


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None:
        return None
    if not one.time.on_gpu:
        return _on_cpu(facts, one)
    if one.time.launch_bound or tiny_micro_batches.find(facts):  # they name the cause
        return None
    seen = one.time.rows.get("host", 0.0)
    cost = seen - added_by_profiler_ms(facts.run)
    if share(cost, one) < TOO_MUCH:
        return None
    sites = [Evidence(f"{in_ms(site.idle_ms)} in {site.what}", site.phase) for site in one.time.hosts[:MAX_SHOWN]]
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(f"the device idles {of_step(seen, one)} because of the host", where(one)), *sites),
        advice="take Python work out of the step; profile with stacks to see the lines",
        flags=() if one.trace.with_stack else (STACKS,),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _on_cpu(facts: Facts, one: RankFacts) -> Finding | None:
    """Python at work for long in places, else calling so many operators that it takes as long as they do."""
    most = one.time.rows.get("host", 0.0) - added_by_profiler_ms(facts.run)
    logging = log_stalls.LOG if log_stalls.find(facts) else None  # that has its price there
    stretches = [stretch for stretch in one.time.stretches if stretch.phase != logging]
    seen = sum(stretch.ms for stretch in stretches)
    if share(min(most, seen), one) >= TOO_MUCH:
        return _in_places(one, stretches, seen, min(most, seen))
    cost = most - sum(stretch.ms for stretch in one.time.stretches)
    if share(cost, one) < TOO_MUCH_CALLING or tiny_micro_batches.find(facts):
        return None
    return _in_calls(one, cost)


def _in_places(one: RankFacts, stretches: list[Stretch], seen: float, cost: float) -> Finding:
    first, stacks = stretches[0], one.trace.with_stack
    shown = [_seen(stretch) for stretch in stretches[:MAX_SHOWN] if stretch.ms >= TOO_MUCH * first.ms]
    place = f"take that work out of {first.phase or 'the step'}, or do it in fewer steps"
    text = f"Python runs for a millisecond or longer without an operator: {of_step(seen, one)}"
    return Finding(
        title=TITLE_ON_CPU,
        cost_ms=cost,
        evidence=(Evidence(text, where(one)), *shown),
        advice=place if stacks else f"{STACKS} names the function; {place}",
        flags=() if stacks else (STACKS,),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _seen(stretch: Stretch) -> Evidence:
    """Which function, or what is known of its place without stacks."""
    after = f", the longest stretch of it after {stretch.after}" if stretch.after else ""
    inside = f" in {stretch.line}" if stretch.line else ""
    return Evidence(f"{in_ms(stretch.ms)} in the median step{inside}{after}", stretch.phase or "outside of all phases")


def _in_calls(one: RankFacts, cost: float) -> Finding:
    operators = sum(phase.kernels for phase in one.time.phases)
    each = f"{1e3 * one.time.rows.get('compute', 0.0) / operators:,.0f} us each" if operators else "in no phase"
    text = f"{operators:,.0f} operators per step, {each}; Python between them takes {of_step(cost, one)}"
    sites = [Evidence(f"{in_ms(site.idle_ms)} in {site.what}", site.phase) for site in one.time.hosts[:MAX_SHOWN]]
    return Finding(
        title=TITLE_ON_CPU,
        cost_ms=cost,
        evidence=(Evidence(text, where(one)), *sites),
        advice=f"give each operator more to do: a larger {LARGER_OPERATORS[0]}, or {LARGER_OPERATORS[1]}",
        flags=LARGER_OPERATORS,
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def added_by_profiler_ms(run: Run | None) -> float:
    """What recording made of a step: in the host's time, since the device works as before. 0 where it is not known."""
    if run is None or not run.profiled_step_ms or not run.before_profile_ms:
        return 0.0
    return max(0.0, run.profiled_step_ms - run.before_profile_ms)
