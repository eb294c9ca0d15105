"""The flight recordings of all ranks beside each other: who entered which call of which group.

A rank without a recording is unknown: nothing says that it did not enter a call. Where a recorder does not tell the
ranks of a group (gloo), they are those that recorded a call in it, which is a guess.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_lite.postmortem.call_sites import find_call_site
from megatron_lite.postmortem.evidence import (
    ALL_RANKS_DESCRIPTION,
    ALL_RANKS_GROUP,
    CallState,
    FlightRecording,
    GroupProgress,
    RecordedCall,
    RecordedGroup,
    StackFrame,
)

COALESCED = "coalesced"
# of a call that only a group's count tells of
UNNAMED_CALL = "collective"
UNKNOWN_RECORD = 2**60
DEFAULT_NAMES = (ALL_RANKS_GROUP, "")
NANOSECONDS = 1e9
# calls that end on no rank before each has entered them; a broadcast may end at its sender
SYNCHRONIZING = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "all_to_all",
    "alltoall",
    "barrier",
)
# a call that fails counts as ended, with gloo: so many at once do not fail
MIN_CALLS_OF_OLD = 64
Pair = tuple[int | None, int | None]


@dataclass(frozen=True)
class EnteredCall:
    """A call that a rank has entered; the operations of a coalesced one are its parts."""

    rank: int
    call: RecordedCall
    parts: tuple[RecordedCall, ...] = ()
    # the rank ended with an error in it
    has_failed: bool = False

    @property
    def name(self) -> str:
        """The name of the call."""
        return self.call.name

    @property
    def number(self) -> int:
        """The number of the call in its group."""
        return self.call.number

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its operations, in any order of calling."""
        return tuple(sorted(part.name for part in self.parts)) or (self.name,)

    @property
    def has_ended(self) -> bool:
        """Whether the rank has nothing more to wait for in it; gloo says so of a call that failed, too."""
        return self.call.has_ended and not self.has_failed

    @property
    def created_ns(self) -> int:
        """When the host called it, in nanoseconds since 1970; 0 where that is not known."""
        return self.call.created_ns or 0

    @property
    def created_s(self) -> float | None:
        """When the host called it, in seconds since 1970."""
        return None if self.call.created_ns is None else self.call.created_ns / NANOSECONDS

    @property
    def is_started(self) -> bool:
        """Whether the device has begun it, as far as its recorder watches that."""
        return self.call.state is not CallState.SCHEDULED or self.call.started_ns is not None

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """The stack of who called it, innermost first."""
        if self.call.frames:
            return self.call.frames
        return next((part.frames for part in self.parts if part.frames), ())

    @cached_property
    def call_site(self) -> str:
        """The line of the user's program that called it."""
        return find_call_site(self.frames)

    @property
    def messages(self) -> tuple[RecordedCall, ...]:
        """The messages between two ranks that it is, or consists of."""
        candidates = self.parts or (self.call,)
        return tuple(one for one in candidates if one.sender is not None and one.receiver is not None)

    @property
    def is_synchronizing(self) -> bool:
        """Whether it can complete only once all ranks of its group have entered it."""
        return any(word in self.name for word in SYNCHRONIZING)


