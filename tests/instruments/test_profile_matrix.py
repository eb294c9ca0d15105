"""The table of profile_matrix.py: a way inside this process by default, cell by cell from a shell as slow tests."""

import re

import pytest
from profile_matrix import (
    CASES,
    WAYS,
    fill_cell,
    find_faults,
    write_flags,
)
from support.launch import Ended, alone, flags, quietly
from support.nsys_report import ANY_STRING, OPTIONS
from support.paths import DOCS

from megatron_lite.errors import DivergedError

TOGETHER = "torch profiler + memory history"  # all readers but that of nsys
FROM_INSIDE = [case for case in CASES if not (case.ranks or case.signalled)]
WELL = Ended(0, "", "", 1.0)
SIGNALLED = Ended(0, "exiting program after receiving SIGTERM", "", 1.0)


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
    cell = fill_cell(way, case, tmp_path)
    if cell.skipped:
        pytest.skip(cell.skipped)
    assert cell.complaints == [], cell.found


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FROM_INSIDE])
def test_without_a_shell_too(tmp_path, case):
    argv, out = flags(write_flags(WAYS[TOGETHER], case, tmp_path)), case.says
    with alone():
        if case.before:
            quietly(flags(case.before.format(run=tmp_path), "--lr-decay-style constant"), tmp_path / "before")
        if case.code:
            with pytest.raises(DivergedError, match=case.says):
                quietly(argv, tmp_path)
        else:
            _, out = quietly(argv, tmp_path)
    found = {kind: read(tmp_path, case.rank) for kind, read in WAYS[TOGETHER].found.items()}
    assert set(found) == {"trace", "snapshot"}
    assert [*find_faults(case, Ended(case.code, out, "", 1.0), found, 0, False)] == []


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
        (CASES[4], [*range(3, 10)], SIGNALLED, None),
        (CASES[4], [*range(3, 9)], SIGNALLED, "trace: 3-9 were meant"),
        (CASES[5], [1, 2, 3, 4, 5], Ended(16, "", "the loss is NaN or Inf", 1.0), None),  # one step may be broken off
    ],
)
def test_a_wrong_window_is_a_complaint(case, found, ended, complaint):
    said = [*find_faults(case, ended, {"trace": found}, last=9 * case.signalled, under_tool=False)]
    assert said == ([complaint] if complaint else [])


def test_nsys_is_started_as_the_docs_say():
    docs = (DOCS / "profiling.md").read_text(encoding="utf-8")
    assert f"{ANY_STRING} nsys profile {OPTIONS} -o NAME " in re.sub(r"\s*\\\n\s*", " ", docs)
