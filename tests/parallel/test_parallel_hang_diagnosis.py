"""Which rank is blamed, from what all ranks have told: no process, no network."""

import pytest
from msgspec.structs import replace
from support.wording import wording

from megatron_lite.config.layout import Layout
from megatron_lite.formats.failure_record import RankAtFailure
from megatron_lite.parallel.hang_diagnosis import CLOSED, LATE_RANK, TERMINATED, Case, answered, find_cause, where
from megatron_lite.parallel.rank_status import Operation, describe_hand_over, describe_position

OPERATION = Operation(1234, "all_reduce", 3 * 2**20, "Float")
WAITING = RankAtFailure(
    host="here",
    pids="space",
    pid=100,
    wall_time=1000.0,
    step=52,
    started_at=1000,
    phase="grad_sync",
    begun=1235,
    finished=1233,
    answers=True,
)
READING = replace(
    WAITING,
    phase="data",
    phase_s=605.0,
    begun=1233,
    stack=("read (/x/y/file.py:12)", "f (/a/megatron_lite/data/loader.py:44)"),
)
LATELY = replace(READING, phase_s=5.0)
MUTE = replace(READING, answers=False, pid=4711, wall_time=997.5)
FAILED = replace(MUTE, left="ValueError: no")
VICTIM = replace(MUTE, left="RanksError: other", blameless=True)
WAITED = "rank 0 waited for it in all_reduce #1234 (12.0 MiB float32), iteration 1052, phase grad_sync"
AGAIN = "start again with --load to go on from the newest checkpoint."


def case(posts, reason=CLOSED, **more) -> Case:
    """Rank 0 asks; `posts` are those of rank 1, 2, ..., None for one that never wrote."""
    told = {rank: post for rank, post in enumerate([WAITING, *posts]) if post is not None}
    return Case(0, 1 + len(posts), reason, 600.0, told, **{"operation": OPERATION, "now": 1000.0} | more)


