"""Tracebacks as Python prints them, taken from the lines of one process one by one."""

import re
from dataclasses import dataclass

from megatron_lite.postmortem.evidence import StackFrame

MAX_TRACEBACK_FRAMES = 200
MAX_ERROR_CHARACTERS = 2_000
# of a message, behind its first line
MAX_MESSAGE_LINES = 8
# lines of others in the middle of a traceback, before it counts as broken off
MAX_STRAY_LINES = 50

HEADER = re.compile(r"(?P<before>.*?)(?:Original )?(?:Exception Group )?Traceback \(most recent call last\):$")
FILE_LINE = re.compile(r'(?P<indent>[ |+]*)File "(?P<file>[^"]*)", line (?P<line>\d{1,9})(?:, in (?P<function>.*))?$')
ERROR_LINE = re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*)|:)?$")
SURE_ERROR = re.compile(r".*(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Timeout|Failure)$|\w+\.[\w.]+$")
CLASS_NAME = re.compile(r"[A-Z]\w+$")
CHAINED = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)")
IGNORED = re.compile(r"Exception ignored (?:in|while)")
IN_THREAD = re.compile(r"Exception in thread (?P<thread>.+?):?$")
OF_PROCESS = re.compile(r"-- Process (?P<local>\d{1,7}) terminated with the following error:")
OF_WORKER = re.compile(r"Caught \w[\w.]* in DataLoader worker process \d+")


@dataclass(frozen=True)
class PythonTraceback:
    """An exception with its traceback, as printed."""

    # number of its first line, from 1
    line: int
    # class of the exception
    error: str
    # what it says, and what had happened before it
    message: str
    # innermost first
    frames: tuple[StackFrame, ...]
    # of a thread that is not the main one, where the traceback says so
    thread: str = ""
    # mp.spawn's number of the process, where it is told
    process: int | None = None


class TracebackReader:
    """Reads tracebacks out of the lines of one process.

    `feed` is given each line; an exception that was ignored by Python, as in a destructor, is left out.
    """

    def __init__(self) -> None:
        # the last one, while lines may still be added to its message
        self.found: list[PythonTraceback] = []
        self._state = ""
        self._begin(0)
        self._thread = ""
        self._process: int | None = None
        self._is_ignored = False
        self._cause = ""
        self._is_chained = False

    def _begin(self, number: int) -> None:
        self._first_line = number
        # outermost first, as printed
        self._frames: list[StackFrame] = []
        self._indent: int | None = None
        self._error = ""
        self._message: list[str] = []
        self._strays = 0

    @property
    def is_open(self) -> bool:
        """Whether the next lines may belong to a traceback."""
        return bool(self._state)

    @property
    def is_in_frames(self) -> bool:
        """Whether the line before belongs to the calls of a traceback, whose text is no message of its own."""
        return self._state == "frames"

    def feed(self, number: int, line: str) -> bool:
        """Take a line without prefixes.

        Args:
            number: Of the line in its file, from 1.
            line: Without its end.

        Returns:
            Whether the line belongs to a traceback.
        """
        if "Traceback (most recent call last):" in line and (header := HEADER.match(line.rstrip())):
            self._begin_traceback(number, header["before"])
            return True
        if self._state == "frames":
            return self._feed_frame(line)
        if self._state == "message":
            return self._feed_message(line)
        if self._state == "between" and line.strip():
            # a chain that does not go on
            self._cause = ""
            self.finish()
        return self._feed_between(line)

    def _begin_traceback(self, number: int, before: str) -> None:
        """Note a first line. `before`: what stands in front of it in its line."""
        if self._state == "message" and self._message and OF_WORKER.search(self._message[0]):
            # the error that a process of a loader handed on: the same exception, where it arose
            self._cause = self._format_error()
            self._is_chained = True
        elif not self._is_chained:
            self.finish()
        self._is_chained = False
        self._begin(number)
        self._state = "frames"

    def _feed_frame(self, line: str) -> bool:
        """Take a line behind the first one."""
        found = FILE_LINE.match(line)
        if found:
            if self._indent is None:
                self._indent = len(found["indent"])
            self._frames.append(StackFrame(found["function"] or "<module>", found["file"], int(found["line"])))
            del self._frames[: -2 * MAX_TRACEBACK_FRAMES]
            return True
        text = line.lstrip(" |+")
        indent = len(line) - len(text)
        if not text or (self._indent is not None and indent >= self._indent):
            # source text, and marks below it
            return True
        error = ERROR_LINE.match(text)
        if not error or not self._is_class(error["error"]):
            # something else was printed in between, or the rest is missing
            self._strays += 1
            if self._indent is None or self._strays > MAX_STRAY_LINES:
                self._state = ""
            return False
        self._error = error["error"]
        self._message = [(error["message"] or "")[:MAX_ERROR_CHARACTERS]]
        self._state = "message"
        return True

    def _is_class(self, name: str) -> bool:
        """Whether the first word of a line is the class of an exception."""
        if SURE_ERROR.match(name):
            return True
        return not self._strays and CLASS_NAME.match(name) is not None

    def _feed_message(self, line: str) -> bool:
        """Take a line behind the one that names the exception."""
        if CHAINED.search(line):
            self._cause = self._format_error()
            self._is_chained = True
            self._state = "between"
            return True
        process = OF_PROCESS.search(line)
        if process:
            self._process = int(process["local"])
            self._is_chained = True
            return True
        is_full = len(self._message) > MAX_MESSAGE_LINES
        if is_full and line.strip():
            self.finish()
            return False
        if line.strip():
            self._message.append(line.strip()[:MAX_ERROR_CHARACTERS])
        # a blank line may stand in front of the next exception of a chain
        return not line.strip()

    def _feed_between(self, line: str) -> bool:
        """Take a line outside of tracebacks."""
        if IGNORED.search(line):
            self.finish()
            self._is_ignored = True
            return True
        thread = IN_THREAD.search(line)
        if thread:
            self.finish()
            self._thread = thread["thread"]
            return True
        process = OF_PROCESS.search(line)
        if process:
            self._process = int(process["local"])
            return True
        return False

    def _format_error(self) -> str:
        """Class and message of the exception in one line."""
        first = self._message[0] if self._message else ""
        text = f"{self._error}: {first}" if first else self._error
        return text[:MAX_ERROR_CHARACTERS]

    def finish(self) -> None:
        """End the traceback that is being read."""
        if self._error and not self._is_ignored:
            message = next((line for line in self._message if line), "")
            if self._cause:
                message = f"{message} (after {self._cause})".strip()
            innermost_first = tuple(reversed(self._frames[-MAX_TRACEBACK_FRAMES:]))
            self.found.append(
                PythonTraceback(
                    line=self._first_line,
                    error=self._error,
                    message=message[:MAX_ERROR_CHARACTERS],
                    frames=innermost_first,
                    thread=self._thread,
                    process=self._process,
                )
            )
        was_complete = bool(self._error)
        self._begin(0)
        self._state = ""
        self._cause = ""
        self._is_chained = False
        if was_complete:
            self._is_ignored = False
            self._thread = ""
            self._process = None


def parse_traceback(text: str) -> PythonTraceback | None:
    """The last traceback in a text; None where there is none.

    Args:
        text: As traceback.format_exc gives it.
    """
    reader = TracebackReader()
    for number, line in enumerate(text.splitlines(), start=1):
        reader.feed(number, line)
    reader.finish()
    return reader.found[-1] if reader.found else None
