"""Read torch's flight recorder, in all forms in which it is written.

Forms: the pickles of TORCH_FR_DUMP_TEMP_FILE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE (torch 2.2 to 2.13), what
_dump_nccl_trace and _dump_fr_trace return, and JSON of the same, as torch.distributed.debug's handlers answer; several
ranks may lie in one file, as in a dict by rank. torch.distributed.flight_recorder.components describes the fields.

What they do not say:

- NCCL watches a call's end always, its start only with TORCH_NCCL_ENABLE_TIMING. A call that it no longer watches
  (`retired`) and that did not complete has failed.
- Operations inside of a coalesced call are never watched. The entry "coalesced" behind them has their state.
- gloo watches nothing: its calls stay "scheduled", and are retired when they end or fail. Its messages are not
  recorded, but counted: `op_id` of the next call, and `pg_status`, count them. A monitored barrier takes two numbers of
  collectives, and is not recorded, either. Its `pg_config` is empty.
- `pg_status` goes by the number of a group on its rank (`pg_id`), which is not the group's name.
"""

import itertools
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.plain_pickles import JSON, PICKLE, PlainFile, PlainUnpickler, parse_json
from megatron_lite.postmortem.evidence import (
    ALL_RANKS_DESCRIPTION,
    CallState,
    FlightRecording,
    GroupProgress,
    JobEvidence,
    RecordedCall,
    RecordedGroup,
    StackFrame,
)
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import read_foreign
from megatron_lite.units import counted

RECORDING_FILE = PlainFile(
    "flight recording", "flight recording", "have torch write it again (TORCH_FR_DUMP_TEMP_FILE names where)"
)
# 20,000 calls with 50 frames of Python and C++ each take 70 MB
MAX_RECORDING_BYTES = 2**29
MAX_RECORDING_MEMORY_PER_BYTE = 60
MAX_RECORDED_CALLS = 200_000
MAX_RECORDED_FRAMES = 128
MAX_NAME_LETTERS = 400
MAX_SHOWN_RANKS = 8
# recorders that see neither start nor end of a call on the device
UNWATCHED_BACKENDS = frozenset({"gloo"})

# --- recognition


