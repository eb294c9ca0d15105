"""The table of failures that torchrun prints at its end, read line by line."""

import re
from dataclasses import dataclass, field

from megatron_lite.postmortem.evidence import EventKind, LogEvent, ProcessEnd
from megatron_lite.postmortem.log_prefixes import LineOrigin, read_time
from megatron_lite.postmortem.python_tracebacks import MAX_ERROR_CHARACTERS, PythonTraceback, TracebackReader

MAX_FAILURES_OF_TABLE = 4_096
ROOT_LINE = "Root Cause (first observed failure):"
OTHERS_LINE = "Failures:"
ENTRY = re.compile(r" *\[\d{1,7}\]:$")
FIELD = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: ?(?P<value>.*)")
RANK_VALUE = re.compile(r"(?P<rank>\d{1,7}) \(local_rank: (?P<local>\d{1,7})\)")
EXIT_VALUE = re.compile(r"(?P<code>-?\d{1,9}) \(pid: (?P<pid>\d{1,9})\)")
RULE = re.compile(r" *(?:={8,}|-{8,}) *$")
# torchrun's words for a process that left none: they say no more than its exit code
NO_WORDS = re.compile(r"Signal \d+ \(.*\) received by PID|To enable traceback see")
SIGTERM = -15
MIN_INDENT = 2


@dataclass
class _Entry:
    """A process that failed."""

    line: int
    origin: LineOrigin
    is_root: bool
    values: dict[str, str] = field(default_factory=dict)
    traceback: PythonTraceback | None = None


class FailureTable:
    """Takes the lines of a log and finds the tables of torchrun in them, one per node that failed."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._entry: _Entry | None = None
        self._section = ""
        self._tracebacks: TracebackReader | None = None

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to a table."""
        return bool(self._section)

    def feed(self, number: int, line: str, origin: LineOrigin) -> bool:
        """Take a line without prefixes.

        Args:
            number: Of the line in its file, from 1.
            line: Without its end.
            origin: What stood in front of it.

        Returns:
            Whether the line belongs to a table.
        """
        text = line.strip()
        if text in (ROOT_LINE, OTHERS_LINE):
            self._close_entry()
            self._section = text
            return True
        if not self._section:
            return False
        if RULE.match(line):
            was_root = self._section == ROOT_LINE
            self._close_entry()
            if was_root and self._entries:
                self._section = ""
            return True
        if ENTRY.match(line):
            self._close_entry()
            if len(self._entries) < MAX_FAILURES_OF_TABLE:
                self._entry = _Entry(number, origin, self._section == ROOT_LINE)
            return True
        return self._feed_field(number, line)

    def _feed_field(self, number: int, line: str) -> bool:
        """Take a line of an entry."""
        entry = self._entry
        if entry is None:
            return not line.strip() or "<NO_OTHER_FAILURES>" in line
        if self._tracebacks is not None:
            self._tracebacks.feed(number, line[MIN_INDENT:])
            return line.startswith(" " * MIN_INDENT)
        found = FIELD.match(line)
        if not found:
            return False
        entry.values[found["name"]] = found["value"].strip()
        if found["name"] == "traceback":
            self._tracebacks = TracebackReader()
            self._tracebacks.feed(number, found["value"])
        return True

    def _close_entry(self) -> None:
        """End the entry that is being read."""
        if self._entry is not None:
            if self._tracebacks is not None:
                self._tracebacks.finish()
                self._entry.traceback = self._tracebacks.found[-1] if self._tracebacks.found else None
            if RANK_VALUE.match(self._entry.values.get("rank", "")):
                self._entries.append(self._entry)
        self._entry = None
        self._tracebacks = None

    def finish(self) -> None:
        """End the table that is being read, which breaks off."""
        self._close_entry()
        self._section = ""

    def is_of_several_nodes(self) -> bool:
        """Whether a rank of the table has another number among those of its node."""
        values = [RANK_VALUE.match(entry.values["rank"]) for entry in self._entries]
        return any(found is not None and found["rank"] != found["local"] for found in values)

    def list_ends(self, source: str) -> list[tuple[ProcessEnd, LineOrigin]]:
        """Make the ends of the processes in the table.

        Args:
            source: The file.
        """
        self.finish()
        return [(_describe_entry(entry, source), entry.origin) for entry in self._entries]

    def list_roots(self, source: str) -> list[LogEvent]:
        """Make an event of each process that a launcher saw fail first.

        Args:
            source: The file.
        """
        self.finish()
        events = []
        for entry in self._entries:
            if entry.is_root:
                end = _describe_entry(entry, source)
                events.append(
                    LogEvent(
                        kind=EventKind.LAUNCHER_SAW_FAILURE,
                        source=end.source,
                        text=ROOT_LINE,
                        rank=end.rank,
                        host=end.host,
                        pid=end.pid,
                        code=end.exit_code,
                        at=end.ended_at,
                    )
                )
        return events


def _describe_entry(entry: _Entry, source: str) -> ProcessEnd:
    """The end of the process of an entry."""
    rank = RANK_VALUE.match(entry.values["rank"])
    code = EXIT_VALUE.match(entry.values.get("exitcode", ""))
    exit_code = int(code["code"]) if code else None
    said = entry.values.get("traceback", "")[:MAX_ERROR_CHARACTERS]
    if NO_WORDS.match(said):
        said = ""
    traceback = entry.traceback
    return ProcessEnd(
        source=f"{source}:{entry.line}",
        rank=int(rank["rank"]) if rank else None,
        local_rank=int(rank["local"]) if rank else None,
        host=entry.values.get("host") or None,
        pid=int(code["pid"]) if code else None,
        exit_code=exit_code,
        error=traceback.error if traceback else "",
        message=traceback.message if traceback else said,
        frames=traceback.frames if traceback else (),
        ended_at=read_time(f"{entry.values.get('time', '')} "),
        # the launcher sends it to those that are left
        is_consequence=True if exit_code == SIGTERM else None,
    )
