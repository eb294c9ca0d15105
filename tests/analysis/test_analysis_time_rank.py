"""Where a step goes, on made traces with and without a GPU: rows with known answers, each cause of idleness alone, and
properties of any soup of events."""

import numpy as np
import pytest
from support.trace_maker import AUTOGRAD, COPY_STREAM, GLOO, MAIN, MadeTrace, cpu_run, gpu_run, measure, place
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.time.time_results import ROW_TITLES, RankTime


def two_kernels(idle_us: float, launched: float, *events: tuple) -> MadeTrace:
    """One step: a kernel until 200 that was launched in time, then a gap, then a kernel launched at `launched`."""
    return MadeTrace().add_all(
        ("step", 1, 0, 1000 + idle_us),
        ("kernel", "first", 10, 200, 0),
        ("kernel", "second", 200 + idle_us, 300 + idle_us, launched),
        *events,
    )


def rows_us(time: RankTime) -> dict[str, float]:
    return {row: round(ms * 1e3, 3) for row, ms in time.rows.items() if ms}


def idle_rows(time: RankTime) -> dict[str, float]:
    """us per row, of what is idle after the first kernel: without the first launch call, and 5 us of latency."""
    rows = rows_us(time)
    rows.pop("compute")
    rows |= {row: round(rows.get(row, 0) - 5, 3) for row in ("host", "launch")}
    return {row: us for row, us in rows.items() if us}


def test_a_whole_run_has_the_rows_that_were_made(tmp_path):
    time = measure(gpu_run(steps=5, all_reduce_us=300, world_size=2), tmp_path)
    rows = {row: ms * 1e3 for row, ms in time.rows.items()}
    wanted = {"compute": 700, "exposed_communication": 100, "exposed_copy": 10}
    assert {row: rows[row] for row in wanted} == pytest.approx(wanted)
    assert (time.step_ms, time.busy_ms, time.idle_ms) == pytest.approx((1.0, 0.81, 0.19))
    assert (time.overlap, time.communication_ms) == pytest.approx((2 / 3, 0.3))
    assert (time.launches, time.device, time.spilled_ms) == (4.0, "NVIDIA A100-SXM4-80GB", 0.0)
    step = time.steps[time.timeline_step]
    phases = {"forward", "backward", "communication", "copies", "optimizer_step"}
    assert {span.name for span in time.timeline} == {*phases, ROW_TITLES["data_wait"]}
    waits = sum(span.end_ns - span.start_ns for span in time.timeline if span.name == ROW_TITLES["data_wait"])
    assert waits / 1e6 == pytest.approx(time.rows["data_wait"]) and waits > 0
    assert all(step.start_ns <= span.start_ns < span.end_ns <= step.end_ns for span in time.timeline)


def test_phases_have_the_device_time_and_not_the_hosts(tmp_path):
    """A synchronization makes the host stand in data_to_device, although the device copies for 34 us only."""
    made = MadeTrace()
    for index in range(3):
        at = index * 30_000
        made.step(index, at, at + 29_900)
        made.annotation("data_to_device", at, at + 28_000)
        made.copy("Memcpy HtoD (Pageable -> Device)", at + 27_000, at + 27_034, at + 100, 1 << 14, call_end=at + 27_950)
        made.annotation("forward", at + 28_000, at + 28_500)
        made.kernel("gemm", at + 28_600, at + 54_000, at + 28_100)
    sends, forward = measure(made, tmp_path).phases
    assert (sends.name, forward.name) == ("data_to_device", "forward")
    assert (sends.host_ms, sends.device_ms, sends.copy_ms) == pytest.approx((28, 0.034, 0.034))
    assert (forward.host_ms, forward.device_ms, forward.lag_ms) == pytest.approx((0.5, 25.4, 0.6))


