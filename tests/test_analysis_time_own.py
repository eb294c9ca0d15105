"""The trainer's own traces: every phase is found, and a step's rows are what the trainer's clock says."""

import pytest
from launch import alone, flags, quietly
from traces import trace_files

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 8"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    with alone():
        quietly(
            flags(
                "--train-iters 9 --global-batch-size 2 --eval-iters 1 --eval-interval 5",
                PROFILE,
                "--tensorboard-dir",
                folder / "tb",
            ),
            folder / "run",
        )
    [path] = trace_files(folder / "tb")
    [trace] = read_traces(path)
    placing = attribute_events(trace)
    return trace, placing, rank_time(trace, placing)


def test_the_windows_steps_are_found_and_the_one_that_evaluates_does_not_count(own):
    _, placing, _ = own
    assert [step.number for step in placing.steps] == [3, 4, 5, 6, 7]
    assert placing.steps[2].why_not == "has eval in it"
    assert placing.notes == ()


def test_rows_sum_to_the_step_and_operators_are_part_of_it(own):
    _, _, time = own
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, rel=1e-12)
    assert 0 < time.rows["compute"] < time.step_ms
    assert (time.rows["save"], time.on_gpu) == (0, False)


def test_phases_fill_the_step_in_order(own):
    _, _, time = own
    assert [phase.name for phase in time.phases] == [
        "data",
        "data_to_device",
        "forward",
        "backward",
        "grad_sync",
        "unscale",
        "clip_grad",
        "optimizer_step",
        "log",
    ]
    assert 0.5 * time.step_ms < sum(phase.host_ms for phase in time.phases) <= time.step_ms
    assert time.loader_host_ms == pytest.approx(time.phases[0].host_ms)
