"""Which rank is to blame when a collective fails. One rank asks all others where they are, decides, and tells it in one line."""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.parallel.flight_recorder import Operation
from megatron_lite.parallel.rank_store import RankStatus, RankStore
from megatron_lite.process_state import memory_kills, process_state
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, write_atomically
from megatron_lite.shared_files import read_bounded
from megatron_lite.units import duration

MAX_NAMED = 8  # ranks in one line
CLOSED, LATE, TERMINATED = "closed", "late", "terminated"  # why somebody asks
SIGNALLED = ("SIGTERM", "KeyboardInterrupt")  # how a rank's farewell begins that somebody ended
AGAIN = "start again with --load to go on from the newest checkpoint."
MAX_RECORD_BYTES = 2**24
ANSWER_SECONDS = 5.0  # ranks look at the store every second
VERDICT_SECONDS = ANSWER_SECONDS + 5.0  # until the speaker has told the others
SECONDS_BETWEEN_LOOKS = 0.1


# --- the cause, from what all ranks have told: no process, no network


@dataclass(frozen=True)
class Case:
    """What the rank that asks has found out."""

    rank: int
    size: int
    reason: str  # CLOSED, LATE or TERMINATED
    limit_s: float  # how long a collective may take
    now: float  # seconds since 1970
    posts: dict[int, RankStatus]  # the newest of every rank that has ever written one
    states: dict[int, str | None] = field(default_factory=dict)  # dead, stopped, running: processes of this machine
    operation: Operation | None = None  # what the asking rank waited in
    memory_kills: int = 0  # on this machine since the run began
    report: str | None = None  # the file with all posts
    detail: str | None = None  # what the transport said of a broken connection

    @property
    def asking(self) -> RankStatus:
        return self.posts[self.rank]


@dataclass(frozen=True)
class Cause:
    """The line, whom it blames, and whether those processes have ended."""

    line: str
    ranks: list[int]
    ended: bool


def find_cause(case: Case, *, heard: bool = True) -> Cause | None:
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


def _named(case: Case, heard: bool) -> Cause | None:
    for kind, describe in _KINDS.items():
        if kind in _ONLY_WHEN_HEARD and (not heard or case.reason == TERMINATED):
            continue
        ranks = [rank for rank in range(case.size) if rank != case.rank and classify_rank(case, rank) == kind]
        if ranks:
            return Cause(describe(case, ranks, case.posts.get(ranks[0])), ranks, kind in ("left", "dead", "signalled"))
    return None


def _unnamed(case: Case) -> Cause | None:
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
    return Cause(line, [], False)


def classify_rank(case: Case, rank: int) -> str | None:
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


def _left(case: Case, ranks: list[int], post: RankStatus) -> str:
    return (
        f"{_who(ranks)} ended in {post.place}, with {post.left}{_waited(case)}. Mend what its own message names, then "
        f"{AGAIN}"
    )


def _dead(case: Case, ranks: list[int], post: RankStatus) -> str:
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


def _stopped(case: Case, ranks: list[int], post: RankStatus) -> str:
    return (
        f"{_who(ranks)} did not join {_operation(case)}{_within(case)}: process {post.pid} on {post.host} is stopped "
        f"(SIGSTOP){_last_seen(case, post)}. Find who stopped it, a debugger or a batch system; {AGAIN}"
    )


def _silent(case: Case, ranks: list[int], post: RankStatus) -> str:
    runs = case.states.get(ranks[0]) == "running"
    what = "its process runs, but its Python does not" if runs else "it died, is stopped, or its machine is cut off"
    return (
        f"{_who(ranks)} does not answer: {what} (process {post.pid} on {post.host}){_last_seen(case, post)}{_waited(case)}. "
        f"Look there, then {AGAIN}"
    )


def _behind(case: Case, ranks: list[int], post: RankStatus) -> str:
    return (
        f"{_who(ranks)} did not join {_operation(case)}{_within(case)}: since {duration(post.phase_s)} in {post.place}, "
        f"in {where(post.stack)}, after collective #{post.begun}. If that is only slow, raise "
        f"--distributed-timeout-minutes{_see(case)}; else mend it, and {AGAIN}"
    )


def _signalled(case: Case, ranks: list[int], post: RankStatus) -> str:
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


def _last_seen(case: Case, post: RankStatus) -> str:
    return f", last seen {duration(max(case.now - post.wall_time, 0))} before in {post.place}, after collective #{post.begun}"


def _see(case: Case) -> str:
    return f" (all stacks: {case.report})" if case.report else ""


