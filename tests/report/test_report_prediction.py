"""The section that holds a prediction against the run: on a terminal, on the page and for programs."""

from dataclasses import replace

import numpy as np
import pytest
from support import report_cases as cases
from support.prediction_cases import GIB, facts, held, measured, memory, record, time
from support.report_schemas import validators
from support.wording import wording

from megatron_lite.analysis.predicted import compare_prediction
from megatron_lite.report.html import html_page
from megatron_lite.report.json_file import as_json
from megatron_lite.report.section import Lines, Table
from megatron_lite.report.sections.memory import prediction_section
from megatron_lite.report.terminal import terminal_lines
from megatron_lite.report.text import Style


def predicted(snapshot=None, **parts):
    snapshots = () if snapshot is None else (snapshot,)
    return compare_prediction(facts(record(memory(), time()), snapshots=snapshots, **parts))


def section(found, everything=False):
    return prediction_section(cases.report(predicted=found), everything)


def test_memory_row_by_row():
    made = section(predicted(measured()))
    assert (made.title, made.subtitle) == (
        wording("report/predicted-against-measured"),
        "rank 0, snapshot.pickle, H100 SXM 80 GB",
    )
    rows = {row[0]: row[1:] for row in made.blocks[0].rows}
    assert rows["parameters"] == ["2.00 GiB", "2.00 GiB", "as predicted"]
    assert rows["workspace"] == ["0 B", "1.00 GiB", "not predicted"]
    assert rows["peak of tensors"] == ["31.00 GiB", "32.00 GiB", "3.2% more"]
    differing = replace(measured(), held=held(parameters=5, gradients=1, moments=8.001, activations=12.1))
    differences = "2.5 x as much, 50% less, 100% less, as predicted, 0.8% more, 100% less, 16% less"
    assert [row[3] for row in section(predicted(differing)).blocks[0].rows] == differences.split(", ")
    assert list(made.blocks[1].texts) == [wording("report/peak-was-predicted-at")]


def test_small_categories_stand_together_unless_all_is_asked_for():
    snapshot = replace(measured(), held=held(parameters=2, moments=8, communication=0.01, other=0.02))
    names = [row[0] for row in section(predicted(snapshot)).blocks[0].rows]
    assert names[-2:] == ["others", wording("report/peak-of-tensors")] and "other" not in names
    assert {"other", "communication"} <= {row[0] for row in section(predicted(snapshot), True).blocks[0].rows}


def test_the_step_against_its_bound():
    made = section(predicted(ranks_seen=cases.report().facts.ranks_seen[:1], peak_memory_bytes=np.full(3, 33.0 * GIB)))
    times = made.blocks[2].rows
    assert times[0] == [wording("report/matrix-products-attention"), "30.00", "50.00", wording("report/x-bound", 1.67)]
    assert times[-2] == ["step", "50.00", "95.50", wording("report/x-bound", 1.91)]
    assert times[-1] == [wording("report/tokens-per-second"), "327,680", "171,000", wording("report/of-bound", 52)]
    assert made.blocks[3].texts[-1] == wording("report/not-in-bound-nodes", 2)


def test_what_is_not_predicted_or_not_comparable_is_left_out_or_said():
    assert section(None) is None and as_json(cases.report())["predicted"] is None
    found = compare_prediction(facts(record(memory()), device="cpu"))
    blocks = section(found).blocks
    assert len(blocks) == 1 and isinstance(blocks[0], Lines) and "--record-memory-history" in blocks[0].texts[0]


def test_all_three_renderers_show_it():
    shown = cases.report(predicted=predicted(measured()))
    lines = terminal_lines(shown, Style(colour=False, unicode=False), True)
    assert any(wording("report/predicted-against-measured") in line for line in lines)
    assert '<section id="prediction"' in html_page(shown)
    read = as_json(shown)["predicted"]
    peak = {"name": "peak of tensors", "predicted": 31 * GIB, "measured": 32 * GIB}
    assert read["memory"]["peak"] == peak | {"difference": pytest.approx(1 / 31)}
    assert read["time"]["step"]["difference"] == pytest.approx(0.91) and read["time"]["parts"] == []


def test_it_fulfils_the_schema():
    found = predicted(measured(), ranks_seen=cases.report().facts.ranks_seen[:1])
    validators()[1].validate(as_json(cases.report(predicted=found)))


def test_names_from_a_file_cannot_break_the_page():
    odd = replace(measured(), source=cases.HOSTILE, peak_phase=cases.HOSTILE)
    assert cases.HOSTILE not in html_page(cases.report(predicted=predicted(odd)))


def test_tables_have_a_letter_per_column():
    for block in section(predicted(measured()), True).blocks:
        if isinstance(block, Table):
            assert {len(row) for row in block.rows} == {len(block.align)} == {len(block.head)}
