"""One verdict for each made job: its class, the ranks, and no more confidence than the evidence bears."""

import pytest
from support.postmortem_cases import CASES

from megatron_lite.postmortem.causes.base import Confidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind

WORDS = [one.word for one in Confidence]


@pytest.mark.parametrize("name", CASES)
def test_a_made_job_is_explained(name):
    make, expected = CASES[name]
    found = conclude(make())
    assert (found.kind, found.ranks) == (expected.kind, expected.ranks), found
    limit = expected.confidence.removeprefix("at most ")
    if limit != expected.confidence:
        assert WORDS.index(found.confidence) <= WORDS.index(limit), found
    elif limit:
        assert found.confidence == limit, found
    if expected.call_site is not None:
        assert found.call_site == expected.call_site


def test_every_class_has_a_case():
    assert {expected.kind for _, expected in CASES.values()} == set(FailureKind)
