"""Other jobs on the machine are looked at before the profiler or a rank is blamed."""

import dataclasses
from pathlib import Path

import pytest
from support.training_maker import cpu, gpu, ordinary_steps, run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.compare.limits import Outcome, judge, read_limit
from megatron_lite.analysis.findings.base import Evidence, Finding, rule
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.run.cores import measure_recording_ms, measure_slowdown
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.verdict_word import VerdictWord
from megatron_lite.report.json_file import as_json
from megatron_lite.report.terminal import terminal_lines
from megatron_lite.report.text import Style

WINDOW = range(20, 26)  # steps from 0
WATCHED = {"device": "cpu", "world": 1}


def choose_by_window(columns: dict) -> dict:
    """Columns with a pair of values as functions of the step: one value outside of the window, one inside."""
    return {
        name: (lambda at, pair=pair: pair[at in WINDOW]) if isinstance(pair, tuple) else pair
        for name, pair in columns.items()
    }


def write(folder: Path, **columns):
    """A trace and 40 steps; a column has a value for steps outside of the window and one for those inside, or one for all."""
    cpu(folder)
    run(folder, steps=ordinary_steps(profiled=lambda at: at in WINDOW, **choose_by_window(columns)), **WATCHED)
    return analyze([folder])


def codes(report) -> list[str]:
    return [one.code for one in report.findings]


def test_steps_that_had_no_core_are_no_overhead_of_the_profiler(tmp_path):
    """Longer by waiting for a core; the process' CPU time grew by little."""
    report = write(tmp_path, ms=(10.0, 48.0), core_wait_ms=(0.2, 36.0), cpu_ms=(9.6, 11.5))
    assert codes(report)[0] == "busy-machine" and "profiler-overhead" not in codes(report)
    assert report.findings[0].cost_ms == pytest.approx(36.0)
    assert report.verdict.confidence == "low" and report.verdict.word is VerdictWord.BUSY_MACHINE
    assert wording("analysis/waits-for-cpu-core", 75) in report.verdict.sentence
    assert wording("analysis/profiler-made") not in report.verdict.sentence + report.verdict.why


def test_a_window_that_took_more_cpu_time_is_the_profilers(tmp_path):
    report = write(tmp_path, ms=(10.0, 20.0), core_wait_ms=0.1, cpu_ms=(9.6, 19.5))
    found = {one.code: one for one in report.findings}
    assert "busy-machine" not in found and "profiler-overhead" in found
    assert wording("analysis/profiler-made-steps-longer", 100) in report.verdict.sentence


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


def pair(tmp_path, a: dict, b: dict):
    """Two runs of steps without a trace, compared and held against a limit."""
    for name, columns in (("a", a), ("b", b)):
        run(tmp_path / name, steps=ordinary_steps(**columns), **WATCHED)
    found = compare(*(analyze([tmp_path / name]).facts for name in "ab"))
    [judged] = judge(found, [read_limit("step_ms > +10%")])
    return found, judged.outcome


def test_a_base_taken_under_load_keeps_no_limit(tmp_path):
    """18% more work, which the base's wait for a core hides; the same without a load is exceeded."""
    found, outcome = pair(tmp_path, {"ms": 11.8, "core_wait_ms": 4.0}, {"ms": 11.8, "core_wait_ms": 0.1})
    assert outcome is Outcome.UNCLEAR and found.notes[0].startswith(wording("analysis/was-measured-on-busy"))
    assert found.sentence.endswith(wording("analysis/on-busy-machine"))
    found, outcome = pair(tmp_path, {"ms": 10.0, "core_wait_ms": 0.1}, {"ms": 11.8, "core_wait_ms": 0.1})
    assert outcome is Outcome.EXCEEDED and "busy machine" not in found.sentence + "".join(found.notes)
    _, outcome = pair(tmp_path, {"ms": 10.0, "core_wait_ms": 0.1}, {"ms": 10.0, "core_wait_ms": 0.1})
    assert outcome is Outcome.KEPT


def test_what_a_load_cannot_explain_is_still_exceeded(tmp_path):
    _, outcome = pair(tmp_path, {"ms": 10.0, "core_wait_ms": 0.1}, {"ms": 30.0, "core_wait_ms": 6.0})
    assert outcome is Outcome.EXCEEDED
    found, outcome = pair(tmp_path, {"ms": 10.0, "cpu_ms": 9.0, "involuntary_switches": 9}, {"ms": 10.0})
    assert outcome is Outcome.UNCLEAR, "how long it waited, the system did not say"
    assert all(one.pair.band is None for one in found.totals if one.unit == "ms")


