"""Which rank is to blame when a collective fails, and the one line that says so. Pure: no process, no network."""

from dataclasses import dataclass, field

from megatron_lite.parallel.flight_recorder import Operation
from megatron_lite.parallel.heartbeat import Post
from megatron_lite.units import duration

MAX_NAMED = 8  # ranks in one line
CLOSED, LATE, TERMINATED = "closed", "late", "terminated"  # why somebody asks
SIGNALLED = ("SIGTERM", "KeyboardInterrupt")  # how a rank's farewell begins that somebody ended
AGAIN = "start again with --load to go on from the newest checkpoint."


@dataclass(frozen=True)
class Case:
    """What the rank that asks has found out."""

    rank: int
    size: int
    reason: str  # CLOSED, LATE or TERMINATED
    limit_s: float  # how long a collective may take
    now: float  # seconds since 1970
    posts: dict[int, Post]  # the newest of every rank that has ever written one
    states: dict[int, str | None] = field(default_factory=dict)  # dead, stopped, running: processes of this machine
    operation: Operation | None = None  # what the asking rank waited in
    memory_kills: int = 0  # on this machine since the run began
    report: str | None = None  # the file with all posts
    detail: str | None = None  # what the transport said of a broken connection

    @property
    def asking(self) -> Post:
        return self.posts[self.rank]


@dataclass(frozen=True)
class Verdict:
    """The line, whom it blames, and whether those processes have ended."""

    line: str
    ranks: list[int]
    ended: bool


def verdict(case: Case, *, heard: bool = True) -> Verdict | None:
    """Whose fault it is, or None if nobody's that can be named. Not `heard`: others may still be about to answer."""
    named = _named(case, heard)
    return _unnamed(case) if named is None and heard else named


def answered(case: Case) -> bool:
    """Has every rank said something, but for those that cannot any more?"""
    return all(
        rank in case.posts
        and (case.posts[rank].answers or case.posts[rank].left or case.states.get(rank) in ("dead", "stopped"))
        for rank in range(case.size)
    )


def _named(case: Case, heard: bool) -> Verdict | None:
    for kind, describe in _KINDS.items():
        if kind in _ONLY_WHEN_HEARD and (not heard or case.reason == TERMINATED):
            continue
        ranks = [rank for rank in range(case.size) if rank != case.rank and kind_of(case, rank) == kind]
        if ranks:
            return Verdict(
                describe(case, ranks, case.posts.get(ranks[0])), ranks, kind in ("left", "dead", "signalled")
            )
    return None


def _unnamed(case: Case) -> Verdict | None:
    if case.reason == LATE:
        line = (
            f"{_operation(case)} took longer than {duration(case.limit_s)} although all ranks had begun it; if the network "
            f"between them is sound, raise --distributed-timeout-minutes{_see(case)}."
        )
    elif case.reason == CLOSED and case.detail:
        line = (
            f"{_operation(case)} of rank {case.rank} lost a connection although all ranks run ({case.detail}); look at the "
            f"network between them, then {AGAIN}"
        )
    else:
        return None
    return Verdict(line, [], False)


def kind_of(case: Case, rank: int) -> str | None:
    """left, dead, absent, stopped, silent, behind, signalled; None for a rank that is not to blame."""
    post, state = case.posts.get(rank), case.states.get(rank)
    if post is None:
        return "absent"
    if post.blameless:
        return "signalled" if post.left and post.left.startswith(SIGNALLED) else None
    if post.left is not None:
        return "left"
    if state in ("dead", "stopped"):
        return state
    if not post.answers:
        return "silent"
    awaited = case.operation.number if case.operation else case.asking.begun
    return "behind" if case.reason == LATE and post.begun < awaited else None


def _left(case: Case, ranks: list[int], post: Post) -> str:
    return (
        f"{_who(ranks)} ended in {post.place}, with {post.left}{_waited(case)}. Mend what its own message names, then "
        f"{AGAIN}"
    )


