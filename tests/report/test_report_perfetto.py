"""report --perfetto: one trace of all ranks, whose figures are the report's."""

import dataclasses
import itertools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.perfetto_reader import read_perfetto
from support.report_cases import snapshot
from support.trace_maker import GLOO, MadeTrace, cpu_run, gpu_run

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.analysis.timeline.build import build_timeline
from megatron_lite.analysis.timeline.rank_tracks import KIND_NAMES
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.cli.main import main
from megatron_lite.report.perfetto_file import write_perfetto

NAME = "run.pftrace"


def convert(folder: Path):
    report = analyze([folder])
    path = folder.parent / NAME
    assert write_perfetto("--perfetto", path, build_timeline(report)) == path.stat().st_size
    return report, read_perfetto(path)


def late_gpu_run(rank: int) -> MadeTrace:
    """Two ranks on one clock, the second of which comes 100 us later to each all_reduce; memory and overlapping ranges."""
    made = gpu_run(steps=5, rank=rank, world_size=2, all_reduce_us=300 - 100 * rank, gpu_lag_us=50 + 100 * rank)
    for index in range(5):
        made.memory(1000 * index + 100, 512, (index + 1) * 2**20, 2**24)
    return made


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "traces"
    for rank in range(2):
        late_gpu_run(rank).write(folder)
    return convert(folder)


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu") / "traces"
    for rank in range(2):
        made = cpu_run(steps=5, rank=rank, gloo_us=300 - 50 * rank)
        made.gloo(600, 1200)  # beside another one, and longer
        made.write(folder)
    return convert(folder)


@pytest.fixture(params=["gpu", "cpu"])
def both(request):
    return request.getfixturevalue(request.param)


def test_every_event_of_a_rank_is_a_slice(both):
    report, read = both
    for one in report.facts.ranks_seen:
        process = f"rank {one.time.rank}"
        assert read.metadata[f"events of {process}"] == str(len(one.trace.events))
        kinds = Counter(KIND_NAMES[kind] for kind in one.trace.events.kind.tolist())
        assert Counter(one.category for one in read.having(process=process) if one.category in KIND_NAMES) == kinds


def test_kernels_take_as_long_as_in_the_report(gpu):
    report, read = gpu
    for one in report.facts.ranks_seen:
        kernels = read.having(process=f"rank {one.time.rank}", category="kernel")
        assert sum(kernel.ns for kernel in kernels) == one.trace.lengths_ns(one.trace.rows[Kind.KERNEL]).sum()
        assert {kernel.track.name for kernel in kernels} == {"GPU 0 stream 7", "GPU 0 stream 20"}
        assert {kernel.arguments["phase"] for kernel in kernels} == {"forward", "backward", "optimizer_step"}


def test_rows_and_phases_tile_the_steps(both):
    report, read = both
    for one in report.facts.ranks_seen:
        process = f"rank {one.time.rank}"
        steps = read.on(process, "steps")
        assert [step.name for step in steps] == [step.name for step in one.time.steps]
        counted = [step for step in steps if step.arguments["counts"] == "yes"]
        assert len(counted) == len(one.time.steady_steps)
        of_row = defaultdict(int)
        for row in read.on(process, "where the steps go"):
            of_row[row.name] += row.ns
        expected = {ROW_TITLES[row]: ms * len(counted) * 1e6 for row, ms in one.time.rows.items() if ms}
        assert dict(of_row) == pytest.approx(expected, abs=1)
        assert sum(of_row.values()) == sum(step.ns for step in counted)
        phases = read.on(process, "phases on the host")
        assert all(before.end <= after.start for before, after in itertools.pairwise(phases))
        host_ns = sum(step.host_end_ns - step.host_start_ns for step in one.time.steps)
        if not one.time.on_gpu:
            host_ns = sum(step.ns for step in steps)
        assert sum(phase.ns for phase in phases) == host_ns
        assert {"data", "forward", "backward", "optimizer_step"} <= {phase.name for phase in phases}


