"""Other jobs on the machine are looked at before the profiler or a rank is blamed."""

from pathlib import Path

import pytest
from training_maker import cpu, gpu, ordinary_steps, run

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.run.cores import measure_slowdown
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.verdict_word import VerdictWord

WINDOW = range(20, 26)  # steps from 0
WATCHED = {"device": "cpu", "world": 1}


def write(folder: Path, **columns):
    """A trace and 40 steps; a column has a value for steps outside of the window and one for those inside, or one for all."""
    values = {
        name: (lambda at, pair=pair: pair[at in WINDOW]) if isinstance(pair, tuple) else pair
        for name, pair in columns.items()
    }
    cpu(folder)
    run(folder, steps=ordinary_steps(profiled=lambda at: at in WINDOW, **values), **WATCHED)
    return analyze([folder])


def codes(report) -> list[str]:
    return [one.code for one in report.findings]


def test_steps_that_had_no_core_are_no_overhead_of_the_profiler(tmp_path):
    """Longer by waiting for a core; the process' CPU time grew by little."""
    report = write(tmp_path, ms=(10.0, 48.0), core_wait_ms=(0.2, 36.0), cpu_ms=(9.6, 11.5))
    assert codes(report)[0] == "busy-machine" and "profiler-overhead" not in codes(report)
    assert report.findings[0].cost_ms == pytest.approx(36.0)
    assert report.verdict.confidence == "low" and report.verdict.word is VerdictWord.BUSY_MACHINE
    assert "has no core for 75% of each profiled step" in report.verdict.sentence
    assert "the profiler made" not in report.verdict.sentence + report.verdict.why


def test_a_window_that_took_more_cpu_time_is_the_profilers(tmp_path):
    report = write(tmp_path, ms=(10.0, 20.0), core_wait_ms=0.1, cpu_ms=(9.6, 19.5))
    found = {one.code: one for one in report.findings}
    assert "busy-machine" not in found and "profiler-overhead" in found
    assert "the profiler made steps 100% longer" in report.verdict.sentence


@pytest.mark.parametrize(
    ("columns", "certain"),
    [
        ({"cpu_ms": (9.6, 13.9)}, True),
        ({"cpu_ms": (9.6, 12.4)}, False),  # a third of it is something else
        ({}, False),  # nothing tells of CPU time
        ({"cpu_ms": (9.6, 13.9), "core_wait_ms": (0.1, 2.0)}, False),
        ({"cpu_ms": (9.6, 13.9), "core_wait_ms": (2.0, 0.1)}, False),  # the steps before it had no cores
        ({"cpu_ms": (9.6, 13.9), "involuntary_switches": (0, 9)}, False),  # elsewhere than on Linux
        ({"cpu_ms": (9.6, 13.9), "ms": lambda at: 14.3 if at in WINDOW or at % 5 == 0 else 10.0}, False),
    ],
)
def test_the_profiler_is_certain_only_if_nothing_else_can_have_been_it(tmp_path, columns, certain):
    report = write(tmp_path, **{"ms": (10.0, 14.3), **columns})
    [one] = [one for one in apply_rules(report.facts) if one.code == "profiler-overhead"]
    assert one.certain is certain


def test_a_single_hiccup_is_no_busy_machine(tmp_path):
    hiccup = lambda ms, usual: lambda at: ms if at == 7 else usual
    report = write(tmp_path, ms=hiccup(3000.0, 10.0), core_wait_ms=hiccup(2900.0, 0.1), cpu_ms=9.6)
    assert "busy-machine" not in codes(report) and report.verdict.word is VerdictWord.COMPUTE_BOUND


def test_waits_that_only_some_short_steps_have_count(tmp_path):
    """Another program keeps a core for several milliseconds, every few steps."""
    report = write(tmp_path, ms=10.0, core_wait_ms=lambda at: 8.0 if at % 4 == 0 else 0.0)
    assert codes(report)[0] == "busy-machine" and report.findings[0].cost_ms == pytest.approx(2.0, rel=0.4)


def test_waits_for_a_core_that_a_gpu_hides_cost_nothing(tmp_path):
    gpu(tmp_path, world_size=1)
    run(tmp_path, steps=ordinary_steps(core_wait_ms=6.0, cpu_ms=3.0), world=1)
    report = analyze([tmp_path])
    assert report.verdict.word is VerdictWord.COMPUTE_BOUND
    assert all(one.cost_ms < 6.0 for one in report.findings if one.code == "busy-machine")


def test_no_finding_is_more_certain_than_its_report(tmp_path):
    report = write(tmp_path, ms=(10.0, 48.0), core_wait_ms=(0.2, 36.0), cpu_ms=(9.6, 11.5))
    assert apply_rules(report.facts)[0].certain, "the rule itself knows it"
    assert report.verdict.confidence == "low" and not any(one.certain for one in report.findings)


def test_absent_ranks_lower_the_confidence_of_waits(tmp_path):
    """Of 4 ranks 2 are read, or all."""
    for name, ranks, confidence in (("some", 2, "low"), ("all", 4, "high")):
        for rank in range(ranks):
            gpu(tmp_path / name, rank, 4, reduce="late", wait_us=4_000)
        verdict = analyze([tmp_path / name]).verdict
        assert (verdict.bound, verdict.confidence) == ("communication", confidence)


def test_slowdown_without_cpu_times_is_of_nobody(tmp_path):
    run(tmp_path, steps=ordinary_steps(ms=lambda at: 20.0 if at in WINDOW else 10.0, profiled=lambda at: at in WINDOW))
    found = measure_slowdown(read_run(tmp_path))
    assert found.lag_ms == 10.0 and found.by_profiler_ms is None and not found.is_by_other_jobs
