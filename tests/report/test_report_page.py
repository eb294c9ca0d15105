"""What a reader of the page relies on: one color for one thing, doubts that can be seen, a step from its begin to its end."""

import dataclasses
import re

import pytest
from support import report_cases as cases
from support.wording import wording

from megatron_lite.analysis.time.time_results import NO_PHASE, ROW_TITLES, Span
from megatron_lite.pipeline_schedule import TimedAction
from megatron_lite.report import draw, palette, svg
from megatron_lite.report.charts import build_charts
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars
from megatron_lite.report.html import html_page
from megatron_lite.report.phase_colors import color_phases
from megatron_lite.report.plan_files import CLAUSES
from megatron_lite.report.sections.all import build_sections

OUR_PHASES = ("data", "forward", "backward", "optimizer_step")


def one_rank(**changes):
    """A report of a job with one rank, whose time is changed."""
    seen = cases.report().facts.ranks_seen[0]
    alone = dataclasses.replace(
        seen, time=dataclasses.replace(seen.time, **changes), trace=dataclasses.replace(seen.trace, world_size=1)
    )
    return cases.report(ranks_seen=(alone,), ranks=None, run=None)


# --- colors


def test_a_phase_has_its_color_whatever_else_is_drawn():
    alone = color_phases(OUR_PHASES)
    beside = color_phases([*OUR_PHASES, "communication", "copies", *ROW_TITLES.values(), NO_PHASE, "my phase"])
    assert all(beside[name] == color for name, color in alone.items())
    assert len(set(alone.values())) == len(OUR_PHASES)
    assert alone["data"] == palette.ROWS["data_wait"] == beside[ROW_TITLES["data_wait"]]
    assert beside["communication"] == palette.ROWS["exposed_communication"] == palette.HELD["communication"]


def test_a_phase_of_another_program_has_the_color_of_its_meaning():
    colors = color_phases(["## forward ##", "loss.backward", "Optimizer.step#AdamW.step"])
    ours = color_phases(OUR_PHASES)
    assert colors["## forward ##"] == ours["forward"]


def test_unknown_phases_differ_and_keep_their_colors():
    names = [f"part {at}" for at in range(5)]
    colors = color_phases(names)
    assert len(set(colors.values())) == len(names)
    assert color_phases(names[::-1]) == colors


def test_a_schedule_has_the_colors_of_the_phases():
    ours = color_phases(OUR_PHASES)
    assert {palette.ACTIONS[name]: name for name in ("forward", "backward")} == {
        ours["forward"]: "forward",
        ours["backward"]: "backward",
    }


# --- the picture of a step


def test_the_phases_are_drawn_from_the_step_s_begin_to_its_end():
    """Also where the device idles first, as it does while the loader is late."""
    spans = (Span("forward", 160_000_000, 170_000_000), Span("backward", 170_000_000, 190_000_000))
    chart = build_charts(one_rank(timeline=spans))["phases"]
    assert chart.axis.highest == pytest.approx(100.0)
    assert list(chart.series[0].begins) == pytest.approx([60.0, 70.0])


def test_what_is_too_short_to_be_seen_has_no_row():
    long = (Span("forward", 100_000_000, 150_000_000), Span("backward", 150_000_000, 190_000_000))
    chart = build_charts(one_rank(timeline=(*long, Span(NO_PHASE, 190_000_000, 190_001_000))))["phases"]
    assert chart.rows == ["forward", "backward"]


def test_names_that_are_cut_stay_apart():
    names = ["void kernel<" + "x" * 60 + f"{at}" + "y" * 60 for at in range(3)]
    assert len(set(draw.fit_names(names))) == 3


@pytest.mark.parametrize("values", [[0.0, 0.0], [-3.0, 2.0], [1e-9, 2e-9], [5e12, 1.0]])
def test_bars_stay_within_the_plot(values):
    chart = BarChart("", [Bars("", ["a", "b"], values, ["red"])], Axis("ms"))
    places = [float(part) for part in re.findall(r' (?:x|width)="([-\d.]+)%"', str(svg.draw(chart)))]
    assert all(0.0 <= place <= 100.0 for place in places)


