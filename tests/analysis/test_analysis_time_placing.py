"""Step, phase and operator of each event, and which steps count: made traces with known answers."""

import pytest
from support.trace_maker import AUTOGRAD, MAIN, MadeTrace, cpu_run, gpu_run, measure, place
from support.wording import wording

from megatron_lite.analysis.time.range_names import known_phase, label_phase
from megatron_lite.analysis.trace.columns import Kind

COPY = "Memcpy HtoD (Pageable -> Device)"


def phase_by_name(trace, placing, kind=Kind.KERNEL) -> dict[str, set]:
    """name of an event -> phases of its instances."""
    found: dict[str, set] = {}
    for row in trace.rows[kind]:
        phase = placing.phase[row]
        found.setdefault(trace.name_of(row), set()).add(placing.phases[phase] if phase >= 0 else None)
    return found


def why_not(made: MadeTrace, folder) -> list[str]:
    """Of each step; "" for those that count."""
    return [step.why_not for step in place(made, folder)[1].steps]


def test_device_work_belongs_where_it_was_launched_on_any_thread(tmp_path):
    trace, placing = place(gpu_run(all_reduce_us=300, world_size=2), tmp_path)
    kernels = phase_by_name(trace, placing)
    assert kernels["ampere_sgemm_128x64_tn"] == {"forward"}
    assert kernels["ampere_sgemm_128x64_nt"] == {"backward"}  # autograd's thread carries no phase of its own
    assert next(phases for name, phases in kernels.items() if "AllReduce" in name) == {"backward"}
    assert phase_by_name(trace, placing, Kind.MEMCPY) == {"Memcpy HtoD (Pinned -> Device)": {"data_to_device"}}
    assert [step.number for step in placing.steps] == [10, 11, 12, 13]
    assert sorted(placing.step[trace.device_rows]) == sorted([0, 1, 2, 3] * 5)
    assert trace.threads[placing.main_thread][1] == str(MAIN)
    # the operator is the innermost around the launch, and an operator's own is its parent
    backward = next(row for row in trace.rows[Kind.KERNEL] if trace.name_of(row).endswith("_nt"))
    inner = placing.operator[backward]
    assert trace.name_of(inner) == "aten::mm"
    assert trace.name_of(placing.operator[inner]).startswith("autograd::engine")
    assert placing.operator[placing.operator[inner]] == -1


