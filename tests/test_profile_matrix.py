"""The table of profile_matrix.py: a way inside this process by default, cell by cell from a shell as slow tests."""

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest
from launch import Ended, alone, flags, quietly
from nsys_report import ANY_STRING, OPTIONS
from profile_matrix import Cell, complaints, main, one, table, words
from profile_ways import CASES, SNAPSHOT, WAYS, steps_of_snapshot, steps_of_trace

from megatron_lite.errors import DivergedError

TOGETHER = "torch profiler + memory history"  # all readers but that of nsys
FROM_INSIDE = [case for case in CASES if not (case.ranks or case.signalled)]
WELL = Ended(0, "", "", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, id=f"{way}, {case.name}")
        for way in WAYS
        for number, case in enumerate(CASES)
        if way in ("torch profiler", "nsys")
        or (way != TOGETHER and number in (0, len(CASES) - 1))  # all of them: python tests/profile_matrix.py
    ],
)
def test_the_files_hold_the_window(tmp_path, way, case):
    cell = one(way, case, tmp_path)
    if cell.skipped:
        pytest.skip(cell.skipped)
    assert cell.complaints == [], cell.found


@pytest.mark.parametrize("case", FROM_INSIDE, ids=lambda case: case.name)
def test_without_a_shell_too(tmp_path, case):
    argv = flags(words(WAYS[TOGETHER], case, tmp_path))
    with alone():
        if case.before:
            quietly(flags(case.before.format(run=tmp_path), "--lr-decay-style constant"), tmp_path / "before")
        if case.code:
            with pytest.raises(DivergedError):
                quietly(argv, tmp_path)
        else:
            quietly(argv, tmp_path)
    found = {kind: read(tmp_path, case.rank) for kind, read in WAYS[TOGETHER].found.items()}
    assert set(found) == {"trace", "snapshot"}
    assert [*complaints(dataclasses.replace(case, says="", code=0), WELL, _whole_steps(found, case), 0, False)] == []


def _whole_steps(found: dict, case) -> dict:
    """Without the step that a failing run broke off."""
    return {kind: held[: len(case.steps)] if case.code else held for kind, held in found.items()}


# --- the table can find fault


@pytest.mark.parametrize(
    ("case", "found", "ended", "complaint"),
    [
        (CASES[0], [3, 4], WELL, None),
        (CASES[0], [2, 3], WELL, "trace: 3-4 were meant"),
        (CASES[0], [3, 4, 5], WELL, "trace: 3-4 were meant"),
        (CASES[0], [], WELL, "trace: 3-4 were meant"),
        (CASES[0], [3, 4], Ended(1, "", "broke", 1.0), "exit code 1: broke"),
        (CASES[0], [3, 4], Ended(0, "", "a warning", 1.0), "noise on stderr: a warning"),
        (CASES[2], [3, 4], WELL, "does not say 'steps 3-4 of this run = iterations 8-9'"),
        (CASES[4], [*range(3, 10)], Ended(0, "exiting program after receiving SIGTERM", "", 1.0), None),
        (
            CASES[4],
            [*range(3, 9)],
            Ended(0, "exiting program after receiving SIGTERM", "", 1.0),
            "trace: 3-9 were meant",
        ),
        (CASES[5], [1, 2, 3, 4, 5], Ended(16, "", "the loss is NaN or Inf", 1.0), None),  # one step may be broken off
    ],
)
def test_a_wrong_window_is_a_complaint(case, found, ended, complaint):
    said = [*complaints(case, ended, {"trace": found}, last=9 * case.signalled, under_tool=False)]
    assert said == ([complaint] if complaint else [])


def test_files_that_are_missing_or_of_another_rank_hold_nothing(tmp_path):
    assert steps_of_trace(tmp_path, 0) == steps_of_snapshot(tmp_path, 0) == []
    (tmp_path / "host_rank1.1.pt.trace.json").write_text('{"traceEvents": []}')
    (tmp_path / SNAPSHOT).touch()
    (tmp_path / "other.pickle").touch()
    assert steps_of_trace(tmp_path, 0) == steps_of_snapshot(tmp_path, 0) == []


def test_a_row_says_what_is_wrong_or_why_nothing_was_done():
    cells = [
        Cell("nsys", CASES[0], skipped="no nsys here"),
        Cell("torch profiler", CASES[0], "python", {"trace": [4]}, ["x"], ["trace: 3-4 were meant"]),
    ]
    *_, skipped, wrong = table(cells)
    assert skipped.startswith("| nsys | 1 rank | no nsys here |")
    assert wrong == "| torch profiler | 1 rank | trace 4 WRONG: trace: 3-4 were meant | x | `python` |"


def test_a_run_that_hangs_is_a_complaint(monkeypatch, tmp_path):
    def hangs(*_, **__):
        raise subprocess.TimeoutExpired("python", 100)

    monkeypatch.setattr("profile_matrix.pretrain", hangs)
    cell = one("torch profiler", CASES[0], tmp_path)
    assert cell.complaints == ["did not end within 100 s"] and cell.command.startswith("python pretrain_gpt.py ... ")


def test_it_ends_with_1_if_a_window_is_wrong(monkeypatch, capsys):
    for said, code in ((["trace: 3-4 were meant"], 1), ([], 0)):
        monkeypatch.setattr("profile_matrix.one", lambda way, case, run, said=said: Cell(way, case, complaints=said))
        assert main(["--way", "torch profiler", "--case", "1 rank"]) == code
        assert capsys.readouterr().out.count("torch profiler") == 2  # its progress and its row


def test_nsys_is_started_as_the_docs_say():
    docs = (Path(__file__).parents[1] / "docs" / "profiling.md").read_text(encoding="utf-8")
    assert f"{ANY_STRING} nsys profile {OPTIONS} -o NAME " in re.sub(r"\s*\\\n\s*", " ", docs)