def test_streams_at_once_count_once_but_their_sum_is_told(tmp_path):
    made = MadeTrace().add_all(
        ("step", 1, 0, 1000),
        ("annotation", "forward", 0, 900),
        ("kernel", "a", 100, 300, 10),
        ("kernel", "b", 200, 400, 20, {"stream": 8}),
        ("kernel", "c", 380, 420, 30),  # begins before the one on the other stream ends, as dependent launches do
    )
    [phase] = measure(made, tmp_path).phases
    assert (phase.device_ms, phase.device_sum_ms, phase.device_span_ms) == pytest.approx((0.32, 0.44, 0.32))


LATE = {"host": 95, "launch": 5}  # of 100 us, where the next kernel is launched at 290


@pytest.mark.parametrize(
    ("idle", "launched", "events", "wanted"),
    [
        (100, 290, [], LATE),
        (100, 290, [("annotation", "data", 210, 270)], {"host": 35, "data_wait": 60, "launch": 5}),
        *(
            (100, 290, [("runtime", call, 210, 250)], {"allocator": 40, "host": 55, "launch": 5})
            for call in ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "hipMalloc")
        ),
        *(
            (100, 290, [("runtime", call, 210, 250)], {"sync": 40, "host": 55, "launch": 5})
            for call in ("cudaStreamSynchronize", "hipDeviceSynchronize", "cudaMemcpy")
        ),
        *((100, 290, [("runtime", call, 210, 250)], LATE) for call in ("cudaEventQuery", "cudaMemcpyAsync")),
        *(
            (100, 290, [("frame", name, 220, 260)], {"garbage_collector": 40, "host": 55, "launch": 5})
            for name in ("<built-in function collect>", "Python GC")
        ),
        (100, 290, [("frame", "gc.py(10): gc_collect", 220, 260)], LATE),
        (
            100,
            290,
            [("annotation", "save", 210, 230), ("annotation", "eval", 240, 260)],
            {"save": 40, "host": 55, "launch": 5},
        ),
        (100, 290, [("sync", 100, 280, "cudaStreamSynchronize", 77)], LATE),  # of another thread: not in the way
        # what was queued in time is latency, dependency or unexplained
        (8, 50, [], {"launch": 8}),
        (80, 50, [], {"unexplained": 80}),
        (80, 50, [("runtime", "cudaStreamWaitEvent", 40, 42)], {"dependency": 80}),
        (80, 50, [("runtime", "cudaStreamWaitEvent", -3, -1)], {"unexplained": 80}),  # before the previous work
    ],
)
def test_each_cause_of_idleness_alone(tmp_path, idle, launched, events, wanted):
    assert idle_rows(measure(two_kernels(idle, launched, *events), tmp_path)) == wanted


def test_a_loader_that_the_device_hides_costs_nothing(tmp_path):
    time = measure(two_kernels(0.5, 150, ("annotation", "data", 20, 140)), tmp_path)
    assert not time.rows["data_wait"] and time.loader_host_ms == pytest.approx(0.12)


def test_work_without_a_launch_call_leaves_its_gap_unexplained(tmp_path):
    time = measure(two_kernels(80, 50, ("kernel", "strange", 240, 270, None)), tmp_path)
    assert idle_rows(time)["unexplained"] == 50 and time.spilled_ms == pytest.approx(0.03)
    assert wording("analysis/have-no-launch-call") in " ".join(time.notes)


def test_a_synchronization_costs_what_the_host_lost_in_it(tmp_path):
    """The host stood in it from 100 to 205: without it, the next launch had come 105 us earlier."""
    made = two_kernels(200, 390, ("frame", "train.py(7): log_loss", 90, 210))
    made.sync(100, 205, operator="aten::item")
    time = measure(made, tmp_path)
    assert idle_rows(time) == {"sync": 105, "host": 90, "launch": 5}
    [site] = time.syncs
    assert (site.call, site.operator, site.frame) == ("cudaStreamSynchronize", "aten::item", "train.py(7): log_loss")
    assert (site.per_step, site.host_ms, site.idle_ms) == pytest.approx((1, 0.105, 0.105))
    time = measure(gpu_run(steps=5, item=True), tmp_path)
    assert (time.syncs[0].operator, time.syncs[0].per_step) == ("aten::item", 1) and time.rows["sync"] > 0


