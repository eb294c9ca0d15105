"""Chrome traces that PyTorch did not write end with one sentence; PyTorch's own are never refused."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.trace_maker import MadeTrace, cpu_run, gpu_run, write
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.discover import TRACE_HEAD_BYTES, discover_sources
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.errors import UserError
from megatron_lite.report.sections.all import build_limitations


def spans(*names, cat=None, pid=7, **more):
    category = {"cat": cat} if cat else {}
    return [
        {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": at, "dur": 1, "args": {}} | category | more
        for at, name in enumerate(names)
    ]


def meta(name, label, pid=7):
    return {"ph": "M", "name": name, "pid": pid, "tid": 1, "args": {"name": label}}


FOREIGN = {
    "JAX": {"traceEvents": [meta("process_name", "/device:GPU:0"), *spans("PjitFunction(train_step)")]},
    "TensorFlow": {
        "traceEvents": [meta("process_name", "/device:GPU:0"), *spans("MatMul", args={"tf_op": "model/dense/MatMul"})]
    },
    "XLA": {
        "traceEvents": [meta("process_name", "/host:CPU"), *spans("fusion.1")],
        "metadata": {"highres-ticks": True},
    },
    "onnxruntime": [*spans("model_loading_uri", cat="Session"), *spans("Conv_0_kernel_time", cat="Node")],
    "PaddlePaddle": {
        "schemaVersion": "1.0.0",
        "span_indx": "1",
        "traceEvents": spans("ProfileStep#1", cat="ProfileStep"),
    },
    "VizTracer": {"viztracer_metadata": {"version": "1"}, "traceEvents": spans("main (a.py:1)", cat="FEE")},
    "py-spy": spans("main", cat="py-spy"),
    "Node.js": {"traceEvents": spans("environment", cat="node,node.bootstrap")},
    "Chrome": {
        "traceEvents": [
            meta("thread_name", "CrRendererMain"),
            *spans("RunTask", cat="disabled-by-default-devtools.timeline"),
        ]
    },
    "Go": {
        "displayTimeUnit": "ns",
        "traceEvents": [meta("process_name", "PROCS"), *spans("proc start"), {"name": "Goroutines"}],
    },
    "clang": {"traceEvents": spans("ExecuteCompiler", "Frontend"), "beginningOfTime": 1},
    "Bazel": {"otherData": {"bazel_version": "7"}, "traceEvents": spans("build", cat="general information")},
    "ninja": spans("a.o", cat="targets"),
    "did not write": {"traceEvents": spans("frame", cat="game") + spans("draw", cat="render")},
}
BARE = ("without a category", {"traceEvents": spans("a", "b")})


def complaint(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        analyze(paths)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("writer", FOREIGN)
@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_who_wrote_a_foreign_trace_is_said_in_a_line(tmp_path, writer, ending):
    path = write(FOREIGN[writer], tmp_path / f"some{ending}")
    said = complaint(path)
    assert said.startswith(f"{path}: ") and writer in said and "PyTorch" in said
    assert complaint(tmp_path) == said


def test_a_trace_without_categories_is_none_of_pytorch(tmp_path):
    _, content = BARE
    assert wording("analysis/pytorch-did-not-write") in complaint(write(content, tmp_path / "t.json"))


@pytest.mark.parametrize("writer", FOREIGN)
def test_beside_real_traces_it_is_ignored_with_the_reason(tmp_path, writer):
    mine = gpu_run(steps=5).write(tmp_path)
    # a newer one must not take the place of the real trace
    write(FOREIGN[writer], tmp_path / "host_rank0.1900000000000000000.pt.trace.json")
    report = analyze([tmp_path])
    assert [one.trace.source for one in report.facts.ranks_seen] == [mine.name]
    assert report.verdict.confidence == "high"
    assert [gap for gap in build_limitations(report) if writer in gap]


@pytest.mark.parametrize(
    ("table", "writer"), [("CANN_API", "Ascend"), ("rocpd_kernel_dispatch", "rocprofv3"), ("StringTable", "nvprof")]
)
def test_databases_of_other_profilers(tmp_path, table, writer):
    path = tmp_path / "profiler.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE {table} (id)")
    assert writer in complaint(path) and "Nsight" not in complaint(path)
    gpu_run(steps=5).write(tmp_path)
    assert [gap for gap in build_limitations(analyze([tmp_path])) if writer in gap]


# What stands at the beginning of files that people take for traces: of real files, as their programs write them.
OTHER_FILES = {
    "NVR": ("k.ncu-rep", b"NVR\0\x10\0\0\0", "nsys profile"),
    "jax 0.10": ("vm.xplane.pb", b'\n\xd4\x16\x12\x0e/host:metadata"\xd3\x0b\x08\x03', "nsys profile"),
    "XPlane": ("a.pb", b"\n\x95\x01\x08\x01\x12\r/device:GPU:0\x1a\x80\x01", "nsys profile"),
    "torch 2.13": (
        "run.et.json",
        b'{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 20254, "time": "2026-11-28 20:38:07", "start_ts": 28648289,',
        "export_chrome_trace",
    ),
    "memory": ("mt.json", b"[[1795898290033915, 1795898290033915, 1795898290034465], [[0, 0]]]", "_dump_snapshot"),
    "memory, raw": ("mt.raw.json.gz", b"[[-1, 1, 256, 0], [1795898290033915828, 2, 128, 2]]", "_dump_snapshot"),
    "rocprofv3": ("1_results.json", b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "torch.profiler"),
    "speedscope": (
        "p.speedscope.json",
        b'{"$schema":"https://www.speedscope.app/file-format-schema.json","profiles":[]}',
        "torch.profiler",
    ),
    "cProfile": ("c.prof", b"\xfb)\x03\xfa\x08<string>\xe9\x01", "torch.profiler"),
    "TensorBoard": (
        "events.out.tfevents.1.vm",
        b'\x18\0\0\0\0\0\0\0\xa3\x7fK"\t.\xff\x97\xec\xc2\xdaA\x1a\rbrain.Event:2R.',
        "folder",
    ),
}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_other_files_are_named_with_a_remedy(tmp_path, kind):
    name, content, remedy = OTHER_FILES[kind]
    for given in (name, "anything"):
        path = tmp_path / given
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        said = complaint(path)
        assert said.startswith(f"{path}: ") and remedy in said


def test_a_profile_of_xla_in_a_folder_is_named_and_other_such_files_are_not(tmp_path):
    gpu_run(steps=5).write(tmp_path)
    for name in ("vm.xplane.pb", "model.pb"):
        (tmp_path / name).write_bytes(OTHER_FILES["jax 0.10"][1] if "xplane" in name else b"\x08\x07\x12\x07pytorch")
    ignored = discover_sources([tmp_path]).ignored
    assert [path.name for path, _ in ignored] == ["vm.xplane.pb"]


@pytest.mark.parametrize("writer", ["JAX", "XLA", "onnxruntime"])
def test_what_is_read_is_said_beside_a_foreign_trace(tmp_path, writer):
    assert "torch.profiler" in complaint(write(FOREIGN[writer], tmp_path / "t.json"))


def test_traces_that_were_altered_are_less_certain(tmp_path):
    made = gpu_run(steps=5)
    assert analyze([made.write(tmp_path)]).verdict.confidence == "high"
    arrow = {"ph": "s", "cat": "critical_path", "name": "critical_path", "id": 0, "pid": 1, "tid": 100, "ts": 1_000_050}
    made.events.append(arrow | {"args": {"weight": 1}})
    [trace] = read_traces(made.write(tmp_path))
    assert trace.damage and "HTA" in trace.damage[0]
    assert analyze([made.write(tmp_path)]).verdict.confidence != "high"


def test_counters_of_the_range_profiler_are_no_times(tmp_path):
    """As a real trace has them: tests/data/cupti_profiler of HTA."""
    made = gpu_run(steps=5)
    made.add("cuda_profiler_range", "gemm", 100, 200, thread=0, pid=0, **{"sm__inst_executed_pipe_tensor.sum": 5})
    [trace] = read_traces(made.write(tmp_path))
    assert trace.damage and "profiler_metrics" in trace.damage[0]


def without_headers(made: MadeTrace) -> list[dict]:
    return made.data()["traceEvents"]


def of_2021(made: MadeTrace) -> dict:
    """Categories as kineto's first releases wrote them, and no header."""
    names = {
        "cpu_op": "Operator",
        "user_annotation": "Operator",
        "cuda_runtime": "Runtime",
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
    }
    return {"traceEvents": [event | {"cat": names.get(event["cat"], event["cat"])} for event in made.events]}


