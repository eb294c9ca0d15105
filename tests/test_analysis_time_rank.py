"""Where a step goes, on made traces of a GPU: rows with known answers, and each cause of idleness alone."""

from dataclasses import replace

import pytest
from trace_maker import AUTOGRAD, COPY_STREAM, NCCL_STREAM, MadeTrace, gpu_run

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime
from megatron_lite.analysis.trace.read import read_traces


def timed(made: MadeTrace, folder) -> RankTime:
    [trace] = read_traces(made.write(folder))
    time = rank_time(trace, attribute_events(trace))
    assert set(time.rows) <= set(ROW_TITLES)
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, abs=1e-9)
    assert all(ms >= 0 for ms in time.rows.values())
    return time


def two_kernels(idle_us: float, launched: float, call_us: float = 5.0, **kernel) -> MadeTrace:
    """One step: a kernel until 200 that was launched in time, then a gap, then a kernel launched at `launched`."""
    made = MadeTrace()
    made.step(1, 0, 1000 + idle_us)
    made.kernel("first", 10, 200, 0)
    made.kernel("second", 200 + idle_us, 300 + idle_us, launched, call_end=launched + call_us, **kernel)
    return made


def idle_rows(time: RankTime) -> dict[str, float]:
    """us per row, of what is idle after the first kernel."""
    rows = {row: round(ms * 1e3, 3) for row, ms in time.rows.items() if ms}
    rows.pop("compute")
    rows["host"] = round(rows.get("host", 0) - 5, 3)  # the step's first launch call, and 5 us of latency
    rows["launch"] = round(rows.get("launch", 0) - 5, 3)
    return {row: us for row, us in rows.items() if us}


def test_a_whole_run_has_the_rows_that_were_made(tmp_path):
    time = timed(gpu_run(steps=5, all_reduce_us=300, world_size=2), tmp_path)
    rows = {row: ms * 1e3 for row, ms in time.rows.items()}
    assert time.step_ms == pytest.approx(1.0)
    assert rows["compute"] == pytest.approx(700)
    assert rows["exposed_communication"] == pytest.approx(100)
    assert rows["exposed_copy"] == pytest.approx(10)
    assert time.overlap == pytest.approx(2 / 3)
    assert time.communication_ms == pytest.approx(0.3)
    assert time.busy_ms == pytest.approx(0.81)
    assert time.idle_ms == pytest.approx(0.19)
    assert (time.launches, time.device, time.spilled_ms) == (4.0, "NVIDIA A100-SXM4-80GB", 0.0)


def test_phases_have_the_device_time_and_not_the_hosts(tmp_path):
    """A synchronisation makes the host stand in data_to_device, although the device copies for 34 us only."""
    made = MadeTrace()
    for index in range(3):
        at = index * 30_000
        made.step(index, at, at + 29_900)
        made.annotation("data_to_device", at, at + 28_000)
        made.copy("Memcpy HtoD (Pageable -> Device)", at + 27_000, at + 27_034, at + 100, 1 << 14, call_end=at + 27_950)
        made.annotation("forward", at + 28_000, at + 28_500)
        made.kernel("gemm", at + 28_600, at + 54_000, at + 28_100)
    phases = {phase.name: phase for phase in timed(made, tmp_path).phases}
    assert list(phases) == ["data_to_device", "forward"]
    assert phases["data_to_device"].host_ms == pytest.approx(28)
    assert phases["data_to_device"].device_ms == pytest.approx(0.034)
    assert phases["data_to_device"].copy_ms == pytest.approx(0.034)
    assert (phases["forward"].host_ms, phases["forward"].device_ms) == pytest.approx((0.5, 25.4))
    assert phases["forward"].lag_ms == pytest.approx(0.6)


