"""Exports of Nsight Systems as columns."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.nsys_maker import export, place, table, two_ranks
from support.paths import TRACES
from support.wording import wording

from megatron_lite.analysis.trace.columns import Kind, Shapes
from megatron_lite.analysis.trace.nsys import name_memcpy, parse_range
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.errors import UserError

REAL = TRACES / "nsys_sqlite" / "mfu_2gpu_before.sqlite"


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_traces(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), path.name)


def test_each_process_is_a_trace(tmp_path):
    path, told = two_ranks(tmp_path), []
    first, second = read_traces(path, report=told.append)
    assert told == [path.stat().st_size]
    assert [path.name for path in tmp_path.iterdir()] == ["report.sqlite"], "nothing is written beside a report"
    assert [(t.rank, t.world_size, t.writer, t.source) for t in (first, second)] == [
        (0, 2, "nsys", "report.sqlite (process 10)"), (1, 2, "nsys", "report.sqlite (process 20)"),
    ]  # fmt: skip
    assert table(first) == [("ANNOTATION", "profile", 0, 9000)]
    assert table(second) == [
        ("ANNOTATION", "step 8", 0, 8000), ("ANNOTATION", "forward", 500, 3000), ("OP", "aten::mm", 600, 900),
        ("RUNTIME", "cudaLaunchKernel", 700, 750), ("KERNEL", "void gemm<float>(int)", 1000, 1500),
        ("SYNC", "Stream Sync", 2000, 2500), ("MEMCPY", "Memcpy HtoD (Pageable -> Device)", 2000, 2100),
        ("MEMSET", "Memset (Device)", 2200, 2300),
    ]  # fmt: skip
    assert (first.base_ns, second.base_ns) == (10**18 + 500, 10**18 + 1000)
    assert (second.devices, second.facts) == (("A", "B"), {"nsys_version": "2026.2"})
    assert wording("analysis/no-gpu-work-of") in first.notes[0] and second.notes == ()
    e, [kernel], [op] = second.events, second.rows[Kind.KERNEL], second.rows[Kind.OP]
    assert second.name_of(second.launch_of[kernel]) == "cudaLaunchKernel"
    assert (e.device[kernel], e.stream[kernel], e.device[op], e.stream[op]) == (1, 7, -1, -1)
    assert (second.shapes[e.shapes[op]], e.sequence[op]) == (Shapes(((2, 3), (3, 4)), ("", "")), 5)
    assert second.threads[e.thread[op]] == ("20", "20")
    assert e.num_bytes[e.num_bytes >= 0].tolist() == [4096, 64]


def test_tables_that_are_not_there(tmp_path):
    [trace] = read_traces(export(tmp_path, NVTX_EVENTS=[(5, 9, 59, "forward", place(3, 3), None)]))
    assert (trace.rank, trace.devices, trace.base_ns) == (None, (), None)
    assert table(trace) == [("ANNOTATION", "forward", 0, 4)]
    kernel = (5, 9, 0, 7, 1, place(3), None, None)
    [trace] = read_traces(export(tmp_path, NVTX_EVENTS=[], CUPTI_ACTIVITY_KIND_KERNEL=[kernel]))
    assert table(trace) == [("KERNEL", "unknown kernel", 0, 4)]


def test_values_of_the_wrong_type(tmp_path):
    path = export(
        tmp_path, NVTX_EVENTS=[("x", "9", 59, 17, "y", None), (-(2**63), 2**63 - 1, 59, b"blob", place(3), None), (1, 2, 59, "a", 2**62, "z")],
        CUPTI_ACTIVITY_KIND_KERNEL=[(-(2**63), 2**63 - 1, 2**40, -5, "c", place(3), "n", None)],
        CUPTI_ACTIVITY_KIND_MEMSET=[(None, 9, 0, 7, 1, place(3), 1), (5, None, None, None, None, place(3), None)],
        TARGET_INFO_SESSION_START_TIME=[("soon",)], StringIds=[("a", b"\xff"), (1, None)],
    )  # fmt: skip
    traces = read_traces(path)
    assert sum(len(trace.events) for trace in traces) == 5
    for trace in traces:
        assert (trace.events.end_ns >= trace.events.start_ns).all()
        assert (np.diff(trace.events.start_ns) >= 0).all() and trace.events.start_ns[0] == 0


def test_files_that_are_something_else(tmp_path):
    assert complaint(export(tmp_path)) == wording("analysis/report-sqlite-sqlite-file", "--type")
    assert complaint(export(tmp_path, NVTX_EVENTS=[])) == wording("analysis/report-sqlite-no-cuda")
    path = two_ranks(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    assert complaint(path).startswith(wording("analysis/report-sqlite-sqlite-cannot"))


@pytest.mark.parametrize(
    ("text", "name", "kind", "sequence", "dims"),
    [
        ("aten::mul, seq = 45328, op_id = 990726", "aten::mul", Kind.OP, 45328, None),
        ("AllToAll4D, seq = 45440, op_id = 990760", "AllToAll4D", Kind.OP, 45440, None),
        ("aten::mm, op_id = 1, sizes = [[2, 3], [], [[4], [5]]]", "aten::mm", Kind.OP, -1, ((2, 3), (), ((4,), (5,)))),
        ("aten::mm", "aten::mm", Kind.OP, -1, None),
        ("MmBackward0, seq = 5", "MmBackward0", Kind.OP, 5, None),
        ("step 10", "step 10", Kind.ANNOTATION, -1, None),
        ("layers.3.mlp", "layers.3.mlp", Kind.ANNOTATION, -1, None),
        ("my range, twice", "my range, twice", Kind.ANNOTATION, -1, None),
        ("a, sizes = [__import__('os')]", "a", Kind.OP, -1, None),
        ("two\nlines", "two\nlines", Kind.ANNOTATION, -1, None),
    ],
)
def test_texts_of_ranges(text, name, kind, sequence, dims):
    *found, shapes = parse_range(text)
    assert (*found, shapes and shapes.dims) == (name, kind, sequence, dims)


def test_names_as_pytorch_writes_them(tmp_path):
    calls = {"cudaLaunchKernel_v7000": "cudaLaunchKernel", "cudaMemcpyAsync_ptsz_v7000": "cudaMemcpyAsync",
             "cuLaunchKernelEx": "cuLaunchKernelEx", "cudaStreamGetCaptureInfo_v2_v11030": "cudaStreamGetCaptureInfo_v2"}  # fmt: skip
    rows = [(at, at + 1, place(1, 1), at, at) for at in range(len(calls))]
    [trace] = read_traces(
        export(tmp_path, NVTX_EVENTS=[], CUPTI_ACTIVITY_KIND_RUNTIME=rows, StringIds=list(enumerate(calls)))
    )
    assert [name for _, name, *_ in table(trace)] == list(calls.values())
    assert name_memcpy(8, 2, 2) == "Memcpy DtoD (Device -> Device)"
    assert name_memcpy(99, 200, 1) == "Memcpy Unknown (Unknown -> Pinned)"


@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/traces beside the repository")
def test_a_real_export_against_sql():
    traces = read_traces(REAL)
    with closing(sqlite3.connect(REAL)) as database:
        for trace in traces:
            pid = int(trace.threads[-1][0])
            kernels, kernel_ns = database.execute(
                "SELECT count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE globalPid >> 24 & 0xffffff = ?",
                (pid,),
            ).fetchone()
            rows = trace.rows[Kind.KERNEL]
            assert len(rows) == kernels
            assert (trace.events.end_ns[rows] - trace.events.start_ns[rows]).sum() == pytest.approx(kernel_ns, rel=1e-4)
            assert (trace.launch_of[trace.device_rows] >= 0).mean() > 0.99
            assert all("op_id" not in name for name in trace.names)
    assert [len(trace.rows[Kind.MEMCPY]) for trace in traces] == [510, 510]
