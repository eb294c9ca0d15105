"""A pipeline's schedule with times: against the formulas, and as the report shows it of a run."""

import itertools
import json

import pytest
from support.finding_cases import pipeline_run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.pipeline_schedule import ActionTimes, Stage, simulate_schedule
from megatron_lite.report.charts import build_schedule
from megatron_lite.report.json_file import as_json
from megatron_lite.report.sections.all import pipeline_section


def take(stages: int, micro_batches: int, times: ActionTimes, chunks: int = 1, splits: bool = False) -> float:
    """How long all actions take."""
    all_stages = [Stage(number, stages, (range(1),) * chunks, splits) for number in range(stages)]
    return max(one.end_ms for one in simulate_schedule(all_stages, micro_batches, [times] * stages))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 7), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_take_what_the_formula_says(stages, micro_batches):
    """Narayanan et al. 2021: (m + p - 1) actions of forward and backward; of v chunks the bubble is a vth."""
    times = ActionTimes(1.0, 2.0)
    assert take(stages, micro_batches, times) == pytest.approx((micro_batches + stages - 1) * 3.0)
    if micro_batches % stages == 0:
        chunked = ActionTimes(0.5, 1.0)
        assert take(stages, micro_batches, chunked, chunks=2) == pytest.approx(micro_batches * 3.0 + (stages - 1) * 1.5)
    split = take(stages, micro_batches, ActionTimes(1.0, 1.0, 1.0), splits=True)
    assert micro_batches * 3.0 <= split < take(stages, micro_batches, times)


def test_no_stage_does_two_things_at_once_and_all_waiting_is_a_slower_stages():
    stages = [Stage(number, 3, (range(1),)) for number in range(3)]
    times = [ActionTimes(1.0, 2.0), ActionTimes(3.0, 6.0), ActionTimes(1.0, 2.0)]
    timed = simulate_schedule(stages, 10, times)
    for number in range(3):
        own = [one for one in timed if one.stage == number]
        assert len(own) == 20 and all(after.start_ms >= before.end_ms for before, after in itertools.pairwise(own))
    slow = [one for one in timed if one.stage == 1]
    assert sum(after.start_ms - before.end_ms for before, after in itertools.pairwise(slow)) == 0.0
    assert max(one.end_ms for one in timed) == pytest.approx(1 + 10 * 9 + 2)


def test_the_report_shows_stages_beside_the_schedule(tmp_path):
    pipeline_run(8, [4.0, 1.0, 3.5, 3.0], (3.0, 6.0, 3.0, 3.0))(tmp_path)
    report = analyze([tmp_path])
    found = report.facts.pipeline
    assert [(one.layers, one.own_ms, one.wait_ms) for one in found.stages] == [
        (6, 8.5, 4.0), (6, 11.5, 1.0), (6, 8.5, 3.5), (6, 8.5, 3.0)
    ]  # fmt: skip
    assert (found.micro_batches, found.chunks, found.bubble) == (8, 1, 3 / 11)
    assert found.ideal_ms > 11.5 + 8.5 / 8 and found.stages[1].ideal_wait_ms == pytest.approx(found.ideal_ms - 11.5)
    section = pipeline_section(report, False)
    table, lines = section.blocks
    assert [row[0] for row in table.rows] == ["1", "2", "3", "4"] and "8 micro-batches" in section.subtitle
    assert (
        lines.texts[0] == wording("analysis/with-equal-stages-schedule", 27)
        and "stage 2 computes longest" in lines.texts[1]
    )
    chart = build_schedule(report)
    assert [one.name for one in chart.series] == ["forward", "backward"]
    assert sum(len(one.values) for one in chart.series) == len(found.actions) == 2 * 8 * 4
    shown = json.loads(json.dumps(as_json(report)))["pipeline"]
    assert shown["stages"][1]["forward_ms"] == 6.0 and len(shown["actions"]) == 64


def test_a_run_without_stages_has_none(tmp_path):
    pipeline_run(8, [4.0])(tmp_path)
    report = analyze([tmp_path])
    assert report.facts.pipeline is None and pipeline_section(report, False) is None and build_schedule(report) is None
