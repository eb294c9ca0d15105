"""Choose the recordings that belong together: those of one attempt of the job.

A folder may hold the dumps of several attempts, several dumps of one attempt, and files of attempts before that the
last one did not overwrite. A verdict on a mixture would blame the ranks whose dumps are old. Older dumps of the same
attempt stay beside the newest: they show whether a rank went on.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.postmortem.evidence import FlightRecording
from megatron_lite.postmortem.flight_recordings import RANK_FOLDER
from megatron_lite.units import counted

# clocks of hosts may differ by so much
MAX_CLOCK_SKEW_NS = 60 * 10**9
# of those that are left out
MAX_NAMED_SETS = 3
# of those that were written before the newest one of the same attempt
MAX_EARLIER_SETS = 2
ATTEMPT_FOLDER = re.compile(r"attempt_(\d{1,4})")
LAST_DIGITS = re.compile(r"\d{1,9}(?=\D*$)")
# a backend with a rank, or with the file of a rank that is unknown
Owner = tuple[str, int | str]


@dataclass(frozen=True)
class RecordingSet:
    """Recordings that were written together: one of each rank."""

    # the path that they share: "/logs/nccl_trace_rank_*"
    name: str
    recordings: tuple[FlightRecording, ...]

    @property
    def owners(self) -> set[Owner]:
        """The backends and ranks that the recordings are of."""
        return set(map(_find_owner, self.recordings))

    @property
    def newest_ns(self) -> int:
        """The moment at which its newest call was made; 0 where nothing tells."""
        return max(map(_find_newest_ns, self.recordings), default=0)

    @property
    def attempt(self) -> str:
        """The number of the attempt, as torchelastic's folders have it; "" without one."""
        folder = str(Path(self.name).parent)
        numbers: list[str] = ATTEMPT_FOLDER.findall(folder)
        return numbers[-1] if numbers else ""


def choose_recordings(
    recordings: Sequence[FlightRecording], world_size: int | None
) -> tuple[tuple[FlightRecording, ...], tuple[str, ...]]:
    """Choose the recordings of the newest attempt.

    Args:
        recordings: All that were found.
        world_size: Ranks of the job, where known.

    Returns:
        By rank those of the newest set that is complete, or of the newest attempt if that was never complete; before
        them older ones of the same attempt. And a line for each that is left out, or whose rank is unknown.
    """
    detailed = _drop_summaries(_settle_backends(recordings))
    if not detailed:
        return (), ()
    settled = _settle_last_rank(detailed, world_size)
    notes = []
    for recording in settled:
        if recording.rank is None:
            notes.append(f"{recording.source}: neither what it holds nor its name tells its rank.")
    sets = _split_sets(settled)
    first = _choose_first(sets)
    chosen, others = _add_other_ranks(first, sets)
    earlier, left_out = _split_earlier(first, others)
    notes += _describe_left_out(left_out, first)
    kept = []
    for recording in chosen:
        if _is_stale(recording, chosen):
            notes.append(f"{recording.source}: was written by an attempt before the others', and is left out.")
        else:
            kept.append(recording)
    kept.extend(earlier)
    kept.sort(key=_find_place)
    return tuple(kept), tuple(notes)


def _find_place(recording: FlightRecording) -> tuple[bool, int, str, int]:
    """A key by which recordings stand in the order of their ranks, the newest of each last; unknown ranks come last."""
    return recording.rank is None, recording.rank or 0, recording.backend, _find_newest_ns(recording)


def _find_owner(recording: FlightRecording) -> Owner:
    if recording.rank is None:
        return recording.backend, recording.source
    return recording.backend, recording.rank


# --- what follows from the others


def _settle_backends(recordings: Sequence[FlightRecording]) -> list[FlightRecording]:
    """Give recordings without a call, which nothing tells the backend of, the only one that the others have."""
    known = {recording.backend for recording in recordings if recording.backend}
    if len(known) != 1:
        return list(recordings)
    (backend,) = known
    return [replace(recording, backend=backend) for recording in recordings]


def _drop_summaries(recordings: Sequence[FlightRecording]) -> list[FlightRecording]:
    """Leave out what logs and status files tell of a rank's last calls where the recorder's own dump is there."""
    dumped = {_find_owner(recording) for recording in recordings if not _is_summary(recording)}
    return [one for one in recordings if not _is_summary(one) or _find_owner(one) not in dumped]


def _is_summary(recording: FlightRecording) -> bool:
    return recording.has_forgotten and not recording.calls


def _settle_last_rank(recordings: list[FlightRecording], world_size: int | None) -> list[FlightRecording]:
    """Give the only recording without a rank the only rank without a recording."""
    known = {recording.rank for recording in recordings if recording.rank is not None}
    missing = set(range(world_size or 0)) - known
    # one more of them than of known ranks: no rank has two, and one is unknown
    if len(recordings) != world_size or len(known) != len(recordings) - 1 or len(missing) != 1:
        return recordings
    (last,) = missing
    settled = []
    for recording in recordings:
        rank = last if recording.rank is None else recording.rank
        settled.append(replace(recording, rank=rank))
    return settled


# --- sets


