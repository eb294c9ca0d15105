"""Findings are certain only where nothing else in the trace can have made what they tell."""

import pytest
from support.finding_cases import (
    moving,
    on_gpu,
    reads_states,
    saves_to_the_host,
    waits,
    works_behind_a_wait,
)

from megatron_lite.analysis.analyze import analyze


def find(write, folder):
    write(folder)
    return {one.code: one for one in analyze([folder]).findings}


def test_a_wait_is_certain_unless_the_host_works_behind_it(tmp_path):
    alone = find(on_gpu(before_backward=waits(600)), tmp_path / "alone")["sync-in-step"]
    assert alone.certain
    found = find(on_gpu(before_backward=works_behind_a_wait(3_000)), tmp_path / "work")
    wait = found["sync-in-step"]
    work = found["host-gaps"]
    assert not wait.certain and not work.certain
    # either of them costs all of it: 3 ms of each step
    assert wait.cost_ms == pytest.approx(3.0, rel=0.02) and work.cost_ms == pytest.approx(3.0, rel=0.02)


def test_work_before_a_wait_is_the_hosts_alone(tmp_path):
    def works_then_waits(step):
        _, end = step.gap(3_000)
        step.made.sync(end - 20, end - 10, operator="aten::item")

    found = find(on_gpu(before_backward=works_then_waits), tmp_path)
    assert found["host-gaps"].cost_ms == pytest.approx(3.0, rel=0.02) and "sync-in-step" not in found


def test_copies_of_a_checkpoint_are_savings(tmp_path):
    """4 copies of 0.38 ms, each with 0.02 ms in which the device does nothing."""
    found = find(on_gpu(before_optimizer=saves_to_the_host(4)), tmp_path / "named")
    assert found["save-in-step"].certain and found["save-in-step"].cost_ms == pytest.approx(1.6, rel=0.03)
    # without stacks nobody knows what for they go to the host
    found = find(on_gpu(before_optimizer=saves_to_the_host(4, "")), tmp_path / "unknown")
    assert not found["exposed-copies"].certain
    assert find(on_gpu(copy_stream=7, copy_us=900), tmp_path / "batches")["exposed-copies"].certain


def test_two_late_steps_of_four_are_likely_at_most(tmp_path):
    short = find(moving([[0, 1200], [0, 0]] * 2), tmp_path / "short")["late-at-times"]
    assert short.rank == 1 and not short.certain
    long = find(moving([[0, 1200], [0, 0]] * 4), tmp_path / "long")["late-at-times"]
    assert long.rank == 1 and long.certain


def test_work_behind_read_states_is_told_once(tmp_path):
    """Behind 2 ms that save-in-step tells, Python works for 3 ms more: host-gaps has no replay, which would move both."""
    found = find(reads_states(thinks_us=3_000), tmp_path)
    assert found["save-in-step"].cost_ms == pytest.approx(2.0, rel=0.02)
    assert found["host-gaps"].cost_ms == pytest.approx(3.0, rel=0.02) and found["host-gaps"].edit is None
