"""Which rank is blamed, from what all ranks have told: no process, no network."""

import json

import pytest
from msgspec.structs import replace
from support.flight_recordings import RecordedJob

from megatron_lite.config.layout import Layout
from megatron_lite.formats.failure_record import RankAtFailure
from megatron_lite.parallel.hang_diagnosis import (
    AGAIN,
    CLOSED,
    LATE_RANK,
    RAISE_LIMIT,
    TERMINATED,
    Case,
    answered,
    find_cause,
    make_evidence,
)
from megatron_lite.parallel.rank_status import StageWait, describe_position
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind

# the third collective was called at 1_795_000_000
SOON = 1_795_000_001.0
NOW = 1_795_000_700.0
WAITING = RankAtFailure(
    host="here",
    pids="space",
    pid=100,
    wall_time=NOW,
    step=52,
    started_at=1000,
    phase="grad_sync",
    phase_s=600.0,
    begun=3,
    finished=2,
    answers=True,
    stack=("all_reduce (/x/torch/distributed/distributed_c10d.py:3245)", "g (/a/megatron_lite/parallel/x.py:9)"),
)
READING = replace(
    WAITING,
    phase="data",
    phase_s=605.0,
    begun=2,
    stack=("read (/x/y/file.py:12)", "f (/a/megatron_lite/data/loader.py:44)"),
)
MUTE = replace(READING, answers=False, pid=4711, wall_time=NOW - 2.5, stack=())
FAILED = replace(MUTE, left="ValueError: no", wall_time=SOON)
VICTIM = replace(MUTE, left="RanksError: other", blameless=True)
RESET = "Read error [1.2.3.4]:5: Connection reset by peer"


def record(size: int, *, without=(), groups=None, group="0", failed=()) -> RecordedJob:
    """Two collectives of all, and a third one that some do not enter."""
    job = RecordedJob(size, groups, backend="gloo")
    for _ in range(2):
        job.call("all_reduce")
    job.call("all_reduce", group, shape=(3 * 2**20,), without=without, stuck=True)
    return job


def excerpts(job: RecordedJob, ranks) -> dict[int, str]:
    """What the recorders of these ranks say, with the ranks of groups, which the trainer adds."""
    texts = {}
    for rank in ranks:
        dump = job.dump(rank)
        dump["pg_config"] = {}
        for name, (description, members) in job.groups.items():
            if rank in members:
                dump["pg_config"][name] = {"name": name, "desc": description, "ranks": str(members)}
        texts[rank] = json.dumps(dump)
    return texts


def case(posts, reason=CLOSED, job=None, **more) -> Case:
    """Rank 0 asks; `posts` are those of rank 1, 2, ..., None for one that never wrote."""
    told = {rank: post for rank, post in enumerate([WAITING, *posts]) if post is not None}
    size = 1 + len(posts)
    job = job or record(size, without=[rank for rank in range(1, size)])
    answering = [rank for rank, post in told.items() if post.answers]
    known = {"now": NOW, "recordings": excerpts(job, answering)}
    return Case(0, size, reason, 600.0, told, **known | more)


def kind(given: Case) -> FailureKind:
    return conclude(make_evidence(given)).kind


