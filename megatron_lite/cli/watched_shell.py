"""A shell that goes through a script and runs no program: how it is started, listened to, answered and ended."""

import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from megatron_lite.cli.launcher import SCRIPT_ENDINGS
from megatron_lite.cli.text_tools import TOOLS, Answer, Toolbox
from megatron_lite.errors import UserError

# not on Windows, where a script is refused
CAN_GO_THROUGH = find_spec("fcntl") is not None
PROLOGUE = Path(__file__).with_name("watched_shell.bash")
MAX_COMMANDS = 2000  # scripts have hundreds
MAX_MEMORY_KIB = 2**18
MAX_RECORD_KIB = 2**14
MAX_SCRIPT_SECONDS = 20  # scripts take milliseconds; one that waits for something waits for ever
SECONDS_FOR_JOBS = 3  # in the background, after the script's end; and behind a launch that was found
SECONDS_BETWEEN_READS = 0.2
MAX_QUESTION = 2**22
MAX_OUTPUT_BYTES = 2**16  # bytes kept of what a script prints
MIN_DESCRIPTOR = 100
NOWHERE = os.devnull  # a PATH without programs; an empty one would be the current folder
NOT_HANDED_ON = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "HISTFILE")
WORD = r"""("[^"\n]*"|'[^'\n]*'|[^\s;|&<>()"']+)"""
# `[ ! -f X ]` as `! [ -f X ]`, whose answer the shell can decide.
DENIED_TEST = re.compile(rf"(\[\[?) ! (-[defrsL]) {WORD} (\]\]?)")
# Redirections of a block, and the input of a command that reads lines. A restricted shell refuses the output with an
# error, and the file may be one that the script has written.
REDIRECTION = rf"""[ \t]*(?:[&012]?>>?[ \t]*(?:&\d|{WORD})|<[ \t]*(?![<(&]){WORD})"""
OF_BLOCK = re.compile(rf"(?m)((?:^|[\s;])(?:\}}|done|fi|esac|\)))((?:{REDIRECTION})+)")
READ_FILE = re.compile(rf"(\bwc -[lw]|\b(?:mapfile|readarray)(?: +-\w)* +\w+|\$\()[ \t]*<[ \t]*(?![<(&]){WORD}")


@dataclass(frozen=True)
class Script:
    """A text for bash."""

    name: str  # its $0
    text: str
    arguments: list[str]
    environment: dict[str, str]
    before: list[str]  # words of the launchers around it


@dataclass(frozen=True)
class Walk:
    """Results of going through a script."""

    commands: list[tuple[list[str], dict[str, str]]]  # words and environment of launches and of what is handed on
    said: str  # the end of what the script printed
    code: int | None  # of its exit; None: it still waits for something


class _Channel:
    """The questions of the shell, one after the other, and the answers of a toolbox.

    A question is: its kind, its number, the script's folder, how many words follow, and they.
    """

    def __init__(self, toolbox: Toolbox, question: int, reply: int):
        self.question = question
        self._toolbox = toolbox
        self._reply = reply
        self._received = b""

    def serve(self) -> bool:
        """Answer what has arrived. False at the end of the pipe."""
        new = os.read(self.question, MAX_OUTPUT_BYTES)
        self._received += new
        if len(self._received) > MAX_QUESTION:
            return False
        while True:
            *fields, rest = self._received.split(b"\0")
            count = int(fields[3]) if len(fields) > 3 and fields[3].isdigit() else None
            if count is None or len(fields) < 4 + count:
                break
            self._received = b"\0".join([*fields[4 + count :], rest])
            kind, number, folder, _, *words = (
                field.decode("utf-8", "surrogateescape") for field in fields[: 4 + count]
            )
            try:
                answer = self._answer(kind, folder, words)
            except (
                OSError,
                ValueError,
            ):  # a path that no file can have, a folder that is closed to this user
                answer = Answer("")
            text = answer.text.replace("\0", "") if isinstance(answer, Answer) else ""
            code = answer.code if isinstance(answer, Answer) else answer
            with suppress(BrokenPipeError):
                os.write(self._reply, f"{number}\0{code}\0{text}\0".encode("utf-8", "surrogateescape"))
        return bool(new)

    def _answer(self, kind: str, folder: str, words: list[str]) -> Answer | str:
        box = self._toolbox
        if kind == "run" and words and words[0] in TOOLS:
            return "input" if box.wants_input(words, folder) else self._or_nothing(box.answer(words, folder, ""))
        if kind == "input" and len(words) > 1 and words[1] in TOOLS:
            return self._or_nothing(box.answer(words[1:], folder, words[0]))
        if kind == "write" and len(words) == 3:
            box.write(os.path.normpath(os.path.join(folder, words[0])), words[2], bool(words[1]))
        if kind == "quoted" and words:
            return Answer(box.quote_placeholders(words[0]))
        if kind == "left":
            box.leave_out(words)
        if kind == "written" and words and words[0] in box.files:
            return Answer(box.read(words[0]) or "")
        if kind == "made" and words:
            return Answer("", int(not box.has_made(words[0], folder)))
        if kind == "place" and words:
            return Answer(box.find(words[0], folder))
        return Answer("", int(kind == "written"))

    @staticmethod
    def _or_nothing(answer: Answer | None) -> Answer:
        return answer or Answer("")


