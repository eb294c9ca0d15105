"""Which steps count."""

import pytest
from trace_maker import MadeTrace, cpu_run, gpu_run

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import Step
from megatron_lite.analysis.trace.read import read_traces


def steps(made: MadeTrace, folder) -> tuple[Step, ...]:
    [trace] = read_traces(made.write(folder))
    return attribute_events(trace).steps


def with_lengths(lengths_us: list[float]) -> MadeTrace:
    """Steps of such lengths, each with one kernel at its end."""
    made, at = MadeTrace(), 0.0
    for number, length in enumerate(lengths_us):
        made.step(number, at, at + length)
        made.kernel("k", at + 0.5 * length, at + length, at + 0.1 * length)
        at += length
    return made


def test_tiles_leave_no_hole(tmp_path):
    found = steps(gpu_run(steps=6), tmp_path)
    assert [step.end_ns for step in found[:-1]] == [step.start_ns for step in found[1:]]
    assert [step.ms for step in found[1:]] == pytest.approx([1.0] * 5)


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
    ],
)
def test_steps_at_the_edges_that_pay_for_the_profiler_do_not_count(tmp_path, lengths, counting):
    assert [k for k, step in enumerate(steps(with_lengths(lengths), tmp_path)) if step.steady] == counting


def test_each_has_its_reason(tmp_path):
    found = steps(with_lengths([200, 100, 100, 100, 200]), tmp_path)
    assert "the profiler starts" in found[0].why_not
    assert "the profiler stops" in found[-1].why_not
    assert [step.why_not for step in found[1:4]] == ["", "", ""]


def test_a_cut_step_does_not_count(tmp_path):
    made = gpu_run(steps=4)
    last = max(event["ts"] for event in made.events if event["cat"] == "kernel")
    made.events = [event for event in made.events if event["cat"] != "kernel" or event["ts"] < last - 300]
    assert steps(made, tmp_path)[-1].why_not == "the trace cuts it"


def test_a_record_of_the_gpu_that_ends_early_cuts_the_step_in_which_it_ends(tmp_path):
    """As when Kineto's buffer of GPU events is full; the host's record goes on."""
    made = gpu_run(steps=6)
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    times = sorted(event["ts"] for event in made.events if event["cat"] in on_gpu)
    made.events = [
        event for event in made.events if event["cat"] not in on_gpu or event["ts"] < times[len(times) * 7 // 12]
    ]
    [trace] = read_traces(made.write(tmp_path))
    found = attribute_events(trace)
    assert [step.why_not for step in found.steps][3:] == ["the trace cuts it", "no work in it", "no work in it"]
    assert any(step.steady for step in found.steps)
    names = f"{found.steps[4].name} to {found.steps[5].name}"
    assert [note for note in found.notes if f"no work of the GPU in {names}: a full buffer ends" in note]


def test_a_whole_record_has_no_early_end(tmp_path):
    [trace] = read_traces(gpu_run(steps=6).write(tmp_path))
    assert not [note for note in attribute_events(trace).notes if "buffer" in note]


@pytest.mark.parametrize("chore", ["eval", "save"])
@pytest.mark.parametrize("make", [gpu_run, cpu_run])
def test_steps_that_evaluate_or_save_do_not_count(tmp_path, chore, make):
    made = make(steps=5)
    made.annotation(chore, 2960, 2980)
    found = steps(made, tmp_path)
    assert f"has {chore} in it" in [step.why_not for step in found]
    assert any(step.steady for step in found)


def test_an_empty_step_does_not_count(tmp_path):
    made = gpu_run(steps=4)
    made.step(14, 4000, 5000)
    found = steps(made, tmp_path)
    assert [step.why_not for step in found][-1] == "no work in it"


def test_if_nothing_is_steady_all_count_and_a_note_says_so(tmp_path):
    made = gpu_run(steps=2)
    made.annotation("eval", 900, 950)
    made.annotation("eval", 1900, 1950)
    [trace] = read_traces(made.write(tmp_path))
    time = rank_time(trace, attribute_events(trace))
    assert len(time.steady_steps) == 2
    assert "no step is a steady one (has eval in it)" in time.notes[0]


def test_one_step_of_several_is_said(tmp_path):
    [trace] = read_traces(with_lengths([300, 100]).write(tmp_path))
    time = rank_time(trace, attribute_events(trace))
    assert "only one step counts; left out: ProfilerStep#0" in time.notes[0]