CASES = {  # kind, ranks, whether they have ended, and figures of the line
    "left": (case([FAILED]), FailureKind.USER_EXCEPTION, (1,), True, ["ValueError: no", "iteration 1052, phase data"]),
    "dead": (case([MUTE], states={1: "dead"}), FailureKind.DIED, (1,), True, ["process 4711 on here", "2.5s", "#2"]),
    "stopped": (
        case([MUTE], reason=LATE_RANK, states={1: "stopped"}),
        FailureKind.STOPPED,
        (1,),
        False,
        ["4711", "iteration 1052, phase data"],
    ),
    "behind": (
        case([READING], reason=LATE_RANK, report="RUN/ranks.json"),
        FailureKind.DATA_LOADER,
        (1,),
        False,
        ["all_reduce #3", "10m05s", "iteration 1052, phase data", "RUN/ranks.json", RAISE_LIMIT],
    ),
    "silent": (case([MUTE]), FailureKind.DIED, (1,), False, ["4711"]),
    "mute, but running": (case([MUTE], states={1: "running"}), FailureKind.STUCK_IN_KERNEL, (1,), False, ["4711"]),
    "absent": (case([None], reason=LATE_RANK), FailureKind.NEVER_ENTERED, (1,), False, ["of 2", "MASTER_ADDR"]),
    "all begun": (
        case([WAITING], reason=LATE_RANK, job=record(2)),
        # gloo has no kernels
        FailureKind.NETWORK,
        (),
        False,
        [RAISE_LIMIT],
    ),
    "connection": (case([WAITING], job=record(2), detail=RESET), FailureKind.NETWORK, (), False, []),
    "SIGTERM": (
        case([replace(VICTIM, left="SIGTERM", wall_time=SOON)], detail=RESET, now=SOON),
        FailureKind.PREEMPTED,
        (1,),
        True,
        ["SIGTERM", "phase data"],
    ),
    "the launcher ends all when one has failed": (
        case([replace(VICTIM, left="SIGTERM"), FAILED]),
        FailureKind.USER_EXCEPTION,
        (2,),
        True,
        ["ValueError: no"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_causes(name):
    given, expected, ranks, ended, figures = CASES[name]
    found = find_cause(given)
    assert found is not None
    assert (kind(given), found.ranks, found.ended) == (expected, ranks, ended), found.line
    assert "\n" not in found.line and AGAIN in found.line
    confidence = conclude(make_evidence(given)).confidence
    assert (f"{confidence} confidence" in found.line) is (confidence != "high"), found.line
    assert [figure for figure in figures if figure not in found.line] == [], found.line


def test_the_cause_stands_before_its_consequences():
    """Whoever failed by itself, or died; ranks that only wait or left because of others never."""
    dead = {2: "dead", 3: "dead"}
    assert find_cause(case([READING, MUTE, FAILED], states={2: "running"}, reason=LATE_RANK)).ranks == (3,)
    assert find_cause(case([READING, MUTE, VICTIM], states=dead, reason=LATE_RANK)).ranks == (2,)
    late = record(4, without=[1])
    assert find_cause(case([READING, WAITING, WAITING], reason=LATE_RANK, job=late)).ranks == (1,)


def test_who_waits_in_a_group_waits_for_its_members():
    """Ranks 0 and 1 split layers, 2 and 3 too; 1 and 3 average gradients: 0 waits for 1, and that for 3."""
    groups = {"7": ("tensor", [0, 1]), "8": ("tensor", [2, 3]), "9": ("replicate", [1, 3])}
    job = record(4, without=[1], groups=groups, group="7")
    job.call("all_reduce", "9", without=[3], stuck=True)
    found = find_cause(case([WAITING, WAITING, READING], reason=LATE_RANK, job=job))
    assert found.ranks == (3,)


def test_what_a_stage_waits_for_is_told_with_the_other_ones_place():
    layout = Layout(tensor=2, pipeline=2)
    job = RecordedJob(4)
    job.call("all_reduce")
    job.send(2, 0, without=[2])
    wait = StageWait(2, "the backward of micro-batch 3 from")
    asking = replace(WAITING, phase="pipeline_wait", waits_for=str(wait))
    given = case([READING, READING, READING], reason=LATE_RANK, job=job, layout=layout)
    given.posts[0] = asking
    found = find_cause(given)
    assert found.ranks == (2,)
    assert "rank 2 (pp 1, tp 0)" in found.line.lower() and str(wait) in found.line
    assert wait.is_received and not StageWait(2, "an earlier tensor to arrive at").is_received


def test_silence_counts_only_after_the_time_for_answers():
    """But whoever has ended is known at once."""
    for post in (MUTE, READING, None):
        assert find_cause(case([post], reason=LATE_RANK), heard=False) is None
    dead = find_cause(case([MUTE], states={1: "dead"}), heard=False)
    assert dead.ranks == (1,) and dead.ended and find_cause(case([FAILED]), heard=False).ended
    assert not answered(case([WAITING, MUTE])) and not answered(case([WAITING, None]))
    assert answered(case([WAITING, FAILED, MUTE], states={3: "stopped"}))


@pytest.mark.parametrize("post", [READING, WAITING, None])
def test_a_signal_blames_only_who_has_ended(post):
    """SIGTERM may mean just that: no rank is accused for being behind or unheard."""
    assert find_cause(case([post, VICTIM], reason=TERMINATED)) is None
    assert find_cause(case([post, FAILED], reason=TERMINATED)).ranks == (2,)


def test_kills_for_want_of_memory_explain_a_death():
    """They are named only when the kernel counted some."""
    killed = case([MUTE], states={1: "dead"}, memory_kills=1)
    assert kind(killed) is FailureKind.HOST_MEMORY and find_cause(killed).ranks == (1,)


def test_a_thousand_ranks_make_one_line_of_readable_length():
    posts = [READING if rank % 2 else WAITING for rank in range(1, 300)]
    job = record(300, without=range(1, 300, 2))
    found = find_cause(case(posts, reason=LATE_RANK, job=job))
    assert found.ranks == tuple(range(1, 300, 2))
    assert len(found.line) < 900


def test_the_place_of_a_rank_names_its_experts():
    """Of ranks that have other experts each, which ones a missing rank has is what its neighbors wait for."""
    layout = Layout(data=4, expert=2)
    places = [layout.describe_place(rank) for rank in range(4)]
    assert places == ["dp 0, ep 0", "dp 1, ep 1", "dp 2, ep 0", "dp 3, ep 1"]
    job = record(4, without=[1])
    line = find_cause(case([READING, WAITING, WAITING], reason=LATE_RANK, job=job, layout=layout)).line
    assert line.startswith("Rank 1 (dp 1, ep 1)")
    # ranks that split an expert are named where they are others than those that split the layer
    assert Layout(tensor=2, data=2, expert=2, expert_tensor=2).describe_place(3) == "dp 1, tp 1, ep 1"
    assert Layout(tensor=2, data=2, expert=4).describe_place(2) == "dp 1, tp 0, ep 2"
    assert Layout(data=4, expert=2, expert_tensor=2).describe_place(3) == "dp 3, ep 1, etp 1"
    assert Layout(data=4).describe_place(1) == ""


def test_positions():
    """A run that was not resumed from anything known counts steps."""
    assert describe_position(WAITING) == "iteration 1052, phase grad_sync"
    assert "52" in describe_position(replace(WAITING, started_at=None))
