"""Finds the rank to blame when a collective fails: one rank asks all others where they are, decides, and tells it in
one line."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from megatron_lite.config.layout import Layout
from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.formats.failure_record import FailureRecord, RankAtFailure, encode_failure
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.parallel.rank_status import DEFAULT, STAGE_TRANSFERS, Operation, RankStore, describe_position
from megatron_lite.process_state import memory_kills, process_state
from megatron_lite.run_folder import write_atomically, write_run
from megatron_lite.shared_files import read_bounded
from megatron_lite.units import duration

MAX_NAMED_RANKS = 8  # ranks in one line
# why somebody asks
CLOSED = "closed"
LATE_RANK = "late"
TERMINATED = "terminated"
SIGNAL_FAREWELLS = ("SIGTERM", "KeyboardInterrupt")  # how a rank's farewell begins that somebody ended
AGAIN = "start again with --load to go on from the newest checkpoint."
MAX_RECORD_BYTES = 2**24
MIN_STUCK = 0.5  # of a collective's time limit that a rank must be in one phase to have kept others waiting
ANSWER_SECONDS = 5.0  # ranks look at the store every second
VERDICT_SECONDS = ANSWER_SECONDS + 5.0  # until the speaker has told the others
SECONDS_BETWEEN_STATUS_LOOKS = 0.1
LINES = {  # what is said of ranks of a kind; whoever is of an earlier kind is to blame
    "left": "{who} ended in {at}, with {post.left}{waited}. Mend what its own message names, then {AGAIN}",
    "dead": "{who} died ({process} is gone){seen}{waited}.{killed} The launcher's summary names the signal; {AGAIN}",
    "absent": (
        "{who} of {case.size} never arrived{waited}; "
        "see that {were} started with the same MASTER_ADDR and MASTER_PORT, and can "
        "reach them."
    ),
    "stopped": (
        "{who} {unjoined}: {process} is stopped (SIGSTOP){seen}. "
        "Find who stopped it, a debugger or a batch system; {AGAIN}"
    ),
    "silent": "{who} does not answer: {trouble} ({process}){seen}{waited}. Look there, then {AGAIN}",
    "behind": (
        "{who} {unjoined}: since {lasted} in {at}, in {call}, after collective #{post.begun}. "
        "If that is only slow, raise "
        "--distributed-timeout-minutes{case.see}; else mend it, and {AGAIN}"
    ),
    "signalled": (
        "{who} ended in {at}, by {signal}{waited}. Find who sent it, a person or a batch system, then {AGAIN}"
    ),
}
ENDED = ("left", "dead", "signalled")


@dataclass
class Case:
    """All that the rank that asks has found out."""

    rank: int
    size: int
    reason: str  # CLOSED, LATE_RANK or TERMINATED
    limit_s: float  # how long a collective may take
    posts: dict[int, RankAtFailure]  # the newest of every rank that has ever written one
    operation: Operation | None = None  # what the asking rank waited in
    detail: str | None = None  # what the transport said of a broken connection
    report: str | None = None  # the file with all posts
    layout: Layout = field(default_factory=Layout)
    now: float = 0.0  # seconds since 1970
    states: dict[int, str | None] = field(default_factory=dict)  # dead, stopped, running: processes of this machine
    memory_kills: int = 0  # on this machine since the run began

    @property
    def waited_in(self) -> str:
        """The words for what the asking rank waited in."""
        if self.operation is None:
            return "a collective" if self.posts[self.rank].begun else "the first meeting of all ranks"
        return str(self.operation)

    @property
    def awaited(self) -> list[int]:
        """The ranks for which the asking rank waits in the end.

        A rank that has not begun what it waits in may wait itself, for others in another group.
        """
        awaited: tuple[str, int, tuple[int, ...]] = (DEFAULT, self.posts[self.rank].begun, ())
        if self.operation is not None:
            awaited = self.operation.awaited
        late = self._find_late(*awaited)
        seen: set[int] = set()
        while not seen.intersection(late):
            seen.update(late)
            idle = [rank for rank in late if self.posts[rank].waiting is None]
            further: set[int] = set()
            for rank in late:
                waiting = self.posts[rank].waiting
                if waiting is not None:
                    further.update(self._find_late(*waiting))
            if idle or not further:
                return idle or late
            late = sorted(further)
        return late

    def _find_late(self, group: str, number: int, ranks: Sequence[int]) -> list[int]:
        """Find the other ranks of a group that have not begun its collective of this number.

        Args:
            group: The name of the group.
            number: The number of the collective, counted from 1 in its group.
            ranks: The ranks of the group; empty for all.
        """
        late = []
        for rank, post in self.posts.items():
            is_other = rank != self.rank and (not ranks or rank in ranks)
            begun = post.begun if group == DEFAULT else post.groups.get(group, 0)
            if is_other and begun < number:
                late.append(rank)
        return sorted(late)

    @property
    def see(self) -> str:
        """The words that lead to the report, if there is one."""
        return f" (all stacks: {self.report})" if self.report else ""


@dataclass(frozen=True)
class Cause:
    """The line to tell, the ranks that it blames, and whether their processes have ended."""

    line: str
    ranks: list[int]
    ended: bool


def find_cause(case: Case, *, heard: bool = True) -> Cause | None:
    """Find whose fault it is; None if nobody's that can be named.

    Args:
        case: What is known.
        heard: Whether all have answered that still may.
    """
    kinds = {rank: classify_rank(case, rank) for rank in range(case.size) if rank != case.rank}
    certain = ("left", "dead")
    for kind in LINES if heard and case.reason != TERMINATED else certain:
        ranks = [rank for rank, found in kinds.items() if found == kind]
        if ranks:
            return Cause(_describe(case, kind, ranks), ranks, kind in ENDED)
    if not heard:
        return None
    if case.reason == LATE_RANK:
        happened = f"{case.waited_in} took longer than {duration(case.limit_s)} although all ranks had begun it"
        remedy = f"if the network between them is sound, raise --distributed-timeout-minutes{case.see}."
        return Cause(f"{happened}; {remedy}", [], False)
    if case.reason == CLOSED and case.detail:
        happened = f"{case.waited_in} of rank {case.rank} lost a connection although all ranks run ({case.detail})"
        return Cause(f"{happened}; look at the network between them, then {AGAIN}", [], False)
    return None


def answered(case: Case) -> bool:
    """Tell whether every rank has said something, but for those that cannot any more."""
    for rank in range(case.size):
        post = case.posts.get(rank)
        if post is None:
            return False
        is_mute = case.states.get(rank) in ("dead", "stopped")
        if not (post.answers or post.left or is_mute):
            return False
    return True


def classify_rank(case: Case, rank: int) -> str | None:
    """Find the key of LINES for a rank; None for one that is not to blame."""
    post = case.posts.get(rank)
    state = case.states.get(rank)
    if post is None:
        return "absent"
    if post.blameless:
        return "signalled" if post.left and post.left.startswith(SIGNAL_FAREWELLS) else None
    if post.left is not None:
        return "left"
    if state in ("dead", "stopped"):
        return state
    if not post.answers:
        return "silent"
    # a rank whose time is over closes its connections, with which others fail whose time is nearly over
    has_waited_long = post.phase_s >= MIN_STUCK * case.limit_s
    is_late = case.reason == LATE_RANK or (case.reason == CLOSED and has_waited_long)
    return "behind" if is_late and rank in case.awaited else None


def _describe(case: Case, kind: str, ranks: list[int]) -> str:
    """The line on ranks of a kind; what is told of one of them is the first's."""
    waited, unjoined = _describe_waiting(case, ranks[0])
    words = {
        "who": _name_ranks(case, ranks),
        "were": "they were" if len(ranks) > 1 else "it was",
        "unjoined": unjoined,
        "killed": "",
        "trouble": "it died, is stopped, or its machine is cut off",
    }
    if case.memory_kills:
        words["killed"] = f" Meanwhile the kernel killed {case.memory_kills} for want of memory on this machine."
    if case.states.get(ranks[0]) == "running":
        words["trouble"] = "its process runs, but its Python does not"
    post = case.posts.get(ranks[0])
    if post is not None:
        seen_at = case.now if post.wall_time is None else post.wall_time
        ago = duration(max(case.now - seen_at, 0))
        words |= {
            "lasted": duration(post.phase_s),
            "call": where(post.stack),
            "process": f"process {post.pid} on {post.host}",
            "at": describe_position(post),
            "seen": f", last seen {ago} before in {describe_position(post)}, after collective #{post.begun}",
            "signal": "SIGTERM" if (post.left or "").startswith("SIGTERM") else "SIGINT",
        }
    return LINES[kind].format(case=case, post=post, waited=waited, AGAIN=AGAIN, **words)


