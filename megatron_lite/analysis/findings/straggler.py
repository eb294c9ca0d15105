"""One rank makes the others wait.

Meaning: every collective ends for all when the last rank has come. A rank that is slower, or that waits for its data
    or its host, costs the time of all, and shows up on the others as communication.
Measured: by collectives of all ranks' traces, matched in order: who starts last, and how much later than the median;
    the cause is the part of its time (computing, data, host, copies) that covers at least 80% of the lag. Where
    traces of several ranks show none, or there are none: every rank's median time over the whole run, in phases where
    none waits for another; and what the profiled steps say of it.
Cost: the others' wait per step.
Do: by the cause: computing: a hot or throttled GPU, another process on it, an unequal share of work; data: its loader
    or disk; host: another job on its cores, garbage collection. Swap the node and see whether the number moves.
Flags: --profile-ranks -1 records all ranks; --timing-log-level 1 --timing-log-option all prints every rank's phases.
False alarm: clocks of several nodes that are not aligned; the report says whether they are.
"""

from megatron_lite.analysis.findings.base import MATTERS, Evidence, Finding, in_ms
from megatron_lite.analysis.ranks.from_run import find_straggler_by_medians
from megatron_lite.analysis.ranks.rank_results import Ranks, Straggler
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "straggler", "rank that the others wait for"
CAUSES = {
    "compute": "it computes longer: look for a throttled or shared GPU (or cores), or more work on this rank",
    "data_wait": "it waits for its data: its loader, disk or --num-workers",
    "host": "its host is late: other jobs on its cores, garbage collection (--manual-gc), other Python work",
    "copy": "it copies longer: its bus, or batches from pageable memory",
}


def find(facts: Facts) -> Finding | None:
    ranks, run = facts.ranks, facts.run
    found = ranks.straggler if ranks else None
    step_ms = max((row.step_ms for row in ranks.rows), default=0.0) if ranks else 0.0
    if found is None and run is not None and run.ranks is not None:
        found, step_ms = find_straggler_by_medians(run.ranks), run.steady_step_ms or 0.0
    if found is None or found.caused_wait_ms < MATTERS * step_ms:
        return None
    flags = ()  # what to record: what the traces that there are do not have
    if ranks is None or ranks.missing:
        flags = ("--profile-ranks -1",)
    elif not all(one.trace.with_stack for one in facts.ranks_seen):
        flags = ("--pytorch-profiler-collect-callstack",)
    why = CAUSES.get(found.cause) or (
        f"record it with {flags[0]}, and compare it with another one"
        if flags
        else "swap its node or GPU with another's and see whether the rank or the place is slow"
    )
    reason = "no single cause covers 80% of its lag"
    if found.cause:
        phase = f", most of it in {found.phase}" if found.phase else ""
        reason = f"{found.cause} takes {in_ms(found.cause_ms)} longer than on the median of the others{phase}"
    advice = f"rank {found.rank}: {why}"
    return Finding(
        cost_ms=found.caused_wait_ms,
        evidence=(Evidence(_describe_lateness(found, ranks), f"rank {found.rank}"), Evidence(reason)),
        advice=advice,
        flags=flags,
        gain_ms=found.caused_wait_ms,
        certain=bool(found.cause) and found.share_last is not None,
        rank=found.rank,
    )


def _describe_lateness(found: Straggler, ranks: Ranks | None) -> str:
    caused = in_ms(found.caused_wait_ms)
    if found.share_last is not None:
        last = f"rank {found.rank} is last in {found.share_last:.0%} of the collectives"
        return f"{last}; others wait {caused} per step"
    # No collectives were seen, only every rank's own clock; traces may show waits all the same.
    text = f"over the whole run rank {found.rank} takes {caused} longer per step than the median rank"
    text += " (medians in steps.jsonl)"
    awaited = [row for row in ranks.rows if row.caused_wait_ms is not None] if ranks else []
    if len(awaited) < 2:
        return text
    most = max(awaited, key=lambda row: row.caused_wait_ms)
    agrees = most.rank == found.rank
    text += "; in the profiled steps, too," if agrees else "; but in the profiled steps"
    whom = "it" if agrees else f"rank {most.rank}"
    return f"{text} the others wait most for {whom}, {in_ms(most.caused_wait_ms)} per step"
