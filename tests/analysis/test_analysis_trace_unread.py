"""Work of a device that a trace does not hold, or holds where nobody reads it, is never told as idle time."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.trace_maker import MadeTrace, cpu_run, gpu_run, measure, place
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.trace.columns import WHOLE_GRAPH, Kind
from megatron_lite.analysis.trace.launches import find_launch_call
from megatron_lite.analysis.trace.read import read_traces

PID = 1 << 48 | 77 << 24
TABLES = {
    "StringIds": "id, value",
    "TARGET_INFO_GPU": "id, name",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName, graphNodeId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start, end, deviceId, streamId, correlationId, globalPid, graphId, graphExecId",
    "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS": "start, end, deviceId, streamId, correlationId, globalPid",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "start, end, deviceId, streamId, correlationId, globalPid",
    "DIAGNOSTIC_EVENT": "timestamp, timestampType, source, severity, text, globalPid",
}
PLACES = {"RUNTIME": 2, "KERNEL": 5, "GRAPH_TRACE": 5}  # of the process in a row
GRAPH_US = 900


def export(folder: Path, **rows) -> Path:
    path = folder / "report.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, values in {"StringIds": (), **rows}.items():
            database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
            for row in values:
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        database.commit()
    return path


def graph_export(folder: Path, nodes=False, second_process=False, **more) -> Path:
    """10 steps of 1 ms, in each a small kernel and a CUDA graph of 0.9 ms, for which the host waits. `nodes`: its kernels, too."""
    tables = {
        name: [] for name in TABLES if name.startswith(("NVTX", "CUPTI_ACTIVITY_KIND_R", "CUPTI_ACTIVITY_KIND_K"))
    }
    graphs = []
    for step in range(10):
        at, first = step * 1_000_000, 3 * step + 1
        tables["NVTX_EVENTS"].append((at, at + 999_000, 59, f"step {step}", PID | 77, None))
        calls = ((2_000, 4_000, first, 1), (6_000, 9_000, first + 1, 2), (10_000, 945_000, first + 2, 3))
        tables["CUPTI_ACTIVITY_KIND_RUNTIME"] += [
            (at + start, at + end, PID | 77, number, name) for start, end, number, name in calls
        ]
        tables["CUPTI_ACTIVITY_KIND_KERNEL"].append((at + 8_000, at + 12_000, 0, 7, first, PID, 4, 4, None))
        graphs.append((at + 40_000, at + 40_000 + GRAPH_US * 1000, 0, 7, first + 1, PID, 5, 6))
        if nodes:
            tables["CUPTI_ACTIVITY_KIND_KERNEL"] += [
                (at + 40_000 + half, at + 480_000 + half, 0, 7, first + 1, PID, 4, 4, 9) for half in (0, 450_000)
            ]
    names = ("cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaStreamSynchronize_v3020", "void gemm<float>(int)")
    tables["StringIds"] = list(enumerate(names, 1))
    tables["TARGET_INFO_GPU"] = [(0, "NVIDIA H100 80GB HBM3")]
    tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = graphs
    if second_process:
        for name, place in (("NVTX_EVENTS", 4), *((f"CUPTI_ACTIVITY_KIND_{kind}", at) for kind, at in PLACES.items())):
            tables[name] += [(*row[:place], row[place] + (1 << 24), *row[place + 1 :]) for row in tables[name]]
    return export(folder, **tables | more)


# --- Nsight Systems


def test_graphs_that_are_recorded_as_a_whole_are_work(tmp_path):
    path = graph_export(tmp_path)
    [trace] = read_traces(path)
    graphs = trace.rows[Kind.KERNEL][trace.matching(WHOLE_GRAPH.match)[trace.rows[Kind.KERNEL]]]
    assert len(graphs) == 10 and (trace.launch_of[graphs] >= 0).all()
    assert "--cuda-graph-trace=node" in " ".join(trace.notes)
    report = analyze([path])
    one = report.facts.critical
    assert one.time.rows["compute"] == pytest.approx(0.904, abs=1e-3)
    assert one.share(one.time.rows["sync"]) < 0.1
    assert report.verdict.confidence == "high" and wording("analysis/whose-kernels-were-not") in report.verdict.sentence


def test_graphs_of_several_ranks_may_communicate(tmp_path):
    """What a graph that is recorded as a whole does is not known: it may be communication."""
    path = graph_export(tmp_path, second_process=True)
    report = analyze([path])
    assert report.verdict.confidence == "low" and wording("analysis/communication-in-them") in report.verdict.why
    assert not [one for one in report.findings if one.certain]


def test_graphs_whose_kernels_are_recorded_are_not_counted_twice(tmp_path):
    path = graph_export(tmp_path, nodes=True)
    [trace] = read_traces(path)
    assert not any(map(WHOLE_GRAPH.match, (trace.name_of(row) for row in trace.rows[Kind.KERNEL])))
    report = analyze([path])
    assert report.facts.critical.time.rows["compute"] == pytest.approx(0.884, abs=1e-3)
    assert "not recorded" not in report.verdict.sentence


def test_graphs_that_are_in_no_table_make_idle_time_unknown(tmp_path):
    path = graph_export(tmp_path, CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[])
    report = analyze([path])
    assert report.verdict.bound == "inconclusive" and "cudaGraphLaunch" in report.verdict.sentence
    assert not [one for one in report.findings if one.certain]


def test_a_table_of_device_work_that_nobody_reads_is_named(tmp_path):
    rows = [(5, 50_000, 0, 7, 1, PID)]
    report = analyze([graph_export(tmp_path, CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS=rows)])
    assert report.verdict.confidence == "low" and "CUPTI_ACTIVITY_KIND_MEM_DECOMPRESS" in report.verdict.why
    assert not [one for one in report.findings if one.certain]
    report = analyze([graph_export(tmp_path, CUPTI_ACTIVITY_KIND_CUDA_EVENT=rows)])
    assert report.verdict.confidence == "high", "an event on a stream is no work"


def diagnostics(*texts, pid=PID):
    return [(1, 1, 1, level, text, pid) for level, text in texts]


def test_what_nsys_says_is_quoted(tmp_path):
    calls = [(1, 2, PID | 77, 0, 1)]
    no_work = {"CUPTI_ACTIVITY_KIND_RUNTIME": calls, "StringIds": [(1, "cuInit")], "TARGET_INFO_GPU": [(0, "GPU X")]}
    texts = ((2, "Installed driver is not supported by this build."), (1, "Number of CUDA events collected: 1."))
    report = analyze([export(tmp_path, **no_work, DIAGNOSTIC_EVENT=diagnostics(*texts))])
    assert report.verdict.bound == "inconclusive" and texts[0][1] in report.verdict.sentence
    assert not [note for note in report.facts.critical.trace.notes if texts[1][1] in note]
    report = analyze([export(tmp_path, **no_work, DIAGNOSTIC_EVENT=diagnostics(*texts, pid=PID + (1 << 24)))])
    assert texts[0][1] not in report.verdict.sentence, "of another process"
    assert "nsys says" not in analyze([export(tmp_path, **no_work)]).verdict.sentence


def test_events_that_nsys_calls_lost_lower_confidence(tmp_path):
    said = "Not all CUDA events might have been collected."
    report = analyze([graph_export(tmp_path, DIAGNOSTIC_EVENT=diagnostics((2, said)))])
    assert report.verdict.confidence == "low" and said in report.verdict.why
    harmless = "Dwarf unwinding is not available on this machine."
    report = analyze([graph_export(tmp_path, DIAGNOSTIC_EVENT=diagnostics((2, harmless)))])
    assert report.verdict.confidence == "high" and harmless in " ".join(report.facts.critical.trace.notes)


def test_what_kineto_logged_is_quoted(tmp_path):
    said = "Exceeded max GPU buffer count (64). Terminating tracing."
    made = gpu_run(steps=5)
    made.header = {"WARNING": [said, said], "ERROR": [7], "INFO": ["Completed Stage: Warm Up"]}
    report = analyze([made.write(tmp_path)])
    assert report.verdict.confidence == "low" and said in report.verdict.why
    assert sum(said in note for note in report.facts.critical.trace.notes) == 1
    made.header = {"WARNING": ["CUPTI callbacks are on"]}
    report = analyze([made.write(tmp_path)])
    assert report.verdict.confidence == "high" and "CUPTI callbacks" in " ".join(report.facts.critical.trace.notes)


# --- launches without their work

LAUNCHES = {
    "cuda_runtime": ["cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cudaGraphLaunch"],
    "cuda_driver": ["cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch"],
    "hip_runtime": ["hipLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel", "hipGraphLaunch"],
    "xpu_runtime": ["urEnqueueKernelLaunchWithArgsExp", "urEnqueueKernelLaunch", "piEnqueueKernelLaunch"],
    "xpu_driver": ["zeCommandListAppendLaunchKernel", "zeCommandListAppendLaunchKernelWithArguments"],
    "privateuse1_runtime": ["musaLaunchKernel", "musaGraphLaunch", "topsLaunchKernel", "cnInvokeKernel", "aclnnMatmul"],
    "mtia_runtime": ["mtiaLaunchKernel", "runtime_kernel_launch"],
}


@pytest.mark.parametrize(("category", "call"), [(cat, call) for cat, calls in LAUNCHES.items() for call in calls])
def test_launches_without_any_work_of_a_device_are_no_cpu_job(tmp_path, category, call):
    made = cpu_run(gloo_us=0)
    for step in range(4):
        made.add(category, call, step * 1000 + 120, step * 1000 + 125, correlation=step + 1)
    report = analyze([made.write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and f"({call})" in report.verdict.sentence
    assert wording("analysis/without-its-work") in report.title and "Python" not in report.verdict.sentence
    assert not [one for one in report.findings if one.cost_ms]


def test_calls_that_start_nothing_are_no_launches():
    for name in (
        "cudaLaunchHostFunc",
        "cudaStreamSynchronize",
        "cudaGraphInstantiate",
        "urEventWait",
        "cudaMalloc",
        "launcher",
    ):
        assert find_launch_call(name) is None, name
    assert find_launch_call("cudaMemcpyAsync").work == "copy"


def test_a_cpu_job_stays_one(tmp_path):
    made = cpu_run(gloo_us=0)
    made.add("cuda_runtime", "cudaGetDeviceCount", 120, 125)
    report = analyze([made.write(tmp_path)])
    assert report.verdict.confidence == "high" and report.title.endswith("CPU")


@pytest.mark.parametrize("backend", ["nccl", "xccl", "hccl"])
def test_a_backend_of_devices_without_any_is_no_cpu_job(tmp_path, backend):
    made = cpu_run(gloo_us=0)
    made.header = {"distributedInfo": {"backend": backend, "rank": 0, "world_size": 2}}
    report = analyze([made.write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and backend in report.verdict.sentence
    # what torch chooses where nobody does, with a GPU or without
    made.header["distributedInfo"]["backend"] = "cpu:gloo,cuda:nccl"
    assert analyze([made.write(tmp_path)]).verdict.bound != "inconclusive"


@pytest.mark.parametrize(
    "call",
    [
        "aclrtSynchronizeStream",
        "AscendCL@aclrtSynchronizeStream",
        "musaStreamSynchronize",
        "urQueueFinish",
        "cnrtQueueSync",
    ],
)
def test_waiting_for_a_device_is_a_synchronization_with_any_runtime(tmp_path, call):
    made = gpu_run(steps=5, item=True)
    same = measure(made, tmp_path)
    for event in made.events:
        event["name"] = event["name"].replace("cudaStreamSynchronize", call)
    assert measure(made, tmp_path).rows["sync"] == same.rows["sync"] > 0


def with_graphs(kernels: bool) -> MadeTrace:
    made = gpu_run(steps=6)
    for step in range(6):
        at = step * 1000.0
        work = [("ampere_sgemm_128x64_tn", at + 810, at + 900)] if kernels else []
        made.graph(work, launched=at + 300)
    return made


def test_graph_launches_without_work_beside_other_kernels(tmp_path):
    report = analyze([with_graphs(kernels=False).write(tmp_path)])
    assert report.verdict.bound == "inconclusive" and "graph launches (cudaGraphLaunch)" in report.verdict.sentence
    assert wording("analysis/without-its-work") not in report.title
    assert analyze([with_graphs(kernels=True).write(tmp_path)]).verdict.confidence == "high"


def test_graph_kernels_with_ids_of_their_own_are_work(tmp_path):
    made = with_graphs(kernels=False)
    for step in range(6):
        made.kernel("ampere_sgemm_128x64_tn", step * 1000 + 810.0, step * 1000 + 900.0, None)
    assert "graph launch" not in analyze([made.write(tmp_path)]).verdict.sentence


def test_lower_layers_that_repeat_launches_are_not_missing(tmp_path):
    """Level Zero's calls have ids of their own beside those of the unified runtime above them."""
    made = gpu_run(steps=5)
    for event in made.events:
        if event["cat"] == "cuda_runtime" and "Launch" in event["name"]:
            event.update(cat="xpu_runtime", name="urEnqueueKernelLaunch")
    for step in range(5):
        made.add(
            "xpu_driver", "zeCommandListAppendLaunchKernel", step * 1000 + 71, step * 1000 + 73, correlation=9000 + step
        )
    assert analyze([made.write(tmp_path)]).verdict.confidence == "high"


