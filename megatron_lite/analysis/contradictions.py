"""Contradictions of a report's figures: damaged files, missing rows, and sources that say different things.

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
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.accelerators import GPU_OPERATORS
from megatron_lite.analysis.trace.columns import WHOLE_GRAPH, Kind, Trace
from megatron_lite.analysis.trace.launches import MAX_LOST, count_lost, describe_early, describe_launches, find_launches
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted, size

MAX_STEP_RATIO = 2.0  # trace's step / the run's own time of its profiled steps, or the other way round
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
    """Find what speaks against the trace of the critical rank; without one, against the highest snapshot.

    Its record may be incomplete, and the run's own allocator may have exceeded its peak.
    """
    told: list[str] = []
    for seen in facts.ranks_seen:
        told += seen.trace.damage
        told += seen.trace.unread
    one = facts.critical
    if one is not None:
        told.append(_describe_hidden_communication(one, len(facts.ranks_seen)))
        told += _check_trace(one, facts.run)
        return [text for text in told if text]
    snapshot = facts.highest_snapshot
    if snapshot is None:
        return told
    if not snapshot.complete:
        told.append(_describe_unknown(snapshot))
    most_bytes = facts.run.counted_peak_bytes if facts.run else 0.0
    if not snapshot.simulated and snapshot.peak_bytes < (1 - MAX_UNSEEN) * most_bytes:
        told.append(f"the run's allocator peaked at {size(int(most_bytes))}, which the snapshot does not show")
    return told


def _describe_unknown(snapshot: Snapshot) -> str:
    """Write how much of the peak has no allocation in the record."""
    unknown = sum(held.num_bytes for held in snapshot.held if held.category == "before the record")
    share = "more than 1%"
    if unknown and snapshot.peak_bytes:
        share = f"{unknown / snapshot.peak_bytes:.0%}"
    return f"{share} of the peak's bytes have no allocation in the record"


def missing_gpu_work(one: RankFacts, run: Run | None) -> str:
    """Explain why a trace without device work is none of a CPU's job; '' where it is one, or has device work."""
    if one.time.on_gpu:
        return ""
    said = _describe_missing_work(one.trace, run)
    return said + quote_diagnostics(one.trace) if said else ""


def _describe_missing_work(trace: Trace, run: Run | None) -> str:
    """Write by what a trace without device work shows that there was some; '' where nothing shows it."""
    # what starts kernels tells more than what only copies
    launches = sorted(find_launches(trace), key=lambda found: found.work == "copy")
    if launches:
        return f"the trace holds {describe_launches(launches[0])} and no kernel"
    if trace.unread:
        return trace.unread[0]
    planned = run.plan.device if run else None
    if planned == "cuda":
        return "the run was on a GPU, and the trace holds none of its work"
    if planned == "cpu":
        return ""
    name = trace.devices[0] if trace.devices else ""
    if name and not trace.without_gpu:
        return f"the trace names a device ({name}) and holds none of its work"
    backend = trace.facts.get("backend")
    if backend in DEVICE_BACKENDS:
        return f"the ranks communicate by {backend}, between devices, and the trace holds no work of one"
    operator = _find_gpu_operator(trace)
    if operator:
        return f"the trace holds {operator}, which only a GPU has, and no work of one"
    if trace.damage and not trace.without_gpu:
        return "the trace is cut off, names no device and holds no kernel"
    return ""


def _find_gpu_operator(trace: Trace) -> str:
    """Name the most frequent operator, or communication of a backend, that only a GPU has; '' for none."""
    operators = trace.find_named(GPU_OPERATORS.match, Kind.OP)
    ranges = trace.find_named(DEVICE_SPAN.match, Kind.ANNOTATION)
    rows = np.concatenate((operators, ranges))
    if not len(rows):
        return ""
    numbers = Counter(trace.events.name[rows].tolist())
    [(most_frequent, _)] = numbers.most_common(1)
    return trace.names[most_frequent]


def quote_diagnostics(trace: Trace) -> str:
    """Quote the writer's own most severe message: '; nsys reports: "..."'; '' where it has none."""
    if not trace.diagnostics:
        return ""
    who = "nsys" if trace.writer == "nsys" else "the profiler"
    return f'; {who} reports: "{trace.diagnostics[0]}"'


def missing_graph_work(one: RankFacts) -> str:
    """Explain why the idle time of a trace is not to be believed; '' where it is.

    CUDA graphs were launched, and their work is not in the trace.
    """
    trace = one.trace
    # kernels of a graph may have correlation ids of their own; then there are kernels without a launch
    rows = trace.device_rows
    is_loose = trace.launch_of[rows] < 0
    start_ns = trace.events.start_ns[rows[is_loose]]
    loose = 0
    for step in one.time.steady_steps:
        in_step = (start_ns >= step.start_ns) & (start_ns < step.end_ns)
        loose += int(in_step.sum())
    for launches in find_launches(trace, _steady_calls(one)):
        if launches.work != "graph":
            continue
        lost = count_lost(trace, launches)
        if lost > max(MAX_LOST * len(launches.rows), loose):
            return f"of {describe_launches(launches)} in the steady steps, {lost:,} have no work in the trace"
    return ""


def measure_whole_graphs(one: RankFacts) -> float:
    """Measure the share of the step in which CUDA graphs run that were recorded as a whole."""
    graphs = one.rows_named(WHOLE_GRAPH.match, Kind.KERNEL)
    return one.share(one.covered_ms(graphs))


def _describe_hidden_communication(one: RankFacts, ranks: int) -> str:
    """Write why the busy time of one of several ranks may not be compute.

    '' where graphs that were recorded as a whole take little of it.
    """
    world_size = one.trace.world_size or 1
    is_one_of_several = ranks > 1 or world_size > 1 or one.time.communication_ms > 0
    if not is_one_of_several or measure_whole_graphs(one) < MAX_IN_GRAPHS:
        return ""
    return "the kernels of CUDA graphs were not recorded, so that communication in them counts as compute"