@dataclass
class MatchedGroup:
    """The collectives of one group, by number and rank."""

    group: RecordedGroup
    # ranks of the job
    members: tuple[int, ...]
    # they are those that recorded a call in it, since nobody tells
    members_are_guessed: bool
    # by number, then by rank
    calls: dict[int, dict[int, EnteredCall]] = field(default_factory=dict)
    # number of the collective that a rank entered last; 0: none. Ranks of which nothing is known are missing
    last: dict[int, int] = field(default_factory=dict)

    @property
    def unread(self) -> tuple[int, ...]:
        """Members of which nothing is known here."""
        return tuple(rank for rank in self.members if rank not in self.last)

    @property
    def entered_by_all(self) -> int:
        """Number of the last collective that all read members have entered."""
        return min(self.last.values(), default=0)

    @property
    def is_of_all(self) -> bool:
        """Whether it is the group of all ranks of the job."""
        return is_default(self.group)

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of its recorded collectives, ascending."""
        return sorted(self.calls)

    def list_numbers_after(self, number: int) -> list[int]:
        """List the numbers of recorded collectives above one."""
        return self.numbers[bisect_right(self.numbers, number) :]

    def find_absent(self, number: int) -> tuple[int, ...]:
        """Find the read members that have not entered the collective of this number."""
        return tuple(sorted(rank for rank, last in self.last.items() if last < number))

    @property
    def title(self) -> str:
        """The group as it is named in a sentence: "all ranks", "group 3 (tp)"."""
        if self.is_of_all:
            return "all ranks"
        said = self.group.description
        words = f" ({said})" if said and said != "undefined" else ""
        return f"group {self.group.name}{words}"

    def describe(self, name: str, number: int) -> str:
        """Write a call of this group: "all_reduce #12 of group 3 (tp)"."""
        return f"{name} #{number} of {self.title}"


def is_default(group: RecordedGroup) -> bool:
    """Tell whether a group is that of all ranks of the job."""
    return group.name in DEFAULT_NAMES or group.description == ALL_RANKS_DESCRIPTION


@dataclass(frozen=True)
class MatchedCalls:
    """All groups, messages, and the ranks whose recordings were read."""

    groups: tuple[MatchedGroup, ...]
    # unfinished messages, by rank
    messages: Mapping[int, tuple[EnteredCall, ...]]
    # each rank's calls in its own order, oldest first
    by_rank: Mapping[int, tuple[EnteredCall, ...]]
    recordings: Mapping[int, FlightRecording]
    # recordings of the same rank that were made before: they show whether it went on
    earlier: Mapping[int, tuple[FlightRecording, ...]]

    def find_group(self, call: EnteredCall) -> MatchedGroup | None:
        """Find the group of a collective; None of a message."""
        for group in self.groups:
            if group.calls.get(call.number, {}).get(call.rank) is call:
                return group
        return None

    def find_source(self, rank: int) -> str:
        """Find the file of a rank's recording; "" without one."""
        recording = self.recordings.get(rank)
        return recording.source if recording else ""

    def is_partial(self, rank: int) -> bool:
        """Tell whether calls of a rank may be missing in its recording."""
        recording = self.recordings.get(rank)
        return recording is None or recording.has_forgotten or recording.is_only_active

    @cached_property
    def message_counts(self) -> dict[int, Counter[Pair]]:
        """How many messages each rank has called, by sender and receiver."""
        counts: dict[int, Counter[Pair]] = {}
        for rank, calls in self.by_rank.items():
            counts[rank] = Counter()
            for call in calls:
                counts[rank].update(list_pairs(call))
        return counts


def list_pairs(call: EnteredCall) -> list[Pair]:
    """List sender and receiver of each message of a call."""
    return [(message.sender, message.receiver) for message in call.messages]


def match_calls(
    recordings: Sequence[FlightRecording],
    ranks: Iterable[int],
    *,
    all_are_known: bool,
    failed_at: Mapping[int, str] | None = None,
) -> MatchedCalls:
    """Lay the recordings of a job beside each other.

    Args:
        recordings: All that were read; those that do not tell their rank are left out.
        ranks: Ranks of the job, whether or not they have a recording.
        all_are_known: Whether the job is known to have no others.
        failed_at: By rank, the line of the program that waited for others when it ended with their loss.
    """
    newest, earlier = _choose_newest(recordings)
    by_rank = {}
    messages = {}
    for rank in sorted(newest):
        calls = _mark_failed(list(_join_coalesced(rank, newest[rank].calls)), (failed_at or {}).get(rank, ""))
        by_rank[rank] = calls
        waiting = tuple(call for call in calls if call.messages and not call.has_ended)
        if waiting:
            messages[rank] = waiting
    groups = _GroupMatcher(newest, by_rank, {*ranks, *newest}, all_are_known).match()
    return MatchedCalls(groups, messages, by_rank, newest, earlier)


