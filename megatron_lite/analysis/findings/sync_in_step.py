"""The host waits for the device inside a step.

Meaning: code asked for a value that the device had not computed yet: .item(), print(tensor), .cpu(), bool(tensor),
    nonzero, or an explicit synchronize. Python stands still until all queued work is done, and then the device stands
    still until Python has launched new work.
Measured: calls per step that block the host, with operator and source line; cost is the device's idle time after
    them, not the time that the host waited: waiting while the device computes costs nothing. On a CPU nothing runs
    ahead of Python: a read there waits for nothing.
Cost: the queue runs empty, and every launch that follows is seen in full. CPU times lie about it: the wait shows up
    in whatever phase comes to ask first, often the copy of the next batch.
Do: read losses and norms at the log interval only; keep conditions on the device (torch.where); copy with
    non_blocking=True from pinned memory.
Flags: --log-interval 100; for Megatron-LM itself --no-check-for-nan-in-loss-and-grad. Stacks name the line:
    --pytorch-profiler-collect-callstack.
False alarm: one wait at a step's end with a full queue behind it, which idle time shows as nothing.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, counted, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.unpinned_copies import is_batch_copy, pageable_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.phases import Phase

CODE, TITLE = "sync-in-step", "synchronisation inside the step"
ONCE = 0.5  # calls per step from which on it is every step's, not that of a log interval
BETWEEN_STEPS = {Phase.LOG.value, Phase.EVAL.value, Phase.SAVE.value}  # there, waiting is meant
MAX_SHOWN = 4


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    sites = find_waits(one)
    cost, calls = sum(site.idle_ms for site in sites), sum(site.per_step for site in sites)
    shown = []
    for site in sites[:MAX_SHOWN]:
        what = f"{site.operator} -> {site.call}" if site.operator else site.call
        times = f"host waits {in_ms(site.host_ms)}, device idles {in_ms(site.idle_ms)}"
        shown.append(
            Evidence(f"{what} in {site.phase or 'no phase'}: {site.per_step:.3g} per step, {times}", site.frame)
        )
    text = f"{counted(calls, 'wait')} per step, after which the device idles {of_step(cost, one)}"
    advice = "read values (.item(), print, .cpu()) at the log interval only, and keep conditions on the device"
    return find_lost_time(one, cost, text, advice, *shown, flags=("--log-interval 100",), cheap=True)


def find_waits(one: RankFacts) -> list[SyncSite]:
    """Where the host waits for the device inside every step; most idle time first."""
    unpinned = len(pageable_rows(one)) > 0  # they are a finding of their own
    return [
        site
        for site in one.time.syncs
        if site.per_step >= ONCE and site.phase not in BETWEEN_STEPS and not (unpinned and is_batch_copy(site))
    ]
