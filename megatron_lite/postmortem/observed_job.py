"""A job as its evidence shows it: each rank's end, place and calls, and who waits for whom. Rules look at this."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from megatron_lite.postmortem.call_sites import Activity, StackPlace, find_call_site, find_main_thread, find_place
from megatron_lite.postmortem.evidence import (
    EventKind,
    JobEvidence,
    LogEvent,
    ProcessEnd,
    ProcessStacks,
    RankProgress,
)
from megatron_lite.postmortem.matched_calls import MatchedCalls, match_calls
from megatron_lite.postmortem.rank_ends import KILL, LOOPBACK, EndKind, RankEnd, unite_ends
from megatron_lite.postmortem.rank_lists import UNNAMED, find_earliest, list_ranks, name_ranks
from megatron_lite.postmortem.waits import Roots, Wait, find_roots, find_waits

# an error of hardware may need so long to show in a process, by a timeout
LONG_BEFORE_S = 7200.0
# a job that hangs may not be looked at for so long
LONG_HANG_S = 86400.0
# the kernel's log reaches back to the machine's start, and holds what befell other jobs, too
OF_KERNEL = (EventKind.XID, EventKind.HOST_OUT_OF_MEMORY)
Placed = TypeVar("Placed", ProcessEnd, LogEvent, ProcessStacks)
OfProcess = ProcessEnd | LogEvent | ProcessStacks | RankProgress


@dataclass(frozen=True)
class ObservedRank:
    """All that is known of one rank, its records oldest first."""

    rank: int
    end: RankEnd | None = None
    stacks: tuple[ProcessStacks, ...] = ()
    events: tuple[LogEvent, ...] = ()
    progress: tuple[RankProgress, ...] = ()

    @property
    def host(self) -> str:
        """The machine, "" where nothing tells."""
        records: list[RankProgress | ProcessStacks | LogEvent] = [*self.progress, *self.stacks, *self.events]
        for record in records:
            if record.host and record.host != LOOPBACK:
                return record.host
        return self.end.host if self.end else ""

    @cached_property
    def place(self) -> StackPlace | None:
        """Where its main thread was at last; None without a stack."""
        for stacks in reversed(self.stacks):
            thread = find_main_thread(stacks)
            if thread is not None and thread.frames:
                return replace(find_place(thread.frames), is_idle=thread.is_idle)
        return None

    @property
    def layout_place(self) -> str:
        """The coordinates in the layout: "pp 1, tp 0"; "" where nothing tells."""
        return next((one.place for one in self.progress if one.place), "")

    @property
    def step_place(self) -> str:
        """Step and phase when it was heard last: "step 12, forward"."""
        if not self.progress:
            return ""
        last = self.progress[-1]
        words = [f"step {last.step}"] if last.step is not None else []
        if last.phase:
            words.append(last.phase)
        return ", ".join(words)

    @property
    def process_state(self) -> str | None:
        """The last state of the process that somebody noted; None of one that is known to have ended."""
        return self._last_state if self.end is None else None

    @property
    def was_stopped(self) -> bool:
        """Whether the process was last seen stopped: such a one acts no more, and only SIGKILL ends it."""
        is_ended_by_others = self.end is None or self.end.exit_code in KILL or self.end.is_consequence
        return self._last_state == "stopped" and is_ended_by_others

    @property
    def _last_state(self) -> str | None:
        for one in reversed(self.progress):
            if one.process_state:
                return one.process_state
        return None

    def has_event(self, kind: EventKind) -> bool:
        """Tell whether its log has a line of a kind."""
        return any(event.kind is kind for event in self.events)


@dataclass(frozen=True)
class ObservedJob:
    """A job as its evidence shows it."""

    evidence: JobEvidence
    ranks: Mapping[int, ObservedRank]
    calls: MatchedCalls
    waits: Mapping[int, Wait]
    # ends of processes whose rank nothing tells
    unplaced_ends: tuple[RankEnd, ...] = ()
    events: Mapping[EventKind, tuple[LogEvent, ...]] = field(default_factory=dict)

    def list_events(self, *kinds: EventKind) -> list[LogEvent]:
        """List the lines of logs of some kinds, earliest first."""
        found = [event for kind in kinds for event in self.events.get(kind, ())]
        return sorted(found, key=_order_events)

    def list_recent_events(self, kind: EventKind) -> list[LogEvent]:
        """List the lines of a kind in logs that reach far back, without those of long before the job failed."""
        first = self._find_trouble()
        events = self.list_events(kind)
        if first is None:
            return events
        return [event for event in events if event.at is None or event.at >= first - LONG_BEFORE_S]

    def _find_trouble(self) -> float | None:
        """Find when trouble began to show, in seconds since 1970: by words on it, else by who went no farther, else by
        looks at the job, else by the kernel's last words; None: unknown."""
        told = [end.at for end in self.ends]
        of_kernel = []
        for kind, events in self.events.items():
            times = [event.at for event in events if event.at is not None]
            if kind in OF_KERNEL:
                of_kernel += times
            else:
                told += times
        last_calls = [calls[-1].created_s for calls in self.calls.by_rank.values() if calls]
        looks = [stacks.taken_at for stacks in self.evidence.stacks]
        looks += [one.seen_at for one in self.evidence.progress]
        looked = find_earliest(looks)
        since_look = None if looked is None else looked - LONG_HANG_S
        candidates = (find_earliest(told), find_earliest(last_calls), since_look, max(of_kernel, default=None))
        return next((time for time in candidates if time is not None), None)

    @cached_property
    def ends(self) -> list[RankEnd]:
        """The ends of all processes, those of ranks first."""
        ends = [one.end for one in self.ranks.values() if one.end is not None]
        ends.extend(self.unplaced_ends)
        return ends

    @cached_property
    def roots(self) -> Roots:
        """The ranks at the end of all waiting, by the recordings."""
        return find_roots(self.waits)

    @cached_property
    def places(self) -> dict[int, StackPlace]:
        """Where ranks are, of those with a stack."""
        found = {}
        for rank, one in self.ranks.items():
            if one.place is not None:
                found[rank] = one.place
        return found

    def list_at(self, activity: Activity) -> tuple[int, ...]:
        """List the ranks whose stack shows an activity."""
        return tuple(rank for rank, place in self.places.items() if place.activity is activity)

    def list_waiting(self) -> tuple[int, ...]:
        """List the ranks that wait for others, by recordings, stacks or their logs."""
        waiting = {*self.waits, *self.list_at(Activity.WAITS_FOR_RANKS), *self.list_at(Activity.BACKWARD)}
        for rank, one in self.ranks.items():
            if one.has_event(EventKind.COLLECTIVE_TIMEOUT):
                waiting.add(rank)
        return tuple(sorted(waiting))

    def list_in_state(self, process_state: str) -> tuple[int, ...]:
        """List the ranks whose process was last seen in a state, and is not known to have ended."""
        return tuple(rank for rank, one in self.ranks.items() if one.process_state == process_state)

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, where something tells."""
        return self.evidence.world_size

    def list_unknown(self, known: Iterable[int]) -> list[int]:
        """List the ranks of the job that are not among some."""
        there = set(known)
        return [rank for rank in range(self.world_size or 0) if rank not in there]

    @cached_property
    def has_several_hosts(self) -> bool:
        """Whether ranks are known to run on more than one machine."""
        return len({one.host for one in self.ranks.values() if one.host}) > 1

    def name(self, ranks: Sequence[int]) -> str:
        """Name ranks, a single one with its place in the layout, and its machine where there are several."""
        if not ranks:
            return UNNAMED
        named = name_ranks(ranks)
        observed = self.ranks.get(ranks[0])
        if len(ranks) > 1 or observed is None:
            return named
        notes = [observed.layout_place]
        if self.has_several_hosts:
            notes.append(observed.host)
        said = ", ".join(note for note in notes if note)
        return f"{named} ({said})" if said else named


def _order_events(event: LogEvent) -> tuple[bool, float]:
    return event.at is None, event.at or 0.0


def observe_job(evidence: JobEvidence) -> ObservedJob:
    """Sort a job's evidence by rank, and find out who waits for whom."""
    placer = _RankPlacer(evidence)
    events = placer.place(evidence.events)
    ends, unplaced_ends = _unite_all_ends(placer.place(evidence.ends))
    stacks = placer.place(evidence.stacks)
    known = {*ends, *range(evidence.world_size or 0)}
    for records in (stacks, events, evidence.progress, evidence.recordings, evidence.unanswered):
        known.update(list_ranks(records))
    failed_at = {}
    for rank, end in ends.items():
        if end.kind is EndKind.LOST_OTHERS:
            failed_at[rank] = find_call_site(end.frames)
    all_are_known = evidence.world_size is not None
    calls = match_calls(evidence.recordings, known, all_are_known=all_are_known, failed_at=failed_at)
    ranks = _sort_by_rank(ends, stacks, events, evidence.progress, calls)
    for rank in list_ranks(evidence.unanswered):
        ranks.setdefault(rank, ObservedRank(rank))
    return ObservedJob(
        evidence=evidence,
        ranks=dict(sorted(ranks.items())),
        calls=calls,
        waits=find_waits(calls),
        unplaced_ends=tuple(unplaced_ends),
        events=_sort_by_kind(events),
    )


