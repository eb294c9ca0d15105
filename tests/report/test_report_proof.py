"""The answer of `prove` on a terminal: a verdict, then what it rests on."""

import numpy as np
import pytest
from support.proof_maker import Layout, Part, Truth, make_run

from megatron_lite.analysis.equality.compare import compare, compare_with_own_sum
from megatron_lite.report.proof_terminal import proof_lines
from megatron_lite.report.text import WIDTH, Style

TRUTH = Truth()


def draw(report):
    lines = proof_lines(report, Style())
    assert all(len(line) <= WIDTH for line in lines)
    return lines


def prove(layout, plant=None):
    run = make_run(TRUTH, layout, plant)
    return compare(run, make_run(TRUTH, seed=2), make_run(TRUTH, seed=3), reference_command="python train.py")


def keep_local(drafts):
    for draft in drafts:
        for step in draft.steps:
            step.gradients = dict(step.local)


def test_a_right_run_is_equal():
    lines = draw(prove(Layout(data=2)))
    assert lines[0].split()[0] == "EQUAL"
    assert any(line.split()[:3] == ["step", "1:", "gradients"] for line in lines)
    assert not any("NaN" in line or "None" in line for line in lines)


def test_an_error_is_named_first_with_its_place():
    lines = draw(prove(Layout(data=2), keep_local))
    assert lines[0].split()[0] == "DIFFERS:"
    assert "4.weight" in lines[0]
    assert any(line.strip().startswith("try: ") for line in lines)


def test_what_was_not_compared_is_said():
    def plant(drafts):
        drafts[0].weights["extra"] = Part(np.ones((2, 2)))

    lines = draw(prove(Layout(data=2), plant))
    assert lines[0].split()[0] == "EQUAL"
    assert any("extra" in line for line in lines)


@pytest.mark.parametrize("layout", [Layout(tensor=2)])
def test_nothing_to_compare_is_not_equal(layout):
    assert draw(compare_with_own_sum(make_run(TRUTH, layout)))[0].startswith("NOT COMPARED")
