"""Runs a command of megatron-lite in a process of its own, and reads its answer.

A process ends when its time is up, with all that it has started, takes its memory along, and can crash without the
server.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from megatron_lite.errors import UserError
from megatron_lite.mcp_server.confine import PROCESSES
from megatron_lite.mcp_server.confined_command import CommandRequest
from megatron_lite.shared_files import read_foreign

ReportProgress = Callable[[float, str], Awaitable[None]]
MODULE = "megatron_lite.mcp_server.confined_command"
COMMAND_FILE = "command.json"
ANSWER_FILE = "answer.json"
PRINTED_FILE = "printed.txt"
ERROR = "error: "  # begins the lines by which a command says what is wrong
SECONDS_BETWEEN_REPORTS = 2
MAX_ERROR_BYTES = 2**16  # bytes that are kept of what a command writes to stderr
MAX_ANSWER_BYTES = 2**26  # the server holds an answer as values, which take ten times as much
MARK = "MEGATRON_LITE_MCP_CALL"  # a variable that all processes of a call have, and no other ones
MAX_LOOKS_FOR_PROCESSES = 50
# Variables that a confined command gets; the others may hold what no answer is to show.
VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Command:
    """A command of megatron-lite.

    Attributes:
        name: Its name.
        options: Its options.
        words: What stands behind the options.
        folder: Its current folder.
        writes_json: Whether it knows --json.
        starts_programs: Whether it starts programs.
        confined: Whether it may reach only the named folders; a script that is run may reach all that the user may.
    """

    name: str
    options: tuple[str, ...]
    words: tuple[str, ...]
    folder: Path
    writes_json: bool = True
    starts_programs: bool = False
    confined: bool = True

    def list_words(self, answer: Path) -> list[str]:
        """List the words behind `megatron-lite`."""
        asked = ["--json", str(answer)] if self.writes_json else []
        return [self.name, *self.options, *asked, *self.words]


@dataclass(frozen=True)
class CommandResult:
    """The answer of a command.

    Attributes:
        exit_code: Its exit code.
        content: The JSON that it wrote; of one that writes none what it printed, in lines.
        lines: What it printed.
    """

    exit_code: int
    content: dict[str, Any]
    lines: list[str]


async def run_command(
    command: Command, roots: tuple[Path, ...], limit_s: float, report: ReportProgress
) -> CommandResult:
    """Run a command to its end.

    Args:
        command: The command.
        roots: The folders that it may read.
        limit_s: Seconds after which it is ended.
        report: Called every few seconds with the seconds since the start, and what the command says it does.

    Raises:
        UserError: It failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-lite-") as name:
        scratch = Path(os.path.realpath(name))
        words = _write_start(command, roots, scratch)
        with (scratch / PRINTED_FILE).open("wb") as printed:
            async with await anyio.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.PIPE,
                cwd=scratch,
                env=_choose_environment(command, scratch),
                start_new_session=True,
            ) as process:
                errors = _Errors()
                try:
                    with anyio.move_on_after(limit_s) as limit:
                        await _listen(process, errors, report)
                finally:
                    end_processes(process.pid, scratch)
                    # the package would end it once more, and then say that it does not know the process
                    with anyio.CancelScope(shield=True):
                        await process.wait()
        if limit.cancelled_caught:
            raise UserError(
                f"{command.name}: took more than {limit_s:g} s and was ended; ask about less of it, "
                "or start the server with a larger --time-limit."
            )
        return read_result(command, process.returncode or 0, errors.text, scratch)


