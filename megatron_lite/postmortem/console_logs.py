"""Reads logs of jobs of any program: what launchers, ranks, NCCL, gloo, batch systems and kernels print as they fail.

A log is read once, in pieces, whatever its size. Lines are found by the table log_patterns.tsv; tracebacks, dumps of
stacks and torchrun's table of failures are put together from lines of one process, told apart by what stands in front
of them. Of each kind and process the first and the last ones are kept, and the rest is counted.

A time without a zone is taken for local time of the machine that reads.
"""

import json
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from megatron_lite.formats.run_record import MAX_RANKS
from megatron_lite.postmortem.elastic_table import FailureTable
from megatron_lite.postmortem.evidence import (
    EventKind,
    FlightRecording,
    GroupProgress,
    JobEvidence,
    LogEvent,
    ProcessEnd,
    ProcessStacks,
    RecordedGroup,
)
from megatron_lite.postmortem.log_patterns import LINE_SEEDS, LinePattern, match_line
from megatron_lite.postmortem.log_prefixes import (
    LineOrigin,
    PrefixReader,
    find_local_rank_in_path,
    find_rank_in_path,
    strip_controls,
)
from megatron_lite.postmortem.process_stacks import StackReader, describe_dump, describe_fatal
from megatron_lite.postmortem.python_tracebacks import PythonTraceback, TracebackReader
from megatron_lite.shared_files import open_foreign

LOG_BLOCK_BYTES = 2**22
MAX_LOG_LINE_BYTES = 2**16
MAX_EVENT_CHARACTERS = 1_000
# characters of a long line that are kept in front of what was found in it
CHARACTERS_BEFORE = 200
# of each kind and process, first and last
KEPT_EVENTS = 8
MAX_PROCESSES = 2**13
MAX_RANKS_OF_LINE = 1_024
# lines for which an open traceback or dump may wait for its next line
PATIENCE_LINES = 10_000
HEAD_LINES = 400
LOG_HEAD_BYTES = 2**16
LABELED_SHARE = 0.8
MIN_LABELED_LINES = 8

# what begins a text of several lines
FIRST_WORDS = (
    b"(most recent call",
    b"Exception i",
    b")!",
    b': "MainThread"',
    b"ailure",
    b"last enqueued",
    b"Process ",
    b"world size: ",
    b"world_size=",
    b" nranks ",
    b"MEMBER: ",
    b"Num processes: ",
    b"will restart worker group",
)
# torchrun's agent, of processes that failed or of new nodes
RESTART = "will restart worker group"
WATCHDOG_PROGRESS = re.compile(
    r"\[PG ID \d+ PG GUID (?P<name>[\w.-]+)(?:\((?P<description>[^)]*)\))? Rank \d+\].*?"
    r"last enqueued(?: NCCL)? work: (?P<enqueued>-?\d+), "
    r"(?:last started(?: NCCL)? work: (?P<started>-?\d+), )?last completed(?: NCCL)? work: (?P<completed>-?\d+)"
)
NCCL_HEAD = re.compile(r"(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d+ \[(?P<device>\d+)\] ")
# what launchers raise since one of their processes failed
LAUNCHER_ERRORS = ("ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "SignalException")
KERNEL_LINE = re.compile(
    rb"\[ *\d+\.\d{6}\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4}\] |.{0,60}? kernel: "
)
# as Megatron-LM, torch's barriers and flags, NCCL, Lightning and accelerate say it
WORLD_SIZE = re.compile(
    r"(?:using world size: |\bworld_size=|\bcomm 0x\w+ rank (?P<rank>\d{1,7}) nranks |MEMBER: \d+/|Num processes: )"
    r"(?P<size>\d{1,7})\b"
)
# a data loader's worker that dies by a bus error writes one behind its last words
NUL_SHARE = 0.01
LAUNCHER_WORDS = (b"torch.distributed.elastic", b"torch/distributed/elastic", b"torchrun")
# with these a process ends whatever it has printed before
SIGNALS_OF_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)
JSON_OF_CONTAINER = '{"log":"'
# files of text beside logs
OTHER_FILES = re.compile(
    r".*\.(?:py|pyi|ipynb|json|jsonl|html|md|rst|tex|yaml|yml|csv|tsv|toml|cfg|ini|xml|css|js|lock|"
    r"sh|bash|sbatch|slurm|c|cc|cpp|cu|h|hpp)|"
    r"(?:requirements.*|vocab|merges)\.txt|(?:LICENSE|README|Makefile|Dockerfile|hostfile).*",
    re.IGNORECASE,
)
SPAWN_ERROR = "ProcessExitedException"
CONSEQUENCES = (EventKind.CONNECTION_LOST, EventKind.COLLECTIVE_TIMEOUT)


