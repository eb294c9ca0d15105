"""benchmarks/postmortem.py: that it judges answers by its table, and that made jobs are concluded on rightly."""

import re
import sys
from dataclasses import replace

import pytest
from support.paths import REPO

sys.path.insert(0, str(REPO))

from benchmarks.postmortem import (
    ANNOUNCED,
    CHECKED,
    EXPLAINED,
    HERE,
    WHILE_IT_RUNS,
    Planted,
    count,
    judge,
    read_table,
    record,
)
from benchmarks.postmortem_scripts.made_jobs import MADE
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind, Postmortem

TABLE = read_table()
MADE_ROWS = [planted for planted in TABLE if planted.recording == "made" and not planted.is_held]
MIN_FAILURES = 44
MIN_OF_A_KIND = 3
MIN_HELD = 12


def test_the_table_has_each_kind_of_failure_several_times():
    named = [planted.name for planted in TABLE]
    assert len(set(named)) == len(named)
    kinds = {kind.value for kind in FailureKind}
    for planted in TABLE:
        assert set(planted.kinds) <= kinds, planted.name
        assert planted.end in {"", WHILE_IT_RUNS, CHECKED, *ANNOUNCED, *EXPLAINED}, planted.name
        assert planted.recording == "made" or (HERE / planted.script).exists(), planted.name
    assert {planted.words[0] for planted in TABLE if planted.recording == "made"} == set(MADE)
    failures = [planted for planted in TABLE if FailureKind.NONE.value not in planted.kinds]
    assert len(failures) >= MIN_FAILURES
    assert sum(planted.is_held for planted in failures) >= MIN_HELD
    for kind in kinds - {FailureKind.NONE.value, FailureKind.UNKNOWN.value}:
        assert sum(kind in planted.kinds for planted in failures) >= MIN_OF_A_KIND, kind


def test_answers_are_judged_by_kind_and_ranks():
    planted = Planted("row", "", 4, (), "made", "", ("died", "network"), ((1,), ()), False)
    answer = Postmortem(kind=FailureKind.DIED, ranks=(1,), verdict="", confidence="high")
    right = judge(planted, answer)
    assert right.is_kind and right.is_rank and not right.is_certainly_wrong
    assert judge(replace(planted, culprits=None), answer) == right
    other = judge(replace(planted, culprits=((2,),)), answer)
    assert other.is_kind and not other.is_rank and other.is_certainly_wrong
    slow = judge(replace(planted, kinds=("slow",)), answer)
    assert not slow.is_kind and slow.is_certainly_wrong
    silent = judge(planted, None)
    assert not silent.is_kind and not silent.is_rank and not silent.is_certainly_wrong
    lines = count({planted: other, replace(planted, name="held", is_held=True): right})
    assert [re.findall(r"\d+", line) for line in lines] == [["2", "2", "1", "1"], ["1", "1", "1", "0"], ["0"] * 4]


@pytest.mark.parametrize("planted", MADE_ROWS, ids=lambda planted: planted.name)
def test_made_jobs_are_concluded_on(planted, tmp_path):
    record(planted, tmp_path / "left")
    answer = conclude(collect_evidence([tmp_path / "left"]))
    judged = judge(planted, answer)
    assert (judged.is_kind, judged.is_rank) == (True, True), answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skips-metrics", "segmentation-fault", "worker-killed"])
def test_real_jobs_are_concluded_on(name, tmp_path):
    [planted] = [planted for planted in TABLE if planted.name == name]
    record(planted, tmp_path / "left")
    answer = conclude(collect_evidence([tmp_path / "left"]))
    judged = judge(planted, answer)
    assert (judged.is_kind, judged.is_rank) == (True, True), answer
