"""What speaks against the figures of a report: damaged files, missing rows, and sources that say different things.

Each is a sentence that lowers the confidence of all that is derived from the source in question.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.accelerators import GPU_OPERATORS
from megatron_lite.analysis.trace.columns import WHOLE_GRAPH, Kind, Trace
from megatron_lite.analysis.trace.launches import MAX_LOST, count_lost, describe_early, describe_launches, find_launches
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted, size

MAX_APART = 2.0  # trace's step / the run's own time of its profiled steps, or the other way round
MAX_SHARE_APART = 0.2  # of a step, by which a trace and the run's own clock may differ about waiting for data
# backends of torch.distributed that only send what lies on a device
DEVICE_BACKENDS = ("nccl", "rccl", "xccl", "hccl", "mccl", "cncl", "eccl")
DEVICE_SPAN = re.compile(f"({'|'.join(DEVICE_BACKENDS)}):")  # that torch writes around a collective
MAX_IN_GRAPHS = 0.2  # of a step, in graphs of which one does not know what they do
MAX_OVERLAP_APART = 0.05  # of a step, by which Ascend's own sums and the tasks of its device may differ
# rows of a step -> names on the track "Overlap Analysis" of Ascend's profiler
OVERLAP_ANALYSIS = {"compute": "Computing", "exposed_communication": "Communication(Not Overlapped)"}
MAX_UNSEEN = 0.1  # of the allocator's peak, which a snapshot of the peak must not lack


def find_contradictions(facts: Facts) -> list[str]:
    """About the trace of the critical rank; without one about the highest snapshot, whose record may be incomplete, or
    whose peak the run's own allocator exceeded."""
    one, run, snapshot = facts.critical, facts.run, facts.highest_snapshot
    told = [text for seen in facts.ranks_seen for text in (*seen.trace.damage, *seen.trace.unread)]
    if one is not None:
        told.append(_describe_hidden_communication(one, len(facts.ranks_seen)))
        return [text for text in (*told, *_check_trace(one, run)) if text]
    if snapshot is not None:
        told += [] if snapshot.complete else [_describe_unknown(snapshot)]
        most = run.peak_memory_bytes.max(initial=0, where=run.peak_memory_bytes > 0) if run else 0
        if not snapshot.simulated and snapshot.peak_bytes < (1 - MAX_UNSEEN) * most:
            told.append(f"the run's allocator peaked at {size(int(most))}, which the snapshot does not show")
    return told


def _describe_unknown(snapshot: Snapshot) -> str:
    """How much of the peak has no allocation in the record."""
    unknown = sum(held.num_bytes for held in snapshot.held if held.category == "before the record")
    share = f"{unknown / snapshot.peak_bytes:.0%}" if unknown and snapshot.peak_bytes else "more than 1%"
    return f"{share} of the peak's bytes have no allocation in the record"


def missing_gpu_work(one: RankFacts, run: Run | None) -> str:
    """Why a trace without device work is none of a CPU's job; '' where it is one, or has device work."""
    if one.time.on_gpu:
        return ""
    trace, planned = one.trace, run.plan.device if run else None
    name = trace.devices[0] if trace.devices else ""
    # what starts kernels tells more than what only copies
    launches = sorted(find_launches(trace), key=lambda found: found.work == "copy")
    if launches:
        said = f"the trace holds {describe_launches(launches[0])} and no kernel"
    elif trace.unread:
        said = trace.unread[0]
    elif planned == "cuda":
        said = "the run was on a GPU, and the trace holds none of its work"
    elif planned == "cpu":
        return ""
    elif name and not trace.without_gpu:
        said = f"the trace names a device ({name}) and holds none of its work"
    elif trace.facts.get("backend") in DEVICE_BACKENDS:
        said = f"the ranks communicate by {trace.facts['backend']}, between devices, and the trace holds no work of one"
    elif operator := _find_gpu_operator(trace):
        said = f"the trace holds {operator}, which only a GPU has, and no work of one"
    elif trace.damage and not trace.without_gpu:
        said = "the trace is cut off, names no device and holds no kernel"
    else:
        return ""
    return said + quote_diagnostics(trace)


def _find_gpu_operator(trace: Trace) -> str:
    """The most frequent operator, or communication of a backend, that only a GPU has; '' for none."""
    events = trace.events
    operators = trace.rows[Kind.OP]
    operators = operators[trace.passing(GPU_OPERATORS.match, Kind.OP)[events.name[operators]]]
    ranges = trace.rows[Kind.ANNOTATION]
    ranges = ranges[trace.passing(DEVICE_SPAN.match, Kind.ANNOTATION)[events.name[ranges]]]
    found = Counter(events.name[np.concatenate((operators, ranges))].tolist())
    return trace.names[found.most_common(1)[0][0]] if found else ""


def quote_diagnostics(trace: Trace) -> str:
    """'; nsys says: "..."' with the writer's own most severe message; '' where it has none."""
    who = "nsys" if trace.writer == "nsys" else "the profiler"
    return f'; {who} reports: "{trace.diagnostics[0]}"' if trace.diagnostics else ""


