"""Finds the rank to blame when a collective fails: one rank asks all others how they are, and draws the conclusion that
`megatron-lite postmortem` would draw of any job."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from megatron_lite.config.layout import Layout
from megatron_lite.config.world import World
from megatron_lite.errors import RanksError
from megatron_lite.formats.failure_record import FailureRecord, RankAtFailure, encode_failure
from megatron_lite.formats.file_names import FLIGHT_RECORDINGS, RANKS_FILE, RUN_FILE
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.parallel.rank_status import RankStore, describe_position
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.evidence import (
    EventKind,
    FlightRecording,
    JobEvidence,
    LogEvent,
    UnansweredRequest,
)
from megatron_lite.postmortem.flight_recordings import build_recordings
from megatron_lite.postmortem.postmortem_results import FailureKind, Postmortem
from megatron_lite.postmortem.run_records import describe_statuses
from megatron_lite.process_state import memory_kills, process_state
from megatron_lite.run_folder import write_atomically, write_run
from megatron_lite.shared_files import read_bounded
from megatron_lite.units import duration

# why somebody asks
CLOSED = "closed"
LATE_RANK = "late"
TERMINATED = "terminated"
AGAIN = "start again with --load to go on from the newest checkpoint"
RAISE_LIMIT = "if that is only slow, raise --distributed-timeout-minutes"
MAX_RECORD_BYTES = 2**24
ANSWER_SECONDS = 5.0  # ranks look at the store every second
VERDICT_SECONDS = ANSWER_SECONDS + 5.0  # until the speaker has told the others
SECONDS_BETWEEN_STATUS_LOOKS = 0.1
SOURCE = "the ranks' own words"
SURE = "high"  # confidence of a conclusion that needs no doubt beside it


@dataclass
class Case:
    """All that the rank that asks has found out."""

    rank: int
    size: int
    reason: str  # CLOSED, LATE_RANK or TERMINATED
    limit_s: float  # how long a collective may take
    posts: dict[int, RankAtFailure]  # the newest of every rank that has ever written one
    recordings: dict[int, str] = field(default_factory=dict)  # excerpts of flight recorders, of ranks that answered
    detail: str | None = None  # what the transport said of a broken connection
    report: str | None = None  # the file with all posts
    layout: Layout = field(default_factory=Layout)
    now: float = 0.0  # seconds since 1970
    states: dict[int, str | None] = field(default_factory=dict)  # dead, stopped, running: processes of this machine
    memory_kills: int = 0  # on this machine since the run began

    @property
    def statuses(self) -> dict[int, RankAtFailure]:
        """The last status of each rank, with its place in the layout and what the kernel says of its process."""
        statuses = {}
        for rank, post in sorted(self.posts.items()):
            state = self.states.get(rank)
            statuses[rank] = replace(post, place=self.layout.describe_place(rank), process_state=state)
        return statuses

    @property
    def ended(self) -> set[int]:
        """Ranks whose processes have ended of their own."""
        said = {rank for rank, post in self.posts.items() if post.left is not None and not post.blameless}
        return said | {rank for rank, state in self.states.items() if state == "dead"}


@dataclass(frozen=True)
class Cause:
    """The line to tell, the ranks that it blames, and whether their processes have ended."""

    line: str
    ranks: tuple[int, ...]
    ended: bool


def find_cause(case: Case, *, heard: bool = True) -> Cause | None:
    """Find whose fault it is; None if nobody's that can be named.

    Args:
        case: What is known.
        heard: Whether all have answered that still may.
    """
    is_certain = bool(case.ended)
    if not is_certain and (case.reason == TERMINATED or not heard):
        return None
    found = conclude(make_evidence(case, heard=heard))
    if found.kind in (FailureKind.UNKNOWN, FailureKind.NONE):
        return None
    ended = bool(found.ranks) and all(_is_gone(case, rank) for rank in found.ranks)
    return Cause(write_line(case, found), found.ranks, ended)


def _is_gone(case: Case, rank: int) -> bool:
    """Whether the process of a rank has ended, for whatever reason."""
    post = case.posts.get(rank)
    return case.states.get(rank) == "dead" or (post is not None and post.left is not None)


def make_evidence(case: Case, *, heard: bool = True) -> JobEvidence:
    """Make evidence of what ranks told: the form in which other jobs leave it in files.

    Args:
        case: What is known.
        heard: Whether all have answered that still may; otherwise silence means nothing.
    """
    told = describe_statuses(SOURCE, case.statuses)
    recordings: dict[int | None, FlightRecording] = {recording.rank: recording for recording in told.recordings}
    for rank, excerpt in case.recordings.items():
        for recording in build_recordings(json.loads(excerpt), SOURCE, rank).recordings:
            recordings[recording.rank] = recording
    return JobEvidence(
        recordings=tuple(recordings.values()),
        stacks=told.stacks,
        ends=told.ends,
        events=tuple(_list_events(case)),
        progress=told.progress,
        unanswered=tuple(_list_unheard(case)) if heard else (),
        world_size=case.size,
    )


def _list_unheard(case: Case) -> list[UnansweredRequest]:
    """The ranks that never arrived, and those that did not answer in time."""
    unheard = []
    for rank in range(case.size):
        post = case.posts.get(rank)
        if post is None:
            unheard.append(UnansweredRequest(SOURCE, rank, "never arrived", never_arrived=True, asked_at=case.now))
        elif not post.answers and post.left is None:
            why = f"no answer within {duration(ANSWER_SECONDS)}"
            unheard.append(UnansweredRequest(SOURCE, rank, why, host=post.host, asked_at=case.now))
    return unheard


def _list_events(case: Case) -> list[LogEvent]:
    """List the events that the asking rank knows: its own error, and kills for want of memory."""
    events = []
    mine = case.posts[case.rank]
    if case.reason == LATE_RANK:
        text = f"a collective took longer than {duration(case.limit_s)}"
        events.append(
            LogEvent(EventKind.COLLECTIVE_TIMEOUT, SOURCE, text, rank=case.rank, at=case.now, lasted_s=case.limit_s)
        )
    if case.reason == CLOSED and case.detail:
        events.append(LogEvent(EventKind.CONNECTION_LOST, SOURCE, case.detail, rank=case.rank, at=case.now))
    if case.memory_kills:
        text = f"meanwhile the kernel killed {case.memory_kills} for want of memory on this machine"
        # when, nobody noted
        events.append(LogEvent(EventKind.HOST_OUT_OF_MEMORY, SOURCE, text, host=mine.host))
    return events


def write_line(case: Case, found: Postmortem) -> str:
    """Write the line that people read: the verdict, where the ranks to blame were, and what to do.

    Args:
        case: What is known.
        found: The conclusion.
    """
    sentences = [found.verdict]
    if found.confidence != SURE:
        sentences.append(f"This is of {found.confidence} confidence")
    heard = [rank for rank in found.ranks if rank in case.posts]
    if heard:
        last = case.posts[heard[0]]
        sentences.append(f"It was heard last in {_describe_last(case, last)}")
    mine = case.posts[case.rank]
    waited = f" for {mine.waits_for}" if mine.waits_for else ""
    sentences.append(f"Rank {case.rank} noticed{waited} in {describe_position(mine)}")
    remedies = []
    if found.next_steps:
        remedies.append(found.next_steps[0].rstrip("."))
    if case.reason == LATE_RANK:
        remedies.append(RAISE_LIMIT)
    remedies.append(AGAIN)
    see = ""
    if case.report:
        see = f" (all stacks: {case.report})"
    said = ". ".join(sentences)
    advised = "; ".join(remedies)
    return f"{said}. {advised}{see}."


def _describe_last(case: Case, post: RankAtFailure) -> str:
    """Write where a rank was when it was heard last, and how long ago."""
    seen_at = case.now if post.wall_time is None else post.wall_time
    ago = duration(max(case.now - seen_at, 0))
    since = f", since {duration(post.phase_s)}" if post.answers else f", {ago} before"
    return f"{describe_position(post)}{since}, after collective #{post.begun} (process {post.pid} on {post.host})"


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

    def diagnose(self, reason: str, mine: RankAtFailure, excerpt: str, detail: str | None = None) -> RanksError | None:
        """Find the error to raise on this rank; None if no rank is to blame. Takes seconds.

        Args:
            reason: CLOSED, LATE_RANK or TERMINATED.
            mine: This rank's status.
            excerpt: What this rank's flight recorder has.
            detail: What the transport said of a lost connection.
        """
        if not self.store.claim_speaker():
            # this thread has no time to answer while it waits
            self.store.set_recording(excerpt)
            self.store.set_status(replace(mine, answers=True))
            line = self.store.wait_for_cause(VERDICT_SECONDS)
            return RanksError(line, told=True) if line else None
        case = self._open_case(reason, mine, excerpt, detail)
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

    def has_dead_neighbor(self, mine: RankAtFailure) -> bool:
        """Tell whether a rank of this machine has died or failed. Takes milliseconds, and disturbs nobody."""
        case = self._open_case(TERMINATED, mine)
        first = self.world.rank - self.world.local_rank
        self._look(case, range(first, first + self.world.local_size))
        return bool(case.ended)

    def _open_case(self, reason: str, mine: RankAtFailure, excerpt: str = "", detail: str | None = None) -> Case:
        return Case(
            rank=self.world.rank,
            size=self.world.size,
            reason=reason,
            limit_s=self.limit_s,
            posts={self.world.rank: replace(mine, answers=True)},
            recordings={self.world.rank: excerpt} if excerpt else {},
            detail=detail,
            report=str(self.run_dir / RANKS_FILE) if self.run_dir else None,
            layout=self.layout,
        )

    def _look(self, case: Case, ranks: range) -> None:
        """Bring the case up to date; who has answered is not asked again."""
        unheard = [rank for rank in ranks if rank not in case.posts or not case.posts[rank].answers]
        case.posts |= self.store.get_statuses(unheard)
        # written before the answer
        told = self.store.get_recordings(rank for rank in unheard if rank in case.posts and case.posts[rank].answers)
        case.recordings |= {rank: excerpt for rank, excerpt in told.items() if excerpt}
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
        """Write RUN/ranks.json: the verdict and every rank's last status, with stacks of those that answered; beside it
        what their flight recorders had; and the end into run.json."""
        # the writer of run.json
        last = self.world.size - 1
        gone = last in found.ranks and case.posts[last].left in (None, "SIGTERM")
        ranks = {str(rank): status for rank, status in case.statuses.items()}
        try:
            write_atomically(run_dir / RANKS_FILE, encode_failure(FailureRecord(verdict=found.line, ranks=ranks)))
            for rank, excerpt in case.recordings.items():
                place = run_dir / f"{FLIGHT_RECORDINGS}{rank}"
                place.parent.mkdir(exist_ok=True)
                write_atomically(place, excerpt)
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