def test_what_a_pointer_is_told_of_a_bar():
    bars = Bars("forward", ["stage 1"], [2.5], ["red"], begins=[10.0], micro_batches=[3])
    drawn = str(svg.draw(BarChart("", [bars], Axis("ms at best, of 8 micro-batches"), Arrangement.OVERLAID)))
    assert wording("report/title-stage-forward-micro", 1, 3, 2.5, 10) in drawn


def test_a_long_schedule_is_small_and_complete_until_it_says_otherwise():
    actions = [
        TimedAction(stage, "forward", at, at + stage, at + stage + 1.0) for at in range(512) for stage in range(16)
    ]
    drawn = str(svg.draw(draw.schedule(actions, "ms")))
    assert drawn.count("h") > len(actions) and len(drawn) < 200_000
    most = draw.schedule(actions * 4, "ms")
    assert "first 20,000 passes" in most.axis.title and len(svg.draw(most)) < 400_000


# --- doubts, and what says nothing


@pytest.mark.parametrize(("confidence", "bound", "trust"), [
    ("high", "compute", "high"), ("low", "compute", "low"), ("low", "inconclusive", "inconclusive"),
])  # fmt: skip
def test_confidence_is_a_word_and_a_look(confidence, bound, trust):
    verdict = dataclasses.replace(cases.report().verdict, confidence=confidence, bound=bound, why="so it is")
    text = html_page(dataclasses.replace(cases.report(), verdict=verdict))
    assert f'<section class="verdict {trust}"' in text
    # an inconclusive verdict says itself that it is, and why
    assert (f"<b>{trust} confidence</b>" in text) == (trust != "inconclusive")


def test_the_only_rank_has_no_number():
    found = (dataclasses.replace(cases.findings()[0], rank=0),)
    alone = dataclasses.replace(one_rank(), findings=found)
    assert alone.facts.has_one_rank
    page = html_page(alone)
    assert not re.search(r"\brank 0\b", re.sub(r"<title>.*?</title>", "", page))


@pytest.mark.parametrize("change", ["rank 3", "two in the world"])
def test_one_trace_of_several_ranks_keeps_its_number(change):
    seen = cases.report().facts.ranks_seen[0]
    trace = (
        dataclasses.replace(seen.trace, rank=3) if change == "rank 3" else dataclasses.replace(seen.trace, world_size=2)
    )
    report = cases.report(ranks_seen=(dataclasses.replace(seen, trace=trace),), ranks=None, snapshots=())
    assert not report.facts.has_one_rank
    assert any(section.subtitle.startswith("rank ") for section in build_sections(report, True))


@pytest.mark.parametrize(("unexplained", "shown"), [(0.0, False), (0.01, False), (4.0, True)])
def test_a_row_that_reads_as_nothing_is_left_out(unexplained, shown):
    [section] = [
        one
        for one in build_sections(one_rank(rows={"compute": 96.0, "unexplained": unexplained}), True)
        if one.key == "step"
    ]
    assert ("unexplained" in [row[0] for row in section.blocks[0].rows]) == shown


def test_phases_without_communication_have_no_column_of_it():
    [section] = [one for one in build_sections(one_rank(communication_ms=0.0), True) if one.key == "phases"]
    table = section.blocks[0]
    assert not any(row[table.head.index("communication")] for row in table.rows)
    assert all(row[table.head.index("copies")] for row in table.rows)


def test_a_plan_s_headline_is_its_first_clause():
    text = "fits in one H200: peak 10.3 of 139.7 GiB (7%), at layer 6, linear_fc2 (backward), estimated; at best 1,201.8 ms"
    assert CLAUSES.split(text)[0] == wording("report/fits-in-one-h", 10.3, 139.7, 7)
    assert len(CLAUSES.split(text)) == 3