def adapt(text: str) -> str:
    """The text in a form whose tests and redirections a restricted shell can be asked about."""
    text = DENIED_TEST.sub(r"! \1 \2 \3 \4", text)
    text = OF_BLOCK.sub(lambda found: found[1] + re.sub(REDIRECTION, _redirect, found[2]), text)
    return READ_FILE.sub(r'\1 <"$(__ask place \2)"', text)


def _redirect(found: re.Match[str]) -> str:
    source = found[2]
    if source:
        return f' <"$(__ask place {source})"'
    return f" {found[0].strip()}" if found[1] is None else ' >&"$__nothing"'


def go_through(bash: str, script: Script, toolbox: Toolbox, all_given: bool = False) -> Walk:
    """Let bash read a script, with every command left out.

    Args:
        bash: the path of bash.
        script: the script, its arguments and variables.
        toolbox: the programs that are answered in their place.
        all_given: whether every file that the script looks for counts as being there.
    """
    with ExitStack() as stack:
        record = stack.enter_context(tempfile.TemporaryFile())
        nothing = stack.enter_context(open(os.devnull, "wb"))
        # the first of each pair is read from, the second is written to
        alive = stack.enter_context(_Pipe())
        question = stack.enter_context(_Pipe())
        reply = stack.enter_context(_Pipe())
        turn = stack.enter_context(_Pipe())
        os.write(turn.into, b"x")
        descriptors = {
            "__record": _raise(stack, record.fileno()),
            "__nothing": _raise(stack, nothing.fileno()),
            "__question": _raise(stack, question.into),
            "__reply": _raise(stack, reply.out),
            "__turn": _raise(stack, turn.out),
            "__turn_back": _raise(stack, turn.into),
        }
        # held open by every process of the script, and named to none
        held = _raise(stack, alive.into)
        shell = _start(bash, script, _write_prologue(descriptors, all_given), (*descriptors.values(), held))
        for pipe in (alive, question):
            pipe.close_into()
        os.close(held)
        os.close(descriptors["__question"])
        channel = _Channel(toolbox, question.out, reply.into)
        assert shell.stdout is not None
        with shell.stdout as output:
            try:
                said, waits = _listen(shell, output.fileno(), alive.out, channel, record)
            finally:
                _end_session(shell)
        record.seek(0)
        commands = list(_read_commands(record.read()))
        return Walk(commands, said.decode("utf-8", "replace"), None if waits else shell.wait())


