"""Kineto files of all years as columns."""

import gzip
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from support.paths import TRACES
from support.trace_maker import MadeTrace, gpu_run, write
from support.wording import wording

from megatron_lite.analysis.trace.columns import Collective, Kind, Shapes
from megatron_lite.analysis.trace.kineto_json import Chunks
from megatron_lite.analysis.trace.kineto_kinds import KIND_OF_CATEGORY
from megatron_lite.analysis.trace.read import read_traces

REAL = sorted(TRACES.glob("*/rank0.*.json.gz"))
needs_traces = pytest.mark.skipif(not REAL, reason="no ../shared/traces beside the repository")


def span(category: str, name: str, ts, dur, pid=1, tid=1, **args) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def read(folder: Path, events: list, name="t.json", **header):
    [trace] = read_traces(write(header | {"traceEvents": events}, folder / name))
    return trace


def table(trace) -> list[tuple]:
    """(kind, name, start, length) of each event."""
    e = trace.events
    return [
        (Kind(k).name, trace.names[n], s, t - s)
        for k, n, s, t in zip(*map(np.ndarray.tolist, (e.kind, e.name, e.start_ns, e.end_ns)))
    ]


@pytest.mark.parametrize(("said", "known"), [(2**20, 2**20), (2**20 + 1, None), (10**12, None), (0, None)])
def test_more_ranks_than_a_run_can_have_are_unknown(tmp_path, said, known):
    """Ranks that were not read are listed by number: a damaged header must not make that endless."""
    made = gpu_run(steps=2, world_size=said)
    [trace] = read_traces(made.write(tmp_path))
    assert trace.world_size == known


def test_a_modern_trace(tmp_path):
    made = MadeTrace(rank=3, world_size=8)
    made.step(7, 0, 100)
    made.op("aten::mm", 10, 20, dims=[[8, 4], [4, 16], []], dtypes=["float", "float", ""], sequence=5, forward_thread=2)
    made.kernel("gemm", 30.125, 40.5, launched=12)
    made.copy("Memcpy HtoD (Pageable -> Device)", 50, 60, 13, 4096)
    made.collective(70, 80, 14, elements=1000, group_size=8)
    made.frame("train.py(1): step", 0, 99)
    made.memory(15, 512, 1024, 2048)
    [trace] = read_traces(made.write(tmp_path))
    e, at = trace.events, {name: i for i, (_, name, *_) in enumerate(table(trace))}
    assert (trace.rank, trace.world_size, trace.devices, trace.writer) == (3, 8, ("NVIDIA A100-SXM4-80GB",), "pytorch")
    assert (trace.with_stack, trace.with_shapes, trace.notes) == (True, True, ())
    assert trace.base_ns == 1_700_000_000_000_000_000 + 1_000_000_000
    assert table(trace)[0] == ("ANNOTATION", "ProfilerStep#7", 0, 100_000)
    assert (e.start_ns[at["gemm"]], e.end_ns[at["gemm"]]) == (30_125, 40_500)
    assert trace.shapes[e.shapes[at["aten::mm"]]] == Shapes(((8, 4), (4, 16), ()), ("float", "float", ""))
    assert (e.sequence[at["aten::mm"]], e.forward_thread[at["aten::mm"]]) == (5, 2)
    copy = at["Memcpy HtoD (Pageable -> Device)"]
    assert (e.num_bytes[copy], e.device[copy], e.stream[copy], e.kind[copy]) == (4096, 0, 7, Kind.MEMCPY)
    nccl = next(i for name, i in at.items() if name.startswith("ncclDev"))
    assert trace.collectives[e.collective[nccl]] == Collective("allreduce", "0", 8, 1000, 1000, "Float", 1)
    assert trace.name_of(trace.launch_of[at["gemm"]]) == "cudaLaunchKernel"
    assert (e.device[at["aten::mm"]], e.stream[at["aten::mm"]], e.correlation[at["aten::mm"]]) == (-1, -1, -1)
    m = trace.memory
    columns = np.stack([m.time_ns, m.num_bytes, m.total_allocated, m.total_reserved, m.device])
    assert columns.T.tolist() == [[15_000, 512, 1024, 2048, 0]]


