"""Step, phase and operator of each event: made traces with known answers."""

import pytest
from trace_maker import AUTOGRAD, MAIN, MadeTrace, cpu_run, gpu_run

from megatron_lite.analysis.time.find_phases import known_phase, label_phase
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.analysis.trace.read import read_traces


def placed(made: MadeTrace, folder):
    [trace] = read_traces(made.write(folder))
    return trace, attribute_events(trace)


def phase_by_name(trace, placing, kind=Kind.KERNEL) -> dict[str, set]:
    """name of an event -> phases of its instances."""
    found: dict[str, set] = {}
    for row in trace.rows[kind]:
        phase = placing.phase[row]
        found.setdefault(trace.name_of(row), set()).add(placing.phases[phase] if phase >= 0 else None)
    return found


def test_device_work_belongs_where_it_was_launched_on_any_thread(tmp_path):
    trace, placing = placed(gpu_run(all_reduce_us=300, world_size=2), tmp_path)
    kernels = phase_by_name(trace, placing)
    assert kernels["ampere_sgemm_128x64_tn"] == {"forward"}
    assert kernels["ampere_sgemm_128x64_nt"] == {"backward"}  # autograd's thread carries no phase of its own
    assert next(phases for name, phases in kernels.items() if "AllReduce" in name) == {"backward"}
    assert phase_by_name(trace, placing, Kind.MEMCPY) == {"Memcpy HtoD (Pinned -> Device)": {"data_to_device"}}
    assert [step.number for step in placing.steps] == [10, 11, 12, 13]
    assert sorted(placing.step[trace.device_rows]) == sorted([0, 1, 2, 3] * 5)
    assert trace.threads[placing.main_thread][1] == str(MAIN)


def test_the_operator_is_the_innermost_around_the_launch_and_an_operators_own_is_its_parent(tmp_path):
    trace, placing = placed(gpu_run(steps=2), tmp_path)
    backward = next(row for row in trace.rows[Kind.KERNEL] if trace.name_of(row).endswith("_nt"))
    inner = placing.operator[backward]
    assert trace.name_of(inner) == "aten::mm"
    assert trace.name_of(placing.operator[inner]).startswith("autograd::engine")
    assert placing.operator[placing.operator[inner]] == -1


def test_a_graph_takes_the_phase_of_its_only_call(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.annotation("forward", 10, 100)
    made.graph([("k1", 200, 300), ("k2", 310, 400), ("k3", 400, 480)], launched=50)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {name: {"forward"} for name in ("k1", "k2", "k3")}


def test_zero_grad_is_a_phase_inside_another_too(tmp_path):
    made = MadeTrace()
    for number in range(2):
        at = 1000 * number
        made.step(number, at, at + 990)
        made.annotation("forward", at + 10, at + 500)
        made.annotation("Optimizer.zero_grad#AdamW.zero_grad", at + 20, at + 100)
        made.op("aten::zero_", at + 30, at + 60)
        made.kernel("fill", at + 120, at + 150, at + 40)
        made.kernel("gemm", at + 150, at + 450, at + 200)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {"fill": {"Optimizer.zero_grad"}, "gemm": {"forward"}}


def test_work_without_a_launch_call_belongs_to_nothing(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.annotation("forward", 10, 100)
    made.kernel("early", 5, 60, None)
    made.kernel("own", 70, 90, 20)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {"early": {None}, "own": {"forward"}}
    assert placing.step[trace.rows[Kind.KERNEL]].tolist() == [-1, 0]


def test_without_phases_operators_tell(tmp_path):
    """A foreign training loop: nothing but PyTorch's own ranges."""
    made = MadeTrace()
    made.step(1, 0, 2000)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100)
    made.op("aten::to", 110, 140)
    made.copy("Memcpy HtoD (Pageable -> Device)", 125, 135, 120, 4096)
    made.op("aten::linear", 200, 300, sequence=5)
    made.kernel("fwd", 400, 500, 220)
    made.op("autograd::engine::evaluate_function: AddmmBackward0", 310, 400, AUTOGRAD, sequence=5, forward_thread=1)
    made.kernel("bwd", 500, 700, 320, thread=AUTOGRAD)
    made.op("aten::add", 410, 430, AUTOGRAD)  # sums gradients between two nodes: inside no node's range
    made.kernel("accumulate", 700, 750, 415, thread=AUTOGRAD)
    made.annotation("Optimizer.step#SGD.step", 500, 600)
    made.kernel("sgd", 750, 800, 520)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {
        "fwd": {"forward"},
        "bwd": {"backward"},
        "accumulate": {"backward"},
        "sgd": {"optimizer_step"},
    }
    assert phase_by_name(trace, placing, Kind.MEMCPY) == {"Memcpy HtoD (Pageable -> Device)": {"data_to_device"}}


def test_foreign_ranges_are_phases_where_they_are_outermost(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.annotation("## generate ##", 10, 300)
    made.annotation("helper", 20, 100)
    made.annotation("## backward ##", 310, 600)
    made.annotation("nccl:all_reduce", 700, 720)
    made.kernel("a", 30, 40, 25)
    made.kernel("b", 700, 800, 400)
    made.kernel("c", 800, 900, 710)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {"a": {"generate"}, "b": {"backward"}, "c": {None}}


def test_a_range_around_the_whole_step_gives_way_to_what_it_holds(tmp_path):
    made = MadeTrace()
    for index in range(3):
        at = index * 1000
        made.step(index, at, at + 990)
        made.annotation("train_one_batch", at + 2, at + 985)
        made.annotation("encoder", at + 10, at + 400)
        made.annotation("decoder", at + 400, at + 900)
        made.kernel("e", at + 100, at + 200, at + 20)
        made.kernel("d", at + 500, at + 600, at + 450)
    trace, placing = placed(made, tmp_path)
    assert phase_by_name(trace, placing) == {"e": {"encoder"}, "d": {"decoder"}}


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["step 5", "step 6", "step 7"], [5, 6, 7]),
        (["iteration_5", "iteration_6", "iteration_7"], [5, 6, 7]),
        (["Train Step #5", "Train Step #6", "Train Step #7"], [5, 6, 7]),
    ],
)
def test_numbered_ranges_are_steps(tmp_path, names, numbers):
    made = MadeTrace()
    made.annotation("capture", 0, 5000)
    for index, name in enumerate(names):
        made.annotation(name, 100 + index * 1000, 1000 + index * 1000)
        made.kernel("k", 200 + index * 1000, 900 + index * 1000, 150 + index * 1000)
    _, placing = placed(made, tmp_path)
    assert [step.number for step in placing.steps] == numbers
    assert placing.notes == ()