def _name_ranks(case: Case, ranks: list[int]) -> str:
    """The names of ranks, as in 'rank 3 (tp 1)' or 'ranks 1, 2, 3 and 9 more'."""
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    if len(ranks) == 1:
        place = case.layout.describe_place(ranks[0])
        return f"rank {named} ({place})" if place else f"rank {named}"
    more = len(ranks) - MAX_NAMED_RANKS
    return f"ranks {named} and {more} more" if more > 0 else f"ranks {named}"


def _describe_waiting(case: Case, culprit: int) -> tuple[str, str]:
    """Describe what did not happen.

    Returns:
        How the asking rank waited, as the end of a sentence, and what the culprit did not do.
    """
    mine = case.posts[case.rank]
    operation = case.operation
    after = ""
    within = ""
    lasted = ""
    if case.reason == LATE_RANK:
        limit = duration(case.limit_s)
        after = f" {limit}"
        within = f" within {limit}"
        lasted = f", for {limit}"
    is_far = operation is not None and operation.ranks and culprit not in operation.ranks
    if operation is not None and operation.group == STAGE_TRANSFERS:
        whom = f"others waiting, and through them rank {case.rank}" if is_far else f"rank {case.rank} waiting"
        unjoined = f"keeps {whom} for {operation}{lasted}"
        return f"; rank {case.rank} waited{after} for {operation}, {describe_position(mine)}", unjoined
    missed = "keeps others waiting, and through them" if is_far else "did not join"
    unjoined = f"{missed} {case.waited_in} of rank {case.rank}{within}"
    if case.reason == TERMINATED and operation is None:
        return f"; rank {case.rank} was in {describe_position(mine)}", unjoined
    return f"; rank {case.rank} waited for it{after} in {case.waited_in}, {describe_position(mine)}", unjoined