@dataclass
class _Found:
    """An event whose rank may be known at the end of the log only."""

    event: LogEvent
    origin: LineOrigin
    # the rank within a group
    group_rank: int | None = None
    # the rank among those of a node, which the line itself names
    local_rank: int | None = None
    # srun's number, which the line itself names
    task: int | None = None
    # srun had begun to end all processes
    is_after_end: bool = False


class _Kept:
    """The first and the last events of one kind and process; those that say the same are one."""

    def __init__(self) -> None:
        self._first: list[_Found] = []
        self._last: deque[_Found] = deque(maxlen=KEPT_EVENTS)
        self._dropped = 0

    def add(self, found: _Found) -> None:
        """Add the next event."""
        kept = self._last or self._first
        latest = kept[-1] if kept else None
        if latest is not None and _says_the_same(latest, found):
            latest.event = replace(latest.event, count=latest.event.count + 1)
            return
        if len(self._first) < KEPT_EVENTS:
            self._first.append(found)
            return
        if len(self._last) == KEPT_EVENTS:
            self._dropped += self._last[0].event.count
        self._last.append(found)

    def list_events(self) -> list[_Found]:
        """All that were kept; the last of the first ones counts those that were not."""
        if self._dropped:
            final = self._first[-1]
            final.event = replace(final.event, count=final.event.count + self._dropped)
            self._dropped = 0
        return [*self._first, *self._last]


def _says_the_same(first: _Found, second: _Found) -> bool:
    """Whether two events differ in their line only."""
    return _name_content(first) == _name_content(second)


def _name_content(found: _Found) -> tuple[LogEvent, tuple[int | None, ...]]:
    """Content of an event, without its place, time and words."""
    event = replace(found.event, source="", text="", at=None, count=1, lasted_s=None)
    return event, (found.group_rank, found.local_rank, found.task, found.origin.rank)