class _Errors:
    """The end of what a command writes to stderr."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: bytes) -> None:
        self.text = (self.text + piece.decode("utf-8", "replace"))[-MAX_ERROR_BYTES:]

    @property
    def last_line(self) -> str:
        lines = self.text.split("\n")
        whole = [line.strip() for line in lines[:-1] if line.strip()]
        return whole[-1] if whole else ""


async def _listen(process: anyio.abc.Process, errors: _Errors, report: ReportProgress) -> None:
    """Read what a command writes to stderr until it ends, and report."""
    began = anyio.current_time()

    async def repeat_report() -> None:
        while True:
            await anyio.sleep(SECONDS_BETWEEN_REPORTS)
            await report(round(anyio.current_time() - began, 1), errors.last_line)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repeat_report)
        assert process.stderr is not None
        async for piece in process.stderr:
            errors.add(piece)
        await process.wait()
        tasks.cancel_scope.cancel()


def end_processes(leader: int, scratch: Path) -> None:
    """End a process and all that it has started, also in sessions of their own, as far as the system tells of them.

    Args:
        leader: The process, which leads a group.
        scratch: The folder of the call, by which its processes are known.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    mark = f"{MARK}={scratch}".encode()
    # one may start another while they are looked for
    for _ in range(MAX_LOOKS_FOR_PROCESSES):
        left = list(_find_marked(mark))
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not left:
            return


def _find_marked(mark: bytes) -> Iterator[int]:
    """Find the processes whose environment has a variable; none where there is no /proc."""
    for file in PROCESSES.glob("[0-9]*/environ"):
        # of others, or gone
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                yield int(file.parent.name)


def _write_start(command: Command, roots: tuple[Path, ...], scratch: Path) -> list[str]:
    """Write the request for a command. Returns the words that start its process."""
    request = CommandRequest(
        argv=tuple(command.list_words(scratch / ANSWER_FILE)),
        readable=tuple(map(str, roots)),
        writable=str(scratch),
        folder=str(command.folder),
        confined=command.confined,
        starts_programs=command.starts_programs,
    )
    file = scratch / COMMAND_FILE
    file.write_bytes(msgspec.json.encode(request))
    return [sys.executable, "-m", MODULE, str(file)]


def _choose_environment(command: Command, scratch: Path) -> Mapping[str, str]:
    """Choose the variables of a command: all for a script that is run, few for others."""
    mark = {MARK: str(scratch)}
    if not command.confined:
        return {**os.environ, **mark}
    kept = {name: value for name, value in os.environ.items() if name in VARIABLES}
    places = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if places:
        kept["PYTHONPATH"] = os.pathsep.join(places)
    # PYTHONSAFEPATH: modules are never taken from the current folder
    own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    return {**kept, **own, **mark, "TMPDIR": str(scratch)}


def read_result(command: Command, exit_code: int, errors: str, scratch: Path) -> CommandResult:
    """Read what a command left.

    Args:
        command: The command.
        exit_code: Its exit code.
        errors: What it wrote to stderr.
        scratch: The folder with what it printed, and its answer.

    Raises:
        UserError: It left no answer, or one that is too large.
    """
    try:
        printed = read_foreign(scratch / PRINTED_FILE, MAX_ANSWER_BYTES).decode("utf-8", "replace")
        answer = scratch / ANSWER_FILE
        has_answer = command.writes_json and answer.is_file()
        content = _decode(read_foreign(answer, MAX_ANSWER_BYTES)) if has_answer else {}
    except ValueError:
        # it was ended while it wrote
        has_answer = False
        content = {}
    except OSError as error:
        raise UserError(f"{command.name}: its answer cannot be read ({error.strerror}); ask about less.") from None
    lines = printed.rstrip().splitlines()
    if has_answer:
        return CommandResult(exit_code, content, [line for line in lines if str(answer) not in line])
    if not command.writes_json and exit_code == 0:
        return CommandResult(exit_code, {"lines": lines}, lines)
    mistakes = [line.removeprefix(ERROR) for line in errors.splitlines() if line.startswith(ERROR)]
    if not mistakes:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        remedy = f"megatron-lite {command.name} in a terminal shows more."
        mistakes = [f"{command.name}: ended without an answer, exit code {exit_code} ({last}); {remedy}"]
    raise UserError("\n".join(mistakes))


def _decode(raw: bytes) -> Any:
    """Read JSON, whose texts may hold halves of letters, as names of files do that are no text: "?" stands for them."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        text = json.dumps(json.loads(raw), ensure_ascii=False)
        return msgspec.json.decode(text.encode("utf-8", "replace"))