def test_a_synchronization_with_work_still_queued_costs_nothing(tmp_path):
    time = measure(two_kernels(0, 20, ("sync", 100, 150, "cudaEventSynchronize")), tmp_path)
    assert not time.rows["sync"]
    assert [(site.call, site.idle_ms) for site in time.syncs] == [("cudaEventSynchronize", 0)]


def test_an_unpinned_copy_is_a_synchronization_and_named(tmp_path):
    made = MadeTrace().add_all(
        ("step", 1, 0, 1000),
        ("kernel", "first", 10, 200, 0),
        ("op", "aten::to", 40, 320),
        ("copy", "Memcpy HtoD (Pageable -> Device)", 220, 300, 50, 1 << 20, {"call_end": 310}),
    )
    time = measure(made, tmp_path)
    assert time.rows["sync"] == pytest.approx(0.020)
    assert (time.syncs[0].call, time.syncs[0].operator) == ("cudaMemcpyAsync (pageable memory)", "aten::to")


def test_what_the_host_did_instead_is_named(tmp_path):
    without = measure(two_kernels(200, 390), tmp_path)
    assert {site.what for site in without.hosts} == {wording("analysis/unnamed-work-between-operators")}
    made = two_kernels(
        200,
        390,
        ("op", "aten::linear", 210, 300),
        ("op", "aten::addmm", 220, 290),  # inside: the outermost is what a program calls
        ("frame", "model.py(12): forward", 150, 399),
        ("frame", "torch/nn/modules/module.py(1773): _call_impl", 160, 398),
    )
    found = {site.what: site.idle_ms * 1e3 for site in measure(made, tmp_path).hosts}
    assert (found["aten::linear"], found["model.py(12): forward"]) == pytest.approx((90, 105))


def test_small_kernels_are_launch_bound_and_a_graph_of_them_is_not(tmp_path):
    """Kernels of 5 us every 20 us; as a graph they are queued long before."""
    single, graph = MadeTrace(), MadeTrace()
    for index in range(3):
        at = index * 2000
        single.step(index, at, at + 1990)
        graph.step(index, at, at + 1990)
        starts = [at + 100 + 20 * k for k in range(90)]
        graph.graph([("small", start, start + 5) for start in starts], launched=at + 10)
        for start in starts:
            single.kernel("small", start, start + 5, start - 7)
    time, queued = measure(single, tmp_path), measure(graph, tmp_path)
    assert time.launch_bound and time.rows["host"] > 0.5 * time.step_ms
    assert (time.median_kernel_us, time.median_launch_interval_us, time.median_queue_us) == pytest.approx((5, 20, 2))
    assert not queued.launch_bound and queued.rows["unexplained"] > 0.5 * queued.step_ms


def test_copies_not_overlapped_with_compute(tmp_path):
    made = MadeTrace().add_all(
        ("step", 1, 0, 1000),
        ("kernel", "k", 100, 200, 10),
        ("copy", "Memcpy DtoH (Device -> Pinned)", 150, 260, 20, 4096, {"stream": COPY_STREAM}),
        ("collective", 240, 300, 30),
        ("kernel", "k", 300, 310, 40),
    )
    rows = measure(made, tmp_path).rows  # compute until 200, communication from 240 on
    assert (rows["exposed_copy"], rows["exposed_communication"]) == pytest.approx((0.040, 0.060))


def test_a_gpu_beside_the_busiest_is_left_out_with_a_note(tmp_path):
    made = gpu_run(steps=3)
    made.kernel("other", 100, 200, 50)["args"]["device"] = 1
    assert "drives 2 GPUs" in " ".join(measure(made, tmp_path).notes)