def _mark_failed(calls: list[EnteredCall], failed_at: str) -> tuple[EnteredCall, ...]:
    """Mark the last call as failed where the rank ended at its line: gloo says of such a call that it has ended."""
    if calls and failed_at and calls[-1].call_site == failed_at:
        calls[-1] = replace(calls[-1], has_failed=True)
    return tuple(calls)


def _choose_newest(
    recordings: Sequence[FlightRecording],
) -> tuple[dict[int, FlightRecording], dict[int, tuple[FlightRecording, ...]]]:
    """Choose the recording of each rank that reaches farthest; the others come before it, oldest first."""
    by_rank: dict[int, list[FlightRecording]] = defaultdict(list)
    for recording in recordings:
        if recording.rank is not None:
            by_rank[recording.rank].append(recording)
    newest = {}
    earlier = {}
    for rank, several in by_rank.items():
        *before, last = sorted(several, key=_measure_reach)
        newest[rank] = last
        if before:
            earlier[rank] = tuple(before)
    return newest, earlier


def _measure_reach(recording: FlightRecording) -> tuple[int, int, int]:
    """Measure how far a recording reaches: the newest call's time and number, then the count of calls."""
    created = max((call.created_ns or 0 for call in recording.calls), default=0)
    return created, count_records(recording), len(recording.calls)


def count_records(recording: FlightRecording) -> int:
    """Count the calls that a rank's recorder has seen, those that it has forgotten too."""
    return max((call.record for call in recording.calls), default=-1) + 1


def _join_coalesced(rank: int, calls: Iterable[RecordedCall]) -> Iterator[EnteredCall]:
    """Join the operations of each coalesced call, whose own entry follows them."""
    parts: list[RecordedCall] = []
    for call in calls:
        if parts and not _are_of_one(parts[-1], call):
            yield from _enter_each(rank, parts)
            parts = []
        # "ALLGATHER_coalesced" ends one, too
        if call.name.endswith(COALESCED):
            yield EnteredCall(rank, call, tuple(parts))
            parts = []
        else:
            parts.append(call)
    yield from _enter_each(rank, parts)


def _enter_each(rank: int, calls: Iterable[RecordedCall]) -> Iterator[EnteredCall]:
    return (EnteredCall(rank, call) for call in calls)


def _are_of_one(first: RecordedCall, second: RecordedCall) -> bool:
    is_of_group = first.group == second.group
    is_alike = first.is_message == second.is_message
    return is_of_group and is_alike and first.number == second.number