def test_streams_at_once_count_once_but_their_sum_is_told(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.annotation("forward", 0, 900)
    made.kernel("a", 100, 300, 10)
    made.kernel("b", 200, 400, 20, stream=8)
    made.kernel("c", 380, 420, 30)  # begins before the one on the other stream ends, as dependent launches do
    [phase] = timed(made, tmp_path).phases
    assert (phase.device_ms, phase.device_sum_ms, phase.device_span_ms) == pytest.approx((0.32, 0.44, 0.32))


def test_a_late_host_is_the_host(tmp_path):
    time = timed(two_kernels(100, launched=290), tmp_path)
    assert idle_rows(time) == {"host": 95, "launch": 5}


def test_the_loader_has_its_own_row(tmp_path):
    made = two_kernels(100, launched=290)
    made.annotation("data", 210, 270)
    time = timed(made, tmp_path)
    assert idle_rows(time) == {"host": 35, "data_wait": 60, "launch": 5}
    assert time.loader_host_ms == pytest.approx(0.06)


def test_a_loader_that_the_device_hides_costs_nothing(tmp_path):
    made = two_kernels(0.5, launched=150)
    made.annotation("data", 20, 140)
    time = timed(made, tmp_path)
    assert "data_wait" not in {row for row, ms in time.rows.items() if ms}
    assert time.loader_host_ms == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("call", "row"),
    [
        ("cudaMalloc", "allocator"),
        ("cudaFree", "allocator"),
        ("cudaHostAlloc", "allocator"),
        ("cuMemCreate", "allocator"),
        ("hipMalloc", "allocator"),
        ("cudaStreamSynchronize", "sync"),
        ("hipDeviceSynchronize", "sync"),
        ("cudaMemcpy", "sync"),
        ("cudaEventQuery", "host"),
        ("cudaMemcpyAsync", "host"),
    ],
)
def test_calls_of_the_runtime(tmp_path, call, row):
    made = two_kernels(100, launched=290)
    made.runtime(call, 210, 250)
    wanted = {"host": 95, "launch": 5} if row == "host" else {row: 40, "host": 55, "launch": 5}
    assert idle_rows(timed(made, tmp_path)) == wanted


@pytest.mark.parametrize("name", ["<built-in function collect>", "Python GC", "gc.py(10): gc_collect"])
def test_the_garbage_collector(tmp_path, name):
    made = two_kernels(100, launched=290)
    made.frame(name, 220, 260)
    assert idle_rows(timed(made, tmp_path)).get("garbage_collector") == (None if name.startswith("gc.py") else 40)


def test_saving_and_evaluating(tmp_path):
    made = two_kernels(100, launched=290)
    made.annotation("save", 210, 230)
    made.annotation("eval", 240, 260)
    time = timed(made, tmp_path)
    assert idle_rows(time)["save"] == 40
    assert "no step is a steady one" in time.notes[0]


def test_what_was_queued_in_time_is_latency_dependency_or_unexplained(tmp_path):
    assert idle_rows(timed(two_kernels(8, launched=50), tmp_path)) == {"launch": 8}
    assert idle_rows(timed(two_kernels(80, launched=50), tmp_path)) == {"unexplained": 80}
    made = two_kernels(80, launched=50)
    made.runtime("cudaStreamWaitEvent", 40, 42)
    assert idle_rows(timed(made, tmp_path)) == {"dependency": 80}


def test_a_wait_for_an_event_before_the_previous_work_is_no_reason(tmp_path):
    made = two_kernels(80, launched=50)
    made.runtime("cudaStreamWaitEvent", -3, -1)
    assert idle_rows(timed(made, tmp_path)) == {"unexplained": 80}


def test_work_without_a_launch_call_leaves_its_gap_unexplained(tmp_path):
    made = two_kernels(80, launched=50)
    made.kernel("strange", 240, 270, None)
    time = timed(made, tmp_path)
    assert idle_rows(time)["unexplained"] == 50
    assert time.spilled_ms == pytest.approx(0.03)
    assert "launched outside of the trace" in " ".join(time.notes)


def test_a_synchronisation_costs_what_the_host_lost_in_it(tmp_path):
    """The host stood in it from 100 to 205: without it, the next launch had come 105 us earlier."""
    made = two_kernels(200, launched=390)
    made.sync(100, 205, operator="aten::item")
    made.frame("train.py(7): log_loss", 90, 210)
    time = timed(made, tmp_path)
    assert idle_rows(time) == {"sync": 105, "host": 90, "launch": 5}
    [site] = time.syncs
    assert (site.call, site.operator, site.frame) == ("cudaStreamSynchronize", "aten::item", "train.py(7): log_loss")
    assert (site.per_step, site.host_ms, site.idle_ms) == pytest.approx((1, 0.105, 0.105))


def test_a_synchronisation_with_work_still_queued_costs_nothing(tmp_path):
    made = two_kernels(0, launched=20)
    made.sync(100, 150, call="cudaEventSynchronize")
    time = timed(made, tmp_path)
    assert not time.rows["sync"]
    assert [(site.call, site.idle_ms) for site in time.syncs] == [("cudaEventSynchronize", 0)]


def test_a_synchronisation_of_another_thread_is_not_in_the_way(tmp_path):
    made = two_kernels(100, launched=290)
    made.sync(100, 280, thread=77)
    assert idle_rows(timed(made, tmp_path)) == {"host": 95, "launch": 5}