def weakened(findings: Sequence[Finding], facts: Facts) -> tuple[Finding, ...]:
    """Make findings that rest on a doubtful trace or snapshot likely at most; those of the run's own records stay.

    Where the device's work is missing, what only the host's time tells costs nothing that is known, and is left out.
    """
    one = facts.critical
    if one is not None and missing_gpu_work(one, facts.run):
        findings = [found for found in findings if found.cost_ms is None or rests_on_run_only(found.evidence)]
    if not find_contradictions(facts):
        return tuple(findings)
    doubted = []
    for found in findings:
        is_sure = rests_on_run_only(found.evidence)
        doubted.append(found if is_sure else replace(found, certain=False))
    return tuple(doubted)


def limit_certainty(findings: Sequence[Finding], confidence: str) -> tuple[Finding, ...]:
    """Make findings no more certain than the verdict of their report: likely at most where it has low confidence."""
    if confidence != "low":
        return tuple(findings)
    return tuple(replace(one, certain=False) for one in findings)


def rests_on_run_only(evidence: Sequence[Evidence]) -> bool:
    """Tell whether all evidence comes from the run's own records."""
    return all(str(piece.where).endswith((RUN_FILE, STEPS_FILE)) for piece in evidence)


def _steady_calls(one: RankFacts) -> Integers:
    """Find the calls of the steady steps."""
    calls = one.trace.rows[Kind.RUNTIME]
    steady: Integers = calls[one.placing.counts[calls]]
    return steady


def _count_lost_kernels(one: RankFacts) -> tuple[int, int]:
    """Count launches of kernels in the steady steps: those that have no kernel, and all."""
    lost = 0
    made = 0
    for launches in find_launches(one.trace, _steady_calls(one)):
        if launches.work == "kernel":
            lost += count_lost(one.trace, launches)
            made += len(launches.rows)
    return lost, made


def _check_overlap_analysis(one: RankFacts) -> Iterator[str]:
    """Check the sums that Ascend's profiler writes beside the tasks that they are made of."""
    trace = one.trace
    time = one.time
    devices = np.unique(trace.events.device[trace.device_rows])
    if len(devices) > 1 or not time.steady_steps:
        return
    starts_ns = np.array([step.start_ns for step in time.steady_steps], np.int64)
    ends_ns = np.array([step.end_ns for step in time.steady_steps], np.int64)
    for row, name in OVERLAP_ANALYSIS.items():
        rows = trace.find_named(name.__eq__, Kind.OTHER)
        if not len(rows):
            continue
        covered_ns = int(trace.cover(rows).within(starts_ns, ends_ns).sum())
        ms = covered_ns / 1e6 / len(starts_ns)
        read_ms = time.rows.get(row, 0.0)
        if abs(ms - read_ms) > MAX_OVERLAP_APART * time.step_ms:
            yield f"the file's own Overlap Analysis has {ms:,.1f} ms of {name} per step, its tasks {read_ms:,.1f} ms"


def _check_trace(one: RankFacts, run: Run | None) -> Iterator[str]:
    """Check a trace by itself and against the run's own records; '' among the sentences says nothing."""
    trace = one.trace
    yield missing_gpu_work(one, run)
    if one.time.on_gpu:
        yield missing_graph_work(one)
        lost, made = _count_lost_kernels(one)
        if lost > MAX_LOST * made:
            yield f"{lost / made:.0%} of the steady steps' kernel launches have no kernel in the trace"
        yield describe_early(trace, one.in_steady_steps(trace.device_rows))
        yield from _check_overlap_analysis(one)
    if run is not None:
        yield from _check_against_run(one, run)


def _check_against_run(one: RankFacts, run: Run) -> Iterator[str]:
    """Check a trace against the run's own records."""
    world_size = one.trace.world_size
    time = one.time
    if time.on_gpu and run.plan.device == "cpu":
        yield "the run was on a CPU, and the trace holds a GPU's work"
    if world_size and run.world_size and world_size != run.world_size:
        yield f"the trace is of {counted(world_size, 'rank')}, the run of {run.world_size}"
    traced_ms = time.step_ms
    own_ms = run.profiled_step_ms or 0.0
    if traced_ms > 0 and own_ms > 0:
        ratio = max(traced_ms / own_ms, own_ms / traced_ms)
        if ratio > MAX_STEP_RATIO:
            own = f"{own_ms:,.1f} ms by the run's own clock ({STEPS_FILE})"
            yield f"a step takes {traced_ms:,.1f} ms in the trace and {own}"
    # one rank's wait for data is not another's
    is_same_rank = time.rank is None or run.writing_rank is None or time.rank == run.writing_rank
    if traced_ms > 0 and is_same_rank:
        yield _compare_data_waits(time, run)


def _compare_data_waits(time: RankTime, run: Run) -> str:
    """Write that a trace has a wait for data that the host's clock does not know in the steps of the window.

    '' where the two agree: hidden waits contradict nothing.
    """
    waits_ms = run.phases_ms.get(Phase.DATA.value)
    if waits_ms is None or not len(waits_ms) or not run.profiled.any():
        return ""
    own_ms = float(np.median(waits_ms[run.profiled]))
    waited_ms = time.rows.get("data_wait", 0.0)
    if not waited_ms - own_ms > MAX_SHARE_APART * time.step_ms:
        return ""
    return (
        f"the trace has {waited_ms:,.1f} ms per step of waiting for the data loader, and {STEPS_FILE} "
        f"{own_ms:,.1f} ms in the same steps"
    )
