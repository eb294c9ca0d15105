"""The host waits for the device inside a step.

Meaning: code asked for a value that the device had not computed yet: .item(), print(tensor),
    .cpu(), bool(tensor), nonzero, or an explicit synchronize. Python stands still until all
    queued work is done, and then the device stands still until Python has launched new work.
Measured: calls per step that block the host, with operator and source line; cost is the device's
    idle time after them, not the time that the host waited: waiting while the device computes
    costs nothing. On a CPU nothing runs ahead of Python: a read there waits for nothing.
Cost: the queue runs empty, and every launch that follows is seen in full. CPU times lie about it:
    the wait shows up in whatever phase comes to ask first, often the copy of the next batch.
Do: read losses and norms at the log interval only; keep conditions on the device (torch.where);
    copy with non_blocking=True from pinned memory.
Flags: --log-interval 100; for Megatron-LM itself --no-check-for-nan-in-loss-and-grad. Stacks name
    the line: --pytorch-profiler-collect-callstack.
False alarm: one wait at a step's end with a full queue behind it, which idle time shows as
    nothing.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    counted,
    in_ms,
    of_step,
    share,
    where,
)
from megatron_lite.analysis.findings.unpinned_copies import is_batch_copy, pageable_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.phases import Phase

CODE = "sync-in-step"
TITLE = "synchronisation inside the step"
ONCE = 0.5  # calls per step from which on it is every step's, not that of a log interval
BETWEEN_STEPS = {Phase.LOG.value, Phase.EVAL.value, Phase.SAVE.value}  # there, waiting is meant
MAX_SHOWN = 4


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    sites = waits_inside(one)
    cost = sum(site.idle_ms for site in sites)
    if share(cost, one) < MIN_SHARE_SHOWN:
        return None
    calls = sum(site.per_step for site in sites)
    text = f"{counted(calls, 'wait')} per step, after which the device idles {of_step(cost, one)}"
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one)), *map(_seen, sites[:MAX_SHOWN])),
        advice="read values (.item(), print, .cpu()) at the log interval only, and keep conditions on the device",
        flags=("--log-interval 100",),
        gain_ms=cost,
        rank=one.time.rank,
    )


def waits_inside(one: RankFacts) -> list[SyncSite]:
    """Where the host waits for the device inside every step; most idle time first."""
    unpinned = len(pageable_rows(one)) > 0  # they are a finding of their own
    return [
        site
        for site in one.time.syncs
        if site.per_step >= ONCE and site.phase not in BETWEEN_STEPS and not (unpinned and is_batch_copy(site))
    ]


def _seen(site: SyncSite) -> Evidence:
    what = f"{site.operator} -> {site.call}" if site.operator else site.call
    return Evidence(
        f"{what} in {site.phase or 'no phase'}: {site.per_step:.3g} per step, host waits "
        f"{in_ms(site.host_ms)}, "
        f"device idles {in_ms(site.idle_ms)}",
        site.frame,
    )
