"""The host comes too late in places.

Meaning: the device runs out of work at certain points, although kernels are large enough on the whole: Python between
    phases, a slow call, building of inputs. On a CPU the same time passes between operators.
Measured: idle time in which the next kernel's launch call had not begun, without what other rows explain (loader,
    synchronisation, allocator, garbage collector), by what the host did meanwhile. Without a GPU: time in which no
    operator ran, by phase; stretches of a millisecond and more are the program's own, shorter ones the price of
    calling operators.
Cost: that time, without what the profiler added to the step where the run's own clock tells it.
Do: move work of the host out of the step, or into a thread; launch work before waiting for anything; where operators
    are small for the price of calling them, give each more to do.
Flags: --pytorch-profiler-collect-callstack shows which lines; record once without it for the true size.
False alarm: a trace with stacks, which slow Python several times; a CPU whose cores other processes use.
"""

from megatron_lite.analysis.findings import log_stalls, tiny_micro_batches
from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step, share
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "host-gaps", "host late in places"
TITLE_ON_CPU = "Python between operators"
TOO_MUCH = 0.10  # of the step; the profiler alone makes a few percent
TOO_MUCH_CALLING = 0.30  # of a CPU's step in short stretches: a small model has no less
MAX_SHOWN = 4
STACKS = "--pytorch-profiler-collect-callstack"
LARGER_OPERATORS = ("--micro-batch-size", "--torch-compile")


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    """With a GPU where the host is late; without one where Python is at work between operators."""
    run, added = facts.run, 0.0
    if run is not None and run.profiled_step_ms and run.before_profile_ms:
        # Recording takes the host's time, since the device works as before.
        added = max(0.0, run.profiled_step_ms - run.before_profile_ms)
    host = one.time.rows.get("host", 0.0)
    sites = [Evidence(f"{in_ms(site.idle_ms)} in {site.what}", site.phase) for site in one.time.hosts[:MAX_SHOWN]]
    if not one.time.on_gpu:
        return _find_in_places(facts, one, host - added) or _find_in_calls(facts, one, host - added, sites)
    if one.time.launch_bound or tiny_micro_batches.find_in_trace(facts, one):  # they name the cause
        return None
    text = f"the device idles {of_step(host, one)} because of the host"
    advice = "take Python work out of the step; profile with stacks to see the lines"
    flags = () if one.trace.with_stack else (STACKS,)
    return find_lost_time(one, host - added, text, advice, *sites, flags=flags, certain=False, at_least=TOO_MUCH)


def _find_in_places(facts: Facts, one: RankFacts, most: float) -> Finding | None:
    """Python at work for long in places."""
    logging = log_stalls.LOG if log_stalls.find(facts) else None  # that has its price there
    stretches = [stretch for stretch in one.time.stretches if stretch.phase != logging]
    seen = sum(stretch.ms for stretch in stretches)
    if share(min(most, seen), one) < TOO_MUCH:
        return None
    shown = []
    for stretch in stretches[:MAX_SHOWN]:
        if stretch.ms >= TOO_MUCH * stretches[0].ms:
            inside = f" in {stretch.line}" if stretch.line else ""
            after = f", the longest stretch of it after {stretch.after}" if stretch.after else ""
            where_seen = stretch.phase or "outside of all phases"
            shown.append(Evidence(f"{in_ms(stretch.ms)} in the median step{inside}{after}", where_seen))
    remedy = f"take that work out of {stretches[0].phase or 'the step'}, or do it in fewer steps"
    advice = remedy if one.trace.with_stack else f"{STACKS} names the function; {remedy}"
    flags = () if one.trace.with_stack else (STACKS,)
    text = f"Python runs for a millisecond or longer without an operator: {of_step(seen, one)}"
    return find_lost_time(
        one, min(most, seen), text, advice, *shown, title=TITLE_ON_CPU, flags=flags, certain=False, at_least=TOO_MUCH
    )


def _find_in_calls(facts: Facts, one: RankFacts, most: float, sites: list[Evidence]) -> Finding | None:
    """Python calling so many operators that it takes as long as they do."""
    cost = most - sum(stretch.ms for stretch in one.time.stretches)
    if tiny_micro_batches.find_in_trace(facts, one):
        return None
    operators = sum(phase.kernels for phase in one.time.phases)
    each = f"{1e3 * one.time.rows.get('compute', 0.0) / operators:,.0f} us each" if operators else "in no phase"
    text = f"{operators:,.0f} operators per step, {each}; Python between them takes {of_step(cost, one)}"
    advice = f"give each operator more to do: a larger {LARGER_OPERATORS[0]}, or {LARGER_OPERATORS[1]}"
    flags = LARGER_OPERATORS
    return find_lost_time(
        one, cost, text, advice, *sites, title=TITLE_ON_CPU, flags=flags, certain=False, at_least=TOO_MUCH_CALLING
    )