def test_shapes_differ_by_output_masks_and_by_no_other_values(tmp_path):
    made = MadeTrace()
    for at, values in enumerate(
        [
            ["", "1", "[True, True, False]"],
            ["", "2", "[True, True, False]"],
            ["", "2", "[False, True, False]"],
            ["", "0.1", "True"],
            ["", "0.2", "[1, 2]"],
            None,
        ]
    ):
        made.op("aten::convolution_backward", 10 * at, 10 * at + 5, dims=[[8, 4], [], []], values=values)
    [trace] = read_traces(made.write(tmp_path))
    masks = [trace.shapes[number].output_mask for number in trace.events.shapes]
    assert masks == [(True, True, False)] * 2 + [(False, True, False)] + [()] * 3
    assert len(trace.shapes) == 3


def test_a_trace_of_2021(tmp_path):
    start = 1_623_142_623_460_016
    trace = read(tmp_path, [
        span("Operator", "aten::copy_", start, 20, 5, "5", **{"External id": 2, "Input Dims": [[2, 3]], "Device": 5}),
        span("Operator", "ProfilerStep#5", start, 90, 5, "5", **{"External id": 1}),
        span("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start + 1, 2, 5, "5"),
        span("Operator", "detach_", start + 5, 2, 5, "5"),
        span("Runtime", "cudaMemcpyAsync", start + 10, 5, 5, "5", cbid=41, correlation=34417, **{"external id": 2}),
        span("Memcpy", "Memcpy HtoD (Pageable -> Device)", start + 20, 30, 0, "stream 7", device=0, stream=7,
             correlation=34417, bytes=1926),
        span("Memset", "Memset (Device)", start + 60, 1, 0, "stream 7"),
        {"ph": "i", "s": "t", "name": "[memory]", "pid": 5, "tid": 5, "ts": start + 3,
         "args": {"Device Type": 0, "Device Id": -1, "Bytes": -4}},
        {"name": "process_name", "ph": "M", "ts": start, "pid": 5, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 5, "tid": 5, "ts": start, "cat": "async", "name": "launch"},
    ])  # fmt: skip
    kinds = {name: kind for kind, name, *_ in table(trace)}
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert kinds["ProfilerStep#5"] == kinds[loader] == "ANNOTATION"
    assert kinds["aten::copy_"] == kinds["detach_"] == "OP"
    assert [row[1] for row in table(trace)][:2] == ["ProfilerStep#5", "aten::copy_"], "the longer one stands first"
    assert trace.base_ns == start * 1000
    [copy] = trace.rows[Kind.MEMCPY]
    [memset] = trace.rows[Kind.MEMSET]
    assert trace.name_of(trace.launch_of[copy]) == "cudaMemcpyAsync"
    assert (trace.events.device[memset], trace.events.stream[memset]) == (0, 7), "from pid and tid"
    assert (trace.memory.device.tolist(), trace.memory.num_bytes.tolist()) == ([-1], [-4])
    assert (trace.memory.total_allocated[0], trace.rank, trace.world_size, trace.devices) == (-1, None, None, ())
    assert len(trace.events) == 7


def test_arguments_as_strings(tmp_path):
    trace = read(tmp_path, [
        span("cuda_runtime", "cudaLaunchKernel", "10", "5", correlation="7"),
        span("kernel", "k", "20.5", "5", 0, "7", device="0", stream="7", correlation="7"),
    ])  # fmt: skip
    assert table(trace) == [("RUNTIME", "cudaLaunchKernel", 0, 5000), ("KERNEL", "k", 10_500, 5000)]
    assert trace.launch_of[1] == 0


@pytest.mark.parametrize("first", [0, 4_458_676_522_690, 8_796_093_022_207, 1_711_964_646_123_456])
def test_times_are_exact_to_the_nanosecond(tmp_path, first):
    """A double of 1.7e15 microseconds has steps of a quarter microsecond. Times that large count from 1970 by themselves."""
    texts = [f"{first + i}.{7 * i % 1000:03d}" for i in range(500)]
    events = ",".join(f'{{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":{ts},"dur":0.001}}' for ts in texts)
    base_ns, header = (0, "") if first > 10**15 else (10**18, '"baseTimeNanoseconds": 1000000000000000000, ')
    path = tmp_path / "t.json"
    path.write_text(f'{{{header}"traceEvents": [{events}]}}')
    [trace] = read_traces(path)
    assert (trace.events.start_ns + trace.base_ns).tolist() == [base_ns + int(Decimal(ts) * 1000) for ts in texts]
    assert set((trace.events.end_ns - trace.events.start_ns).tolist()) == {1}


def test_absolute_times_in_whole_microseconds_and_times_without_a_clock(tmp_path):
    trace = read(tmp_path, [span("cpu_op", name, 1_694_128_201_435_418 + at, 1) for at, name in enumerate("ab")])
    assert (trace.base_ns, trace.events.start_ns.tolist()) == (1_694_128_201_435_418_000, [0, 1000])
    assert read(tmp_path, [span("cpu_op", "a", 12.5, 1)]).base_ns is None


def test_beginnings_and_ends(tmp_path):
    half = lambda ph, ts, name=None, tid=1: {"ph": ph, "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": ts}
    trace = read(tmp_path, [
        half("B", 0, "outer"), half("B", 10, "inner"), half("B", 12, "other", tid=2), half("E", 20), half("E", 30),
        half("E", 40, tid=2), half("B", 50, "open"), half("E", 60, tid=3),
    ])  # fmt: skip
    assert table(trace) == [
        ("OP", "outer", 0, 30_000),
        ("OP", "inner", 10_000, 10_000),
        ("OP", "other", 12_000, 28_000),
    ]
    assert trace.notes == (wording("analysis/beginnings-or-ends-of", 2),)


def test_halves_that_were_read_one_by_one_may_have_starts_of_different_types(tmp_path):
    """Around an unreadable event a start with a fraction is read exactly, and a whole one as a double."""
    half = '{"ph": "%s", "cat": "user_annotation", "name": "a", "pid": 1, "tid": 1, "ts": %s}'
    text = ", ".join([half % ("B", "1700000000000000.5"), '{"ph": unreadable}', half % ("E", "1700000000000002")])
    (tmp_path / "t.json").write_text(f'{{"traceEvents": [{text}]}}')
    [trace] = read_traces(tmp_path / "t.json")
    assert table(trace) == [("ANNOTATION", "a", 0, 1500)]


def test_halves_without_a_finite_start_are_left_out(tmp_path):
    half = lambda ph, ts: {"ph": ph, "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": ts}
    endless = [half("B", "Infinity"), half("E", "Infinity")]
    exact = [half("B", 1700000000000000.5), half("E", 1700000000000002)]
    assert table(read(tmp_path, [*exact, *endless])) == [("OP", "a", 0, 1500)]


def test_a_bare_list_of_events(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([span("cpu_op", "a", 1, 1), span("kernel", "k", 2, 1, 0, 7)]))
    assert [row[:2] for row in table(read_traces(path)[0])] == [("OP", "a"), ("KERNEL", "k")]


def test_each_category(tmp_path):
    of_devices = {"xpu_runtime": Kind.RUNTIME, "mlu_memcpy": Kind.MEMCPY, "musa_user_annotation": Kind.GPU_ANNOTATION}
    kinds = KIND_OF_CATEGORY | of_devices | {"mystery": Kind.OTHER, "hpu_op": Kind.RUNTIME}
    trace = read(tmp_path, [span(category, category, at, 1) for at, category in enumerate(kinds)])
    assert {trace.name_of(row): trace.events.kind[row] for row in range(len(kinds))} == kinds


def test_a_trace_of_2020(tmp_path):
    """torch.autograd.profiler before Kineto: a list without categories."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps([
        {"name": "mm", "ph": "X", "ts": 10.5, "dur": 5, "tid": 1, "pid": "CPU functions", "args": {}},
        {"name": "mm", "ph": "s", "ts": 10.5, "tid": 1, "pid": "CPU functions", "id": 1, "cat": "cpu_to_cuda", "args": {}},
        {"name": "mm", "ph": "X", "ts": 20.5, "dur": 7, "tid": 0, "pid": "CUDA functions", "args": {}},
    ]))  # fmt: skip
    assert table(read_traces(path)[0]) == [("OP", "mm", 0, 5000), ("KERNEL", "mm", 10_000, 7000)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("host_rank12.170.pt.trace.json", 12),
        ("rank3.json", 3),
        ("trace[5].json", 5),
        ("rank-7_x.json", 7),
        ("host_170.json", None),
    ],
)
def test_the_rank_from_the_name_where_the_file_has_none(tmp_path, name, rank):
    assert read(tmp_path, [span("cpu_op", "a", 1, 1)], name).rank == rank
    assert read(tmp_path, [span("cpu_op", "a", 1, 1)], name, distributedInfo={"rank": 1}).rank == 1


def test_the_header_may_stand_behind_the_events(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({
        "metadata": {"text": 'a "traceEvents": [ in a text', "list": [{"a": 1}, {"b": 2}]},
        "traceEvents": [span("cpu_op", "a", 1, 1)],
        "INFO": [{"a": [{}]}, {"b": []}], "distributedInfo": {"rank": 2, "world_size": 4}, "baseTimeNanoseconds": 10**18,
    }, indent=1))  # fmt: skip
    [trace] = read_traces(path)
    assert (trace.rank, trace.world_size, trace.base_ns, len(trace.events)) == (2, 4, 10**18 + 1000, 1)


@pytest.mark.parametrize("indent", [None, 1])
def test_where_the_file_is_cut_into_chunks_does_not_matter(tmp_path, indent):
    data = gpu_run(steps=2).data()
    data["traceEvents"].append(
        span("cpu_op", 'a "name" with }, {"ph": and } ] in it \\', 1.0, 2.0, list=[{"a": 1}, {"b": [{}]}])
    )
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data, indent=indent))
    expected = [(event["name"], event["ts"]) for event in data["traceEvents"]]
    for block_bytes in (16, 100, 333, 1000, 4096, 10**6):
        chunks = Chunks(path, block_bytes)
        assert [(event.name, event.ts) for events in chunks for event in events] == expected
        assert (chunks.damage, chunks.header["schemaVersion"]) == (None, 1)


def test_gzip_of_several_parts(tmp_path):
    text = json.dumps(gpu_run(steps=2).data()).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(gzip.compress(text[at : at + 1000]) for at in range(0, len(text), 1000)))
    plain = tmp_path / "t.json"
    plain.write_bytes(text)
    assert table(read_traces(path)[0]) == table(read_traces(plain)[0])


@needs_traces
@pytest.mark.parametrize(
    "path", [path for path in REAL if path.stat().st_size < 800_000], ids=lambda path: path.parent.name
)
def test_real_traces_against_plain_json(path):
    data = json.loads(gzip.open(path).read(), parse_float=Decimal, strict=False)
    [trace] = read_traces(path)
    spans = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    first = min(event["ts"] for event in spans)
    expected = Counter(
        (KIND_OF_CATEGORY.get(e["cat"], Kind.OTHER).name, e["name"], int((e["ts"] - first) * 1000)) for e in spans
    )
    assert Counter(row[:3] for row in table(trace)) == expected
    assert sum(int(e["dur"] * 1000) for e in spans) == (trace.events.end_ns - trace.events.start_ns).sum(), (
        "nothing clipped"
    )
    assert sum("Input Dims" in e["args"] for e in spans) == (trace.events.shapes >= 0).sum()
    assert sum(e["args"].get("Collective name") is not None for e in spans) == (trace.events.collective >= 0).sum()
    assert len(trace.memory) == sum(e["name"] == "[memory]" for e in data["traceEvents"])
    order = np.lexsort((-trace.events.end_ns, trace.events.start_ns))
    assert (np.diff(trace.events.start_ns) >= 0).all() and (order == np.arange(len(order))).all()


@needs_traces
def test_device_work_finds_its_launch():
    found = {}
    for path in REAL:
        [trace] = read_traces(path)
        found[path.parent.name] = float((trace.launch_of[trace.device_rows] >= 0).mean())
    assert found.pop("h100_qwen_stacks") == pytest.approx(0.702, abs=0.001), (
        "509 of 1,707 were launched before the window"
    )
    assert set(found.values()) == {1.0}


def test_only_names_of_the_wanted_kinds_are_asked(tmp_path):
    events = [
        span("kernel", "a", 1, 1),
        span("cpu_op", "b", 2, 1),
        span("cpu_op", "a", 3, 1),
        span("python_function", "f", 4, 1),
    ]
    trace, asked = read(tmp_path, events), []
    passes = trace.passing(lambda name: asked.append(name) or name == "a", Kind.OP, Kind.MEMCPY)
    assert sorted(asked) == ["a", "b"]
    assert passes.tolist() == [name == "a" for name in trace.names]


@pytest.mark.parametrize("name", ["event_wait", "EVENT_WAIT", "notify_wait"])
def test_waiting_on_a_device_is_no_work(tmp_path, name):
    made = MadeTrace()
    made.step(1, 0, 1000)
    for start, work in ((100, "matmul_kernel"), (300, name)):
        made.kernel(work, start, start + 150, start - 10)["cat"] = "mtia_ccp_events"
    [trace] = read_traces(made.write(tmp_path))
    assert [trace.name_of(row) for row in trace.device_rows] == ["matmul_kernel"]
    assert [trace.name_of(row) for row in trace.rows[Kind.SYNC]] == [name]


@pytest.mark.parametrize("by_kind", [False, True])
def test_of_more_events_than_may_be_held_the_first_part_in_time_is_read(tmp_path, by_kind, monkeypatch):
    """Whatever the file's order: profilers write all that the host did first, then all that the GPU did."""
    monkeypatch.setattr(Chunks.__init__, "__defaults__", (4096,))
    events = gpu_run(steps=40, item=True).events
    memory = [{"ph": "i", "name": "[memory]", "ts": event["ts"], "args": {"Bytes": 1}} for event in events[::5]]
    events = sorted(
        events + memory, key=(lambda event: event.get("cat", "")) if by_kind else (lambda event: event["ts"])
    )
    path = write({"traceEvents": events}, tmp_path / "t.json")
    [whole], limit, told = read_traces(path), len(events) // 3, []
    [part] = read_traces(path, limit, told.append)
    assert limit // 3 < len(part.events) + len(part.memory) <= limit and told[-1] == path.stat().st_size
    last = max(part.events.end_ns.max(), part.memory.time_ns.max())
    before = table(whole)[: len(part.events) * 2]
    assert table(part) == [event for event in before if event[2] + event[3] <= last]
    assert len(part.memory) == (whole.memory.time_ns <= last).sum()
    [note] = part.notes
    assert re.fullmatch(
        rf"t.json: more than {limit:,} events; what ends within its first 0.0\d+ of 0.04\d* s was read, the rest left out; .*",
        note,
    )
    assert not whole.notes