LAST_SEEN = "last seen 2.5s before in iteration 1052, phase data, after collective #1233"
NOT_JOINED = "rank 1 did not join all_reduce #1234 (12.0 MiB float32) of rank 0 within 10m00s: "
LATE_MUTE, RESET = (
    case([MUTE], states={1: "stopped"}, reason=LATE_RANK),
    "Read error [1.2.3.4]:5: Connection reset by peer",
)
LINES = {  # what is told of each kind of trouble
    "left": (case([FAILED]), ["rank 1 ended in iteration 1052, phase data, with ValueError: no", WAITED, AGAIN]),
    "dead": (
        case([MUTE], states={1: "dead"}),
        ["rank 1 died (process 4711 on here is gone)", LAST_SEEN, WAITED, AGAIN],
    ),
    "stopped": (LATE_MUTE, [f"{NOT_JOINED}process 4711 on here is stopped (SIGSTOP)", LAST_SEEN, AGAIN]),
    "behind": (
        case([READING], reason=LATE_RANK, report="RUN/ranks.json"),
        [
            f"{NOT_JOINED}since 10m05s in iteration 1052, phase data, in read (x/y/file.py:12) called by f ",
            "(megatron_lite/data/loader.py:44), after collective #1233. ",
            "raise --distributed-timeout-minutes (all stacks: RUN/ranks.json)",
            AGAIN,
        ],
    ),
    "silent": (
        case([MUTE]),
        ["rank 1 does not answer: it died, is stopped, or its machine is cut off (process 4711 on here)"],
    ),
    "absent": (
        case([None], reason=LATE_RANK),
        ["rank 1 of 2 never arrived", "waited for it 10m00s in all_reduce", "MASTER_ADDR"],
    ),
    "all begun": (
        case([WAITING], reason=LATE_RANK),
        ["took longer than 10m00s although all ranks had begun it", "raise --distributed-timeout-minutes."],
    ),
    "connection": (
        case([LATELY], detail=RESET),
        [f"lost a connection although all ranks run ({RESET})", "network", AGAIN],
    ),
    "a rank whose time is over has closed it": (
        case([READING], detail=RESET),
        [
            "rank 1 did not join all_reduce #1234 (12.0 MiB float32) of rank 0: since 10m05s in iteration 1052, phase data"
        ],
    ),
    "SIGTERM": (
        case([replace(VICTIM, left="SIGTERM")], detail=RESET),
        ["phase data, by SIGTERM", WAITED, "who sent it"],
    ),
    "SIGINT": (case([replace(VICTIM, left="KeyboardInterrupt: ")]), ["phase data, by SIGINT", WAITED, "who sent it"]),
    "the launcher ends all when one has failed": (
        case([replace(VICTIM, left="SIGTERM"), FAILED]),
        ["rank 2 ended in iteration 1052, phase data, with ValueError: no", "Mend what its own message names"],
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_lines(kind):
    given, parts = LINES[kind]
    line = find_cause(given).line
    assert all(part in line for part in parts) and "\n" not in line


def test_what_the_kernel_says_is_told():
    """A process that runs but is mute is another trouble; memory is named only when the kernel counted."""
    running = find_cause(case([MUTE], states={1: "running"})).line
    assert wording("parallel/its-process-runs-but", 4711) in running
    assert wording("parallel/want-of-memory") not in find_cause(case([MUTE], states={1: "dead"})).line
    killed = find_cause(case([MUTE], states={1: "dead"}, memory_kills=1)).line
    assert wording("parallel/meanwhile-kernel-killed-for", 1) in killed


def test_the_cause_stands_before_its_consequences():
    """Whoever failed by itself, then who died; ranks that only wait or left because of others never."""
    dead = {2: "dead", 3: "dead"}
    assert find_cause(case([READING, MUTE, FAILED], states={2: "dead"}, reason=LATE_RANK)).ranks == [3]
    assert find_cause(case([READING, MUTE, VICTIM], states=dead, reason=LATE_RANK)).ranks == [2]
    assert find_cause(case([READING, WAITING, VICTIM], reason=LATE_RANK)).ranks == [1]
    joined = replace(WAITING, begun=OPERATION.number)
    assert find_cause(case([joined], reason=LATE_RANK)).ranks == []
    assert find_cause(case([VICTIM, VICTIM])) is None
    assert find_cause(case([WAITING, LATELY])) is None, "a lost connection says nothing of who is behind"


def test_who_waits_in_a_group_waits_for_its_members():
    """Ranks 0 and 1 split layers, 2 and 3 too; 1 and 3 average gradients."""
    operation = Operation(7, "all_gather", 100, "Half", "tensor", (0, 1))
    behind = replace(READING, begun=1234, groups={"tensor": 6, "replicate": 3})
    other = replace(WAITING, groups={"tensor of others": 9})
    found = find_cause(case([behind, other, other], reason=LATE_RANK, operation=operation))
    assert found.ranks == [1]
    assert wording("parallel/rank-did-not-join", 1, 7, 200, 0, 1, 0) in found.line
    through = replace(behind, waiting=("replicate", 4, (1, 3)))
    last = replace(READING, groups={"tensor of others": 9, "replicate": 3})
    found = find_cause(
        case(
            [replace(through, groups={"tensor": 6, "replicate": 4}), other, last], reason=LATE_RANK, operation=operation
        )
    )
    assert found.ranks == [3]
    assert wording("parallel/rank-keeps-others-waiting", 3, 7, 200, 0, 1, 0) in found.line
    begun = replace(WAITING, groups={"tensor": 7})
    found = find_cause(case([begun, other, last], reason=LATE_RANK, operation=operation))
    assert found.ranks == [] and wording("parallel/although-all-ranks-had") in found.line


def test_what_a_stage_waits_for_is_told_with_the_other_ones_place():
    layout = Layout(tensor=2, pipeline=2)
    owed = describe_hand_over(2, "the backward of micro-batch 3 from")
    waiting = replace(WAITING, phase="pipeline_wait")
    asks = {"reason": LATE_RANK, "operation": owed, "layout": layout}
    line = find_cause(case([waiting, READING, READING], **asks)).line
    assert line.startswith(wording("parallel/rank-pp-tp-keeps", 2, 1, 0, 0, 3, 2))
    # rank 2 waits in turn for its neighbor, which reads data
    second = replace(READING, groups={"tensor": 7}, waiting=("tensor", 7, (2, 3)))
    third = replace(READING, groups={"tensor": 6})
    line = find_cause(case([waiting, second, third], **asks)).line
    through = (
        "keeps others waiting, and through them rank 0 for the backward of micro-batch 3 from rank 2, for 10m00s: "
    )
    assert line.startswith(f"rank 3 (pp 1, tp 1) {through}")
    line = find_cause(case([waiting, FAILED, waiting], operation=owed)).line
    assert wording("parallel/rank-waited-for-backward", 0, 3, 2, 1052) in line
    assert [layout.describe_place(rank) for rank in range(4)] == [
        "pp 0, tp 0",
        "pp 0, tp 1",
        "pp 1, tp 0",
        "pp 1, tp 1",
    ]


def test_the_place_of_a_rank_names_its_experts():
    """Of ranks that have other experts each, which ones a missing rank has is what its neighbors wait for."""
    layout = Layout(data=4, expert=2)
    assert [layout.describe_place(rank) for rank in range(4)] == [
        "dp 0, ep 0",
        "dp 1, ep 1",
        "dp 2, ep 0",
        "dp 3, ep 1",
    ]
    line = find_cause(case([READING, WAITING, WAITING], reason=LATE_RANK, layout=layout)).line
    assert line.startswith(wording("parallel/rank-dp-ep-did", 1, 1, 1))
    # ranks that split an expert are named where they are others than those that split the layer
    assert Layout(tensor=2, data=2, expert=2, expert_tensor=2).describe_place(3) == "dp 1, tp 1, ep 1"
    assert Layout(tensor=2, data=2, expert=4).describe_place(2) == "dp 1, tp 0, ep 2"
    assert Layout(data=4, expert=2, expert_tensor=2).describe_place(3) == "dp 3, ep 1, etp 1"
    assert Layout(data=4).describe_place(1) == ""


def test_ranks_that_wait_in_a_circle_are_told_as_behind():
    first = Operation(7, "all_gather", 0, "", "a", (0, 1))
    second = replace(READING, groups={"a": 6, "b": 2}, waiting=("b", 2, (1, 2)))
    third = replace(READING, groups={"b": 1, "a": 0}, waiting=("a", 7, (0, 1)))
    assert find_cause(case([second, third], reason=LATE_RANK, operation=first)).ranks == [1]


def test_silence_counts_only_after_the_time_for_answers():
    """But whoever has ended is known at once."""
    for post in (MUTE, READING, None):
        assert find_cause(case([post], reason=LATE_RANK), heard=False) is None
    dead = find_cause(case([MUTE], states={1: "dead"}), heard=False)
    assert dead.ranks == [1] and dead.ended and find_cause(case([FAILED])).ended
    assert not find_cause(case([READING], reason=LATE_RANK)).ended
    assert not answered(case([WAITING, MUTE])) and not answered(case([WAITING, None]))
    assert answered(case([WAITING, FAILED, MUTE], states={3: "stopped"}))


@pytest.mark.parametrize("post", [READING, WAITING, None])
def test_a_signal_blames_only_who_has_ended(post):
    """SIGTERM may mean just that: no rank is accused for being behind or unheard."""
    assert find_cause(case([post, VICTIM], reason=TERMINATED)) is None
    assert find_cause(case([post, FAILED], reason=TERMINATED)).ranks == [2]


def test_before_the_group_there_is_no_operation():
    start = replace(WAITING, step=0, begun=0, finished=0, phase=None)
    given = case([None], reason=LATE_RANK, operation=None)
    given.posts = {0: start}
    line = find_cause(given).line
    assert wording("parallel/never-arrived-rank-waited", 0) in line


def test_a_thousand_ranks_make_one_line_of_readable_length():
    posts = [READING if rank % 2 else WAITING for rank in range(1, 1000)]
    found = find_cause(case(posts, reason=LATE_RANK))
    assert found.ranks == list(range(1, 1000, 2))
    assert (
        found.line.startswith(wording("parallel/ranks-and-more-did", 1, 3, 5, 7, 9, 11, 13, 15, 492))
        and len(found.line) < 600
    )


def test_places():
    """The innermost call and the trainer's own; a run that was not resumed from anything known counts steps."""
    assert where([]) == wording("parallel/unknown-place")
    assert where(["f (/a/b/c/d.py:1)"]) == "f (b/c/d.py:1)"
    assert where(["f (/x/megatron_lite/a.py:1)", "g (/x/megatron_lite/b.py:2)"]) == "f (x/megatron_lite/a.py:1)"
    assert describe_position(replace(WAITING, started_at=None)) == wording("parallel/step-of-this-run", 52)