def _start(bash: str, script: Script, prologue: str, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start the shell in a session of its own. UserError for a script that cannot be given to it.

    Args:
        bash: the path of bash.
        script: the script, its arguments and variables.
        prologue: what the shell runs before it.
        descriptors: of the open files that the shell inherits.
    """
    environment = {name: value for name, value in script.environment.items() if name not in NOT_HANDED_ON}
    options = ["--restricted", "--noprofile", "--norc", "-c", prologue]
    try:
        return subprocess.Popen(
            [bash, *options, script.name, adapt(script.text), *script.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, "PATH": NOWHERE},
            pass_fds=descriptors,
        )
    except (OSError, ValueError) as error:  # longer than an argument may be; a zero byte
        raise _explain_no_start(script, error) from None


def _explain_no_start(script: Script, error: Exception) -> UserError:
    why = f"cannot be given to bash ({getattr(error, 'strerror', None) or 'no text'})"
    return UserError(f"{script.name}: {why}; give the trainer's flags themselves.")


def _write_prologue(descriptors: dict[str, int], all_given: bool) -> str:
    """The text that the shell runs before the script, with the values that it needs in front."""
    settings = {
        **descriptors,
        "__max_commands": MAX_COMMANDS,
        "__max_memory": MAX_MEMORY_KIB,
        "__max_record": MAX_RECORD_KIB,
        "__all_given": "1" if all_given else "",
        "__tools": f"'{' '.join(TOOLS)}'",
        "__scripts": f"'*:*@({'|'.join(SCRIPT_ENDINGS)})'",
    }
    first = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{first}\n{PROLOGUE.read_text(encoding='utf-8')}"


class _Pipe:
    """Two ends, closed when the block ends."""

    def __enter__(self) -> "_Pipe":  # noqa: PYI034 - Self came with Python 3.11
        self.out, self.into = os.pipe()
        self._open = {self.out, self.into}
        return self

    def close_into(self) -> None:
        """Close the end that is written to, so that the other one ends with the last process that holds it."""
        self._open.discard(self.into)
        os.close(self.into)

    def __exit__(self, *error: object) -> None:
        for end in self._open:
            os.close(end)


def _raise(stack: ExitStack, descriptor: int) -> int:
    """The same open file under a number that no script uses for a file of its own."""
    import fcntl

    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, MIN_DESCRIPTOR)

    def close() -> None:
        with suppress(OSError):
            os.close(number)

    stack.callback(close)
    return number


def _read_commands(record: bytes) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Each command: the number of its words and they, the number of variables and they."""
    items = iter(record.decode("utf-8", "surrogateescape").split("\0")[:-1])
    for number in items:
        words = [word for _, word in zip(range(int(number)), items)]
        variables = [variable for _, variable in zip(range(int(next(items, 0))), items)]
        # None: the shell was ended while it wrote this.
        if variables:
            yield words, dict(variable.partition("=")[::2] for variable in variables)


def _listen(
    shell: subprocess.Popen[bytes], out: int, alive: int, channel: _Channel, record: IO[bytes]
) -> tuple[bytes, bool]:
    """Read what the script prints to its end, and whether the shell itself still waits for something. Jobs in the
    background have until SECONDS_FOR_JOBS after it. alive: the end of a pipe that closes with the last process."""
    said = b""
    deadline = time.monotonic() + MAX_SCRIPT_SECONDS
    running = {out, alive, channel.question}
    was_found = False
    while alive in running and (left := deadline - time.monotonic()) > 0:
        for file in select.select(running, [], [], min(left, SECONDS_BETWEEN_READS))[0]:
            if file == channel.question:
                running -= set() if channel.serve() else {file}
                continue
            new = os.read(file, MAX_OUTPUT_BYTES)
            said = (said + new)[-MAX_OUTPUT_BYTES:] if file == out else said
            running -= set() if new else {file}
        if not was_found and b"pretrain_gpt.py\0" in os.pread(record.fileno(), MAX_OUTPUT_BYTES, 0):
            was_found = True
            deadline = min(deadline, time.monotonic() + SECONDS_FOR_JOBS)
        if shell.poll() is not None:
            deadline = min(deadline, time.monotonic() + SECONDS_FOR_JOBS)
    if alive not in running:  # the shell ends, or has closed the pipe
        with suppress(subprocess.TimeoutExpired):
            shell.wait(max(deadline - time.monotonic(), SECONDS_BETWEEN_READS))
    return said, shell.poll() is None


def _end_session(shell: subprocess.Popen[bytes]) -> None:
    """End all processes that the script has started: its process group, and where /proc shows it those of `set -m`."""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    found = True
    while found:
        found = False
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, _, session, *_ = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                if state not in "ZX" and int(session) == shell.pid:
                    found = True
                    os.kill(int(file.parent.name), signal.SIGKILL)