def _dead(case: Case, ranks: list[int], post: Post) -> str:
    killed = (
        f" Meanwhile the kernel killed {case.memory_kills} for want of memory on this machine."
        if case.memory_kills
        else ""
    )
    return (
        f"{_who(ranks)} died (process {post.pid} on {post.host} is gone){_last_seen(case, post)}{_waited(case)}."
        f"{killed} The launcher's summary names the signal; {AGAIN}"
    )


def _absent(case: Case, ranks: list[int], post: None) -> str:
    return (
        f"{_who(ranks)} of {case.size} never arrived{_waited(case)}; see that {'it was' if len(ranks) == 1 else 'they were'} "
        f"started with the same MASTER_ADDR and MASTER_PORT, and can reach them."
    )


def _stopped(case: Case, ranks: list[int], post: Post) -> str:
    return (
        f"{_who(ranks)} did not join {_operation(case)}{_within(case)}: process {post.pid} on {post.host} is stopped "
        f"(SIGSTOP){_last_seen(case, post)}. Find who stopped it, a debugger or a batch system; {AGAIN}"
    )


def _silent(case: Case, ranks: list[int], post: Post) -> str:
    runs = case.states.get(ranks[0]) == "running"
    what = "its process runs, but its Python does not" if runs else "it died, is stopped, or its machine is cut off"
    return (
        f"{_who(ranks)} does not answer: {what} (process {post.pid} on {post.host}){_last_seen(case, post)}{_waited(case)}. "
        f"Look there, then {AGAIN}"
    )


def _behind(case: Case, ranks: list[int], post: Post) -> str:
    return (
        f"{_who(ranks)} did not join {_operation(case)}{_within(case)}: since {duration(post.phase_s)} in {post.place}, "
        f"in {where(post.stack)}, after collective #{post.begun}. If that is only slow, raise "
        f"--distributed-timeout-minutes{_see(case)}; else mend it, and {AGAIN}"
    )


def _signalled(case: Case, ranks: list[int], post: Post) -> str:
    signal = "SIGTERM" if post.left.startswith("SIGTERM") else "SIGINT"
    return (
        f"{_who(ranks)} ended in {post.place}, by {signal}{_waited(case)}. Find who sent it, a person or a batch system, "
        f"then {AGAIN}"
    )


_KINDS = {
    "left": _left,
    "dead": _dead,
    "absent": _absent,
    "stopped": _stopped,
    "silent": _silent,
    "behind": _behind,
    "signalled": _signalled,
}
_ONLY_WHEN_HEARD = ("absent", "silent", "behind", "stopped", "signalled")


def where(stack: list[str]) -> str:
    """'wait (connection.py:9) called by _each (megatron_lite/data/loader.py:44)': the innermost call, and ours."""
    if not stack:
        return "an unknown place"
    ours = next((call for call in stack if "/megatron_lite/" in call), None)
    inner = _short(stack[0])
    return inner if ours in (None, stack[0]) else f"{inner} called by {_short(ours)}"


def _short(call: str) -> str:
    name, _, path = call.partition(" (")
    return f"{name} ({'/'.join(path.split('/')[-3:])}"


def _who(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MAX_NAMED]))
    more = len(ranks) - MAX_NAMED
    return f"ranks {named} and {more} more" if more > 0 else f"ranks {named}"


def _operation(case: Case) -> str:
    if case.operation is None:
        return "a collective" if case.asking.begun else "the first meeting of all ranks"
    return str(case.operation)


def _within(case: Case) -> str:
    return f" of rank {case.rank} within {duration(case.limit_s)}" if case.reason == LATE else f" of rank {case.rank}"


def _waited(case: Case) -> str:
    me = case.asking
    if case.reason == TERMINATED and case.operation is None:
        return f"; rank {case.rank} was in {me.place}"
    waited = f" {duration(case.limit_s)}" if case.reason == LATE else ""
    return f"; rank {case.rank} waited for it{waited} in {_operation(case)}, {me.place}"


def _last_seen(case: Case, post: Post) -> str:
    return f", last seen {duration(max(case.now - post.wall_time, 0))} before in {post.place}, after collective #{post.begun}"


def _see(case: Case) -> str:
    return f" (all stacks: {case.report})" if case.report else ""