@pytest.mark.parametrize(
    ("events", "phases"),
    [
        pytest.param(
            [
                ("step", 1, 0, 1000),
                ("annotation", "forward", 10, 100),
                ("graph", [("k1", 200, 300), ("k2", 310, 400), ("k3", 400, 480)], 50),
            ],
            {"k1": "forward", "k2": "forward", "k3": "forward"},
            id="a graph takes the phase of its only call",
        ),
        pytest.param(
            [
                ("step", 1, 0, 990),
                ("annotation", "forward", 10, 500),
                ("annotation", "Optimizer.zero_grad#AdamW.zero_grad", 20, 100),
                ("op", "aten::zero_", 30, 60),
                ("kernel", "fill", 120, 150, 40),
                ("kernel", "gemm", 150, 450, 200),
            ],
            {"fill": "Optimizer.zero_grad", "gemm": "forward"},
            id="zero_grad is a phase inside another too",
        ),
        pytest.param(
            [
                ("step", 1, 0, 1000),
                ("annotation", "forward", 10, 100),
                ("kernel", "early", 5, 60, None),
                ("kernel", "own", 70, 90, 20),
            ],
            {"early": None, "own": "forward"},
            id="work without a launch call belongs to nothing",
        ),
        pytest.param(
            [
                ("step", 1, 0, 2000),
                ("annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100),
                ("op", "aten::to", 110, 140),
                ("copy", COPY, 125, 135, 120, 4096),
                ("op", "aten::linear", 200, 300, MAIN, None, None, 5),
                ("kernel", "fwd", 400, 500, 220),
                ("op", "autograd::engine::evaluate_function: X", 310, 400, AUTOGRAD, None, None, 5, 1),
                ("kernel", "bwd", 500, 700, 320, {"thread": AUTOGRAD}),
                ("op", "aten::add", 410, 430, AUTOGRAD),  # sums gradients between two nodes: inside no node's range
                ("kernel", "acc", 700, 750, 415, {"thread": AUTOGRAD}),
                ("annotation", "Optimizer.step#SGD.step", 500, 600),
                ("kernel", "sgd", 750, 800, 520),
            ],
            {"fwd": "forward", "sgd": "optimizer_step", COPY: "data_to_device", "bwd": "backward", "acc": "backward"},
            id="a foreign loop: nothing but PyTorch's own ranges",
        ),
        pytest.param(
            [
                ("step", 1, 0, 1000),
                ("annotation", "## generate ##", 10, 300),
                ("annotation", "helper", 20, 100),
                ("annotation", "## backward ##", 310, 600),
                ("annotation", "nccl:all_reduce", 700, 720),
                ("kernel", "a", 30, 40, 25),
                ("kernel", "b", 700, 800, 400),
                ("kernel", "c", 800, 900, 710),
            ],
            {"a": "generate", "b": "backward", "c": None},
            id="foreign ranges are phases where they are outermost",
        ),
        pytest.param(
            [
                ("step", 1, 0, 990),
                ("annotation", "train_one_batch", 2, 985),
                ("annotation", "encoder", 10, 400),
                ("annotation", "decoder", 400, 900),
                ("kernel", "e", 100, 200, 20),
                ("kernel", "d", 500, 600, 450),
            ],
            {"e": "encoder", "d": "decoder"},
            id="a range around the whole step gives way to what it holds",
        ),
        pytest.param(
            [
                ("step", 1, 0, 300_000),
                *(("annotation", f"batch {batch}", 100 * batch, 100 * batch + 90) for batch in range(500)),
                ("annotation", "forward", 60_000, 200_000),
                ("kernel", "k", 70_000, 90_000, 60_100),
            ],
            {"k": "forward"},
            id="thousands of names are not thousands of phases",
        ),
    ],
)
def test_phases_of_device_work(tmp_path, events, phases):
    trace, placing = place(MadeTrace().add_all(*events), tmp_path)
    found = phase_by_name(trace, placing) | phase_by_name(trace, placing, Kind.MEMCPY)
    assert found == {name: {phase} for name, phase in phases.items()} and len(placing.phases) <= 100
    outside = [trace.name_of(row) for row in trace.device_rows if placing.step[row] < 0]
    assert outside == (["early"] if "early" in phases else [])


@pytest.mark.parametrize("form", ["step {}", "iteration_{}", "Train Step #{}", "my_update", None])
def test_ranges_that_stand_in_for_steps(tmp_path, form):
    made = MadeTrace()
    for index in range(3):
        at = 100 + 1000 * index
        if form:
            made.annotation(form.format(5 + index), at, at + 850)
        made.annotation("nccl:all_reduce", at + 860, at + 990)  # no step, however often it comes
        made.kernel("k", at + 100, at + 700, at + 50)
    _, placing = place(made, tmp_path)
    if form == "my_update":
        assert [step.name for step in placing.steps] == ["my_update"] * 3 and "my_update" in placing.notes[0]
    elif form:
        assert ([step.number for step in placing.steps], placing.notes) == ([5, 6, 7], ())
    else:
        assert [(step.name, step.steady) for step in placing.steps] == [("whole trace", True)]
        assert wording("analysis/counts-as-one-step") in placing.notes[0]


def test_two_windows_in_one_file_leave_a_hole(tmp_path):
    made, later = gpu_run(steps=3, first=10), gpu_run(steps=3, first=110)
    for event in later.events:
        event["ts"] += 50_000
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 1000
    made.events += later.events
    steps = place(made, tmp_path)[1].steps
    assert [step.number for step in steps] == [10, 11, 12, 110, 111, 112]
    assert max(step.ms for step in steps) < 2  # the 47 ms between the windows belong to no step


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
    assert label_phase(name) == label and known_phase("forwarding_table") is None


def test_events_between_steps_belong_to_the_later_one(tmp_path):
    trace, placing = place(cpu_run(steps=3), tmp_path)
    assert set(placing.step[trace.rows[Kind.OP]]) == {0, 1, 2}
    assert placing.step[trace.rows[Kind.ANNOTATION]].min() == 0


def test_a_step_that_begins_with_its_first_phase_is_not_inside_it(tmp_path):
    made = MadeTrace().add_all(
        ("step", 1, 0, 1000),
        ("annotation", "data", 0, 100),
        ("annotation", "forward", 100, 300),
        ("annotation", "nested", 100, 300),
        ("kernel", "k", 200, 900, 150),
    )
    phases = phase_by_name(*place(made, tmp_path), Kind.ANNOTATION)
    assert (phases["ProfilerStep#1"], phases["nested"]) == ({None}, {"forward"})


# --- which steps count


def make_steps(lengths_us: list[float]) -> MadeTrace:
    """Steps of such lengths, each with one kernel at its end."""
    made, at = MadeTrace(), 0.0
    for number, length in enumerate(lengths_us):
        made.step(number, at, at + length)
        made.kernel("k", at + 0.5 * length, at + length, at + 0.1 * length)
        at += length
    return made


def test_tiles_leave_no_hole(tmp_path):
    _, placing = place(gpu_run(steps=6), tmp_path)
    steps = placing.steps
    assert [step.end_ns for step in steps[:-1]] == [step.start_ns for step in steps[1:]]
    assert [step.ms for step in steps[1:]] == pytest.approx([1.0] * 5)
    assert not [note for note in placing.notes if wording("analysis/no-work-of-gpu") in note], (
        "a whole record has no early end"
    )


@pytest.mark.parametrize(
    ("lengths", "counting"),
    [
        ([100], [0]),
        ([100, 100], [0, 1]),
        ([200, 100], [1]),
        ([100, 100, 100], [0, 1, 2]),
        ([200, 100, 100], [1, 2]),
        ([100, 100, 200], [0, 1]),
        ([100, 100, 100, 100], [1, 2, 3]),
        ([100, 100, 300, 100, 100], [1, 2, 3, 4]),  # a slow step in the middle is the run's own
        ([200, 100, 100, 100, 200], [1, 2, 3]),
    ],
)
def test_steps_at_the_edges_that_pay_for_the_profiler_do_not_count(tmp_path, lengths, counting):
    reasons = why_not(make_steps(lengths), tmp_path)
    assert [k for k, reason in enumerate(reasons) if not reason] == counting
    assert wording("analysis/at-beginning-of-window") in reasons[0] or lengths[0] == 100
    assert wording("analysis/at-end-of-window") in reasons[-1] or lengths[-1] == 100


def test_a_cut_step_does_not_count(tmp_path):
    made = gpu_run(steps=4)
    last = max(event["ts"] for event in made.events if event["cat"] == "kernel")
    made.events = [event for event in made.events if event["cat"] != "kernel" or event["ts"] < last - 300]
    assert why_not(made, tmp_path)[-1] == wording("analysis/fewer-events-than-others")
    made.step(14, 4000, 5000)
    assert why_not(made, tmp_path)[-1] == wording("analysis/fewer-events-than-others"), (
        "a step of which only the mark is there is left out"
    )
    made.op("aten::mm", 4100, 4200)
    assert why_not(made, tmp_path)[-1] == wording("analysis/no-work-in-it")


def test_a_record_of_the_gpu_that_ends_early_cuts_the_step_in_which_it_ends(tmp_path):
    """As when Kineto's buffer of GPU events is full; the host's record goes on."""
    made = gpu_run(steps=6)
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    times = sorted(event["ts"] for event in made.events if event["cat"] in on_gpu)
    end = times[len(times) * 7 // 12]
    made.events = [event for event in made.events if event["cat"] not in on_gpu or event["ts"] < end]
    _, found = place(made, tmp_path)
    assert [step.why_not for step in found.steps][3:] == [
        wording("analysis/fewer-events-than-others"),
        wording("analysis/no-work-in-it"),
        wording("analysis/no-work-in-it"),
    ]
    assert any(step.steady for step in found.steps)
    names = f"{found.steps[4].name} to {found.steps[5].name}"
    assert [note for note in found.notes if wording("analysis/no-work-of-gpu-in", names) in note]


@pytest.mark.parametrize("chore", ["eval", "save"])
@pytest.mark.parametrize("make", [gpu_run, cpu_run])
def test_steps_that_evaluate_or_save_do_not_count(tmp_path, chore, make):
    made = make(steps=5)
    made.annotation(chore, 2960, 2980)
    assert {f"has {chore} in it", ""} <= set(why_not(made, tmp_path))


def test_what_is_left_when_few_steps_are_steady_is_said(tmp_path):
    made = gpu_run(steps=2).add_all(("annotation", "eval", 900, 950), ("annotation", "eval", 1900, 1950))
    time = measure(made, tmp_path)
    assert len(time.steady_steps) == 2 and wording("analysis/no-step-is-steady") in time.notes[0]
    time = measure(make_steps([300, 100]), tmp_path)
    assert wording("analysis/only-one-step-counts", 0) in time.notes[0]


@pytest.mark.parametrize(
    "collective", ["c10d::allreduce_", "_c10d_functional::all_reduce", "c10d::_reduce_scatter_base_"]
)
def test_sums_of_gradients_by_hand_are_not_forward(tmp_path, collective):
    """They have the number of the next step's first operator; a reduction within a pass has that of the operator behind it."""
    made = MadeTrace(device=None)
    for step in range(6):
        at, number = 1000.0 * step, 10 * step
        made.step(step + 1, at, at + 990)
        made.op("aten::mm", at + 10, at + 100, sequence=number)
        made.op(f"{collective} of tensors", at + 110, at + 150, sequence=number + 1)
        made.op("aten::addmm", at + 160, at + 300, sequence=number + 1)
        for which, start in ((number + 1, 310), (number, 500)):
            made.op(
                "autograd::engine::evaluate_function: MmBackward0",
                at + start,
                at + start + 180,
                sequence=which,
                forward_thread=1,
            )
        made.op(f"{collective} of gradients", at + 700, at + 800, sequence=number + 10)
    trace, placing = place(made, tmp_path)
    found = phase_by_name(trace, placing, Kind.OP)
    assert found["aten::mm"] == found["aten::addmm"] == {"forward"}
    assert found[f"{collective} of tensors"] == {"forward"}
    assert found[f"{collective} of gradients"] == {None}
