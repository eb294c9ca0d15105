"""What speaks against the figures of a report: damaged files, missing rows, and sources that say different things.

Each is a sentence that lowers the confidence of all that is derived from the source in question.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
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
    """About the trace of the critical rank and the highest snapshot."""
    one, run = facts.critical, facts.run
    told = [text for seen in facts.ranks_seen for text in seen.trace.damage]
    told += _of_trace(one, run) if one is not None else []
    if facts.highest_snapshot is not None and one is None:
        told += _of_snapshot(facts.highest_snapshot, run)
    return [text for text in told if text]


def missing_gpu_work(one: RankFacts, run: Run | None) -> str:
    """Why a trace without kernels is none of a CPU's job; '' where it is one, or has kernels."""
    trace, planned = one.trace, run.plan.get("device") if run else None
    if one.time.on_gpu:
        return ""
    launches = int(np.isin(trace.events.name[trace.rows[Kind.RUNTIME]], _launch_names(one)).sum())
    name = trace.devices[0] if trace.devices else ""
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


def rests_on_run_only(evidence: Sequence[Evidence]) -> bool:
    """Does all of it come from the run's own records?"""
    return all(piece.where.endswith((RUN_FILE, STEPS_FILE)) for piece in evidence)


def _of_snapshot(one: Snapshot, run: Run | None) -> list[str]:
    """An incomplete record, or a peak that the run's own allocator exceeded."""
    told = [] if one.complete else ["the record dropped older events"]
    peaks = [peak for peak in run.peak_memory_bytes if not math.isnan(peak)] if run else []
    if peaks and not one.simulated and one.peak_bytes < (1 - MAX_UNSEEN) * max(peaks):
        told.append(f"the run's allocator peaked at {size(int(max(peaks)))}, which the snapshot does not show")
    return told


def _of_trace(one: RankFacts, run: Run | None) -> list[str]:
    told = [missing_gpu_work(one, run), _lost_kernels(one)]
    if run is None:
        return told
    if one.time.on_gpu and run.plan.get("device") == "cpu":
        told.append("the run was on a CPU, and the trace holds a GPU's work")
    if one.trace.world_size and run.world_size and one.trace.world_size != run.world_size:
        told.append(f"the trace is of {one.trace.world_size} ranks, the run of {run.world_size}")
    return [*told, _other_step_time(one, run), _other_wait_for_data(one, run)]


def _lost_kernels(one: RankFacts) -> str:
    trace, events = one.trace, one.trace.events
    steady = np.array([step.steady for step in one.time.steps] + [False])
    calls = trace.rows[Kind.RUNTIME]
    calls = calls[np.isin(events.name[calls], _launch_names(one)) & (events.correlation[calls] >= 0)]
    calls = calls[steady[one.placing.step[calls]]] if len(calls) else calls
    lost = int((~np.isin(events.correlation[calls], events.correlation[trace.device_rows])).sum())
    if not len(trace.device_rows) or lost <= MAX_LOST * len(calls):
        return ""
    return f"{lost / len(calls):.0%} of the steady steps' kernel launches have no kernel in the trace"


def _launch_names(one: RankFacts) -> np.ndarray:
    return np.flatnonzero(one.trace.passing(LAUNCH.match, Kind.RUNTIME))


def _other_step_time(one: RankFacts, run: Run) -> str:
    traced, own = one.time.step_ms, run.profiled_step_ms or 0.0
    if not (traced > 0 and own > 0) or max(traced / own, own / traced) <= MAX_APART:
        return ""
    return f"a step takes {traced:,.1f} ms in the trace and {own:,.1f} ms by the run's own clock ({STEPS_FILE})"


def _other_wait_for_data(one: RankFacts, run: Run) -> str:
    """A trace's wait that the host's clock does not know in the steps of the window; hidden waits contradict nothing."""
    waits = [ms for ms, profiled in zip(run.phases_ms.get(Phase.DATA.value, ()), run.profiled) if profiled]
    traced = one.time.rows.get("data_wait", 0.0)
    if not waits or not one.time.step_ms > 0 or traced - median(waits) <= MAX_SHARE_APART * one.time.step_ms:
        return ""
    return (
        f"the trace has {traced:,.1f} ms per step of waiting for the loader, and {STEPS_FILE} "
        f"{median(waits):,.1f} ms in the same steps"
    )