def test_no_finding_costs_what_is_printed_as_nothing(tmp_path):
    facts = write(tmp_path, ms=10.0).facts
    tiny = Finding(code="sync-in-step", cost_ms=0.004, evidence=(Evidence("seen"),), advice="do")
    rule_of = lambda found: rule("sync-in-step", "")(lambda facts: found)
    for found, number in (
        (tiny, 0),
        (dataclasses.replace(tiny, cost_ms=0.006), 1),
        (dataclasses.replace(tiny, cost_ms=None), 1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_lite.analysis.findings.rules.RULES", {"sync-in-step": rule_of(found)})
            assert len(apply_rules(facts)) == number


def test_products_count_for_what_they_compute(tmp_path):
    """Tiny ones take the time of dispatch or of a busy machine, which no precision shortens."""
    for name, dims, found in (("tiny", [[8, 16], [16, 16]], False), ("usual", [[2048, 1024], [1024, 4096]], True)):
        cpu(tmp_path / name, dtype="float", dims=dims)
        run(tmp_path / name, precision="fp32", **WATCHED)
        assert ("fp32-products" in codes(analyze([tmp_path / name]))) is found


def test_every_step_stands_beside_the_profiled_ones(tmp_path):
    columns = {"phase_forward": (3.0, 6.0), "phase_data": 0.5, "phase_eval": 0.0, "core_wait_ms": 0.4}
    report = write(tmp_path, ms=(12.0, 20.0), **columns)
    found = report.facts.every_step
    assert (found.steps, found.profiled_steps, found.step_ms, found.profiled_step_ms) == (33, 6, 12.0, 20.0)
    rows = {row.name: (row.ms, row.profiled_ms) for row in found.rows}
    assert list(rows) == ["data", "forward", "backward", "optimizer_step", "other", "no core"]
    assert rows["forward"] == (3.0, 6.0) and rows["data"] == (0.5, 0.5) and rows["no core"] == (0.4, 0.4)
    assert rows["other"] == pytest.approx((2.2, 7.2))
    text = "\n".join(terminal_lines(report, Style(False), everything=True))
    assert "All steps" in text and as_json(report)["every_step"]["step_ms"] == 12.0


def test_the_word_is_said_once(tmp_path):
    report = write(tmp_path, ms=10.0)
    assert report.verdict.headline == f"COMPUTE-BOUND: {report.verdict.sentence}"
    run(tmp_path / "alone", **WATCHED)
    headline = analyze([tmp_path / "alone"]).verdict.headline
    assert headline.count("INCONCLUSIVE") == 1


def late_optimizer(folder: Path, late_us: float, **columns):
    """A GPU's trace whose host comes to the optimizer so long after the device is done, and a run around it."""
    gpu(folder, world_size=1, reduce="none", before_optimizer=lambda step: step.gap(late_us))
    step_ms = analyze([folder]).facts.critical.time.step_ms
    before_ms = step_ms - late_us / 1000
    run(
        folder,
        steps=ordinary_steps(
            ms=lambda at: step_ms if at in WINDOW else before_ms, profiled=lambda at: at in WINDOW, **columns
        ),
        world=1,
    )
    return analyze([folder])


def test_what_recording_added_to_the_hosts_time_is_not_the_programs(tmp_path):
    """The device waits 0.7 ms of 10 for the host, all of which a step without the profiler does not take."""
    report = late_optimizer(tmp_path, 700.0)
    assert report.facts.critical.time.rows["host"] == pytest.approx(0.7, abs=0.05)
    assert wording("analysis/waiting-for-host") not in report.verdict.sentence
    assert wording("analysis/may-be-recording-own") in report.verdict.sentence
    assert report.verdict.confidence == "high"


def test_a_device_that_only_waits_while_recorded_is_not_bound_by_its_host(tmp_path):
    report = late_optimizer(tmp_path, 4000.0)
    time = report.facts.critical.time
    assert time.rows["host"] > 0.25 * time.step_ms
    assert report.verdict.word is VerdictWord.COMPUTE_BOUND
    assert not {"host-gaps", "launch-bound", "short-gaps"} & {*codes(report)}


@pytest.mark.parametrize(("nested", "share"), [(0, 7 / 8), (24, 7 / 32)])
def test_without_a_device_recording_inside_of_operators_makes_those_longer(tmp_path, nested, share):
    """Of eight events per step one, the optimizer's range, is as long as its operator and counts as inside of it."""

    def record_inside_the_first_product(made, at):
        first = at + 100.0
        for number in range(nested):
            made.op("aten::view", first + 10 * number, first + 10 * number + 5)

    cpu(tmp_path, change=record_inside_the_first_product)
    added = {"ms": (10.0, 14.0), "core_wait_ms": 0.1, "cpu_ms": (9.6, 13.6)}
    steps = ordinary_steps(profiled=lambda at: at in WINDOW, **choose_by_window(added))
    run(tmp_path, steps=steps, **WATCHED)
    facts = analyze([tmp_path]).facts
    assert measure_recording_ms(facts.run, facts.critical.time) == pytest.approx(4.0 * share)
