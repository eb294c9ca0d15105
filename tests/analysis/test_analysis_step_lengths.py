"""Steps outside the profiled window: some that take far longer, and steps that get slower."""

import random

import pytest
from support.finding_cases import recorded
from support.training_maker import cpu, gpu, ordinary_steps

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.run.step_lengths import find_slow_steps, find_slowing_steps
from megatron_lite.thresholds import MIN_STEPS

CODES = ("slow-steps", "slowing-steps")


def find(folder, on_gpu=False, **columns):
    """The findings about the lengths of 40 steps, by code, and the report."""
    (gpu if on_gpu else cpu)(folder)
    recorded(steps=ordinary_steps(**columns), world=1, device="cuda" if on_gpu else "cpu")(folder)
    report = analyze([folder])
    return {one.code: one for one in report.findings if one.code in CODES}, report


def grows(late_ms, every):
    return lambda at: late_ms if at % every == every - 1 else 10.0


@pytest.mark.parametrize(("late_ms", "every", "late"), [(2_000.0, 13, 3), (90.0, 8, 5), (50.0, 10, 4)])
def test_steps_that_take_longer_at_equal_distances_are_named(tmp_path, late_ms, every, late):
    found, report = find(tmp_path, ms=grows(late_ms, every))
    assert list(found) == ["slow-steps"]
    slow = find_slow_steps(report.facts.run, False)
    assert (len(slow.iterations), slow.every, slow.typical_ms, slow.slow_ms) == (late, every, 10.0, late_ms)
    assert slow.phase == "other" and slow.phase_ms == pytest.approx(late_ms - 10, rel=0.1)
    assert found["slow-steps"].cost_ms == pytest.approx((late_ms - 10) * late / slow.steps)


def test_the_phase_that_grows_is_named(tmp_path):
    found, report = find(
        tmp_path, ms=grows(90.0, 8), phase_data=lambda at: 80.0 if at % 8 == 7 else 0.1, core_wait_ms=0.0, cpu_ms=9.0
    )
    slow = find_slow_steps(report.facts.run, False)
    assert slow.phase == "data" and slow.phase_ms == pytest.approx(79.9)
    assert "prefetch" in found["slow-steps"].advice


def test_a_window_without_slow_steps_does_not_speak_for_the_run(tmp_path):
    _, report = find(tmp_path / "a", ms=grows(90.0, 8))
    assert report.verdict.confidence == "low" and "5 of 39" in report.verdict.why
    _, alike = find(tmp_path / "b")
    assert alike.verdict.confidence == "high"


def test_steps_that_get_slower_are_named(tmp_path):
    found, report = find(tmp_path, ms=lambda at: 10.0 + 0.5 * at, phase_backward=lambda at: 5.5 + 0.5 * at)
    assert list(found) == ["slowing-steps"] and report.verdict.confidence == "low"
    slowing = find_slowing_steps(report.facts.run, False)
    assert slowing.phase == "backward" and slowing.last_ms - slowing.first_ms == pytest.approx(15.0, rel=0.05)


def noise(seed, share):
    chance = random.Random(seed)
    return [10.0 * (1 + abs(chance.gauss(0, share))) for _ in range(40)]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"ms": lambda at: 500.0 if at == 20 else 10.0},  # a single one
        {"ms": lambda at: 500.0 if at < 5 else 10.0},  # the run warms up
        {"ms": lambda at: 12.0 if at % 5 == 4 else 10.0},  # not much longer
        {"ms": grows(20.0, 2)},  # every second step is no exception
        {"ms": lambda at: 90.0 if at % 8 == 7 else 10.0, "core_wait_ms": lambda at: 80.0 if at % 8 == 7 else 0.0},
        {"ms": lambda at: 10.0 + 0.5 * at, "core_wait_ms": lambda at: 0.5 * at},
        {"ms": lambda at: 10.0 + 0.01 * at},
        {"ms": lambda at: 10.0 + 10.0 * (at // 20), "batch_size": lambda at: 8 + 8 * (at // 20)},
    ],
)
def test_near_misses(tmp_path, columns):
    found, _ = find(tmp_path, **columns)
    assert found == {}


@pytest.mark.parametrize("share", [0.03, 0.2])
def test_noise_is_no_pattern(tmp_path, share):
    for seed in range(3):
        lengths = noise(seed, share)
        found, _ = find(tmp_path / str(seed), ms=lambda at, lengths=lengths: lengths[at])
        assert found == {}


def test_delays_by_chance_on_a_cpu_are_no_pattern(tmp_path):
    """Other jobs on the cores make the computing of some steps long, at unequal distances; nobody recorded it."""
    late = (3, 4, 17, 29, 31)
    columns = {
        "ms": lambda at: 60.0 if at in late else 10.0,
        "phase_backward": lambda at: 55.0 if at in late else 5.5,
    }
    found, report = find(tmp_path / "cpu", **columns)
    assert found == {} and find_slow_steps(report.facts.run, False).phase == "backward"
    found, _ = find(tmp_path / "gpu", on_gpu=True, gpu_ms=columns["ms"], **columns)
    assert list(found) == ["slow-steps"] and not found["slow-steps"].certain


def test_a_host_that_runs_ahead_of_its_gpu_has_no_slow_steps(tmp_path):
    """Without a wait in each step the host launches nine steps in no time, and waits in the tenth for all of them."""
    waits = {"ms": lambda at: 82.0 if at % 10 == 9 else 2.0}
    assert find(tmp_path / "unknown", on_gpu=True, **waits)[0] == {}
    assert find(tmp_path / "known", on_gpu=True, gpu_ms=10.0, **waits)[0] == {}
    assert list(find(tmp_path / "slow", on_gpu=True, gpu_ms=grows(90.0, 10))[0]) == ["slow-steps"]


def test_short_runs_say_nothing(tmp_path):
    cpu(tmp_path)
    recorded(steps=ordinary_steps(10, ms=grows(90.0, 4)), world=1, device="cpu")(tmp_path)
    report = analyze([tmp_path])
    assert report.facts.run.ordinary.sum() > MIN_STEPS
    assert find_slow_steps(report.facts.run, False) is None and find_slowing_steps(report.facts.run, False) is None
