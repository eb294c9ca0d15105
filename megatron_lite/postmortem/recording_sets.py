"""Choose the recordings that belong together: those of one attempt of the job, one of each rank.

A folder may hold the dumps of several attempts, several dumps of one attempt, and files of attempts before that the
last one did not overwrite. A verdict on a mixture would blame the ranks whose dumps are old.
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
ATTEMPT_FOLDER = re.compile(r"attempt_(\d{1,4})")
LAST_DIGITS = re.compile(r"\d{1,9}(?=\D*$)")


@dataclass(frozen=True)
class RecordingSet:
    """Recordings that were written together: one of each rank."""

    # the path that they share: "/logs/nccl_trace_rank_*"
    name: str
    recordings: tuple[FlightRecording, ...]

    @property
    def owners(self) -> set[tuple[str, int | str]]:
        """Backends and ranks; the file stands for a rank that is unknown."""
        return {
            (recording.backend, recording.source if recording.rank is None else recording.rank)
            for recording in self.recordings
        }

    @property
    def newest_ns(self) -> int:
        """When its newest call was made; 0 where nothing tells."""
        return max((_find_newest_ns(recording) for recording in self.recordings), default=0)


def choose_recordings(
    recordings: Sequence[FlightRecording], world_size: int | None
) -> tuple[tuple[FlightRecording, ...], tuple[str, ...]]:
    """Choose the recordings of the newest attempt, one of each rank.

    Args:
        recordings: All that were found.
        world_size: Ranks of the job, where known.

    Returns:
        Those of the newest set that is complete, or of the newest attempt if that was never complete; and a line for
        each that is left out, or whose rank is unknown.
    """
    settled, notes = _settle_last_rank(recordings, world_size)
    sets = sorted(_split_sets(settled), key=lambda one: one.newest_ns)
    if not sets:
        return (), tuple(notes)
    chosen = _unite_sets(sets, notes)
    kept, stale = _split_stale(chosen.recordings)
    notes += [f"{one.source}: was written by an attempt before that of the others, and is left out." for one in stale]
    kept.sort(key=lambda one: (one.rank is None, one.rank or 0, one.backend))
    return tuple(kept), tuple(notes)


def _settle_last_rank(
    recordings: Sequence[FlightRecording], world_size: int | None
) -> tuple[list[FlightRecording], list[str]]:
    """Give the only recording without a rank the only rank without a recording."""
    unknown = [recording for recording in recordings if recording.rank is None]
    known = [recording.rank for recording in recordings if recording.rank is not None]
    missing = set(range(world_size or 0)).difference(known)
    are_all_distinct = len(set(known)) == len(known)
    if len(unknown) == 1 and len(missing) == 1 and are_all_distinct and len(recordings) == world_size:
        (rank,) = missing
        return [replace(one, rank=rank) if one.rank is None else one for one in recordings], []
    return list(recordings), [f"{one.source}: neither what it holds nor its name tells its rank." for one in unknown]


# --- sets


def _split_sets(recordings: Sequence[FlightRecording]) -> list[RecordingSet]:
    """Recordings by the path that they share; several of one rank at one path are sets of their own."""
    found: dict[tuple[str, int], list[FlightRecording]] = {}
    seen: dict[tuple[str, str, int | None], int] = {}
    sources = Counter(recording.source for recording in recordings)
    for recording in sorted(recordings, key=_find_newest_ns):
        name = _find_shared_path(recording, sources[recording.source] == 1)
        key = (name, recording.backend, recording.rank)
        repeated = seen.get(key, 0) if recording.rank is not None else 0
        seen[key] = repeated + 1
        found.setdefault((name, repeated), []).append(recording)
    return [RecordingSet(name, tuple(members)) for (name, _), members in found.items()]


def _find_shared_path(recording: FlightRecording, is_alone: bool) -> str:
    """The path of a recording with * for its rank, in the file's name, or in that of its folder: rank_3.

    Args:
        recording: Of a rank, or of an unknown one.
        is_alone: Whether its file holds no other.
    """
    path = Path(recording.source)
    if not is_alone or recording.rank is None:
        return recording.source
    if shared := _hide_rank(path.name, recording.rank):
        return str(path.with_name(shared))
    folder = path.parent
    if RANK_FOLDER.fullmatch(folder.name) and (shared := _hide_rank(folder.name, recording.rank)):
        return str(folder.with_name(shared) / path.name)
    return recording.source


def _hide_rank(name: str, rank: int) -> str | None:
    """The name with * for its last number; None where that is not the rank."""
    found = LAST_DIGITS.search(name)
    if found is None or int(found[0]) != rank:
        return None
    return f"{name[: found.start()]}*{name[found.end() :]}"


def _unite_sets(sets: Sequence[RecordingSet], notes: list[str]) -> RecordingSet:
    """The newest set, with those that tell of other ranks of the same attempt; each other one is noted.

    Args:
        sets: Oldest first.
        notes: Where a line is added for each set that is left out.
    """
    fullest = max(len(one.owners) for one in sets)
    newest = sets[-1]
    full = [one for one in sets if len(one.owners) == fullest]
    # a newer dump of few ranks of the same attempt says less than one of all
    first = newest if _is_later_attempt(newest, full[-1]) else full[-1]
    chosen = RecordingSet(first.name, first.recordings)
    for one in reversed(sets):
        if one is first:
            continue
        if one.owners.isdisjoint(chosen.owners) and _find_attempt(one) == _find_attempt(first):
            chosen = RecordingSet(first.name, chosen.recordings + one.recordings)
        else:
            when = "newer, and of fewer ranks" if one.newest_ns > first.newest_ns else "older"
            notes.append(
                f"{one.name}: {counted(len(one.recordings), 'recording')} left out; {first.name} is read, "
                f"beside which these are {when}."
            )
    return chosen


def _find_attempt(one: RecordingSet) -> str:
    """The number of the attempt, as torchelastic's folders have it; "" without one."""
    found = ATTEMPT_FOLDER.findall(str(Path(one.name).parent))
    return str(found[-1]) if found else ""