def test_collectives_begin_apart_as_the_report_says(both):
    report, read = both
    began = defaultdict(dict)
    for one in read.having(category="collective"):
        began[one.arguments["collective"]][one.process] = one
    assert len(began) == (5 if report.facts.critical.time.on_gpu else 6)
    for of_ranks in began.values():
        first, second = of_ranks["rank 0"], of_ranks["rank 1"]
        earliest = min(first.start, second.start)
        for one in (first, second):
            assert one.start - earliest == one.arguments["begins_ns_after_first_rank"]
        assert first.flows == second.flows != ()
    rows = {row.rank: row for row in report.facts.ranks.rows}
    if report.facts.critical.time.on_gpu:
        assert rows[0].wait_ms == pytest.approx(0.1)
        assert {of["rank 1"].start - of["rank 0"].start for of in began.values()} == {100_000}


def test_arrows_lead_from_launches_to_kernels(gpu):
    report, read = gpu
    for one in report.facts.ranks_seen:
        own = read.having(process=f"rank {one.time.rank}")
        calls = {slice.flows: slice for slice in own if slice.category == "runtime" and slice.flows}
        work = [slice for slice in own if slice.category in ("kernel", "memcpy", "memset")]
        assert len(work) == len(calls) > 0
        for kernel in work:
            assert calls[kernel.flows].start < kernel.start


def test_findings_stand_where_their_evidence_does(gpu):
    report, read = gpu
    assert report.findings
    marked = {one.arguments["code"]: one for one in read.having(category="finding") if "code" in one.arguments}
    assert set(marked) == {finding.code for finding in report.findings}
    for finding in report.findings:
        told = marked[finding.code].arguments
        assert told["remedy"] == finding.advice
        assert told["confidence"] == ("certain" if finding.certain else "likely")
        if finding.gain_ms is not None:
            name = "gain_at_most_us_per_step" if finding.gain_is_bound else "gain_us_per_step"
            assert told[name] == pytest.approx(1000 * finding.gain_ms, abs=1)
        assert told["verdict"] == report.verdict.headline
    instants = read.having(category="evidence")
    rows = [getattr(evidence.where, "row", None) for finding in report.findings for evidence in finding.evidence]
    assert len(instants) == sum(row is not None for row in rows)
    for one in instants:
        around = [other for other in read.slices if other.track is one.track and other.start == one.start]
        assert any(other.category in KIND_NAMES for other in around)
    [verdict] = [one for one in read.on("run", "verdict and findings") if one.name == report.verdict.headline]
    assert verdict.arguments["confidence"] == report.verdict.confidence


def test_memory_is_counted(gpu):
    _, read = gpu
    for rank in ("rank 0", "rank 1"):
        values = [value for _, value in read.counters[rank, "memory allocated on GPU 0"]]
        assert values == [2**20 * (index + 1) for index in range(5)]
        assert {value for _, value in read.counters[rank, "memory reserved on GPU 0"]} == {2**24}


def test_what_overlaps_stands_beside_each_other(cpu):
    _, read = cpu
    for rank in ("rank 0", "rank 1"):
        gloo = [one for one in read.having(process=rank) if one.name == "gloo:all_reduce"]
        assert len(gloo) == 6 and len({id(one.track) for one in gloo}) == 2
        assert {one.depth for one in gloo} == {0}
        assert {one.track.thread for one in gloo} == {(read.processes[rank], GLOO), None}
        assert all("gloo" in one.track.name for one in gloo)


def test_threads_have_names(gpu):
    _, read = gpu
    named = {track.name for track in read.tracks.values() if track.thread}
    assert named == {"main thread", "autograd"}
    assert len(set(read.processes.values())) == 3, "made traces have the same number of a process"


