"""Steps outside the profiled window: some that take far longer, and steps that get slower."""

import random

import pytest
from support.finding_cases import recorded
from support.training_maker import cpu, gpu, ordinary_steps
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.run.step_lengths import find_slow_steps, find_slowing_steps, has_slow_profiled_step
from megatron_lite.thresholds import MIN_RANK_STEPS

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


PROFILED = {"profiled": lambda at: 13 <= at < 17}  # steps 14 to 17


@pytest.mark.parametrize(("every", "is_held"), [(8, True), (9, False)])
def test_a_window_that_holds_a_slow_step_speaks_for_the_run(tmp_path, every, is_held):
    """Step 16 is one of those that take longer, or step 18 just after the window."""
    found, report = find(tmp_path, ms=grows(90.0, every), **PROFILED)
    text = found["slow-steps"].evidence[0].text
    assert text.startswith(f"4 of 35 steps take 90 ms, every {every} steps (the median: 10 ms)")
    assert (wording("analysis/none-of-them-in") in report.verdict.why) is not is_held
    assert report.verdict.confidence == ("high" if is_held else "low")


@pytest.mark.parametrize(
    ("columns", "is_slow"), [({}, True), ({"compiling": lambda at: at == 14}, False), ({"core_wait_ms": 80.0}, False)]
)
def test_a_profiled_step_is_slow_by_itself(tmp_path, columns, is_slow):
    """Not by compiling, nor by waiting for a core."""
    lengths = lambda at: 90.0 if at == 14 else 10.0
    _, report = find(tmp_path, ms=lengths, **PROFILED, **columns)
    assert has_slow_profiled_step(report.facts.run, False, limit_ms=15.0) is is_slow


@pytest.mark.parametrize(
    ("columns", "every"),
    [
        (PROFILED, 8),
        ({"phase_save": lambda at: 5.0 if at == 15 else 0.0}, 8),
        ({"phase_eval": lambda at: 5.0 if at in (15, 23) else 0.0}, 8),
        # step 16 was looked at, and is as short as others
        ({"ms": lambda at: 90.0 if at % 8 == 7 and at != 15 else 10.0}, None),
        # 8, 24, 32, 39
        ({"ms": lambda at: 90.0 if at in (7, 15, 23, 31, 38) else 10.0} | PROFILED, None),
    ],
)
def test_a_slow_step_that_does_not_count_leaves_the_distances_equal(tmp_path, columns, every):
    _, report = find(tmp_path, **{"ms": grows(90.0, 8), **columns})
    slow = find_slow_steps(report.facts.run, False)
    assert 16 not in slow.iterations and slow.every == every


@pytest.mark.parametrize(
    ("own", "waits", "phase"),
    [
        ({"data": 80.0}, {"backward": 100.0}, ""),  # the wait alone makes backward longest
        ({"data": 80.0}, {"backward": 60.0}, ""),  # nobody knows that it is not in data
        ({"data": 80.0}, {"backward": 20.0}, "data"),
        ({"data": 80.0}, {"data": 100.0}, "data"),  # whatever of it is the wait
        ({}, {"backward": 100.0}, ""),
    ],
)
def test_a_phase_that_may_be_longer_by_waiting_for_a_core_is_not_named(tmp_path, own, waits, phase):
    """Every eighth step computes 80 ms more, in a phase or in none, and waits for a core."""
    wait_ms = sum(waits.values())
    usual = {"data": 0.1, "backward": 5.5}
    in_slow = {name: ms + own.get(name, 0.0) + waits.get(name, 0.0) for name, ms in usual.items()}
    phases = {f"phase_{name}": lambda at, name=name: in_slow[name] if at % 8 == 7 else usual[name] for name in usual}
    waited = lambda at: wait_ms if at % 8 == 7 else 0.0
    _, report = find(tmp_path, ms=grows(90.0 + wait_ms, 8), core_wait_ms=waited, **phases)
    slow = find_slow_steps(report.facts.run, False)
    assert (slow.every, slow.slow_ms, slow.phase) == (8, pytest.approx(90.0), phase)


def test_steps_that_get_slower_are_named(tmp_path):
    found, report = find(tmp_path, ms=lambda at: 10.0 + 0.5 * at, phase_backward=lambda at: 5.5 + 0.5 * at)
    assert list(found) == ["slowing-steps"] and report.verdict.confidence == "low"
    slowing = find_slowing_steps(report.facts.run, False)
    assert slowing.phase == "backward" and slowing.last_ms - slowing.first_ms == pytest.approx(15.0, rel=0.05)


@pytest.mark.parametrize(("wait_ms", "codes"), [(3.0, ["slowing-steps"]), (15.0, [])])
def test_steps_that_get_slower_beside_a_few_other_jobs_are_named(tmp_path, wait_ms, codes):
    """The same wait for a core in all steps, which is far less than what they get slower, or more."""
    growing = {"ms": lambda at: 10.0 + wait_ms + 0.5 * at, "phase_backward": lambda at: 5.5 + 0.5 * at}
    found, report = find(tmp_path, core_wait_ms=wait_ms, **growing)
    assert list(found) == codes and "busy-machine" in [one.code for one in report.findings]


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
    assert report.facts.run.ordinary.sum() > MIN_RANK_STEPS
    assert find_slow_steps(report.facts.run, False) is None and find_slowing_steps(report.facts.run, False) is None