def _split_sets(recordings: Sequence[FlightRecording]) -> list[RecordingSet]:
    """Recordings by the path that they share, oldest first; several of one rank at one path are sets of their own."""
    in_files = Counter(recording.source for recording in recordings)
    members: dict[tuple[str, int], list[FlightRecording]] = {}
    repeats: Counter[tuple[str, Owner]] = Counter()
    for recording in sorted(recordings, key=_find_newest_ns):
        name = recording.source
        if in_files[name] == 1 and recording.rank is not None:
            name = _hide_rank(Path(name), recording.rank)
        owner = _find_owner(recording)
        number = repeats[name, owner]
        repeats[name, owner] += 1
        members.setdefault((name, number), []).append(recording)
    sets = [RecordingSet(name, tuple(together)) for (name, _), together in members.items()]
    return sorted(sets, key=lambda one: one.newest_ns)


def _hide_rank(path: Path, rank: int) -> str:
    """The path with * for the rank at the end of the file's name, or of that of its folder: rank_3."""
    folder = path.parent
    if _ends_in(path.name, rank):
        return str(folder / LAST_DIGITS.sub("*", path.name))
    if RANK_FOLDER.fullmatch(folder.name) and _ends_in(folder.name, rank):
        return str(folder.parent / LAST_DIGITS.sub("*", folder.name) / path.name)
    return str(path)


def _ends_in(name: str, rank: int) -> bool:
    found = LAST_DIGITS.search(name)
    return found is not None and int(found[0]) == rank


def _choose_first(sets: Sequence[RecordingSet]) -> RecordingSet:
    """The newest complete set, or the newest one if it is of a later attempt.

    A newer dump of few ranks of the same attempt says less than one of all.
    """
    fullest = max(len(one.owners) for one in sets)
    newest = sets[-1]
    complete = [one for one in sets if len(one.owners) == fullest][-1]
    return newest if _is_later_attempt(newest, complete) else complete


def _may_be_of_one_attempt(one: RecordingSet, other: RecordingSet) -> bool:
    """Whether no folder says that two sets are of different attempts."""
    return one.attempt == other.attempt or "" in (one.attempt, other.attempt)


def _is_later_attempt(one: RecordingSet, other: RecordingSet) -> bool:
    """Whether the recorders of `one` began after those of `other` ended: the processes are new ones."""
    if not _may_be_of_one_attempt(one, other):
        return True
    begins = _find_begins(one.recordings)
    return bool(begins) and other.newest_ns > 0 and min(begins) > other.newest_ns


def _add_other_ranks(
    first: RecordingSet, sets: Sequence[RecordingSet]
) -> tuple[list[FlightRecording], list[RecordingSet]]:
    """The recordings of `first`, and of sets of other ranks of its attempt; and the other sets, newest first."""
    chosen = list(first.recordings)
    owners = first.owners
    others = []
    for one in reversed(sets):
        if one is first:
            continue
        if _may_be_of_one_attempt(one, first) and owners.isdisjoint(one.owners):
            chosen += one.recordings
            owners |= one.owners
        else:
            others.append(one)
    return chosen, others


def _split_earlier(
    first: RecordingSet, others: Sequence[RecordingSet]
) -> tuple[list[FlightRecording], list[RecordingSet]]:
    """The recordings of older sets of the attempt of `first`, and the sets left out."""
    earlier: list[FlightRecording] = []
    left_out = []
    count = 0
    for one in others:
        is_older = 0 < one.newest_ns <= first.newest_ns
        if is_older and count < MAX_EARLIER_SETS and not _is_later_attempt(first, one):
            earlier.extend(one.recordings)
            count += 1
        else:
            left_out.append(one)
    return earlier, left_out


def _describe_left_out(left_out: Sequence[RecordingSet], first: RecordingSet) -> list[str]:
    lines = []
    for one in left_out[:MAX_NAMED_SETS]:
        age = "newer, and of fewer ranks" if one.newest_ns > first.newest_ns else "older"
        what = counted(len(one.recordings), "recording")
        lines.append(f"{one.name}: {what} left out; {first.name} is read, beside which these are {age}.")
    others = left_out[MAX_NAMED_SETS:]
    if others:
        what = counted(len(others) - 1, "other set")
        lines.append(f"{others[-1].name} and {what} of recordings are left out, too.")
    return lines


# --- files that the last attempt did not overwrite


def _is_stale(recording: FlightRecording, chosen: Sequence[FlightRecording]) -> bool:
    """Whether the last call of a recording is older than the first calls of most processes."""
    newest_ns = _find_newest_ns(recording)
    begins = _find_begins(chosen)
    later = [begin for begin in begins if begin > newest_ns + MAX_CLOCK_SKEW_NS]
    return newest_ns > 0 and 2 * len(later) > len(begins)


def _find_newest_ns(recording: FlightRecording) -> int:
    return max((call.created_ns or 0 for call in recording.calls), default=0)


def _find_begins(recordings: Sequence[FlightRecording]) -> list[int]:
    """When the first calls of processes were made; recorders that no longer have them are left out."""
    begins = []
    for recording in recordings:
        if recording.calls and recording.calls[0].record == 0:
            begins.append(recording.calls[0].created_ns or 0)
    return begins
