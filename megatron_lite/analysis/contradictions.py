"""What speaks against the figures of a report: damaged files, missing rows, and sources that say different things.

Each is a sentence that lowers the confidence of all that is derived from the source in question.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.run_folder import RUN_FILE, STEPS_FILE
from megatron_lite.units import size

LAUNCH = re.compile(r"(cuda|cu|hip|hipExt)(Module)?Launch(Cooperative)?Kernel")
MAX_LOST = 0.05  # of the steady steps' launches without a kernel; kernels of the window's edges are regularly missing
MAX_APART = 2.0  # trace's step / the run's own time of its profiled steps, or the other way round
MAX_SHARE_APART = 0.2  # of a step, by which a trace and the run's own clock may differ about waiting for data
MAX_UNSEEN = 0.1  # of the allocator's peak, which a snapshot of the peak must not lack


def find_contradictions(facts: Facts) -> list[str]:
    """About the trace of the critical rank; without one about the highest snapshot, whose record may be incomplete, or whose
    peak the run's own allocator exceeded."""
    one, run, snapshot = facts.critical, facts.run, facts.highest_snapshot
    told = [text for seen in facts.ranks_seen for text in seen.trace.damage]
    if one is not None:
        return [text for text in (*told, *_check_trace(one, run)) if text]
    if snapshot is not None:
        told += [] if snapshot.complete else ["the record dropped older events"]
        most = run.peak_memory_bytes.max(initial=0, where=run.peak_memory_bytes > 0) if run else 0
        if not snapshot.simulated and snapshot.peak_bytes < (1 - MAX_UNSEEN) * most:
            told.append(f"the run's allocator peaked at {size(int(most))}, which the snapshot does not show")
    return told


def missing_gpu_work(one: RankFacts, run: Run | None) -> str:
    """Why a trace without kernels is none of a CPU's job; '' where it is one, or has kernels."""
    trace, planned = one.trace, run.plan.get("device") if run else None
    if one.time.on_gpu:
        return ""
    launches, name = len(_find_launches(one)), trace.devices[0] if trace.devices else ""
    if launches:
        return f"the trace holds {launches:,} kernel launches and no kernel"
    if planned == "cuda":
        return "the run was on a GPU, and the trace holds none of its work"
    if planned == "cpu" or trace.without_gpu or not (name or trace.damage):
        return ""
    if not trace.damage:
        return f"the trace names a GPU ({name}) and holds none of its work: a CPU's job, or no CUDA activities"
    return f"the trace {f'names a GPU ({name}) and' if name else 'is cut off, names no device and'} holds no kernel"


def weakened(findings: Sequence[Finding], facts: Facts) -> tuple[Finding, ...]:
    """Findings that rest on a doubtful trace or snapshot are likely at most; those of the run's own records stay."""
    if not find_contradictions(facts):
        return tuple(findings)
    return tuple(one if rests_on_run_only(one.evidence) else replace(one, certain=False) for one in findings)


def limit_certainty(findings: Sequence[Finding], confidence: str) -> tuple[Finding, ...]:
    """No finding is more certain than the verdict of its report: all are likely at most where the verdict has low confidence."""
    if confidence != "low":
        return tuple(findings)
    return tuple(replace(one, certain=False) for one in findings)


def rests_on_run_only(evidence: Sequence[Evidence]) -> bool:
    """Does all of it come from the run's own records?"""
    return all(piece.where.endswith((RUN_FILE, STEPS_FILE)) for piece in evidence)


def _find_launches(one: RankFacts) -> Integers:
    calls = one.trace.rows[Kind.RUNTIME]
    return calls[one.trace.passing(LAUNCH.match, Kind.RUNTIME)[one.trace.events.name[calls]]]


def _check_trace(one: RankFacts, run: Run | None) -> Iterator[str]:
    trace, time, correlation = one.trace, one.time, one.trace.events.correlation
    yield missing_gpu_work(one, run)
    calls = _find_launches(one)
    calls = calls[(correlation[calls] >= 0) & one.placing.counts[calls]]
    lost = int((~np.isin(correlation[calls], correlation[trace.device_rows])).sum())
    if len(trace.device_rows) and lost > MAX_LOST * len(calls):
        yield f"{lost / len(calls):.0%} of the steady steps' kernel launches have no kernel in the trace"
    if run is None:
        return
    if time.on_gpu and run.plan.get("device") == "cpu":
        yield "the run was on a CPU, and the trace holds a GPU's work"
    if trace.world_size and run.world_size and trace.world_size != run.world_size:
        yield f"the trace is of {trace.world_size} ranks, the run of {run.world_size}"
    traced, own = time.step_ms, run.profiled_step_ms or 0.0
    if traced > 0 and own > 0 and max(traced / own, own / traced) > MAX_APART:
        yield f"a step takes {traced:,.1f} ms in the trace and {own:,.1f} ms by the run's own clock ({STEPS_FILE})"
    if None not in (time.rank, run.writing_rank) and time.rank != run.writing_rank:
        return  # one rank's wait for data is not another's
    # a wait that the host's clock does not know in the steps of the window; hidden waits contradict nothing
    waits = run.phases_ms.get(Phase.DATA.value, run.step_ms[:0])
    waits = waits[run.profiled] if len(waits) else waits
    waited = time.rows.get("data_wait", 0.0)
    if len(waits) and traced > 0 and waited - np.median(waits) > MAX_SHARE_APART * traced:
        yield (
            f"the trace has {waited:,.1f} ms per step of waiting for the loader, and {STEPS_FILE} "
            f"{np.median(waits):,.1f} ms in the same steps"
        )