# --- steps at the end


def test_a_step_at_the_end_in_which_nothing_was_done_is_left_out_silently(tmp_path):
    made = gpu_run(steps=5)
    made.step(15, 5000, 5400)
    made.sync(5410, 5420, call="cudaDeviceSynchronize")
    _, found = place(made, tmp_path)
    assert len(found.steps) == 5 and not [note for note in found.notes if "ProfilerStep#15" in note]
    assert len(measure(made, tmp_path).steps) == 5
    made.op("aten::mm", 5100, 5200)
    _, found = place(made, tmp_path)
    assert len(found.steps) == 6 and [note for note in found.notes if "ProfilerStep#15" in note]


@pytest.mark.parametrize("what", ["cudaLaunchKernel", "frame", "annotation"])
def test_a_step_at_the_end_in_which_the_host_worked_is_named(tmp_path, what):
    made = gpu_run(steps=5)
    made.step(15, 5000, 5400)
    if what == "frame":
        made.frame("train.py(7): save", 5010, 5300)
    elif what == "annotation":
        made.annotation("save", 5010, 5300)
    else:
        made.runtime(what, 5010, 5020)
    _, found = place(made, tmp_path)
    assert [note for note in found.notes if "ProfilerStep#15" in note]


def test_a_trace_of_a_single_empty_step_keeps_it(tmp_path):
    made = MadeTrace(device=None)
    made.step(3, 0, 100)
    _, found = place(made, tmp_path)
    assert len(found.steps) == 1


