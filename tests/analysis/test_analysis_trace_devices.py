"""Accelerators other than CUDA's: what is read of them, and what is named because nobody reads it."""

import json
from pathlib import Path

import pytest
from support.trace_maker import BASE_US, MadeTrace, cpu_run, gpu_run, measure, place

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.trace.accelerators import find_accelerator, read_accelerators
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.analysis.trace.read import read_traces

HOST, CANN, NPU, HCCL, SUMS = 77, 7701, 800, 7702, 7703
STEPS = 5


def meta(pid, name, tid=0):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": tid, "args": {"name": name}}


def span(pid, tid, name, start, end, cat=None, **args):
    event = {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": f"{BASE_US + start:.3f}",
        "dur": end - start,
        "args": args,
    }
    return event | ({"cat": cat} if cat else {})


def ascend_run(talk_apart=True, computing=600.0) -> list[dict]:
    """Steps of 1000 us as torch_npu writes them: 2 products of 300, a copy of 50, 200 of communication not overlapped with compute, a wait."""
    events = [meta(HOST, "Python"), meta(CANN, "CANN"), meta(NPU, "Ascend Hardware"), meta(SUMS, "Overlap Analysis")]
    events += [meta(HCCL, "HCCL")] if talk_apart else []
    for step in range(STEPS):
        at = step * 1000.0
        events.append(span(HOST, HOST, f"ProfilerStep#{step + 3}", at, at + 990, "cpu_op"))
        events.append(span(HOST, HOST, "forward", at + 5, at + 60, "cpu_op"))
        for half in range(2):
            number = 10 * step + half
            events.append(span(HOST, HOST, "aten::mm", at + 10 + 20 * half, at + 25 + 20 * half, "cpu_op"))
            events.append(
                span(CANN, HOST, "Node@launch", at + 12 + 20 * half, at + 20 + 20 * half, connection_id=number)
            )
            task = {"Task Type": "AI_CORE", "Stream Id": 3, "connection_id": number}
            events.append(span(NPU, 3, "aclnnMm_MatMulV2", at + 50 + 300 * half, at + 350 + 300 * half, **task))
        events.append(span(NPU, 3, "MEMCPY_ASYNC", at + 650, at + 700, **{"Task Type": "SDMA_SQE"}))
        events.append(span(NPU, 3, "EVENT_WAIT", at + 700, at + 900, **{"Task Type": "EVENT_WAIT_SQE"}))
        where, args = (HCCL, {"connection_id": 10 * step + 5}) if talk_apart else (NPU, {"Task Type": "HCCL"})
        events.append(span(where, 9, "hcom_allReduce__1_0_1", at + 700, at + 900, **args))
        events.append(span(CANN, HOST, "Node@launch", at + 52, at + 58, connection_id=10 * step + 5))
        events.append(span(SUMS, 0, "Computing", at + 50, at + 50 + computing))
        events.append(span(SUMS, 2, "Communication(Not Overlapped)", at + 700, at + 900))
    return events


def write(folder: Path, content) -> Path:
    path = folder / "trace_view.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("talk_apart", [True, False])
def test_tasks_of_an_ascend_npu_are_its_work(tmp_path, talk_apart):
    path = write(tmp_path, ascend_run(talk_apart))
    [trace] = read_traces(path)
    assert set(map(trace.name_of, trace.rows[Kind.KERNEL])) == {"aclnnMm_MatMulV2", "hcom_allReduce__1_0_1"}
    assert len(trace.rows[Kind.MEMCPY]) == STEPS and not trace.unread
    report = analyze([path])
    time = report.facts.critical.time
    assert (time.device, len(time.steps)) == ("Ascend NPU", STEPS)
    assert time.rows["compute"] == pytest.approx(0.6) and time.rows["exposed_communication"] == pytest.approx(0.2)
    assert time.rows["exposed_copy"] == pytest.approx(0.05)
    assert {phase.name: phase.kernels for phase in time.phases}["forward"] == (3 if talk_apart else 2)
    assert report.verdict.confidence == "high" and "Ascend NPU" in report.verdict.sentence


def test_a_bare_list_may_begin_with_any_entry(tmp_path):
    """Writers differ in the order of an entry's fields."""
    first = {"name": "process_name", "pid": CANN, "tid": 0, "args": {"name": "CANN"}, "ph": "M"}
    assert analyze([write(tmp_path, [first, *ascend_run()])]).facts.critical.time.on_gpu


def test_sums_of_the_profiler_that_differ_from_its_tasks_lower_confidence(tmp_path):
    report = analyze([write(tmp_path, ascend_run(computing=400.0))])
    assert report.verdict.confidence == "low" and "Overlap Analysis" in report.verdict.why


def test_marks_that_are_written_as_operators_are_steps(tmp_path):
    made = cpu_run(gloo_us=0)
    for event in made.events:
        if event["name"].startswith("ProfilerStep"):
            event["cat"] = "cpu_op"
    _, found = place(made, tmp_path)
    assert [step.name for step in found.steps] == [f"ProfilerStep#{number}" for number in range(10, 14)]


def rename(made: MadeTrace, **categories: str) -> MadeTrace:
    for event in made.events:
        event["cat"] = categories.get(event["cat"], event["cat"])
    made.device = None
    return made


