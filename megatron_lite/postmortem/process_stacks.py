"""Reads stacks of processes: py-spy's text and JSON, and what Python's faulthandler prints.

A file may hold the dumps of many processes, one behind the other or with a rank in front of each line.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.postmortem.evidence import JobEvidence, ProcessEnd, ProcessStacks, StackFrame, ThreadStack
from megatron_lite.postmortem.log_prefixes import (
    PrefixReader,
    find_local_rank_in_path,
    find_rank_in_path,
    strip_controls,
)
from megatron_lite.shared_files import read_foreign

MAX_DUMP_BYTES = 2**26
MAX_FRAMES_OF_THREAD = 500
MAX_THREADS = 2_000
# processes of one file, and dumps of one process
MAX_PROCESS_DUMPS = 4_096
MAX_COMMAND_CHARACTERS = 1_000
MAX_FUNCTION_CHARACTERS = 200

PROCESS = re.compile(r"Process (?P<pid>\d{1,9}): (?P<command>.*)")
PYSPY_THREAD = re.compile(
    r"Thread (?P<id>0x[0-9A-Fa-f]+|\d+) \((?P<status>(?:active|idle)(?:\+gil)?)\)(?:: \"(?P<name>.*)\")?$"
)
# a prefix in front of the line may have taken one
PYSPY_INDENTS = (3, 4)
PYSPY_PLACE = re.compile(r"(?P<file>.*?)(?::(?P<line>\d{1,9}))?$")
# of --locals, and of a header
PYSPY_OTHER = re.compile(r" {7}|Python v\d|Parent Process \d")
FAULT_THREAD = re.compile(
    r"(?P<current>Current thread|Thread) (?P<id>0x[0-9A-Fa-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
FAULT_FRAME = re.compile(r' {1,2}File "(?P<file>.*)", line (?P<line>\d{1,9}|\?\?\?) in (?P<function>.*)')
FAULT_OTHER = re.compile(r"  (?:<|Garbage-collecting|\.\.\.|Binary file )|Current thread's C stack")
FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
FAULT_TIMEOUT = re.compile(r"Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!")
# a line in front of a dump, by whoever wrote several into one file
RANK_LINE = re.compile(r"\brank[ :=_#-]*(?P<rank>\d{1,7})\b", re.IGNORECASE)
MAX_RANK_LINE_CHARACTERS = 120
SIGNALS = {
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Floating point exception": 8,
}
FATAL_ERROR = "Fatal Python error"
# a dump begins within so many lines of a file that holds nothing else
LINES_BEFORE_DUMP = 5
JSON_HEAD = re.compile(rb'\s*\[\s*\{\s*"pid"\s*:\s*\d+\s*,\s*"thread_id"')
MAIN_THREAD = "MainThread"


@dataclass
class _Thread:
    """A thread that is being read."""

    id: str
    name: str = ""
    is_idle: bool | None = None
    holds_interpreter: bool | None = None
    # the thread that failed, or that asked for the dump
    is_current: bool = False
    # innermost first
    frames: list[StackFrame] = field(default_factory=list)

    def add_frame(self, function: str, file: str, line: str | None) -> None:
        """Add the next frame outwards."""
        if len(self.frames) < MAX_FRAMES_OF_THREAD:
            number = int(line) if line and line.isdecimal() else None
            self.frames.append(StackFrame(function[:MAX_FUNCTION_CHARACTERS], file, number))


@dataclass
class _Dump:
    """The stacks of a process that are being read."""

    line: int
    rank: int | None = None
    pid: int | None = None
    command: str = ""
    # by a name of faulthandler: "Segmentation fault"
    fatal: str = ""
    threads: list[_Thread] = field(default_factory=list)
    thread_ids: set[str] = field(default_factory=set)

    def add_thread(self, thread: _Thread) -> None:
        """Add the next thread."""
        if len(self.threads) < MAX_THREADS:
            self.threads.append(thread)
            self.thread_ids.add(thread.id)


class StackReader:
    """Reads dumps of stacks out of the lines of one process, or of one file."""

    def __init__(self) -> None:
        self.dumps: list[_Dump] = []
        self._dump: _Dump | None = None
        self._thread: _Thread | None = None
        self._next_rank: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the next lines may belong to a dump."""
        return self._dump is not None

    def feed(self, number: int, line: str) -> bool:
        """Take a line without prefixes.

        Args:
            number: Of the line in its file, from 1.
            line: Without its end.

        Returns:
            Whether the line belongs to a dump.
        """
        if not line.strip():
            self._thread = None
            return self.is_open
        readers = (self._read_process, self._read_pyspy_thread, self._read_fault_thread, self._read_fatal)
        if any(read(number, line) for read in readers):
            return True
        if self._thread is not None and self._read_frame(self._thread, line):
            return True
        if self._dump is not None and (PYSPY_OTHER.match(line) or FAULT_OTHER.match(line)):
            return True
        found = RANK_LINE.search(line) if len(line) <= MAX_RANK_LINE_CHARACTERS else None
        self._next_rank = int(found["rank"]) if found else None
        self._dump = None
        self._thread = None
        return False

    def list_dumps(self) -> list[_Dump]:
        """The dumps so far; of very many those in the middle are left out."""
        return self.dumps

    def _begin(self, number: int) -> _Dump:
        """Begin the dump of another process, or a later one."""
        dump = _Dump(line=number, rank=self._next_rank)
        self._next_rank = None
        # the last ones tell most of a process that was looked at every few minutes
        if len(self.dumps) >= MAX_PROCESS_DUMPS:
            del self.dumps[MAX_PROCESS_DUMPS // 2]
        self.dumps.append(dump)
        self._dump = dump
        self._thread = None
        return dump

    def _read_process(self, number: int, line: str) -> bool:
        """Whether the line is the first one of py-spy."""
        found = PROCESS.match(line)
        if found:
            dump = self._begin(number)
            dump.pid = int(found["pid"])
            dump.command = found["command"][:MAX_COMMAND_CHARACTERS]
        return found is not None

    def _read_pyspy_thread(self, number: int, line: str) -> bool:
        """Whether the line names a thread, as py-spy does."""
        found = PYSPY_THREAD.match(line)
        if found:
            dump = self._dump or self._begin(number)
            thread = _Thread(
                id=found["id"],
                name=found["name"] or "",
                is_idle=found["status"].startswith("idle"),
                holds_interpreter=found["status"].endswith("+gil"),
            )
            self._thread = thread
            dump.add_thread(thread)
        return found is not None

    def _read_fault_thread(self, number: int, line: str) -> bool:
        """Whether the line names a thread, as faulthandler does."""
        found = FAULT_THREAD.match(line)
        if found:
            dump = self._dump
            # each thread stands in a dump once
            if dump is None or found["id"] in dump.thread_ids:
                dump = self._begin(number)
            is_current = found["current"] == "Current thread"
            self._thread = _Thread(id=found["id"], name=found["name"] or "", is_current=is_current)
            dump.add_thread(self._thread)
        return found is not None

    def _read_fatal(self, number: int, line: str) -> bool:
        """Whether the line is the first one of faulthandler."""
        found = FATAL.match(line)
        if found:
            self._begin(number).fatal = found["what"]
        elif FAULT_TIMEOUT.match(line):
            self._begin(number)
        else:
            return False
        return True

    def _read_frame(self, thread: _Thread, line: str) -> bool:
        """Whether the line is a frame of the thread."""
        found = FAULT_FRAME.match(line)
        if found:
            thread.add_frame(found["function"], found["file"], found["line"])
            return True
        # not a pattern: names of C++ functions are long, and hold any number of parentheses
        indent = len(line) - len(line.lstrip())
        function, _, place = line.strip().rpartition(" (")
        found = PYSPY_PLACE.match(place[:-1])
        if indent not in PYSPY_INDENTS or not function or not place.endswith(")") or not found:
            return False
        thread.add_frame(function, found["file"], found["line"])
        return True


def _find_main(dump: _Dump) -> _Thread | None:
    """The main thread: by its name, its number, or what it has called first."""
    for thread in dump.threads:
        if thread.name == MAIN_THREAD or thread.id == str(dump.pid):
            return thread
    unnamed = [thread for thread in dump.threads if not thread.name and thread.frames]
    for thread in unnamed:
        if thread.frames[-1].function == "<module>":
            return thread
    # threads that Python starts begin here
    started = [thread for thread in unnamed if thread.frames[-1].function not in ("_bootstrap", "Thread._bootstrap")]
    return started[-1] if started else None


def describe_dump(dump: _Dump, source: str, rank: int | None = None, host: str | None = None) -> ProcessStacks:
    """Make the record of a dump.

    Args:
        dump: As a StackReader found it.
        source: The file.
        rank: Of the process, where the dump does not say it.
        host: Of the process.
    """
    main = _find_main(dump)
    threads = []
    for thread in dump.threads:
        threads.append(
            ThreadStack(
                name=thread.name or (MAIN_THREAD if thread is main else thread.id),
                frames=tuple(thread.frames),
                is_main=thread is main,
                is_idle=thread.is_idle,
                holds_interpreter=thread.holds_interpreter,
            )
        )
    return ProcessStacks(
        source=f"{source}:{dump.line}",
        threads=tuple(threads),
        rank=rank if dump.rank is None else dump.rank,
        host=host,
        pid=dump.pid,
        command=dump.command,
    )


def describe_fatal(
    dump: _Dump, source: str, rank: int | None = None, local_rank: int | None = None, host: str | None = None
) -> ProcessEnd | None:
    """Make the record of a process' end, if the dump was made since it failed.

    Args:
        dump: As a StackReader found it.
        source: The file.
        rank: Of the process.
        local_rank: Among those of its node.
        host: Of the process.
    """
    if not dump.fatal:
        return None
    current = next((thread for thread in dump.threads if thread.is_current), None)
    signal = SIGNALS.get(dump.fatal)
    return ProcessEnd(
        source=f"{source}:{dump.line}",
        rank=rank if dump.rank is None else dump.rank,
        local_rank=local_rank,
        host=host,
        pid=dump.pid,
        exit_code=None if signal is None else -signal,
        error=FATAL_ERROR,
        message=dump.fatal,
        frames=tuple(current.frames) if current else (),
    )


def parse_stacks(text: str, source: str, rank: int | None = None) -> tuple[ProcessStacks, ...]:
    """Read the dumps in a text, by py-spy or faulthandler.

    Args:
        text: One or several dumps.
        source: Where the text comes from.
        rank: Of the process, where the text does not say it.
    """
    return tuple(describe_dump(dump, source, rank) for dump in _read_dumps(text, rank))


def _read_dumps(text: str, rank: int | None) -> list[_Dump]:
    """The dumps of a text, whose lines may have their rank in front of them."""
    prefixes = PrefixReader()
    readers: dict[int | None, StackReader] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        origin, rest = prefixes.split(strip_controls(line))
        owner = origin.task if origin.rank is None else origin.rank
        readers.setdefault(owner, StackReader()).feed(number, rest)
    dumps = []
    for owner, reader in readers.items():
        for dump in reader.dumps:
            if dump.rank is None:
                dump.rank = rank if owner is None else owner
            dumps.append(dump)
    return [dump for dump in dumps if dump.threads or dump.fatal][:MAX_PROCESS_DUMPS]


class _JsonFrame(msgspec.Struct):
    """A frame in the JSON of py-spy."""

    name: str
    filename: str
    line: int = 0


class _JsonProcess(msgspec.Struct):
    """The process, where py-spy was asked for those that it started, too."""

    command_line: str = ""


class _JsonThread(msgspec.Struct):
    """A thread in the JSON of py-spy."""

    pid: int
    frames: list[_JsonFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    process_info: _JsonProcess | None = None


def _read_json(text: str) -> list[_Dump]:
    """The dumps of one or several JSON texts, one behind the other. ValueError for what is none."""
    decoder = json.JSONDecoder()
    dumps: dict[int, _Dump] = {}
    at = 0
    while at < len(text):
        values, end = decoder.raw_decode(text, at)
        line = text.count("\n", 0, at) + 1
        for thread in msgspec.convert(values, list[_JsonThread]):
            dump = dumps.setdefault(thread.pid, _Dump(line=line, pid=thread.pid))
            _add_json_thread(dump, thread)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return list(dumps.values())


def _add_json_thread(dump: _Dump, found: _JsonThread) -> None:
    """Add a thread to its process."""
    if found.process_info is not None:
        dump.command = found.process_info.command_line[:MAX_COMMAND_CHARACTERS]
    thread = _Thread(
        id=str(found.os_thread_id or ""),
        name=found.thread_name or "",
        is_idle=None if found.active is None else not found.active,
        holds_interpreter=found.owns_gil,
    )
    for frame in found.frames:
        # not the short name: a program's own files would look like those of packages
        thread.add_frame(frame.name, frame.filename, str(frame.line))
    dump.add_thread(thread)


def is_stack_file(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` holds stacks and nothing else."""
    if JSON_HEAD.match(head):
        return True
    prefixes = PrefixReader()
    reader = StackReader()
    lines = [line for line in head.decode("utf-8", "replace").splitlines() if line.strip()]
    others = 0
    for number, line in enumerate(lines):
        _, rest = prefixes.split(strip_controls(line))
        if not reader.feed(number, rest):
            others += 1
        if number == LINES_BEFORE_DUMP and not reader.dumps:
            return False
    # a log may hold a dump among much else; its reader takes it, too
    has_threads = any(dump.threads for dump in reader.dumps)
    return has_threads and others <= LINES_BEFORE_DUMP + len(reader.dumps)


def read_stack_file(path: Path) -> JobEvidence:
    """Read a file of stacks.

    The rank is taken from the dump, or from the file's name. UserError or OSError for a file that cannot be read.
    """
    text = read_foreign(path, MAX_DUMP_BYTES).decode("utf-8", "replace")
    rank = find_rank_in_path(path)
    try:
        dumps = _read_json(text) if text.lstrip()[:1] == "[" and text.lstrip()[1:].lstrip()[:1] == "{" else []
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: is no JSON as py-spy writes it.") from error
    dumps = dumps or _read_dumps(text, rank)
    if not dumps:
        raise UserError(f"{path}: holds no stack of a process.")
    source = str(path)
    local_rank = find_local_rank_in_path(path)
    ends = [describe_fatal(dump, source, rank, local_rank) for dump in dumps]
    return JobEvidence(
        stacks=tuple(describe_dump(dump, source, rank) for dump in dumps if dump.threads),
        ends=tuple(end for end in ends if end is not None),
    )