# --- operators, tracks and clocks


def host_job(folder: Path, operators: list[str], ranges: list[str] = ()) -> None:
    """5 steps of 10 ms with these operators and ranges of the host, and no word on any device."""
    made = MadeTrace(None, 1, device=None)
    for step in range(5):
        at = 10_000.0 * step
        made.step(step, at, at + 9_900)
        for at_op, name in enumerate(operators * 10):
            made.op(name, at + 10 + 200 * at_op, at + 60 + 200 * at_op)
        for name in ranges:
            made.annotation(name, at + 8_210, at + 8_290)
    made.write(folder)


@pytest.mark.parametrize(
    ("operators", "ranges", "is_known"),
    [
        (["aten::cudnn_convolution", "aten::mm"], [], False),
        (["aten::_flash_attention_forward"], [], False),
        (["aten::_scaled_dot_product_efficient_attention"], [], False),
        (["aten::miopen_batch_norm"], [], False),
        (["aten::mm"], ["nccl:all_reduce"], False),
        (["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::cudnn_is_acceptable"], ["gloo:all_reduce"], True),
        (["aten::_use_cudnn_ctc_loss", "aten::mkldnn_convolution"], [], True),
    ],
)
def test_operators_that_only_a_gpu_has_are_no_cpu_job(tmp_path, operators, ranges, is_known):
    host_job(tmp_path, operators, ranges)
    report = analyze([tmp_path])
    assert (report.verdict.bound != "inconclusive") == is_known
    assert (report.verdict.confidence == "high") == is_known
    assert is_known or not [one for one in report.findings if one.cost_ms]


