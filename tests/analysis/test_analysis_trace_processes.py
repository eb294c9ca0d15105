"""Files into which scripts merged the traces of several ranks: each is read as its own, or the doubt is told."""

import pytest
from support.trace_maker import MAIN, MadeTrace, cpu_run, gpu_run, write

from megatron_lite.analysis.discover import discover_sources
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.kineto import read_kineto
from megatron_lite.analysis.trace.processes import find_ranks
from megatron_lite.analysis.trace.read import read_traces

FORMS = {
    "labels": lambda rank, pid: f"[TP{rank:02d}] {pid}",
    "rank for all": lambda rank, pid: f"rank{rank}",
    "number for all": lambda rank, pid: rank,
    "offset": lambda rank, pid: 1000 * (rank + 1) + pid,
    "as they were": lambda rank, pid: pid if pid == 0 else 4711 + rank,
    "devices of their own": lambda rank, pid: rank if pid == 0 else 4711 + rank,
    "one id": lambda rank, pid: pid,
}


def merge(ranks: list[MadeTrace], form: str, shift_us: float = 0.0, unique: bool = False) -> dict:
    """The file that a script makes of the ranks' traces. unique: no two ranks have a correlation id in common."""
    merged = ranks[0].data()
    merged.pop("distributedInfo", None)
    merged["traceEvents"] = []
    for rank, made in enumerate(ranks):
        for event in made.events:
            args = dict(event["args"])
            if unique and "correlation" in args:
                args["correlation"] += 10_000 * rank
            moved = {"pid": FORMS[form](rank, event["pid"]), "ts": event["ts"] + shift_us * rank, "args": args}
            merged["traceEvents"].append(event | moved)
    return merged


def lengths(ranks: list[MadeTrace]) -> list[list[float]]:
    return [sorted(event["dur"] for event in made.events if event["cat"] == "kernel") for made in ranks]


@pytest.mark.parametrize("form", ["labels", "rank for all", "number for all", "offset", "devices of their own"])
@pytest.mark.parametrize("unique", [True, False])
def test_ranks_of_one_file(tmp_path, form, unique):
    # rank 1 is slower, and begins a little later
    ranks = [gpu_run(steps=4, rank=0), gpu_run(steps=4, rank=1, step_us=1500.0)]
    path = write(merge(ranks, form, shift_us=37.0, unique=unique), tmp_path / "merged.json")
    traces = read_traces(path)
    times = [rank_time(trace, attribute_events(trace)) for trace in traces]
    assert [time.step_ms for time in times] == pytest.approx([1.0, 1.5])
    assert [time.rows["compute"] for time in times] == pytest.approx([0.7, 0.7])
    known = form in ("labels", "rank for all", "number for all")
    assert [trace.rank for trace in traces] == ([0, 1] if known else [None, None])
    found = [sorted((e.end_ns - e.start_ns)[e.kind == 3] / 1e3) for e in (trace.events for trace in traces)]
    assert found == [pytest.approx(one) for one in lengths(ranks)]
    assert not any(trace.damage for trace in traces) or not unique


def test_ranks_without_gpus(tmp_path):
    made = [cpu_run(rank=rank, step_us=1000.0 + 500 * rank) for rank in range(3)]
    traces = read_traces(write(merge(made, "as they were"), tmp_path / "merged.json"))
    times = [rank_time(trace, attribute_events(trace)).step_ms for trace in traces]
    assert times == pytest.approx([1.0, 1.5, 2.0], rel=0.01)


def test_ranks_under_one_device_id(tmp_path):
    made = [gpu_run(rank=rank) for rank in range(2)]
    for unique in (True, False):
        path = write(merge(made, "as they were", shift_us=37.0, unique=unique), tmp_path / f"{unique}.json")
        traces = read_traces(path)
        assert len(traces) == (2 if unique else 1) and all(trace.damage for trace in traces)


def test_ranks_under_one_process_id(tmp_path):
    [trace] = read_traces(write(merge([gpu_run(), gpu_run()], "one id", shift_us=37.0), tmp_path / "merged.json"))
    assert "ProfilerStep#10" in trace.damage[0]


def near_misses() -> list:
    spans = gpu_run()
    spans.add("user_annotation", "PyTorch Profiler (0)", 0, 4000, thread="PyTorch Profiler", pid="Spans")
    containers = gpu_run()
    for event in containers.events:
        if event["cat"] == "cuda_runtime":
            event["pid"] = 77  # the machine's number of the process, not the container's
    twice = gpu_run(steps=3)
    for event in gpu_run(steps=3).events:
        event["ts"] += 50_000
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 1000
        twice.events.append(event)
    helper = gpu_run(steps=200)
    helper.add("cpu_op", "aten::empty", 10, 11, thread=MAIN, pid=9)
    return [
        pytest.param(spans, id="the profiler's own row"),
        pytest.param(containers, id="calls under another number"),
        pytest.param(twice, id="two windows"),
        pytest.param(helper, id="a process that does next to nothing"),
    ]


@pytest.mark.parametrize("made", near_misses())
def test_files_of_one_process(tmp_path, made):
    path = made.write(tmp_path)
    [trace] = read_traces(path)
    assert len(trace.events) == len(read_kineto(path).events) and not trace.damage


@pytest.mark.parametrize(
    ("pids", "ranks"),
    [
        (["[TP00] 12", "[TP01] 12"], [0, 1]),
        (["rank 3 (pid 12)", "rank 5 (pid 13)"], [3, 5]),
        (["Rank0", "Rank1"], [0, 1]),
        (["0", "1"], [0, 1]),
        (["4711", "4712"], [None, None]),
        (["[TP00-DP00] 1", "[TP00-DP01] 1"], [None, None]),
        (["rank0 a", "rank0 b"], [None, None]),
        (["http0", "http1"], [None, None]),
    ],
)
def test_ranks_in_process_ids(pids, ranks):
    assert find_ranks(pids) == ranks


def test_a_merge_beside_the_ranks_own_traces_is_not_read(tmp_path):
    ranks = [gpu_run(rank=rank, world_size=2) for rank in range(2)]
    for made in ranks:
        made.write(tmp_path)
    merged = write(merge(ranks, "labels"), tmp_path / "merged-1700000000000000001.trace.json")
    sources = discover_sources([tmp_path])
    assert len(sources.traces) == 2 and merged not in sources.traces
    assert [path for path, _ in sources.ignored] == [merged]
    assert discover_sources([merged]).traces == (merged,)