def kernels_alone(made: MadeTrace) -> dict:
    return {"traceEvents": [event for event in made.events if event["cat"] == "kernel"]}


def of_2020(made: MadeTrace) -> list[dict]:
    """The legacy profiler's: no categories, two processes."""
    pid = {"cpu_op": "CPU functions", "kernel": "CUDA functions"}
    return [
        {key: value for key, value in event.items() if key != "cat"} | {"pid": pid[event["cat"]]}
        for event in made.events
        if event["cat"] in pid
    ]


@pytest.mark.parametrize("change", [without_headers, of_2021, kernels_alone, of_2020])
def test_traces_of_pytorch_that_lack_most_of_it_are_read(tmp_path, change):
    path = write(change(gpu_run(steps=5)), tmp_path / "anything.json")
    assert discover_sources([path]).traces == (path,)
    assert analyze([path]).facts.critical.time.step_ms > 0


def test_a_trace_of_pytorch_with_nothing_in_it_is_none_of_others(tmp_path):
    made = MadeTrace(device=None)
    made.add("Trace", "PyTorch Profiler (0)", 0, 100)
    assert analyze([made.write(tmp_path)]).verdict.bound == "inconclusive"


def test_names_of_others_in_a_trace_of_pytorch_do_not_matter(tmp_path):
    made = cpu_run(gloo_us=0)
    made.frame("jax/_src/api.py(3): PjitFunction", 10, 20)
    made.frame("viztracer_metadata perfetto CrRendererMain", 30, 40)
    assert analyze([made.write(tmp_path)]).verdict.confidence == "high"


def test_events_of_pytorch_behind_those_of_another_tool_are_found(tmp_path):
    """As VizTracer puts them into its own file."""
    long = spans(*(f"f{number} {'x' * 400}" for number in range(2500)), cat="FEE")
    content = {"viztracer_metadata": {}, "traceEvents": long + without_headers(cpu_run(gloo_us=0))}
    text = json.dumps(content).encode()
    assert len(text) > TRACE_HEAD_BYTES
    for name, data in (("a.json", text), ("b.json.gz", gzip.compress(text))):
        path = tmp_path / name
        path.write_bytes(data)
        assert discover_sources([path]).traces == (path,)
        [trace] = read_traces(path)
        assert len(trace.events) > 2500