def track(folder: Path, process: str | None, category: str, share: float) -> None:
    """A GPU's run, and beside it a track that is busy for this share of the time; None: a thread of the host."""
    made = gpu_run(steps=5)
    end = max(event["ts"] + event.get("dur", 0) for event in made.events)
    host = next(event["pid"] for event in made.events if event.get("cat") == "cpu_op")
    pid = host if process is None else 4_711
    if process is not None:
        made.events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
    for at in range(0, int(end), 1_000):
        made.events.append(
            {"ph": "X", "cat": category, "name": "task", "pid": pid, "tid": 990, "ts": at, "dur": 1_000 * share}
        )
    made.write(folder)


@pytest.mark.parametrize(
    ("process", "category", "share", "is_named"),
    [
        ("DLA 0", "dla", 0.75, True),
        ("Accelerator 7", "gpu_op", 0.75, True),
        ("DLA 0", "dla", 0.01, False),
        ("Traces", "dla", 0.75, False),
        ("CUPTI", "overhead", 0.75, False),
        (None, "sampling", 0.75, False),
    ],
)
def test_a_busy_track_beside_a_gpu_is_named(tmp_path, process, category, share, is_named):
    track(tmp_path, process, category, share)
    report = analyze([tmp_path])
    unread = report.facts.critical.trace.unread
    assert bool(unread) == is_named and (not unread or f"'{process}'" in unread[0])