def _is_later_attempt(one: RecordingSet, other: RecordingSet) -> bool:
    """Whether the recorders of `one` began after those of `other` ended: the processes are new ones."""
    if _find_attempt(one) != _find_attempt(other):
        return True
    if one.newest_ns == 0 or other.newest_ns == 0:
        return False
    begins = [_find_begin_ns(recording) for recording in one.recordings]
    known = [begin for begin in begins if begin is not None]
    return bool(known) and min(known) > other.newest_ns


# --- files that the last attempt did not overwrite


def _split_stale(recordings: Sequence[FlightRecording]) -> tuple[list[FlightRecording], list[FlightRecording]]:
    """Recordings of one attempt, and those whose last call is older than the first call of all others."""
    begins = [_find_begin_ns(recording) for recording in recordings]
    kept: list[FlightRecording] = []
    stale: list[FlightRecording] = []
    for number, recording in enumerate(recordings):
        others = [begin for at, begin in enumerate(begins) if at != number and begin is not None]
        newest_ns = _find_newest_ns(recording)
        is_stale = newest_ns > 0 and any(newest_ns + MAX_CLOCK_SKEW_NS < begin for begin in others)
        if is_stale:
            stale.append(recording)
        else:
            kept.append(recording)
    return kept, stale


def _find_newest_ns(recording: FlightRecording) -> int:
    return max((call.created_ns or 0 for call in recording.calls), default=0)


def _find_begin_ns(recording: FlightRecording) -> int | None:
    """When the first call of a process was made; None where the recorder no longer has it."""
    if not recording.calls or recording.calls[0].record > 0:
        return None
    return recording.calls[0].created_ns