class _Process:
    """Texts of several lines, out of the lines of one process."""

    def __init__(self, origin: LineOrigin):
        self.origin = origin
        self.tracebacks = TracebackReader()
        self.stacks = StackReader()

    def feed(self, number: int, line: str) -> bool:
        """Take a line; returns whether it is part of a text that is not an event of its own."""
        was_in_frames = self.tracebacks.feed(number, line) and self.tracebacks.is_in_frames
        is_stack = self.stacks.feed(number, line)
        return was_in_frames or is_stack

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to a text that has begun."""
        return self.tracebacks.is_open or self.stacks.is_open


class LogReader:
    """Reads one log from its beginning to its end."""

    def __init__(self, source: str, written_at: float | None = None):
        """
        Args:
            source: The file, as evidence names it.
            written_at: When it was written last, in seconds since 1970: the year of times that have none.
        """
        self._source = source
        self._prefixes = PrefixReader(written_at)
        self._number = 1
        self._processes: dict[LineOrigin, _Process] = {}
        self._open: set[LineOrigin] = set()
        self._opened_at = 0
        self._events: dict[tuple[EventKind, LineOrigin], _Kept] = {}
        self._table = FailureTable()
        # ends of processes that srun or mp.spawn told of
        self._told_ends: list[_Found] = []
        # srun has ended those that were left
        self._srun_ended = False
        self._progress: dict[tuple[LineOrigin, str], tuple[int, str, GroupProgress]] = {}
        # of prefixes without a rank; None where they stood in front of lines of several ranks
        self._ranks_of: dict[LineOrigin, int | None] = {}
        self._world_size: int | None = None
        # by host and pid: how many ranks the largest communicator of NCCL has, and the process' rank in it
        self._communicators: dict[tuple[str, int], tuple[int, int]] = {}
        self._has_launcher = False
        # what stands in front of the first lines
        self._head: list[LineOrigin] = []
        self._is_full = False
        # the line at which torchrun began the last attempt; 0 where there was one only
        self._restarted_at = 0

    def read(self, file: BinaryIO) -> None:
        """Read a log from its beginning."""
        rest = b""
        is_first = True
        while block := file.read(LOG_BLOCK_BYTES):
            block = rest + block
            if is_first:
                self._head = _list_origins(block[:LOG_HEAD_BYTES])
                is_first = False
            end = block.rfind(b"\n") + 1
            if not end and len(block) < MAX_LOG_LINE_BYTES:
                rest = block
                continue
            if not end:
                # a line without an end, of which the rest is dropped with the next block
                end = len(block)
            rest = block[end:]
            self._read_block(block[:end])
        self._read_block(rest)
        for process in self._processes.values():
            process.tracebacks.finish()

    def _read_block(self, block: bytes) -> None:
        """Read whole lines: those that may matter, and all of them while a text of several lines goes on."""
        self._has_launcher = self._has_launcher or any(word in block for word in LAUNCHER_WORDS)
        starts = deque(_find_lines(block))
        at = 0
        while at < len(block):
            if self._is_anything_open():
                begin = at
            else:
                while starts and starts[0] < at:
                    starts.popleft()
                if not starts:
                    self._number += block.count(b"\n", at)
                    return
                begin = starts.popleft()
                self._number += block.count(b"\n", at, begin)
            end = block.find(b"\n", begin)
            end = len(block) if end < 0 else end
            self._read_line(block[begin : min(end, begin + MAX_LOG_LINE_BYTES)])
            self._number += 1
            at = end + 1

    def _is_anything_open(self) -> bool:
        """Whether a text of several lines goes on."""
        if (self._open or self._table.is_open) and self._number - self._opened_at > PATIENCE_LINES:
            for origin in self._open:
                self._processes[origin].tracebacks.finish()
            self._open.clear()
            self._table.finish()
        return bool(self._open) or self._table.is_open

    def _read_line(self, raw: bytes) -> None:
        """Read one line for all that it may belong to."""
        text = raw.decode("utf-8", "replace")
        if text.startswith(JSON_OF_CONTAINER):
            text = _unwrap_line(text)
        text = strip_controls(text.rstrip("\r\n"))
        # a progress bar writes over itself
        text = text.rpartition("\r")[2]
        origin, line = self._prefixes.split(text)
        if RESTART in line:
            self._forget_attempt()
            return
        stream = replace(origin, at=None)
        if origin.rank is not None:
            self._note_rank(replace(stream, rank=None), origin.rank)
        if self._table.feed(self._number, line.rstrip(), origin):
            self._opened_at = self._number
            return
        process = self._find_process(stream)
        if process is not None:
            was_open = stream in self._open
            is_part = process.feed(self._number, line)
            if process.is_open and not was_open:
                self._open.add(stream)
                self._opened_at = self._number
            elif not process.is_open:
                self._open.discard(stream)
            if is_part:
                return
        if line.strip():
            self._note_progress(stream, line)
            self._note_world_size(line)
            self._note_events(origin, stream, line)

    def _forget_attempt(self) -> None:
        """Forget what an attempt said that was started again: its failure is not the job's last one."""
        self._restarted_at = self._number
        self._processes.clear()
        self._open.clear()
        self._events.clear()
        self._table = FailureTable()
        self._told_ends.clear()
        self._srun_ended = False
        self._progress.clear()

    def _note_rank(self, stream: LineOrigin, rank: int) -> None:
        """Note that these prefixes stood in front of a line of the rank."""
        if len(self._ranks_of) < MAX_PROCESSES and self._ranks_of.setdefault(stream, rank) != rank:
            # a launcher of several
            self._ranks_of[stream] = None

    def _find_process(self, stream: LineOrigin) -> _Process | None:
        """The process whose lines have such prefixes; None where there are too many."""
        process = self._processes.get(stream)
        if process is None and len(self._processes) < MAX_PROCESSES:
            process = _Process(stream)
            self._processes[stream] = process
        self._is_full = self._is_full or process is None
        return process

    def _note_progress(self, stream: LineOrigin, line: str) -> None:
        """Note how far a group is on a rank, as the watchdog of NCCL says."""
        found = WATCHDOG_PROGRESS.search(line) if "last enqueued" in line else None
        if found is None or stream.rank is None or len(self._progress) >= MAX_PROCESSES:
            return
        numbers = []
        for name in ("enqueued", "started", "completed"):
            # -1 stands for none so far
            numbers.append(None if found[name] is None else max(int(found[name]), 0))
        key = (stream, found["name"])
        self._progress[key] = (self._number, found["description"] or "", GroupProgress(*numbers))

    def _note_world_size(self, line: str) -> None:
        """Note how many ranks the job has, if the line says so; the largest number, since groups have fewer."""
        found = WORLD_SIZE.search(line)
        if found:
            self._world_size = max(self._world_size or 0, min(int(found["size"]), MAX_RANKS)) or None
        head = NCCL_HEAD.search(line) if found and found["rank"] else None
        if found and head and len(self._communicators) < MAX_PROCESSES:
            process = (head["host"], int(head["pid"]))
            told = (int(found["size"]), int(found["rank"]))
            self._communicators[process] = max(told, self._communicators.get(process, told))

    def _note_events(self, origin: LineOrigin, stream: LineOrigin, line: str) -> None:
        """Keep what the line tells."""
        matched = match_line(line)
        if matched is None:
            return
        pattern, match = matched
        self._srun_ended = self._srun_ended or (
            pattern.kind is EventKind.LAUNCHER_ENDED_OTHERS and "srun" in pattern.word
        )
        for found in self._make_events(pattern, match, origin, line):
            is_told = found.task is not None or (found.local_rank is not None and SPAWN_ERROR in line)
            if is_told and len(self._told_ends) < MAX_PROCESSES:
                found.is_after_end = self._srun_ended
                self._told_ends.append(found)
            key = (found.event.kind, stream)
            if key not in self._events and len(self._events) >= MAX_PROCESSES:
                self._is_full = True
                return
            self._events.setdefault(key, _Kept()).add(found)

    def _make_events(
        self, pattern: LinePattern, match: re.Match[str], origin: LineOrigin, line: str
    ) -> Iterator[_Found]:
        """The events of a line, one for each rank that it names."""
        fields = pattern.read_fields(match)
        begin = max(0, match.start() - CHARACTERS_BEFORE) if len(line) > MAX_EVENT_CHARACTERS else 0
        head = NCCL_HEAD.search(line) if "NCCL" in line else None
        host = fields.host or (head["host"] if head else None) or origin.host
        pid = fields.pid if fields.pid is not None or head is None else int(head["pid"])
        device = fields.device or (f"GPU {head['device']}" if head else "")
        event = LogEvent(
            kind=pattern.kind,
            source=f"{self._source}:{self._number}",
            text=line[begin : begin + MAX_EVENT_CHARACTERS].strip(),
            rank=fields.rank,
            host=host,
            pid=origin.pid if pid is None else pid,
            device=device,
            code=fields.code,
            at=origin.at if fields.at is None else fields.at,
            group=fields.group,
            number=fields.number,
            call=fields.call,
            lasted_s=fields.lasted_s,
            peer=fields.peer,
        )
        for rank in fields.ranks[:MAX_RANKS_OF_LINE]:
            yield _Found(replace(event, rank=rank), origin)
        for task in fields.tasks[:MAX_RANKS_OF_LINE]:
            yield _Found(event, origin, task=task)
        if not fields.ranks and not fields.tasks:
            yield _Found(event, origin, group_rank=fields.group_rank, local_rank=fields.local_rank)

    def collect(self, path: Path) -> JobEvidence:
        """Make the evidence of a log that was read.

        Args:
            path: Of the file: its name and folders may tell the rank.
        """
        naming = self._choose_naming(path)
        ends = [naming.name_end(end, origin) for end, origin in self._table.list_ends(self._source)]
        ends += self._list_exceptions(naming)
        stacks: list[ProcessStacks] = []
        for process in self._processes.values():
            rank = naming.find_rank(process.origin)
            local_rank = naming.find_local_rank(process.origin)
            for dump in process.stacks.list_dumps():
                if dump.threads:
                    stacks.append(describe_dump(dump, self._source, rank, process.origin.host))
                fatal = describe_fatal(dump, self._source, rank, local_rank, process.origin.host)
                if fatal is not None:
                    ends.append(fatal)
        ends = self._name_by_table(ends)
        ends += [_describe_told_end(naming.name_event(found), found) for found in self._told_ends]
        events = [naming.name_event(found) for kept in self._events.values() for found in kept.list_events()]
        events += self._table.list_roots(self._source)
        events.sort(key=lambda event: _line_of(event.source))
        unread = []
        if self._is_full:
            unread.append(f"{self._source}: has lines of too many processes, of which some are left out.")
        if self._restarted_at:
            unread.append(
                f"{self._source}:{self._restarted_at}: the job was started again; the attempts before are left out."
            )
        return JobEvidence(
            recordings=tuple(self._list_recordings()),
            stacks=tuple(stacks),
            ends=tuple(ends),
            events=tuple(events),
            world_size=self._world_size,
            unread=tuple(unread),
        )

    def _name_by_table(self, ends: list[ProcessEnd]) -> list[ProcessEnd]:
        """Give exceptions without a rank those of the processes that a launcher saw fail without words.

        Only where nothing else is possible: all exceptions are alike, and there are as many processes, or one.
        """
        failed = [end for end in ends if _failed_without_words(end)]
        unnamed = [end for end in ends if end.rank is None and end.error]
        contents = {(end.error, end.message, end.frames[:1], end.exit_code) for end in unnamed}
        if len(contents) != 1 or len(failed) not in (1, len(unnamed)):
            return ends
        exit_code = unnamed[0].exit_code
        if any(exit_code not in (None, end.exit_code) or end.exit_code in SIGNALS_OF_OTHERS for end in failed):
            return ends
        # the first of several prints of one exception is the rank's own
        names = {id(end): process for end, process in zip(unnamed, failed, strict=False)}
        named = []
        for end in ends:
            its = names.get(id(end))
            named.append(end if its is None else replace(end, rank=its.rank, local_rank=its.local_rank, pid=its.pid))
        return named

    def _choose_naming(self, path: Path) -> "_Naming":
        """How processes are named in this log."""
        told = {origin.rank for origin in self._processes if origin.rank is not None}
        rank = find_rank_in_path(path)
        local_rank = find_local_rank_in_path(path)
        if local_rank is not None and len(told) == 1:
            # torch says the rank itself in front of some lines
            (rank,) = told
        return _Naming(
            rank_of_file=rank,
            local_rank_of_file=local_rank,
            tasks_are_ranks=self._is_labeled_by_rank(),
            is_labeled=self._is_labeled(),
            locals_are_ranks=self._is_of_one_node(),
            ranks_of=self._ranks_of,
            ranks_of_processes=self._list_ranks_of_processes(),
        )

    def _list_ranks_of_processes(self) -> dict[tuple[str, int], int]:
        """The ranks by host and pid, as the communicator of all ranks has them; those of smaller ones count alone."""
        ranks = {}
        for process, (size, rank) in self._communicators.items():
            if size == self._world_size:
                ranks[process] = rank
        # of two communicators of that size one may be a group of some ranks
        return ranks if len(set(ranks.values())) == len(ranks) else {}

    def _is_labeled(self) -> bool:
        """Whether nearly all of the first lines have srun's number of their process in front of them."""
        labeled = sum(origin.task is not None for origin in self._head)
        return len(self._head) >= MIN_LABELED_LINES and labeled >= LABELED_SHARE * len(self._head)

    def _is_labeled_by_rank(self) -> bool:
        """Whether srun's numbers are those of ranks, rather than of launchers of several."""
        has_local = any(origin.local_rank is not None for origin in (*self._processes, *self._head))
        return not has_local and not self._has_launcher

    def _is_of_one_node(self) -> bool:
        """Whether nothing tells of a second node, so that a rank's number on its node is its rank."""
        origins = {*self._processes, *self._head}
        tasks = {origin.task for origin in origins if origin.task is not None and self._is_labeled()}
        hosts = {origin.host for origin in origins if origin.host is not None}
        wrong = any(
            origin.local_rank is not None and origin.local_rank != rank
            for origin, rank in self._ranks_of.items()
            if rank is not None
        )
        return len(tasks) < 2 and len(hosts) < 2 and not wrong and not self._table.is_of_several_nodes()

    def _list_exceptions(self, naming: "_Naming") -> list[ProcessEnd]:
        """The exceptions of all processes."""
        ends = []
        for process in self._processes.values():
            found = [one for one in process.tracebacks.found if not one.error.endswith(LAUNCHER_ERRORS)]
            kept = found if len(found) <= KEPT_EVENTS else [*found[: KEPT_EVENTS // 2], *found[-KEPT_EVENTS // 2 :]]
            ends += [naming.name_end(self._describe_exception(one), process.origin, one.process) for one in kept]
        return ends

    def _describe_exception(self, found: PythonTraceback) -> ProcessEnd:
        """The end of a process by an exception."""
        matched = match_line(f"{found.error}: {found.message}")
        is_consequence = True if matched is not None and matched[0].kind in CONSEQUENCES else None
        message = f"{found.message} (in thread {found.thread})".strip() if found.thread else found.message
        return ProcessEnd(
            source=f"{self._source}:{found.line}",
            error=found.error,
            message=message,
            frames=found.frames,
            is_consequence=is_consequence,
        )

    def _list_recordings(self) -> Iterator[FlightRecording]:
        """How far groups are, of each rank whose watchdog said so."""
        by_rank: dict[int, dict[str, tuple[int, str, GroupProgress]]] = {}
        for (stream, name), told in self._progress.items():
            if stream.rank is not None:
                by_rank.setdefault(stream.rank, {})[name] = told
        for rank, groups in sorted(by_rank.items()):
            first = min(number for number, _, _ in groups.values())
            yield FlightRecording(
                source=f"{self._source}:{first}",
                rank=rank,
                backend="nccl",
                calls=(),
                groups={name: RecordedGroup(name, description) for name, (_, description, _) in groups.items()},
                progress={name: progress for name, (_, _, progress) in groups.items()},
                has_forgotten=True,
            )


@dataclass(frozen=True)
class _Naming:
    """How ranks are named in a log."""

    # by the file's name and folders
    rank_of_file: int | None
    local_rank_of_file: int | None
    tasks_are_ranks: bool
    # srun's numbers stand in front of nearly all lines, so that they are no other numbers
    is_labeled: bool
    locals_are_ranks: bool
    # of other prefixes that stood in front of a line together with a rank
    ranks_of: dict[LineOrigin, int | None]
    # by host and pid, as NCCL names them
    ranks_of_processes: dict[tuple[str, int], int]

    def find_rank(self, origin: LineOrigin) -> int | None:
        """The rank of a process; None where nothing tells it."""
        if origin.rank is not None:
            return origin.rank
        known = self.ranks_of.get(replace(origin, at=None))
        is_named = origin.local_rank is not None or origin.task is not None or origin.pid is not None
        if known is not None and is_named:
            return known
        if origin.local_rank is not None:
            return origin.local_rank if self.locals_are_ranks else None
        if origin.task is not None and self.is_labeled and self.tasks_are_ranks:
            return origin.task
        return self.rank_of_file

    def find_local_rank(self, origin: LineOrigin) -> int | None:
        """The rank among those of its node; None where nothing tells it."""
        return self.local_rank_of_file if origin.local_rank is None else origin.local_rank

    def name_event(self, found: _Found) -> LogEvent:
        """The event with its rank, as far as it can be told."""
        event = found.event
        if event.rank is not None:
            return event
        if found.task is not None:
            return replace(event, rank=found.task if self.tasks_are_ranks else None)
        if found.local_rank is not None:
            return replace(event, rank=found.local_rank if self.locals_are_ranks else None)
        rank = self.find_rank(found.origin)
        if rank is None and event.host is not None and event.pid is not None:
            rank = self.ranks_of_processes.get((event.host, event.pid))
        # ranks of a group are those of the job in the group of all, which is also meant where none is named
        if rank is None and event.group in ("", "0"):
            rank = found.group_rank
        return replace(event, rank=rank)

    def name_end(self, end: ProcessEnd, origin: LineOrigin, process: int | None = None) -> ProcessEnd:
        """The end with its rank, as far as it can be told.

        Args:
            end: As it was read.
            origin: What stood in front of it.
            process: The number of a process that mp.spawn started.
        """
        if end.rank is not None:
            return end
        local_rank = self.find_local_rank(origin) if process is None else process
        rank = self.find_rank(origin)
        if process is not None:
            rank = process if self.locals_are_ranks else None
        return replace(
            end,
            rank=rank,
            local_rank=local_rank,
            host=end.host or origin.host,
            pid=origin.pid if end.pid is None else end.pid,
            ended_at=origin.at if end.ended_at is None else end.ended_at,
        )


def _failed_without_words(end: ProcessEnd) -> bool:
    """Whether only the exit code of a rank is known, with which it failed of its own."""
    return end.rank is not None and bool(end.exit_code) and not end.error and not end.is_consequence


def _unwrap_line(text: str) -> str:
    """The line in an object of JSON, as Docker keeps logs, behind its time; the text as it is if it is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    line = values.get("log") if isinstance(values, dict) else None
    if not isinstance(line, str):
        return text
    return f"{values.get('time', '')} {line}".lstrip()


def _describe_told_end(event: LogEvent, found: _Found) -> ProcessEnd:
    """The end of a process of which srun or mp.spawn told."""
    exit_code = event.code
    if event.kind in (EventKind.SIGNAL, EventKind.HOST_OUT_OF_MEMORY):
        exit_code = -signal.SIGKILL if event.code is None else -event.code
    return ProcessEnd(
        source=event.source,
        rank=event.rank,
        local_rank=found.local_rank,
        host=event.host,
        exit_code=exit_code,
        ended_at=event.at,
        is_consequence=True if found.is_after_end else None,
    )


def _line_of(source: str) -> int:
    return int(source.rpartition(":")[2])


@lru_cache(maxsize=1)
def _list_words() -> tuple[bytes, ...]:
    """The texts by which lines are found, without those that hold another one."""
    words = {*FIRST_WORDS, *(seed.encode() for seed in LINE_SEEDS)}
    return tuple(word for word in words if not any(other in word for other in words - {word}))


def _find_lines(block: bytes) -> list[int]:
    """Where the lines begin that may matter, ascending."""
    starts = set()
    for word in _list_words():
        at = block.find(word)
        while at >= 0:
            starts.add(block.rfind(b"\n", 0, at) + 1)
            end = block.find(b"\n", at)
            at = block.find(word, end) if end >= 0 else -1
    return sorted(starts)


def _list_origins(head: bytes) -> list[LineOrigin]:
    """Prefixes of the lines at the beginning of a log."""
    prefixes = PrefixReader()
    lines = [line for line in head.decode("utf-8", "replace").splitlines()[:HEAD_LINES] if line.strip()]
    return [replace(prefixes.split(strip_controls(line))[0], at=None) for line in lines]


def is_console_log(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` may be a log: lines of text. It is the last that is asked."""
    text = head.replace(b"\0", b"").lstrip()
    is_binary = head.count(b"\0") > len(head) * NUL_SHARE
    if not text or is_binary or OTHER_FILES.fullmatch(path.name):
        return False
    if text[:1] in (b"{", b"<") and not text.startswith(JSON_OF_CONTAINER.encode()):
        return False
    return all(byte >= 32 or byte in b"\t\n\r\x0b\x0c\x1b\x08" for byte in text[:HEAD_LINES])


def is_kernel_log(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is what a kernel logs, as dmesg or the journal show it."""
    lines = head.splitlines()[:HEAD_LINES]
    marked = sum(KERNEL_LINE.match(line) is not None for line in lines)
    return bool(lines) and marked >= LABELED_SHARE * len(lines) and is_console_log(head, path)


def read_console_log(path: Path) -> JobEvidence:
    """Read a log. OSError for a file that cannot be read."""
    with open_foreign(path) as file:
        reader = LogReader(str(path), path.stat().st_mtime)
        reader.read(file)
    return reader.collect(path)


def parse_lines(lines: Iterable[str], source: str = "log") -> JobEvidence:
    """Read lines of a log that are at hand.

    Args:
        lines: Without their ends.
        source: Where they come from.
    """
    reader = LogReader(source)
    reader.read(BytesIO("\n".join(lines).encode("utf-8", "replace")))
    return reader.collect(Path(source))