@pytest.mark.parametrize(("early_us", "is_doubted"), [(0, False), (3, False), (500, True), (8_000, True)])
def test_kernels_before_their_launches_make_idle_time_doubtful(tmp_path, early_us, is_doubted):
    made = gpu_run(steps=5)
    calls = {event["args"]["correlation"]: event for event in made.events if event.get("cat") == "cuda_runtime"}
    for event in made.events:
        call = calls.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and call is not None and early_us:
            event["ts"] = call["ts"] - early_us
    made.write(tmp_path)
    report = analyze([tmp_path])
    said = [text for text in report.verdict.why.split("; ") if "clocks" in text]
    assert bool(said) == is_doubted
    assert "launch-bound" not in [one.code for one in report.findings] or not is_doubted


TABLES["MPI_COLLECTIVES_EVENTS"] = "start, end, globalTid, textId, size"
TABLES["OSRT_API"] = "start, end, globalTid, correlationId, nameId"


def slow_host(folder: Path, kernel_us: int = 3_000, kernels: int = 1, gap_us: int = 7_000, **more) -> Path:
    """6 steps of `kernels` kernels, after each of which the device idles; the host is in no range."""
    ranges, calls, work = [], [], []
    step_ns = kernels * (kernel_us + gap_us) * 1_000
    for step in range(6):
        ranges.append((step * step_ns, (step + 1) * step_ns - 1_000, 59, f"step {step}", PID | 77, None))
        for index in range(kernels):
            at, number = step * step_ns + index * (kernel_us + gap_us) * 1_000, step * kernels + index + 1
            calls.append((at + 1_000, at + 9_000, PID | 77, number, 1))
            work.append((at + 10_000, at + 10_000 + kernel_us * 1_000, 0, 7, number, PID, 2, 2, None))
    tables = {
        "StringIds": [(1, "cudaLaunchKernel_v7000"), (2, "void gemm<float>(int)"), (3, "read")],
        "NVTX_EVENTS": ranges,
        "CUPTI_ACTIVITY_KIND_RUNTIME": calls,
        "CUPTI_ACTIVITY_KIND_KERNEL": work,
        "TARGET_INFO_GPU": [(0, "NVIDIA H100 80GB HBM3")],
    }
    return export(folder, **tables | more)


def test_communication_of_the_host_that_nobody_reads_is_named(tmp_path):
    rows = [(10_000_000 * step + 3_100_000, 10_000_000 * step + 9_900_000, PID | 77, None, 4) for step in range(6)]
    slow_host(tmp_path, MPI_COLLECTIVES_EVENTS=rows)
    report = analyze([tmp_path])
    assert "MPI_COLLECTIVES_EVENTS" in report.verdict.why and "40.8 ms" in report.verdict.why
    assert report.verdict.confidence == "low"


def test_calls_of_the_system_that_nobody_reads_are_noted(tmp_path):
    """They are recorded by default: the longest of threads that launch is named, others' waiting is not."""
    own = [(10_000_000 * step + 3_100_000, 10_000_000 * step + 9_900_000, PID | 77, 1, 3) for step in range(6)]
    other = [(0, 60_000_000, PID | 78, 1, 2)]
    slow_host(tmp_path, OSRT_API=own + other)
    report = analyze([tmp_path])
    [said] = [note for note in report.facts.critical.trace.notes if "OSRT_API" in note]
    assert wording("analysis/calls-of-read", 6) in said and "40.8 ms" in said and report.verdict.confidence == "high"


@pytest.mark.parametrize(
    ("kernel_us", "kernels", "gap_us", "code"),
    [(3_000, 1, 7_000, "host-gaps"), (20, 40, 60, "launch-bound"), (20, 40, 2_500, "host-gaps")],
)
def test_only_small_kernels_that_come_in_short_order_are_bound_by_launching(tmp_path, kernel_us, kernels, gap_us, code):
    slow_host(tmp_path, kernel_us, kernels, gap_us)
    assert [one.code for one in analyze([tmp_path]).findings if one.code in ("host-gaps", "launch-bound")] == [code]