def missing_graph_work(one: RankFacts) -> str:
    """Why the idle time of a trace is not to be believed: CUDA graphs were launched, and their work is not in it; else
    ''."""
    trace = one.trace
    # kernels of a graph may have correlation ids of their own; then there are kernels without a launch
    loose = trace.device_rows[trace.launch_of[trace.device_rows] < 0]
    start = trace.events.start_ns[loose]
    steady = one.time.steady_steps
    inside = sum(int(((start >= step.start_ns) & (start < step.end_ns)).sum()) for step in steady)
    for launches in find_launches(trace, _steady_calls(one)):
        if launches.work != "graph":
            continue
        lost = count_lost(trace, launches)
        if lost > max(MAX_LOST * len(launches.rows), inside):
            return f"of {describe_launches(launches)} in the steady steps, {lost:,} have no work in the trace"
    return ""


def measure_whole_graphs(one: RankFacts) -> float:
    """Share of the step in which CUDA graphs run that were recorded as a whole."""
    return one.share(one.covered_ms(one.rows_named(WHOLE_GRAPH.match, Kind.KERNEL)))


def _describe_hidden_communication(one: RankFacts, ranks: int) -> str:
    """Why the busy time of one of several ranks may not be compute;
    '' where graphs recorded as a whole take little of it."""
    several = ranks > 1 or (one.trace.world_size or 1) > 1 or one.time.communication_ms > 0
    if not several or measure_whole_graphs(one) < MAX_IN_GRAPHS:
        return ""
    return "the kernels of CUDA graphs were not recorded, so that communication in them counts as compute"


def weakened(findings: Sequence[Finding], facts: Facts) -> tuple[Finding, ...]:
    """Findings that rest on a doubtful trace or snapshot are likely at most; those of the run's own records stay.

    Where the device's work is missing, what only the host's time tells costs nothing that is known, and is left out.
    """
    one = facts.critical
    if one is not None and missing_gpu_work(one, facts.run):
        findings = [found for found in findings if found.cost_ms is None or rests_on_run_only(found.evidence)]
    if not find_contradictions(facts):
        return tuple(findings)
    return tuple(found if rests_on_run_only(found.evidence) else replace(found, certain=False) for found in findings)


def limit_certainty(findings: Sequence[Finding], confidence: str) -> tuple[Finding, ...]:
    """No finding is more certain than the verdict of its report:
    all are likely at most where the verdict has low confidence."""
    if confidence != "low":
        return tuple(findings)
    return tuple(replace(one, certain=False) for one in findings)


def rests_on_run_only(evidence: Sequence[Evidence]) -> bool:
    """Does all of it come from the run's own records?"""
    return all(piece.where.endswith((RUN_FILE, STEPS_FILE)) for piece in evidence)


def _steady_calls(one: RankFacts) -> Integers:
    """Calls of the steady steps."""
    calls = one.trace.rows[Kind.RUNTIME]
    steady: Integers = calls[one.placing.counts[calls]]
    return steady


def _count_lost_kernels(one: RankFacts) -> tuple[int, int]:
    """(launches of kernels in the steady steps that have no kernel, all launches of kernels)"""
    lost, made = 0, 0
    for launches in find_launches(one.trace, _steady_calls(one)):
        if launches.work == "kernel":
            lost += count_lost(one.trace, launches)
            made += len(launches.rows)
    return lost, made


def _check_overlap_analysis(one: RankFacts) -> Iterator[str]:
    """Ascend's profiler writes its own sums beside the tasks that they are made of."""
    trace, time = one.trace, one.time
    if len(np.unique(trace.events.device[trace.device_rows])) > 1:
        return
    steady = [(step.start_ns, step.end_ns) for step in time.steady_steps]
    if not steady:
        return
    others = trace.rows[Kind.OTHER]
    for row, name in OVERLAP_ANALYSIS.items():
        rows = others[trace.passing(name.__eq__, Kind.OTHER)[trace.events.name[others]]]
        cover = trace.cover(rows)
        ms = sum(int(cover.within(np.array([start]), np.array([end]))[0]) for start, end in steady) / 1e6 / len(steady)
        read = time.rows.get(row, 0.0)
        if len(rows) and abs(ms - read) > MAX_OVERLAP_APART * time.step_ms:
            yield f"the file's own Overlap Analysis has {ms:,.1f} ms of {name} per step, its tasks {read:,.1f} ms"


def _check_trace(one: RankFacts, run: Run | None) -> Iterator[str]:
    trace, time = one.trace, one.time
    yield missing_gpu_work(one, run)
    if time.on_gpu:
        yield missing_graph_work(one)
        lost, made = _count_lost_kernels(one)
        if lost > MAX_LOST * made:
            yield f"{lost / made:.0%} of the steady steps' kernel launches have no kernel in the trace"
        yield describe_early(trace, trace.device_rows[one.placing.counts[trace.device_rows]])
        yield from _check_overlap_analysis(one)
    if run is None:
        return
    if time.on_gpu and run.plan.device == "cpu":
        yield "the run was on a CPU, and the trace holds a GPU's work"
    if trace.world_size and run.world_size and trace.world_size != run.world_size:
        yield f"the trace is of {counted(trace.world_size, 'rank')}, the run of {run.world_size}"
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
            f"the trace has {waited:,.1f} ms per step of waiting for the data loader, and {STEPS_FILE} "
            f"{np.median(waits):,.1f} ms in the same steps"
        )