def test_item_in_a_run_is_found_with_its_place(tmp_path):
    time = timed(gpu_run(steps=5, item=True), tmp_path)
    assert time.syncs[0].operator == "aten::item"
    assert time.syncs[0].per_step == 1
    assert time.rows["sync"] > 0


def test_an_unpinned_copy_is_a_synchronisation_and_named(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.kernel("first", 10, 200, 0)
    made.op("aten::to", 40, 320)
    made.copy("Memcpy HtoD (Pageable -> Device)", 220, 300, 50, 1 << 20, call_end=310)
    time = timed(made, tmp_path)
    assert time.rows["sync"] == pytest.approx(0.020)
    assert (time.syncs[0].call, time.syncs[0].operator) == ("cudaMemcpyAsync (pageable memory)", "aten::to")


def test_what_the_host_did_instead_is_named(tmp_path):
    made = two_kernels(200, launched=390)
    made.op("aten::linear", 210, 300)
    made.op("aten::addmm", 220, 290)  # inside: the outermost is what a program calls
    made.frame("model.py(12): forward", 150, 399)
    made.frame("torch/nn/modules/module.py(1773): _call_impl", 160, 398)
    found = {site.what: site.idle_ms * 1e3 for site in timed(made, tmp_path).hosts}
    assert found["aten::linear"] == pytest.approx(90)
    assert found["model.py(12): forward"] == pytest.approx(105)


def test_without_stacks_it_is_python(tmp_path):
    assert {site.what for site in timed(two_kernels(200, launched=390), tmp_path).hosts} == {"Python between operators"}


def launch_bound_run(graph: bool) -> MadeTrace:
    """Kernels of 5 us every 20 us; as a graph they are queued long before."""
    made = MadeTrace()
    for index in range(3):
        at = index * 2000
        made.step(index, at, at + 1990)
        starts = [at + 100 + 20 * k for k in range(90)]
        if graph:
            made.graph([("small", start, start + 5) for start in starts], launched=at + 10)
        else:
            for start in starts:
                made.kernel("small", start, start + 5, start - 7)
    return made


def test_small_kernels_are_launch_bound_and_a_graph_of_them_is_not(tmp_path):
    time = timed(launch_bound_run(graph=False), tmp_path)
    assert time.launch_bound
    assert (time.median_kernel_us, time.median_launch_interval_us, time.median_queue_us) == pytest.approx((5, 20, 2))
    assert time.rows["host"] > 0.5 * time.step_ms
    graph = timed(launch_bound_run(graph=True), tmp_path / "graph")
    assert not graph.launch_bound
    assert graph.rows["unexplained"] > 0.5 * graph.step_ms


def test_copies_that_nothing_hides(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.kernel("k", 100, 200, 10)
    made.copy("Memcpy DtoH (Device -> Pinned)", 150, 260, 20, 4096, stream=COPY_STREAM)
    made.collective(240, 300, 30, thread=AUTOGRAD, stream=NCCL_STREAM)
    made.kernel("k", 300, 310, 40)
    rows = timed(made, tmp_path).rows
    assert rows["exposed_copy"] == pytest.approx(0.040)  # compute until 200, communication from 240 on
    assert rows["exposed_communication"] == pytest.approx(0.060)


def test_the_timeline_shows_phases_apart_from_communication(tmp_path):
    time = timed(gpu_run(steps=5, all_reduce_us=300, world_size=2), tmp_path)
    step = time.steps[time.timeline_step]
    assert {span.name for span in time.timeline} == {"forward", "backward", "communication", "copies", "optimizer_step"}
    assert all(step.start_ns <= span.start_ns < span.end_ns <= step.end_ns for span in time.timeline)


def test_a_gpu_beside_the_busiest_is_left_out_with_a_note(tmp_path):
    made = gpu_run(steps=3)
    made.kernel("other", 100, 200, 50)["args"]["device"] = 1
    time = timed(made, tmp_path)
    assert "drives 2 GPUs" in " ".join(time.notes)


def test_no_launch_calls_at_all_are_one_note(tmp_path):
    made = gpu_run(steps=3)
    made.events = [event for event in made.events if event["cat"] != "cuda_runtime"]
    time = timed(made, tmp_path)
    assert "no device work can be joined" in " ".join(time.notes)
    assert time.rows["unexplained"] > 0
    assert not time.launch_bound


def test_a_trace_without_any_event_of_use_is_no_error(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    [trace] = read_traces(made.write(tmp_path))
    time = rank_time(trace, attribute_events(trace))
    assert (time.step_ms, time.rows) == (0.0, {})
    assert "no step has any work in it" in time.notes
    assert replace(time).steady_steps == ()