# --- asking all ranks


class HangDiagnosis:
    """Of one rank, in the thread that owns the store."""

    def __init__(self, world: World, store: RankStore, limit_s: float, ends_record: bool):
        self.world, self.store, self.limit_s = world, store, limit_s
        self.ends_record = ends_record  # the process ends here: run.json's own writer will not come to it
        self.run_dir: Path | None = None
        self._kills = memory_kills()

    def diagnose(
        self, reason: str, mine: RankStatus, operation: Operation | None, detail: str | None = None
    ) -> RanksError | None:
        """The error to raise on this rank; None if no rank is to blame. Takes seconds. `detail`: of a lost connection."""
        if not self.store.claim_speaker():
            line = self.store.wait_for_cause(VERDICT_SECONDS)
            return RanksError(line, told=True) if line else None
        case = dataclasses.replace(self._case(reason, mine, operation), detail=detail)
        found = find_cause(case, heard=False)
        end = time.monotonic() + ANSWER_SECONDS
        while found is None and reason != TERMINATED:
            heard = answered(case) or time.monotonic() >= end
            found = find_cause(case, heard=heard)
            if heard:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
            case = self._look_again(case)
        return self._conclude(case, found)

    def has_dead_neighbor(self, mine: RankStatus, operation: Operation | None) -> bool:
        """Has a rank of this machine died or failed? Takes milliseconds, and disturbs nobody."""
        first = self.world.rank - self.world.local_rank
        case = self._case(TERMINATED, mine, operation, range(first, first + self.world.local_size))
        return find_cause(case, heard=False) is not None

    def _case(self, reason: str, mine: RankStatus, operation: Operation | None, ranks=None) -> Case:
        posts = self.store.get_statuses(range(self.world.size) if ranks is None else ranks)
        kills = memory_kills()
        case = Case(
            rank=self.world.rank,
            size=self.world.size,
            reason=reason,
            limit_s=self.limit_s,
            now=time.time(),
            posts={**posts, self.world.rank: dataclasses.replace(mine, answers=True)},
            operation=operation,
            memory_kills=kills - self._kills if kills is not None and self._kills is not None else 0,
            report=str(self.run_dir / RANKS_FILE) if self.run_dir else None,
        )
        return dataclasses.replace(case, states=_states(case))

    def _look_again(self, case: Case) -> Case:
        open_ranks = [rank for rank in range(case.size) if rank not in case.posts or not case.posts[rank].answers]
        posts = case.posts | self.store.get_statuses(open_ranks)
        newer = dataclasses.replace(case, posts=posts, now=time.time())
        return dataclasses.replace(newer, states=_states(newer))

    def _conclude(self, case: Case, found: Cause | None) -> RanksError | None:
        self.store.publish_cause(found.line if found else "")
        if found is None:
            return None
        if self.run_dir is not None:
            self._leave_words(case, found)
        return RanksError(found.line, ended=found.ended)

    def _leave_words(self, case: Case, found: Cause):
        last = self.world.size - 1
        gone = last in found.ranks and case.posts[last].left in (None, "SIGTERM")
        try:
            write_posts(self.run_dir, found.line, case.posts)
            if gone or self.ends_record or case.reason == TERMINATED:
                end_record(self.run_dir, found.line)
        except (OSError, ValueError):
            return  # a full disk must not hide the verdict


def _states(case: Case) -> dict[int, str | None]:
    """Of the processes on this machine, ended ranks left out: another process may have their number by now."""
    return {
        rank: process_state(post.pid)
        for rank, post in case.posts.items()
        if rank != case.rank and (post.host, post.pids) == (case.asking.host, case.asking.pids) and post.left is None
    }


# --- what a run whose ranks failed leaves in its folder


def write_posts(folder: Path, line: str, posts: dict[int, RankStatus]):
    """RUN/ranks.json: the verdict and every rank's last post, with stacks of those that answered."""
    record = {"verdict": line, "ranks": {rank: dataclasses.asdict(post) for rank, post in sorted(posts.items())}}
    write_atomically(folder / RANKS_FILE, json.dumps(record, indent=1) + "\n")


def end_record(folder: Path, line: str):
    """RUN/run.json says how the run ended, if nobody has said so yet."""
    path = folder / RUN_FILE
    record = json.loads(read_bounded(path, MAX_RECORD_BYTES))
    if record.get("status") == "running":
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        record |= {"status": f"failed: RanksError: {line}", "ended": ended}
        write_atomically(path, json.dumps(record, indent=1) + "\n")