@pytest.mark.parametrize(
    ("categories", "device"),
    [
        ({"cuda_runtime": "xpu_runtime"}, "Intel XPU"),
        ({"cuda_runtime": "mtia_runtime", "kernel": "mtia_ccp_events"}, "Meta MTIA"),
        ({"cuda_runtime": "privateuse1_runtime"}, "device of PrivateUse1"),
        ({"cuda_runtime": "musa_runtime", "gpu_memcpy": "musa_memcpy"}, "Moore Threads MUSA GPU"),
        ({"cuda_runtime": "mlu_runtime", "gpu_memcpy": "mlu_memcpy"}, "Cambricon MLU"),
    ],
)
def test_work_of_other_accelerators_is_read_and_named(tmp_path, categories, device):
    same = measure(gpu_run(steps=5), tmp_path)
    made = rename(gpu_run(steps=5), **categories)
    report = analyze([made.write(tmp_path)])
    assert report.facts.critical.time.rows == same.rows
    assert report.title.endswith(device) and report.verdict.confidence == "high"


def test_an_accelerator_with_one_category_for_host_and_device(tmp_path):
    made = rename(gpu_run(steps=5), cuda_runtime="hpu_op", kernel="hpu_op")
    time = measure(made, tmp_path)
    assert time.device == "Intel Gaudi HPU" and time.rows["compute"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("number", "device"),
    [(1, "GPU"), (9, "XLA"), (12, "XPU"), (13, "MPS"), (15, "HPU"), (18, "IPU"), (19, "MTIA"), (20, "PrivateUse1")],
)
def test_memory_of_a_device_whose_work_is_not_there(tmp_path, number, device):
    made = cpu_run(gloo_us=0)
    made.memory(120.0, 4096, 4096)
    made.events[-1]["args"] |= {"Device Type": number, "Device Id": 0}
    report = analyze([made.write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and device in report.verdict.sentence
    made.events[-1]["args"] |= {"Device Type": 0, "Device Id": -1}
    assert analyze([made.write(tmp_path)]).verdict.confidence == "high"


@pytest.mark.parametrize(
    ("operator", "device"),
    [
        ("aten::_mps_convolution", "Apple GPU (MPS)"),
        ("npu::npu_format_cast", "Ascend NPU"),
        ("xla::add", "XLA device (TPU)"),
    ],
)
def test_operators_of_a_device_whose_work_is_not_there(tmp_path, operator, device):
    made = cpu_run(gloo_us=0)
    made.op(operator, 262, 270)
    report = analyze([made.write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and device in report.verdict.sentence


def test_every_accelerator_of_torch_is_named():
    """c10/core/DeviceType.h, without the host and what is no device (MKLDNN, IDEEP, Meta, Lazy)."""
    numbers = {row.number for row in read_accelerators()}
    assert numbers >= {1, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 18, 19, 20}
    assert find_accelerator(["cpu_op"], ["python"], ["aten::mm"], []) == ""


# --- tracks that nobody reads


def with_track(made: MadeTrace, process: str, category: str | None, pid=901) -> MadeTrace:
    """A track of its own, busy 600 of each 1000 us."""
    made.events.append(meta(pid, process))
    for step in range(4):
        event = made.add(category or "", f"work {step}", step * 1000 + 100, step * 1000 + 700, 5, pid)
        if category is None:
            del event["cat"]
    return made


@pytest.mark.parametrize(("process", "category"), [("TPU 0", None), ("Foo device 0", "foo_op"), ("MTIA 0", "mystery")])
def test_a_track_that_nobody_reads_is_no_cpu_job(tmp_path, process, category):
    report = analyze([with_track(cpu_run(gloo_us=0), process, category).write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and process in report.verdict.sentence
    assert not [one for one in report.findings if one.cost_ms]


def test_a_track_of_another_accelerator_beside_a_gpu_lowers_confidence(tmp_path):
    report = analyze([with_track(gpu_run(steps=5), "NPU 1", "npu_task").write(tmp_path)])
    assert report.verdict.confidence == "low" and "NPU 1" in report.verdict.why


@pytest.mark.parametrize(
    ("process", "category"),
    [
        ("PyTorch Profiler", "Trace"),
        ("python", "fwdbwd"),
        ("python", "cpu_instant_event"),
        ("CPU counters", "gpu_counters"),
    ],
)
def test_tracks_that_are_no_work_say_nothing(tmp_path, process, category):
    report = analyze([with_track(cpu_run(gloo_us=0), process, category).write(tmp_path)])
    assert report.verdict.confidence == "high" and report.title.endswith("CPU")


def test_a_trace_of_a_gpu_alone_says_nothing_of_the_host(tmp_path):
    made = gpu_run(steps=5)
    made.events = [event for event in made.events if event["cat"] in ("kernel", "gpu_memcpy")]
    report = analyze([made.write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and not [one for one in report.findings if one.certain]
    assert report.facts.critical.time.rows["compute"] > 0


def test_conversions_of_nsys_exports_are_read(tmp_path):
    """As nsys2json writes them: kernels of category "cuda" on "Device N", ranges of category "nvtx"."""
    events = []
    for step in range(5):
        at = step * 1000.0
        events.append(span("Device 0", "NVTX Thread 1", f"step {step}", at, at + 990, "nvtx"))
        events.append(span("Device 0", "Stream 7", "ampere_sgemm_128x64_tn", at + 100, at + 800, "cuda"))
        events.append(span("Device 0", "Stream 8", "Memcpy HtoD", at + 20, at + 50, "cuda"))
    report = analyze([write(tmp_path, {"traceEvents": events})])
    [trace] = read_traces(tmp_path / "trace_view.json")
    assert len(trace.rows[Kind.KERNEL]) == len(trace.rows[Kind.MEMCPY]) == 5
    assert report.facts.critical.time.rows["compute"] == pytest.approx(0.7, abs=0.01)
