"""One rank makes the others wait.

Meaning: every collective ends for all when the last rank has come. A rank that is slower, or that
    waits for its data or its host, costs the time of all, and shows up on the others as
    communication.
Measured: by collectives of all ranks' traces, matched in order: who starts last, and how much
    later than the median; the cause is the part of its time (computing, data, host, copies) that
    covers at least 80% of the lag. Where traces of several ranks show none, or there are none: every
    rank's median time over the whole run, in phases where none waits for another; and what the
    profiled steps say of it.
Cost: the others' wait per step.
Do: by the cause: computing: a hot or throttled GPU, another process on it, an unequal share of
    work; data: its loader or disk; host: another job on its cores, garbage collection. Swap the
    node and see whether the number moves.
Flags: --profile-ranks -1 records all ranks; --timing-log-level 1 --timing-log-option all prints
    every rank's phases.
False alarm: clocks of several nodes that are not aligned; the report says whether they are.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import MATTERS, in_ms
from megatron_lite.analysis.ranks.from_run import find_straggler_by_medians
from megatron_lite.analysis.ranks.rank_results import Ranks, Straggler
from megatron_lite.analysis.run_facts import Facts

CODE = "straggler"
TITLE = "rank that the others wait for"
CAUSES = {
    "compute": "it computes longer: look for a throttled or shared GPU (or cores), or more work on this rank",
    "data_wait": "it waits for its data: its loader, disk or --num-workers",
    "host": "its host is late: other jobs on its cores, garbage collection (--manual-gc), other Python work",
    "copy": "it copies longer: its bus, or batches from pageable memory",
}


def find(facts: Facts) -> Finding | None:
    found = facts.ranks.straggler if facts.ranks else None
    step_ms = max((row.step_ms for row in facts.ranks.rows), default=0.0) if facts.ranks else 0.0
    if found is None and facts.run is not None and facts.run.ranks is not None:
        found, step_ms = find_straggler_by_medians(facts.run.ranks), facts.run.steady_step_ms or 0.0
    if found is None or found.caused_wait_ms < MATTERS * step_ms:
        return None
    flags = _what_to_record(facts)
    why = CAUSES.get(found.cause) or (
        f"record it with {flags[0]}, and compare it with another one"
        if flags
        else "swap its node or GPU with another's and see whether the rank or the place is slow"
    )
    return Finding(
        cost_ms=found.caused_wait_ms,
        evidence=(Evidence(_lateness(found, facts.ranks), f"rank {found.rank}"), Evidence(_reason(found))),
        advice=f"rank {found.rank}: {why}",
        flags=flags,
        gain_ms=found.caused_wait_ms,
        certain=bool(found.cause) and found.share_last is not None,
        rank=found.rank,
    )


def _what_to_record(facts: Facts) -> tuple[str, ...]:
    """What the traces that there are do not have: ranks, stacks."""
    if facts.ranks is None or facts.ranks.missing:
        return ("--profile-ranks -1",)
    return () if all(one.trace.with_stack for one in facts.ranks_seen) else ("--pytorch-profiler-collect-callstack",)


def _lateness(found: Straggler, ranks: Ranks | None) -> str:
    if found.share_last is None:  # no collectives were seen, only every rank's own clock
        return (
            f"over the whole run rank {found.rank} takes {in_ms(found.caused_wait_ms)} longer per step than the median "
            f"rank (medians in steps.jsonl){_in_profiled_steps(found, ranks) if ranks else ''}"
        )
    return (
        f"rank {found.rank} is last in {found.share_last:.0%} of the collectives; others wait "
        f"{in_ms(found.caused_wait_ms)} per step"
    )


def _in_profiled_steps(found: Straggler, ranks: Ranks) -> str:
    """What traces say of a rank that only the whole run's medians call slow; '' without waits in traces."""
    awaited = [row for row in ranks.rows if row.caused_wait_ms is not None]
    if len(awaited) < 2:
        return ""
    most = max(awaited, key=lambda row: row.caused_wait_ms)
    agrees = most.rank == found.rank
    where, whom = (
        ("in the profiled steps, too,", "it") if agrees else ("but in the profiled steps", f"rank {most.rank}")
    )
    return f"; {where} the others wait most for {whom}, {in_ms(most.caused_wait_ms)} per step"


def _reason(found: Straggler) -> str:
    if not found.cause:
        return "no single cause covers 80% of its lag"
    where = f", most of it in {found.phase}" if found.phase else ""
    return f"{found.cause} takes {in_ms(found.cause_ms)} longer than on the median of the others{where}"
