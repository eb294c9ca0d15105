"""Perfetto's own trace processor reads what `report --perfetto` writes, and its sums are the report's."""

from pathlib import Path

import numpy as np
import pytest
from support.paths import TRACES
from support.trace_maker import cpu_run
from support.trace_processor import explain_no_processor, query

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.ranks.ranks import align_ranks
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.analysis.timeline.build import build_timeline
from megatron_lite.analysis.timeline.rank_tracks import KIND_NAMES
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.report.perfetto_file import write_perfetto

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(explain_no_processor()), reason=explain_no_processor() or "there is one"),
]
PLACED = """
    with placed as (
        select s.*, p.name as process, t.name as track
        from slice s join process_track t on s.track_id = t.id join process p using (upid)
        union all
        select s.*, p.name as process, th.name as track
        from slice s join thread_track t on s.track_id = t.id join thread th using (utid) join process p using (upid)
    )
"""
KINDS = ", ".join(f"'{name}'" for name in KIND_NAMES)
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
EVENTS = f"{PLACED} select process, count(*) from placed where category in ({KINDS}) group by process"
KERNELS = f"{PLACED} select process, sum(dur) from placed where category = 'kernel' group by process"
STEPS = f"""{PLACED} select process, sum(dur), sum(iif(extract_arg(arg_set_id, 'debug.counts') = 'yes', dur, 0))
    from placed where category = 'step' group by process"""
PHASES = f"{PLACED} select process, sum(dur) from placed where category = 'phase' group by process"
ROWS = f"{PLACED} select process, name, sum(dur) from placed where category = 'row' group by process, name"
BEGINS = f"""{PLACED} select process, extract_arg(arg_set_id, 'debug.collective') as collective, ts
    from placed where category = 'collective' and collective is not null"""
FINDINGS = """select extract_arg(arg_set_id, 'debug.code'), name, extract_arg(arg_set_id, 'debug.remedy')
    from slice where category = 'finding'"""
COUNTERS = "select t.name, count(*) from counter c join process_counter_track t on c.track_id = t.id group by t.name"
FLOWS = "select count(*) from flow"
METADATA = "select name, str_value from metadata where name glob 'cr-clock of*'"
QUERIES = (ERRORS, EVENTS, KERNELS, STEPS, PHASES, ROWS, BEGINS, FINDINGS, COUNTERS, FLOWS, METADATA)


@pytest.fixture(params=["dlrm", "made"])
def folder(request, tmp_path) -> Path:
    """Eight ranks of a real job on GPUs, and two made ones on CPUs with memory."""
    if request.param == "dlrm":
        return TRACES / "v100_dlrm_8ranks"
    for rank in range(2):
        made = cpu_run(rank=rank, gloo_us=300 - 50 * rank)
        made.memory(500, 64, 1024)
        made.write(tmp_path / "traces")
    return tmp_path / "traces"


def test_sums_are_the_reports(folder, tmp_path):
    report = analyze([folder])
    path = tmp_path / "run.pftrace.gz"
    write_perfetto("--perfetto", path, build_timeline(report))
    answers = dict(zip(QUERIES, query(path, *QUERIES), strict=True))
    assert answers[ERRORS] == []
    ranks = {f"rank {one.time.rank}": one for one in report.facts.ranks_seen}
    assert {process: count for process, count in answers[EVENTS]} == {
        process: len(one.trace.events) for process, one in ranks.items()
    }
    kernels = {process: one.trace.lengths_ns(one.trace.rows[Kind.KERNEL]).sum() for process, one in ranks.items()}
    assert dict(answers[KERNELS]) == {process: ns for process, ns in kernels.items() if ns}
    _check_steps(answers, ranks)
    _check_collectives(answers[BEGINS], report)
    told = {(code, name.partition("] ")[2], remedy) for code, name, remedy in answers[FINDINGS] if code}
    assert told == {(finding.code, finding.title, finding.advice) for finding in report.findings} != set()
    assert len(answers[METADATA]) == len(ranks)
    memory = sum(len(np.unique(one.trace.memory.device)) for one in ranks.values())
    assert bool(answers[COUNTERS]) == bool(memory)
    [[flows]] = answers[FLOWS]
    assert flows >= len(answers[BEGINS]) / 2


def _check_steps(answers, ranks):
    phases = dict(answers[PHASES])
    of_rows = {}
    for process, name, ns in answers[ROWS]:
        of_rows.setdefault(process, {})[name] = ns
    for process, all_ns, steady_ns in answers[STEPS]:
        time = ranks[process].time
        steady = len(time.steady_steps)
        assert steady_ns == pytest.approx(time.step_ms * steady * 1e6, abs=1)
        assert sum(of_rows[process].values()) == steady_ns
        expected = {ROW_TITLES[row]: ms * steady * 1e6 for row, ms in time.rows.items() if ms}
        assert of_rows[process] == pytest.approx(expected, abs=1)
        host_ns = sum(step.host_end_ns - step.host_start_ns for step in time.steps)
        assert phases[process] == (host_ns if time.on_gpu else all_ns)


def _check_collectives(began, report):
    """Of one collective, the ranks begin as far apart as the comparison of ranks has it."""
    aligned = align_ranks(report.facts.ranks_seen)
    found = {}
    for process, collective, ts in began:
        found.setdefault(collective, {})[process] = ts
    number = 0
    for group in aligned.groups:
        for row in group.call:
            starts = {}
            for at, call in zip(group.members.tolist(), row.tolist()):
                calls = aligned.window.calls[at]
                starts[f"rank {calls.rank}"] = int(calls.start_ns[call]) + aligned.clocks.start_ns[at]
            apart = {process: ns - min(starts.values()) for process, ns in starts.items()}
            seen = [one for one in found.values() if {key: ts - min(one.values()) for key, ts in one.items()} == apart]
            assert seen
            number += 1
    assert number == len(found) > 0
