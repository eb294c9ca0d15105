"""Logs of real jobs of torch 2.13 under torchrun and mp.spawn, gloo, 2 ranks, which failed on purpose."""

from pathlib import Path

import pytest

from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind

LOGS = Path(__file__).parent / "logs"
# by log: the class, and the ranks to blame; None where the log may leave them open
EXPECTED = {
    "barrier": (FailureKind.NEVER_ENTERED, (1,)),
    "chain": (FailureKind.USER_EXCEPTION, (0, 1)),
    "detail": (FailureKind.OTHER_ARGUMENTS, None),
    "detail_op": (FailureKind.OTHER_ORDER, None),
    "error": (FailureKind.USER_EXCEPTION, (1,)),
    "kill": (FailureKind.DIED, (1,)),
    "loader_error": (FailureKind.DATA_LOADER, (0, 1)),
    "loader_slow": (FailureKind.DATA_LOADER, (0, 1)),
    "mismatch": (FailureKind.OTHER_ARGUMENTS, None),
    "segv": (FailureKind.DIED, (0,)),
    "spawn_error": (FailureKind.USER_EXCEPTION, (1,)),
    "spawn_kill": (FailureKind.DIED, (1,)),
    # a client was missing that no rank knows
    "store": (FailureKind.UNKNOWN, ()),
    "tee": (FailureKind.USER_EXCEPTION, (1,)),
    "timeout": (FailureKind.NEVER_ENTERED, (1,)),
}
CALL_SITES = {
    "error": "cases.py:20 in main",
    "tee": "cases.py:20 in main",
    "loader_error": "cases.py:10 in __getitem__",
    "spawn_error": "spawn.py:5 in f",
    "segv": "cases.py:56 in main",
}


def test_every_log_has_its_answer():
    assert sorted(path.stem for path in LOGS.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_alone_tells_the_class_and_the_rank(name):
    evidence = collect_evidence([LOGS / f"{name}.log"])
    assert evidence.unread == () and evidence.read == {"console logs": 1}
    found = conclude(evidence)
    kind, ranks = EXPECTED[name]
    assert found.kind is kind
    if ranks is not None:
        assert found.ranks == ranks
    if name in CALL_SITES:
        assert found.call_site == CALL_SITES[name]


def test_ends_that_followed_are_told_from_the_first():
    evidence = collect_evidence([LOGS / "error.log"])
    ends = {(end.rank, end.exit_code): end.is_consequence for end in evidence.ends}
    assert ends == {(0, -15): True, (0, None): True, (1, 1): None, (1, None): None}