def test_no_launch_calls_at_all_are_one_note(tmp_path):
    made = gpu_run(steps=3)
    made.events = [event for event in made.events if event["cat"] != "cuda_runtime"]
    time = measure(made, tmp_path)
    assert wording("analysis/no-device-work-can") in " ".join(time.notes)
    assert time.rows["unexplained"] > 0 and not time.launch_bound


def test_a_trace_without_any_event_of_use_is_no_error(tmp_path):
    time = measure(MadeTrace().add_all(("step", 1, 0, 1000)), tmp_path)
    assert (time.step_ms, time.rows, time.steady_steps) == (0.0, {}, ())
    assert wording("analysis/no-step-has-any") in time.notes


# --- without a GPU


def test_a_whole_cpu_run_has_the_rows_that_were_made(tmp_path):
    time = measure(cpu_run(steps=5), tmp_path)
    assert (time.on_gpu, time.device, time.syncs, time.launches) == (False, None, (), 0.0)
    # gloo runs from 500 to 800; operators until 550 and from 800 on
    wanted = {"data_wait": 100, "compute": 490, "exposed_communication": 250, "host": 160}
    assert rows_us(time) == pytest.approx(wanted, abs=1.01)  # the last step ends 5 us early
    assert (time.overlap, time.loader_host_ms) == pytest.approx((1 / 6, 0.1))
    phases = ["data", "forward", "backward", "grad_sync", "optimizer_step"]
    assert [phase.name for phase in time.phases] == phases
    assert [span.name for span in time.timeline] == [*phases[:3], "communication", *phases[3:]]
    backward = time.phases[2]
    assert (backward.host_ms, backward.compute_ms, backward.communication_ms) == pytest.approx((0.3, 0.24, 0.1))
    assert backward.device_ms == backward.host_ms


ENGINE = "autograd::engine::evaluate_function: "


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        # waiting inside autograd's wrapper is communication, and its own work is compute
        (
            [("op", f"{ENGINE}torch::autograd::AccumulateGrad", 400, 700), ("gloo", 500, 700)],
            {"compute": 300, "exposed_communication": 200, "host": 500},
        ),
        # a collective operator waits
        (
            [("op", "c10d::allreduce_", 400, 700), ("gloo", 410, 700)],
            {"compute": 210, "exposed_communication": 290, "host": 500},
        ),
        # so does whatever calls one that waits
        (
            [
                ("op", "_SumOverRanks", 400, 700),
                ("op", "_c10d_functional::wait_tensor", 450, 680),
                ("op", "PythonDispatchMode", 460, 670),
                ("gloo", 410, 650),
            ],
            {"compute": 300, "exposed_communication": 200, "host": 500},
        ),
        # operators of autograd's thread and compiled code compute; a loader's thread is not the step's
        (
            [
                ("op", "aten::mm", 200, 400, AUTOGRAD),
                ("op", f"{ENGINE}MmBackward0", 200, 400, AUTOGRAD),
                ("op", "aten::stack", 500, 600, 77),
                ("annotation", "## Call CompiledFxGraph abc ##", 700, 800),
            ],
            {"compute": 400, "host": 600},
        ),
        # collating is loading
        (
            [
                ("annotation", "data", 0, 90),
                ("op", "aten::stack", 10, 50),
                ("annotation", "save", 800, 900),
                ("frame", "<built-in function collect>", 600, 650),
            ],
            {"data_wait": 90, "compute": 200, "save": 100, "garbage_collector": 50, "host": 560},
        ),
    ],
)
def test_each_row_of_a_cpus_step(tmp_path, events, wanted):
    made = MadeTrace(device=None).add_all(("step", 1, 0, 1000), ("op", "aten::mm", 100, 300), *events)
    assert rows_us(measure(made, tmp_path)) == wanted