def where(stack: Sequence[str]) -> str:
    """Name the innermost call of a stack and the innermost one of this package, as in
    'wait (connection.py:9) called by _each (megatron_lite/data/loader.py:44)'."""
    if not stack:
        return "an unknown place"
    calls = [stack[0]]
    ours = next((call for call in stack if "/megatron_lite/" in call), stack[0])
    if ours != stack[0]:
        calls.append(ours)
    named = []
    for call in calls:
        name, _, path = call.partition(" (")
        end_of_path = "/".join(path.split("/")[-3:])
        named.append(f"{name} ({end_of_path}")
    return " called by ".join(named)


class HangDiagnosis:
    """Asks all ranks for one of them, in the thread that owns its connection to the store."""

    def __init__(
        self, world: World, store: RankStore, limit_s: float, *, ends_record: bool, layout: Layout | None = None
    ):
        """
        Args:
            world: This rank's place in the launch.
            store: Where ranks tell each other how they are.
            limit_s: How long a collective may take, in seconds.
            ends_record: Whether the process ends here, so that run.json's own writer will not come to it.
            layout: This rank's place among the others; None where all hold the same.
        """
        self.world = world
        self.store = store
        self.limit_s = limit_s
        self.ends_record = ends_record
        self.layout = layout or Layout()
        self.run_dir: Path | None = None
        self._kills = memory_kills()

    def diagnose(
        self, reason: str, mine: RankAtFailure, operation: Operation | None, detail: str | None = None
    ) -> RanksError | None:
        """Find the error to raise on this rank; None if no rank is to blame. Takes seconds.

        Args:
            reason: CLOSED, LATE_RANK or TERMINATED.
            mine: This rank's status.
            operation: What this rank waits in, if that is known.
            detail: What the transport said of a lost connection.
        """
        if not self.store.claim_speaker():
            # this thread has no time to answer while it waits
            waiting = None if operation is None else operation.awaited
            self.store.set_status(replace(mine, answers=True, waiting=waiting))
            line = self.store.wait_for_cause(VERDICT_SECONDS)
            return RanksError(line, told=True) if line else None
        case = self._open_case(reason, mine, operation, detail)
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            self._look(case, range(case.size))
            heard = answered(case) or time.monotonic() >= end
            found = find_cause(case, heard=heard)
            if found is not None or heard or reason == TERMINATED:
                break
            time.sleep(SECONDS_BETWEEN_STATUS_LOOKS)
        self.store.publish_cause(found.line if found else "")
        if found is None:
            return None
        if self.run_dir is not None:
            self._write_down(case, found, self.run_dir)
        return RanksError(found.line, ended=found.ended)

    def has_dead_neighbor(self, mine: RankAtFailure, operation: Operation | None) -> bool:
        """Tell whether a rank of this machine has died or failed. Takes milliseconds, and disturbs nobody."""
        case = self._open_case(TERMINATED, mine, operation)
        first = self.world.rank - self.world.local_rank
        self._look(case, range(first, first + self.world.local_size))
        return find_cause(case, heard=False) is not None

    def _open_case(
        self, reason: str, mine: RankAtFailure, operation: Operation | None, detail: str | None = None
    ) -> Case:
        return Case(
            rank=self.world.rank,
            size=self.world.size,
            reason=reason,
            limit_s=self.limit_s,
            posts={self.world.rank: replace(mine, answers=True)},
            operation=operation,
            detail=detail,
            report=str(self.run_dir / RANKS_FILE) if self.run_dir else None,
            layout=self.layout,
        )

    def _look(self, case: Case, ranks: range) -> None:
        """Bring the case up to date; who has answered is not asked again."""
        unheard = [rank for rank in ranks if rank not in case.posts or not case.posts[rank].answers]
        case.posts |= self.store.get_statuses(unheard)
        case.now = time.time()
        mine = case.posts[case.rank]
        case.states = {}
        for rank, post in case.posts.items():
            is_here = post.host == mine.host and post.pids == mine.pids
            # ended ranks left out: another process may have their number by now
            if rank != case.rank and is_here and post.left is None and post.pid is not None:
                case.states[rank] = process_state(post.pid)
        kills = memory_kills()
        if kills is not None and self._kills is not None:
            case.memory_kills = kills - self._kills

    def _write_down(self, case: Case, found: Cause, run_dir: Path) -> None:
        """Write RUN/ranks.json: the verdict and every rank's last status, with stacks of those that answered; and the
        end into run.json."""
        # the writer of run.json
        last = self.world.size - 1
        gone = last in found.ranks and case.posts[last].left in (None, "SIGTERM")
        ranks = {}
        for rank, post in sorted(case.posts.items()):
            ranks[str(rank)] = replace(post, place=self.layout.describe_place(rank))
        try:
            write_atomically(run_dir / RANKS_FILE, encode_failure(FailureRecord(verdict=found.line, ranks=ranks)))
            if gone or self.ends_record or case.reason == TERMINATED:
                end_record(run_dir, found.line)
        except (OSError, ValueError):
            return  # a full disk must not hide the verdict


def end_record(folder: Path, line: str) -> None:
    """Write into run.json how the run ended, if nobody has done so yet.

    Args:
        folder: The run's.
        line: What a RanksError says.
    """
    path = folder / RUN_FILE
    try:
        record = msgspec.convert(json.loads(read_bounded(path, MAX_RECORD_BYTES)), RunRecord)
    except msgspec.ValidationError:  # of somebody else
        return
    if record.status == "running":
        ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_run(folder, msgspec.structs.replace(record, status=f"failed: RanksError: {line}", ended=ended))