class _GroupMatcher:
    """Makes the groups of a job, and places each rank's collectives in them."""

    def __init__(
        self,
        recordings: Mapping[int, FlightRecording],
        by_rank: Mapping[int, tuple[EnteredCall, ...]],
        ranks: Iterable[int],
        all_are_known: bool,
    ):
        """
        Args:
            recordings: By rank.
            by_rank: The calls of each rank.
            ranks: Ranks of the job.
            all_are_known: Whether there are no others.
        """
        self._recordings = recordings
        self._by_rank = by_rank
        self._ranks = tuple(sorted(ranks))
        self._all_are_known = all_are_known
        # by name of a group
        self._recorders: dict[str, list[int]] = defaultdict(list)
        self._groups: dict[tuple[str, tuple[int, ...]], MatchedGroup] = {}

    def match(self) -> tuple[MatchedGroup, ...]:
        """Make all groups of the job."""
        for rank, recording in self._recordings.items():
            for name in _list_group_names(recording):
                self._recorders[name].append(rank)
        for rank, recording in self._recordings.items():
            for name in _list_group_names(recording):
                group = recording.groups.get(name) or RecordedGroup(name)
                self._place_calls(self._find_group(group), rank, recording)
        for matched in self._groups.values():
            self._add_ranks_without_calls(matched)
            _forget_old_recordings(matched)
        return tuple(self._groups.values())

    def _find_group(self, group: RecordedGroup) -> MatchedGroup:
        """Find a group, or make it: with the ranks that are told, all ranks for the default one, else who recorded."""
        members = group.ranks or self._find_told_ranks(group.name)
        key = (group.name, members)
        if key in self._groups:
            return self._groups[key]
        is_guessed = not members
        if is_guessed and is_default(group):
            members = self._ranks
            is_guessed = not self._all_are_known
        elif is_guessed:
            members = tuple(sorted(self._recorders[group.name]))
        matched = MatchedGroup(group, members, is_guessed)
        self._groups[key] = matched
        return matched

    def _find_told_ranks(self, name: str) -> tuple[int, ...]:
        """Find the ranks of a group by what other ranks' recorders tell; () where they tell none, or several."""
        told = {recording.groups[name].ranks for recording in self._recordings.values() if name in recording.groups}
        told.discard(())
        return told.pop() if len(told) == 1 else ()

    def _place_calls(self, matched: MatchedGroup, rank: int, recording: FlightRecording) -> None:
        """Place a rank's collectives in their group.

        Args:
            matched: The group.
            rank: The rank.
            recording: Its recording.
        """
        name = matched.group.name
        last = 0
        for call in self._by_rank[rank]:
            if call.call.group == name and not call.call.is_message:
                matched.calls.setdefault(call.number, {})[rank] = call
                last = max(last, call.number)
        progress = recording.progress.get(name, GroupProgress())
        for counted in _list_uncited(name, progress, last):
            matched.calls.setdefault(counted.number, {})[rank] = EnteredCall(rank, counted)
        last = max(last, progress.enqueued or 0)
        # a file without calls that have ended does not tell how far the group is
        if last or not recording.is_only_active:
            matched.last[rank] = last

    def _add_ranks_without_calls(self, matched: MatchedGroup) -> None:
        """Note that members whose whole recording has nothing of the group have not entered any of its collectives."""
        for rank in matched.members:
            recording = self._recordings.get(rank)
            if recording is None or rank in matched.last:
                continue
            if not recording.is_only_active and not recording.has_forgotten:
                matched.last[rank] = 0


def _list_uncited(group: str, progress: GroupProgress, last: int) -> list[RecordedCall]:
    """List the calls of which only numbers are known: the first that a rank waits in, and the last that it entered.

    Args:
        group: The name of the group.
        progress: The numbers.
        last: The number of the last call that is recorded itself.
    """
    enqueued = progress.enqueued or 0
    completed = progress.completed
    numbers = {enqueued}
    if completed is not None and completed < enqueued:
        numbers.add(max(completed, 0) + 1)
    calls = []
    for number in sorted(numbers):
        if number > last:
            has_ended = completed is not None and number <= completed
            state = CallState.COMPLETED if has_ended else CallState.SCHEDULED
            calls.append(RecordedCall(group, number, UNNAMED_CALL, state, record=UNKNOWN_RECORD + number))
    return calls


def _forget_old_recordings(matched: MatchedGroup) -> None:
    """Count ranks as unread whose recording is older than the others': these completed many calls after its last."""
    for rank, last in list(matched.last.items()):
        completed = 0
        for number in matched.list_numbers_after(last):
            calls = matched.calls[number].values()
            completed += 1 if any(call.has_ended and call.is_synchronizing for call in calls) else 0
        if completed >= MIN_CALLS_OF_OLD:
            del matched.last[rank]


def _list_group_names(recording: FlightRecording) -> list[str]:
    """List the groups in which a rank ran collectives, in the order of their first call."""
    names = [call.group for call in recording.calls if not call.is_message]
    return list(dict.fromkeys([*names, *recording.progress]))