def test_phases_and_lines_of_a_cpus_step(tmp_path):
    made = MadeTrace(device=None).add_all(
        ("step", 1, 0, 1000),
        ("op", "aten::mm", 100, 300),
        ("annotation", "forward", 50, 400),
        ("annotation", "clip_grad", 100, 150),  # inside another: not counted twice
        ("frame", "train.py(3): tokenize", 600, 900),
    )
    time, between = measure(made, tmp_path), "Python between operators"
    assert {phase.name: phase.host_ms * 1e3 for phase in time.phases} == pytest.approx(
        {"forward": 300, "clip_grad": 50}
    )
    wanted = {(between, ""): 350, (between, "forward"): 150, ("train.py(3): tokenize", ""): 300}
    assert {(site.what, site.phase): site.idle_ms * 1e3 for site in time.hosts} == pytest.approx(wanted)


# --- whatever stands in a trace: no error, and rows that sum to the step

NAMES = {
    "op": ("aten::mm", "aten::item", "aten::to", f"{ENGINE}X", "c10d::allreduce_", "", "\x00<b>"),
    "runtime": ("cudaStreamSynchronize", "cudaMalloc", "cudaStreamWaitEvent", "cudaEventQuery", "cudaMemcpyAsync", "?"),
    "annotation": (
        *("forward", "backward", "data", "save", "eval", "gloo:all_reduce", "nccl:all_reduce", "layers.0 forward"),
        *("step 7", "##", "enumerate(DataLoader)#x.__next__", "Optimizer.step#Y.step"),
    ),
    "frame": (
        *("train.py(3): step", "<built-in function collect>", "torch/nn/module.py(1): call", "nn.Module: X_0"),
        *("(", ".py(1): "),
    ),
    "kernel": ("gemm", "ncclDevKernel_AllReduce", "", "Memcpy HtoD (Pageable -> Device)"),
}


def soup(random, gpu: bool, marked: bool) -> MadeTrace:
    """Ranges that cross each other, empty ones, work before its launch, whole kinds missing."""
    made = MadeTrace(device="NVIDIA A100" if gpu else None)
    for number in range(random.integers(1, 5) if marked else 0):
        made.step(number * int(random.integers(1, 3)), number * 500, number * 500 + float(random.integers(0, 700)))
    for method, most in {"op": 40, "annotation": 20, "frame": 20, "runtime": 20 * gpu, "kernel": 60 * gpu}.items():
        for _ in range(random.integers(0, most + 1)):
            start = float(random.integers(0, 2000))
            end, thread = start + float(random.choice([0, 1, 30, 400])), int(random.choice([MAIN, AUTOGRAD, GLOO]))
            named = {"thread": thread}
            if method == "op":
                named["sequence"] = int(random.integers(-1, 3))
            elif method == "kernel":
                named["stream"] = int(random.integers(7, 10))
                named["launched"] = random.choice([None, start - 20, start + 50, start - 300])
            getattr(made, method)(random.choice(NAMES[method]), start, end, **named)
    made.annotation("at least one event", 5, 6)
    return made


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_any_soup_of_events_gives_figures(tmp_path, gpu, seed):
    made = soup(np.random.default_rng(seed), gpu, marked=seed % 3 > 0)
    time, (_, placing) = measure(made, tmp_path), place(made, tmp_path)
    assert time.busy_ms <= time.step_ms + 1e-9
    assert all(0 <= phase.device_ms <= phase.device_sum_ms + 1e-9 for phase in time.phases)
    assert time.overlap is None or 0 <= time.overlap <= 1 + 1e-9
    assert placing.step.max(initial=-1) < len(placing.steps) and placing.phase.max(initial=-1) < len(placing.phases)
    ends = [step.end_ns for step in placing.steps]
    assert ends == sorted(ends) and all(step.end_ns >= step.start_ns for step in placing.steps)
    assert analyze([tmp_path]).verdict.sentence
