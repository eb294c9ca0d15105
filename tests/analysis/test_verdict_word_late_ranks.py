"""The verdict's word where ranks come late: STRAGGLER where that costs more than what else may bound the step."""

import dataclasses

import pytest
from support import report_cases as cases
from support.wording import wording

from megatron_lite.analysis.ranks.rank_results import Imbalance
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.analysis.verdict_word import VerdictWord

COMPUTES = {"compute": 95.0, "host": 5.0}
ALWAYS = dataclasses.replace(cases.ranks_of().straggler, caused_wait_ms=15.0)


def judge(rows: dict[str, float], always_ms: float = 0.0, moving_ms: float = 0.0, rank: int | None = None):
    """The verdict on a rank whose step of 100 ms has these rows, where ranks wait so long for late ones."""
    one = cases.report().facts.critical
    time = dataclasses.replace(one.time, rows=rows, step_ms=sum(rows.values()))
    ranks = dataclasses.replace(
        cases.ranks_of(),
        straggler=dataclasses.replace(ALWAYS, caused_wait_ms=always_ms) if always_ms else None,
        imbalance=Imbalance(rank, moving_ms, 5 * moving_ms, 2, 10, None, (), None) if moving_ms else None,
    )
    facts = Facts((dataclasses.replace(one, time=time),), ranks, (), None, ())
    late = dataclasses.replace(cases.findings()[0], code="late-at-times", cost_ms=always_ms or moving_ms)
    return build_verdict(facts, (late,) if always_ms or moving_ms else ())


@pytest.mark.parametrize(
    ("rows", "waits", "word"),
    [
        (COMPUTES, {"always_ms": 15.0}, VerdictWord.STRAGGLER),
        (COMPUTES, {"moving_ms": 15.0}, VerdictWord.STRAGGLER),
        (COMPUTES, {"moving_ms": 41.0, "rank": 1}, VerdictWord.STRAGGLER),
        # near misses: hardly late, not late, and a step that loses more to something else
        (COMPUTES, {"moving_ms": 6.0}, VerdictWord.COMPUTE_BOUND),
        (COMPUTES, {}, VerdictWord.COMPUTE_BOUND),
        ({"compute": 40.0, "data_wait": 60.0}, {"always_ms": 15.0}, VerdictWord.INPUT_BOUND),
        ({"compute": 40.0, "exposed_communication": 60.0}, {"moving_ms": 15.0}, VerdictWord.COMMUNICATION_BOUND),
        # what the late rank is late by is most of what it loses
        ({"compute": 40.0, "data_wait": 60.0}, {"always_ms": 50.0}, VerdictWord.STRAGGLER),
        ({"compute": 70.0, "exposed_communication": 30.0}, {"moving_ms": 25.0}, VerdictWord.STRAGGLER),
        ({"compute": 70.0, "unexplained": 30.0}, {"always_ms": 25.0}, VerdictWord.INCONCLUSIVE),
    ],
)
def test_the_word_is_the_late_rank_where_it_costs_most(rows, waits, word):
    assert judge(rows, **waits).word is word


def test_the_sentence_says_it_once():
    said = judge(COMPUTES, moving_ms=41.0, rank=1).sentence
    assert "rank 1" in said and wording("analysis/most-costly-cause") not in said
    assert wording("analysis/most-costly-cause") not in judge(COMPUTES, always_ms=15.0).sentence


@pytest.mark.parametrize(
    ("rows", "missing", "doubted"),
    [
        ({"compute": 86.0, "exposed_communication": 14.0}, (1,), True),
        # near misses: too little waiting for a late rank to be the word, and all ranks read
        ({"compute": 92.0, "exposed_communication": 8.0}, (1,), False),
        ({"compute": 86.0, "exposed_communication": 14.0}, (), False),
    ],
)
def test_a_rank_that_was_not_read_may_be_the_late_one(rows, missing, doubted):
    one = cases.report().facts.critical
    time = dataclasses.replace(one.time, rows=rows, step_ms=sum(rows.values()))
    ranks = dataclasses.replace(cases.ranks_of(), straggler=None, imbalance=None, world_size=2, missing=missing)
    verdict = build_verdict(Facts((dataclasses.replace(one, time=time),), ranks, (), None, ()), ())
    assert verdict.word is VerdictWord.COMPUTE_BOUND
    assert (verdict.confidence == "low") is doubted
    assert ("1 of 2 ranks" in verdict.why) is doubted