def test_counters_of_steps_are_those_of_the_record(tmp_path):
    folder = tmp_path / "run"
    cpu_run(steps=3, world_size=1).write(folder)
    shape = {"seq_length": 128}
    (folder / "run.json").write_text(json.dumps({"schema": 1, "plan": {"shape": shape}}))
    lines = [
        {
            "kind": "step",
            "iteration": 9 + at,
            "step": 1 + at,
            "ms": 2.0,
            "phases_ms": {},
            "loss": 5.0 - at,
            "batch_size": 4,
        }
        for at in range(5)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, read = convert(folder)
    steps = read.on("rank 0", "steps")
    assert read.counters["run", "loss"] == [(step.start, 4.0 - at) for at, step in enumerate(steps)]
    assert {value for _, value in read.counters["run", "tokens per second"]} == {128 * 4 / 0.002}


def test_a_snapshot_stands_beside_the_step_that_it_shares(tmp_path):
    cpu_run(steps=2, first=1, world_size=1, step_us=50_000).write(tmp_path)
    report = analyze([tmp_path])
    taken = snapshot()
    facts = dataclasses.replace(report.facts, snapshots=(taken,))
    path = tmp_path / NAME
    write_perfetto("--perfetto", path, build_timeline(dataclasses.replace(report, facts=facts)))
    read = read_perfetto(path)
    first, last = read.on("rank 0", "steps")
    inside = [point for point in taken.curve if 50 <= point.time_us / 1000 <= 50 + (last.end - first.start) / 1e6]
    for word in ("allocated", "reserved"):
        [found] = [values for (_, name), values in read.counters.items() if word in name]
        assert [value for _, value in found] == [getattr(point, word) for point in inside] != []
        assert [time - first.start for time, _ in found] == [point.time_us * 1000 - 50_000_000 for point in inside]


def test_the_clock_of_a_gpu_is_counted(tmp_path):
    made = gpu_run(steps=4)
    made.header = {"megatron_lite_hardware": {"samples": 3, "sm_clock_mhz": 1755.0}}
    made.write(tmp_path / "traces")
    report, read = convert(tmp_path / "traces")
    steps = report.facts.critical.time.steps
    [values] = [values for (_, name), values in read.counters.items() if "clock" in name]
    assert values == [(steps[0].start_ns, 1755.0), (steps[-1].end_ns, 1755.0)]


def test_the_host_in_the_loader_stands_on_a_track(gpu):
    """It waits 39 us for each batch."""
    _, read = gpu
    for rank in ("rank 0", "rank 1"):
        assert [wait.ns for wait in read.having(process=rank, category="loader")] == [39_000] * 5


def test_workers_of_the_loader_stand_on_a_track(tmp_path):
    """Each step the host waits 300 us for a batch, and gets one every 1,000 us."""
    made = gpu_run(steps=5, data_us=400.0)
    for index in range(5):
        made.annotation(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 1000 * index + 50, 1000 * index + 350
        )
    made.write(tmp_path / "traces")
    _, read = convert(tmp_path / "traces")
    batches = read.having(process="rank 0", category="loader worker")
    assert [batch.ns for batch in batches] == [1_000_000] * 4
    assert {batch.end % 1_000_000 for batch in batches} == {batches[0].start % 1_000_000}


def test_the_critical_path_is_the_graphs(both):
    _, read = both
    path = read.on("run", "critical path")
    steps, step_ms = re.match(r"(\d+) steps of ([\d.]+) ms", read.metadata["critical path"]).groups()
    assert sum(one.ns for one in path) == pytest.approx(int(steps) * float(step_ms) * 1e6, rel=0.001)
    known_ms = re.search(r"([\d.,]+) ms$", read.metadata["critical path"])[1]
    assert sum(one.ns for one in path) / 1e6 == pytest.approx(float(known_ms), abs=0.001)
    assert all(before.end == after.start for before, after in itertools.pairwise(path))


def test_clocks_say_how_they_were_aligned(tmp_path):
    """Rank 1's clock is 40 ms ahead on another host; the same traces without a clock; one that no other is beside."""
    said = []
    for bases in ((0, 40_000_000), (None, None), (0,)):
        folder = tmp_path / str(len(said)) / "traces"
        for rank, base in enumerate(bases):
            made = gpu_run(steps=5, rank=rank, world_size=2, all_reduce_us=300)
            made.header = {"host_name": f"node{rank}", "baseTimeNanoseconds": "none" if base is None else 10**18 + base}
            made.write(folder)
        report = analyze([folder])
        timeline = build_timeline(report)
        said.append(timeline.clocks)
        if base is not None and len(bases) == 2:
            assert timeline.unix_ns is not None
    apart = said[0]
    assert [clock.name for clock in apart] == ["rank 0 on node0", "rank 1 on node1"]
    moved = [clock.moved_ns for clock in apart]
    assert moved[1] - moved[0] == -40_000_000 and {clock.collectives for clock in apart} == {5}
    for clocks in said[:2]:
        assert np.allclose([clock.off_ns for clock in clocks], 0) and len({clock.start_ns for clock in clocks}) == 1
    assert {clock.source.name for clock in apart} <= {"OWN", "CORRECTED"}
    assert {clock.source.name for clock in said[1]} == {"COLLECTIVES"}
    assert [clock.source.name for clock in said[2]] == ["ALONE"] and np.isnan(said[2][0].off_ns)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu_run(steps=4).write(tmp_path / "traces")
    assert main(["report", "traces", "--no-html", "--perfetto", NAME]) == 0
    assert f"{NAME} (" in capsys.readouterr().out
    assert main(["report", "traces", "--no-html", "--perfetto", f"{NAME}.gz"]) == 0
    assert Path(f"{NAME}.gz").stat().st_size < Path(NAME).stat().st_size
    assert read_perfetto(Path(f"{NAME}.gz")) == read_perfetto(Path(NAME))
    for name in (NAME, f"{NAME}.gz"):
        assert main(["report", name, "--no-html"]) == 2, "it is no trace of a rank"
        assert "--perfetto" in capsys.readouterr().err
        (tmp_path / "traces" / name).write_bytes(Path(name).read_bytes())
    report = analyze([tmp_path / "traces"])
    assert len(report.facts.ranks_seen) == 1 and not any(NAME in gap for gap in report.facts.gaps)
    Path("other.pftrace").write_bytes(b"somebody's")
    assert main(["report", "traces", "--no-html", "--perfetto", "other.pftrace"]) == 2
    assert Path("other.pftrace").read_bytes() == b"somebody's"
    capsys.readouterr()
    for name in ("run.json", "run.pftrace.zst", "run"):
        assert main(["report", "traces", "--no-html", "--perfetto", name]) == 2
        assert f"--perfetto {name}" in capsys.readouterr().err and not Path(name).exists()
    assert main(["report", "traces", "--no-html", "--perfetto", f"none/{NAME}"]) == 2
    assert f"--perfetto none/{NAME}" in capsys.readouterr().err
    Path("folder").mkdir()
    Path("folder/run.json").write_text(json.dumps({"schema": 1, "status": "finished"}))
    assert main(["report", "folder", "--no-html", "--perfetto", NAME]) == 2
    assert f"--perfetto {NAME}" in capsys.readouterr().err


def test_names_of_any_letters_are_written(tmp_path):
    """Also of a half letter, as a name has that is no text, and of a file's and a machine's name."""
    made = gpu_run(steps=4)
    made.header["host_name"] = "h\u00f6st"
    made.annotation("gr\u00f6\u00dfe \u6570\u636e \U0001f600 \ud800", 100, 120)
    made.write(tmp_path / "\u540d")
    _, read = convert(tmp_path / "\u540d")
    names = {one.name for one in read.slices}
    assert any("gr\u00f6\u00dfe \u6570\u636e \U0001f600 \ufffd" in name for name in names)
