"""Findings are certain only where nothing else in the trace can have made what they tell."""

from support.finding_cases import (
    moving,
)

from megatron_lite.analysis.analyze import analyze


def find(write, folder):
    write(folder)
    return {one.code: one for one in analyze([folder]).findings}


def test_two_late_steps_of_four_are_likely_at_most(tmp_path):
    short = find(moving([[0, 1200], [0, 0]] * 2), tmp_path / "short")["late-at-times"]
    assert short.rank == 1 and not short.certain
    long = find(moving([[0, 1200], [0, 0]] * 4), tmp_path / "long")["late-at-times"]
    assert long.rank == 1 and long.certain