def is_flight_recording(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a pickle or JSON of the flight recorder, whatever its name."""
    if not (PICKLE.match(head) or JSON.match(head)):
        return False
    # the header of a profiler's trace lists process groups, too
    if b'"deviceProperties"' in head or b'"traceEvents"' in head:
        return False
    return b"pg_config" in head or (b"profiling_name" in head and b"seq_id" in head)


def read_flight_recordings(path: Path) -> JobEvidence:
    """Read the recordings of one or several ranks from a file. UserError, one line, for one that cannot be read."""
    try:
        content = read_foreign(path, MAX_RECORDING_BYTES)
        with limit_memory(len(content), MAX_RECORDING_MEMORY_PER_BYTE):
            values = PlainUnpickler(content).load() if PICKLE.match(content) else parse_json(content)
            return build_recordings(values, str(path), find_rank_in_path(path))
    except Exception as error:  # noqa: BLE001 - damaged files make the readers raise errors of many kinds
        raise UserError(f"{path}: {RECORDING_FILE.describe_failure(error)}") from None


# --- ranks that names tell

# places on a node, and nodes
OTHER_RANK = re.compile(r"(?:local|node|group|machine|host)[_\-]?rank[_\-. \[]?\d+", re.IGNORECASE)
RANK_WORD = re.compile(r"rank[_\-. \[]?(\d{1,6})(?!\d)", re.IGNORECASE)
RANK_FOLDER = re.compile(r"rank[_\-]?(\d{1,6})", re.IGNORECASE)
# what torch appends to the prefix that it is given; not the last part of a date or a time
LAST_NUMBER = re.compile(r"(?<!\d)(?<!\d[\-_.:])(\d{1,5})(?:\.(?:pkl|pickle|json|bin|dump|txt))*$", re.IGNORECASE)
RANK_KEY = re.compile(r"(?:\w*rank[_\-]?)?(\d{1,6})(?:\.\w+)*", re.IGNORECASE)


def find_rank_in_path(path: Path) -> int | None:
    """The rank in a file's name, or in that of the nearest folder: 3 of trace_rank_3.pkl, of fr_3, of rank_3/dump."""
    name = OTHER_RANK.sub("", path.name)
    if words := RANK_WORD.findall(name):
        return int(words[-1])
    if found := LAST_NUMBER.search(name):
        return int(found[1])
    for folder in path.parents:
        if found := RANK_FOLDER.fullmatch(folder.name):
            return int(found[1])
    return None


# --- the form, as torch writes it

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Shapes = tuple[tuple[int, ...], ...]
Made = TypeVar("Made")


class TorchFrame(msgspec.Struct):
    """A frame of a call's stack."""

    name: str
    filename: str
    line: Number | None = None


class TorchEntry(msgspec.Struct):
    """A call in the flight recorder."""

    profiling_name: str
    state: CallState
    record_id: Number | None = None
    # of the group, on this rank
    pg_id: Number | None = None
    # name and description
    process_group: tuple[str, str] | None = None
    collective_seq_id: Number | None = None
    p2p_seq_id: Number | None = None
    # of torch 2.2, which counts calls of both kinds together
    seq_id: Number | None = None
    op_id: Number = 0
    is_p2p: bool = False
    input_sizes: Shapes = ()
    output_sizes: Shapes = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    # JSON has 0 for None
    time_created_ns: Number | None = None
    time_discovered_started_ns: Number | None = None
    time_discovered_completed_ns: Number | None = None
    # of torch 2.2
    time_created_us: Number | None = None
    retired: bool = False
    timeout_ms: Number | None = None
    frames: list[Any] = []


class TorchGroup(msgspec.Struct):
    """A group as a rank lists it."""

    desc: str = ""
    # text such as "[0, 1]", or numbers
    ranks: str | list[Number] = ""


class TorchStatus(msgspec.Struct):
    """The last calls of a group; -1 for none."""

    last_enqueued_collective: int = -1
    last_started_collective: int = -1
    last_completed_collective: int = -1


class TorchDump(msgspec.Struct):
    """The dump of a rank, whose parts are checked one by one."""

    version: str = ""
    # by name; by number in torch 2.3
    pg_config: dict[str | int, Any] = {}
    pg_status: dict[str, Any] = {}
    entries: list[Any] = []


def _convert(value: object, kind: type[Made]) -> Made | None:
    """A value as a record; None where it is none. Numbers may be text."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        return None


RANKS_TEXT = re.compile(r"\[[\d, ]*\]")


def _read_ranks(told: str | list[int]) -> tuple[int, ...]:
    """The ranks of a group; () where it does not name them."""
    if isinstance(told, list):
        return tuple(told)
    if not RANKS_TEXT.fullmatch(told):
        return ()
    return _convert(re.findall(r"\d+", told), tuple[Number, ...]) or ()


# --- dumps among plain values

MAX_DUMP_NESTING = 3
MAX_DUMPS = 2**16
DUMP_KEYS = frozenset({"pg_config", "entries", "pg_status"})


def build_recordings(values: object, source: str, named_rank: int | None = None) -> JobEvidence:
    """Make recordings of plain values.

    Args:
        values: What a pickle or JSON of the flight recorder holds: a rank's dump, or those of several ranks in a dict
            or list.
        source: The file that they come from.
        named_rank: The rank that the file's name tells; it counts where the values do not contradict.

    Returns:
        The recordings, with a line in `unread` for each part that could not be read.
    """
    found = list(_find_dumps(values, None, 0))
    recordings = []
    unread: list[str] = []
    for told_rank, dump in found:
        if len(found) == 1 and told_rank is None:
            told_rank = named_rank
        builder = RecordingBuilder(source, unread)
        recordings.append(builder.build(dump, told_rank))
    if not found:
        unread.append(f"{source}: holds no dump of the flight recorder that is known here.")
    return JobEvidence(
        recordings=tuple(recordings),
        unread=tuple(unread),
        world_size=find_world_size(recordings),
    )


def _find_dumps(values: object, rank: int | None, depth: int) -> Iterator[tuple[int | None, TorchDump]]:
    """Each dump in `values`, with the rank that its place tells."""
    if depth > MAX_DUMP_NESTING:
        return
    if isinstance(values, dict):
        own_rank = _convert(values.get("rank"), Number)
        if own_rank is not None:
            rank = own_rank
        dump = _convert(values, TorchDump)
        if dump is not None and not DUMP_KEYS.isdisjoint(values):
            yield rank, dump
            return
        for key, value in itertools.islice(values.items(), MAX_DUMPS):
            yield from _find_dumps(value, _find_rank_in_key(key, rank), depth + 1)
    elif isinstance(values, list | tuple):
        # torch 2.2 writes its entries and nothing else
        first: object = values[0] if values else None
        if _convert(first, TorchEntry) is not None:
            yield rank, TorchDump(entries=list(values))
            return
        for value in values[:MAX_DUMPS]:
            yield from _find_dumps(value, rank, depth + 1)


def _find_rank_in_key(key: object, otherwise: int | None) -> int | None:
    """3 of "3", "rank3" and "rank_3.json"."""
    found = RANK_KEY.fullmatch(str(key)[:MAX_NAME_LETTERS])
    return int(found[1]) if found else otherwise


def find_world_size(recordings: Sequence[FlightRecording]) -> int | None:
    """The number of ranks of the job, as its default group has it."""
    largest = 0
    for recording in recordings:
        for group in recording.groups.values():
            if group.description == ALL_RANKS_DESCRIPTION:
                largest = max(largest, len(group.ranks))
    return largest or None


# --- one dump

MESSAGE = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
MESSAGE_NAMES = frozenset({"send", "recv"})


class RecordingBuilder:
    """Makes the recording of one rank."""

    def __init__(self, source: str, unread: list[str]):
        """
        Args:
            source: The file.
            unread: Where a line is added for each part that cannot be read.
        """
        self._source = source
        self._unread = unread
        self._backend = ""
        self._groups: dict[str, RecordedGroup] = {}
        # by their number on this rank
        self._group_names: dict[int, str] = {}
        # ranks that the dump can be of, by what it holds; None: any
        self._own_ranks: set[int] | None = None
        # stacks and their frames, by what they are made of: calls share them
        self._stacks: dict[tuple[int, ...], tuple[StackFrame, ...]] = {}
        self._frames: dict[int, StackFrame | None] = {}
        # shapes and types
        self._shared: dict[Any, Any] = {}

    def build(self, dump: TorchDump, told_rank: int | None) -> FlightRecording:
        """Make the recording of a dump, of the rank that its place or the file's name tells."""
        self._read_groups(dump.pg_config)
        calls = _settle_parts(self._read_calls(dump.entries))
        is_only_active = self._is_only_active(calls)
        return FlightRecording(
            source=self._source,
            rank=self._choose_rank(told_rank),
            backend=self._backend,
            calls=calls,
            groups=self._groups,
            progress=self._read_progress(dump.pg_status, calls),
            has_forgotten=bool(calls) and calls[0].record > 0 and not is_only_active,
            is_only_active=is_only_active,
            tells_starts=any(call.started_ns or call.state is CallState.STARTED for call in calls),
            version=dump.version[:MAX_NAME_LETTERS],
        )

    def _read_groups(self, pg_config: dict[str | int, Any]) -> None:
        """Groups that the dump lists. A rank lists those that it is in: it is in all of them."""
        for name, value in pg_config.items():
            # torch 2.3 has the ranks alone
            ranks_alone = TorchGroup(ranks=_convert(value, list[Number]) or "")
            told = _convert(value, TorchGroup) or ranks_alone
            ranks = _read_ranks(told.ranks)
            if name != "" and ranks:
                self._add_group(str(name), told.desc, ranks)
                self._restrict_own_ranks(set(ranks))

    def _restrict_own_ranks(self, ranks: set[int]) -> None:
        self._own_ranks = ranks if self._own_ranks is None else self._own_ranks & ranks

    def _add_group(self, name: str, description: str, ranks: tuple[int, ...]) -> None:
        known = "" if description == "undefined" else description[:MAX_NAME_LETTERS]
        self._groups[name] = RecordedGroup(name, known, ranks)

    def _read_calls(self, entries: list[Any]) -> list[RecordedCall]:
        if len(entries) > MAX_RECORDED_CALLS:
            self._unread.append(f"{self._source}: only the newest {MAX_RECORDED_CALLS:,} of its calls are read.")
        calls: list[RecordedCall] = []
        damaged = 0
        for value in entries[-MAX_RECORDED_CALLS:]:
            entry = _convert(value, TorchEntry)
            call = None if entry is None else self._build_call(entry)
            if call is None:
                damaged += 1
            else:
                calls.append(call)
        if damaged:
            self._unread.append(f"{self._source}: {counted(damaged, 'call')} of {len(entries):,} cannot be read.")
        return sorted(calls, key=operator.attrgetter("record"))

    def _build_call(self, entry: TorchEntry) -> RecordedCall | None:
        """The call of an entry; None for one without a name or number."""
        backend, _, title = entry.profiling_name[:MAX_NAME_LETTERS].partition(":")
        name = title.partition(" ")[0]
        is_message = entry.is_p2p or name in MESSAGE_NAMES
        number = entry.p2p_seq_id if is_message else entry.collective_seq_id
        if number is None:
            number = entry.seq_id
        record = entry.seq_id if entry.record_id is None else entry.record_id
        if not name or number is None or record is None:
            return None
        self._backend = self._backend or backend
        group = self._find_group(entry)
        sender, receiver = self._read_ends(title, group)
        is_watched = backend not in UNWATCHED_BACKENDS
        created_us = entry.time_created_us
        return RecordedCall(
            group=group.name,
            number=number,
            name=sys.intern(name),
            state=entry.state,
            record=record,
            operation=entry.op_id,
            is_message=is_message,
            sender=sender,
            receiver=receiver,
            input_shapes=self._share(entry.input_sizes),
            output_shapes=self._share(entry.output_sizes),
            input_types=self._share(entry.input_dtypes),
            output_types=self._share(entry.output_dtypes),
            is_retired=entry.retired,
            has_failed=entry.retired and is_watched and entry.state is not CallState.COMPLETED,
            created_ns=entry.time_created_ns if created_us is None else created_us * 1000,
            started_ns=entry.time_discovered_started_ns or None,
            completed_ns=entry.time_discovered_completed_ns or None,
            timeout_ms=entry.timeout_ms,
            frames=self._read_frames(entry.frames),
        )

    def _find_group(self, entry: TorchEntry) -> RecordedGroup:
        """The group of a call; torch 2.2 knows its number only."""
        name, description = entry.process_group or (str(entry.pg_id), "")
        if entry.pg_id is not None:
            self._group_names[entry.pg_id] = name
        if name not in self._groups:
            self._add_group(name, description, ())
        return self._groups[name]

    def _read_ends(self, title: str, group: RecordedGroup) -> tuple[int | None, int | None]:
        """Sender and receiver of a message, as ranks of the job: the title has their places in the group."""
        found = MESSAGE.match(title)
        if found is None:
            return None, None
        own = _find_rank(group, int(found[2]))
        peer = _find_rank(group, int(found[4]))
        if own is not None:
            self._restrict_own_ranks({own})
        if found[1] == "send":
            return own, peer
        return peer, own

    def _read_frames(self, values: list[Any]) -> tuple[StackFrame, ...]:
        """The frames of a stack; equal ones are one object, as far as they are in the pickle."""
        shown = values[:MAX_RECORDED_FRAMES]
        key = tuple(map(id, shown))
        if key not in self._stacks:
            frames = map(self._read_frame, shown)
            self._stacks[key] = tuple(frame for frame in frames if frame is not None)
        return self._stacks[key]

    def _share(self, value: Made) -> Made:
        """An equal value that is there already, if there is one."""
        shared: Made = self._shared.setdefault(value, value)
        return shared

    def _read_frame(self, value: object) -> StackFrame | None:
        if id(value) not in self._frames:
            self._frames[id(value)] = _build_frame(value)
        return self._frames[id(value)]

    def _choose_rank(self, told: int | None) -> int | None:
        """The rank whose dump this is: the one told, unless what it holds says otherwise; None where neither does."""
        possible = self._own_ranks
        # groups and messages that contradict each other tell nothing
        if not possible:
            return told
        if told in possible:
            return told
        if told is not None:
            shown = ", ".join(str(rank) for rank in sorted(possible)[:MAX_SHOWN_RANKS])
            self._unread.append(f"{self._source}: is named as of rank {told}, and holds groups of rank {shown}.")
        return min(possible) if len(possible) == 1 else None

    def _read_progress(self, pg_status: dict[str, Any], calls: Sequence[RecordedCall]) -> dict[str, GroupProgress]:
        """How far each group has come, in numbers of its collectives, where that is certain."""
        progress = {}
        for group_id, value in pg_status.items():
            number = _convert(group_id, int)
            status = _convert(value, TorchStatus)
            if number is None or status is None or number not in self._group_names:
                continue
            name = self._group_names[number]
            of_group = [call for call in calls if call.group == name]
            progress[name] = GroupProgress(
                enqueued=self._read_status(status.last_enqueued_collective, of_group),
                started=self._read_status(status.last_started_collective, of_group),
                completed=self._read_status(status.last_completed_collective, of_group),
            )
        return progress

    def _read_status(self, status: int, of_group: Sequence[RecordedCall]) -> int | None:
        """The number of a collective that `pg_status` means; None where it may mean a message."""
        if status < 0:
            return None
        if self._backend in UNWATCHED_BACKENDS:
            # it counts messages, too, as the operations of calls do
            return next((call.number for call in of_group if call.operation == status), None)
        if any(call.is_message for call in of_group):
            return None
        return status

    def _is_only_active(self, calls: Sequence[RecordedCall]) -> bool:
        """Whether calls that had ended were left out: the numbers of records have gaps, and no call has ended."""
        if not calls or self._backend in UNWATCHED_BACKENDS:
            return False
        if any(call.state is CallState.COMPLETED for call in calls):
            return False
        return calls[-1].record + 1 != len(calls)


def _build_frame(value: object) -> StackFrame | None:
    frame = _convert(value, TorchFrame)
    if frame is None:
        return None
    return StackFrame(frame.name[:MAX_NAME_LETTERS], frame.filename[:MAX_NAME_LETTERS], frame.line)


def _find_rank(group: RecordedGroup, place: int) -> int | None:
    """The rank of the job at a place of a group."""
    if place < len(group.ranks):
        return group.ranks[place]
    is_whole_job = group.description == ALL_RANKS_DESCRIPTION and not group.ranks
    return place if is_whole_job else None


def _settle_parts(calls: Sequence[RecordedCall]) -> tuple[RecordedCall, ...]:
    """Make operations inside of coalesced calls parts of them, with their state."""
    settled: list[RecordedCall] = []
    # the last call of each number
    last: dict[tuple[str, bool, int], RecordedCall] = {}
    for call in reversed(calls):
        key = (call.group, call.is_message, call.number)
        whole = last.setdefault(key, call)
        if whole is not call and whole.name.endswith("coalesced"):
            call = _make_part(call, whole)
        settled.append(call)
    return tuple(reversed(settled))


def _make_part(call: RecordedCall, whole: RecordedCall) -> RecordedCall:
    return replace(
        call,
        is_part=True,
        state=whole.state,
        is_retired=whole.is_retired,
        has_failed=whole.has_failed,
        started_ns=whole.started_ns,
        completed_ns=whole.completed_ns,
    )