def test_a_range_that_repeats_stands_in_for_steps(tmp_path):
    made = MadeTrace()
    for at in (100, 1100, 2100):
        made.annotation("my_update", at, at + 800)
        made.annotation("nccl:all_reduce", at + 810, at + 990)  # no step, however often it comes
        made.kernel("k", at + 100, at + 700, at + 50)
    _, placing = placed(made, tmp_path)
    assert [step.name for step in placing.steps] == ["my_update"] * 3
    assert "my_update" in placing.notes[0]


def test_without_any_mark_the_trace_is_one_step(tmp_path):
    made = MadeTrace()
    made.kernel("k", 100, 700, 50)
    made.op("aten::mm", 40, 60)
    _, placing = placed(made, tmp_path)
    assert [(step.name, step.steady) for step in placing.steps] == [("whole trace", True)]
    assert "counts as one step" in placing.notes[0]


def test_two_windows_in_one_file_leave_a_hole(tmp_path):
    made = gpu_run(steps=3, first=10)
    later = gpu_run(steps=3, first=110)
    for event in later.events:
        event["ts"] += 50_000
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 1000
    made.events += later.events
    _, placing = placed(made, tmp_path)
    assert [step.number for step in placing.steps] == [10, 11, 12, 110, 111, 112]
    assert max(step.ms for step in placing.steps) < 2  # the 47 ms between the windows belong to no step


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("## forward ##", "forward"),
        ("Optimizer.step#AdamW.step", "optimizer_step"),
        ("forward-compute", "forward"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data"),
        ("batch-generator", "data"),
        ("DistributedDataParallel.forward", "forward"),
        ("## sparse_data_dist ##", "sparse_data_dist"),
        ("Optimizer.zero_grad#SGD.zero_grad", "Optimizer.zero_grad"),
        ("###", "###"),
    ],
)
def test_names_of_other_people(name, label):
    assert label_phase(name) == label


def test_what_means_no_phase_is_none():
    assert known_phase("forwarding_table") is None


def test_events_between_steps_belong_to_the_later_one(tmp_path):
    trace, placing = placed(cpu_run(steps=3), tmp_path)
    rows = trace.rows[Kind.OP]
    assert set(placing.step[rows]) == {0, 1, 2}
    assert placing.step[trace.rows[Kind.ANNOTATION]].min() == 0


def test_a_step_that_begins_with_its_first_phase_is_not_inside_it(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.annotation("data", 0, 100)
    made.annotation("forward", 100, 300)
    made.annotation("nested", 100, 300)
    made.kernel("k", 200, 900, 150)
    trace, placing = placed(made, tmp_path)
    phases = phase_by_name(trace, placing, Kind.ANNOTATION)
    assert phases["ProfilerStep#1"] == {None}
    assert phases["nested"] == {"forward"}


def test_thousands_of_names_are_not_thousands_of_phases(tmp_path):
    made = MadeTrace()
    made.step(1, 0, 300_000)
    for batch in range(500):
        made.annotation(f"batch {batch}", 100 * batch, 100 * batch + 90)
    made.annotation("forward", 60_000, 200_000)
    made.kernel("k", 70_000, 90_000, 60_100)
    trace, placing = placed(made, tmp_path)
    assert len(placing.phases) <= 100
    assert phase_by_name(trace, placing) == {"k": {"forward"}}