def _sort_by_rank(
    ends: Mapping[int, RankEnd],
    stacks: Sequence[ProcessStacks],
    events: Sequence[LogEvent],
    progress: Sequence[RankProgress],
    calls: MatchedCalls,
) -> dict[int, ObservedRank]:
    """Sort records by rank.

    Args:
        ends: How ranks ended.
        stacks: Where processes were.
        events: Lines of logs.
        progress: How far ranks were.
        calls: Whose ranks are known, too.
    """
    ranks = {*ends, *calls.by_rank}
    for records in (stacks, events, progress):
        ranks.update(list_ranks(records))
    stacks_by_rank = _group_by_rank(sorted(stacks, key=lambda one: one.taken_at or 0.0))
    events_by_rank = _group_by_rank(events)
    progress_by_rank: dict[int, list[RankProgress]] = defaultdict(list)
    for one in sorted(progress, key=lambda one: one.seen_at or 0.0):
        progress_by_rank[one.rank].append(one)
    observed = {}
    for rank in sorted(ranks):
        observed[rank] = ObservedRank(
            rank=rank,
            end=ends.get(rank),
            stacks=tuple(stacks_by_rank.get(rank, ())),
            events=tuple(events_by_rank.get(rank, ())),
            progress=tuple(progress_by_rank.get(rank, ())),
        )
    return observed


def _sort_by_kind(events: Sequence[LogEvent]) -> dict[EventKind, tuple[LogEvent, ...]]:
    by_kind: dict[EventKind, list[LogEvent]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    return {kind: tuple(several) for kind, several in by_kind.items()}


class _RankPlacer:
    """Finds the rank of records that name only a process."""

    def __init__(self, evidence: JobEvidence):
        self._by_process: dict[tuple[str, int], int] = {}
        self._by_pid: dict[int, set[int]] = defaultdict(set)
        records: list[OfProcess] = [*evidence.progress, *evidence.stacks, *evidence.ends, *evidence.events]
        for record in records:
            self._learn(record)

    def _learn(self, record: OfProcess) -> None:
        if record.rank is None or record.pid is None:
            return
        self._by_process[record.host or "", record.pid] = record.rank
        self._by_pid[record.pid].add(record.rank)

    def place(self, records: Sequence[Placed]) -> list[Placed]:
        """Give records their ranks, where another record of the same process has it."""
        placed = []
        for record in records:
            if record.rank is None and record.pid is not None:
                record = replace(record, rank=self._find(record.host or "", record.pid))
            placed.append(record)
        return placed

    def _find(self, host: str, pid: int) -> int | None:
        process = (host, pid)
        if process in self._by_process:
            return self._by_process[process]
        ranks = self._by_pid.get(pid, set())
        # processes of two machines may have one number
        return next(iter(ranks)) if len(ranks) == 1 else None


def _group_by_rank(records: Iterable[Placed]) -> dict[int, list[Placed]]:
    grouped: dict[int, list[Placed]] = defaultdict(list)
    for record in records:
        if record.rank is not None:
            grouped[record.rank].append(record)
    return grouped


def _unite_all_ends(ends: Sequence[ProcessEnd]) -> tuple[dict[int, RankEnd], list[RankEnd]]:
    """Unite the records of each rank's end.

    Args:
        ends: Records of processes.

    Returns:
        The ends by rank, and those of unknown ranks, one for each process.
    """
    by_rank = {}
    for rank, several in _group_by_rank(ends).items():
        by_rank[rank] = unite_ends(several)
    by_process: dict[object, list[ProcessEnd]] = defaultdict(list)
    for number, end in enumerate(ends):
        if end.rank is None:
            process = end.pid or f"unknown {number}"
            by_process[process].append(end)
    return by_rank, [unite_ends(several) for several in by_process.values()]
