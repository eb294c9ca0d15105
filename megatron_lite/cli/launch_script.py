"""What a launch script would start, found without starting anything: bash reads the script, and every command is left out."""

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from megatron_lite.cli.launcher import ASSIGNMENT, Launch, find_launch, header_environment, split_at_trainer
from megatron_lite.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows, where a script is refused
    fcntl = None

PROLOGUE = Path(__file__).with_name("watched_shell.bash")
MAX_COMMANDS = 2000  # scripts have hundreds
MAX_MEMORY_KIB, MAX_RECORD_KIB = 2**18, 2**14
SECONDS = 20  # scripts take milliseconds; one that waits for something waits for ever
SECONDS_FOR_JOBS = 3  # in the background, after the script's end
SECONDS_BETWEEN = 0.2
MAX_SAID = 2**16  # bytes kept of what a script prints
LONGEST_SAID = 200
MIN_DESCRIPTOR = 100
DEEPEST = 4  # scripts that start scripts
NOWHERE = os.devnull  # a PATH without programs; an empty one would be the current folder
STARTS_NONE = "starts no pretrain_gpt.py"
SHELLS = ("bash", "sh", "zsh")
NOT_HANDED_ON = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "HISTFILE")


@dataclass(frozen=True)
class _Script:
    """A text for bash."""

    name: str  # its $0
    text: str
    arguments: list[str]
    environment: dict[str, str]
    before: list[str]  # words of the launchers around it


def read_launch_script(script: str, arguments: list[str]) -> Launch:
    """The first command of `script`, or of what it hands on to, that starts pretrain_gpt.py.

    UserError if there is none, or no bash.
    """
    bash = shutil.which("bash") if fcntl else None
    if bash is None:
        raise UserError(f"{script}: there is no bash here to read it; give the trainer's flags themselves.")
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{script}: cannot be read ({error.strerror}); check the path.") from None
    header = header_environment(text)
    found, why_not = _look(bash, _Script(script, text, arguments, {**header, **os.environ}, []), DEEPEST)
    if found is None:
        raise UserError(why_not)
    return find_launch(*found, header)


def _look(bash: str, script: _Script, depth: int) -> tuple[tuple[list[str], dict[str, str]] | None, str]:
    """((words of the command, its environment), or None, and the reason)."""
    record, said, code = _walk(bash, script)
    why_not = _explain_nothing(bash, script, said, code)
    # each command: the number of its words and they, the number of variables and they
    items = iter(record.decode("utf-8", "surrogateescape").split("\0")[:-1])
    for number in items:
        words = list(islice(items, int(number)))
        variables = list(islice(items, int(next(items, 0))))
        if not variables:  # the shell was ended while it wrote this
            continue
        environment = dict(variable.partition("=")[::2] for variable in variables)
        if split_at_trainer(words):
            return ([*script.before, *words], environment), ""
        inner = _find_inner(script.before, words, environment) if depth > 1 else None
        if inner:
            found, inner_why_not = _look(bash, inner, depth - 1)
            if found:
                return found, ""
            why_not = inner_why_not if STARTS_NONE in why_not else why_not
    return None, why_not


def _find_inner(before: list[str], words: list[str], environment: dict[str, str]) -> _Script | None:
    """The script or the -c "..." that a command hands on to another shell."""
    for at, word in enumerate(words):
        around = [*before, *words[:at]]
        own = environment | dict(word.split("=", 1) for word in words[:at] if ASSIGNMENT.match(word))
        if re.fullmatch("-[a-z]*c", word) and any(other.rpartition("/")[2] in SHELLS for other in words[:at]):
            text, name, *arguments = [*words[at + 1 :], "", ""][: max(2, len(words) - at - 1)]
            return _Script(name or "bash", text, arguments, own, around)
        if word.endswith(".sh") and (path := Path(own.get("PWD", ""), word)).is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            return _Script(str(path), text, words[at + 1 :], own, around)
    return None


def _walk(bash: str, script: _Script) -> tuple[bytes, str, int | None]:
    """(the record of the commands, the end of what the script printed, its exit code; None: it still waits for something)."""
    environment = {name: value for name, value in script.environment.items() if name not in NOT_HANDED_ON}
    alive, held_low = os.pipe()
    with (
        tempfile.TemporaryFile() as record,
        open(os.devnull, "wb") as nothing,
        open(alive, "rb", buffering=0),
        open(held_low, "wb") as low,
        _open_high(record) as out,
        _open_high(nothing) as null,
        _open_high(low) as held,
    ):
        low.close()
        limits = f"__max_commands={MAX_COMMANDS} __max_memory={MAX_MEMORY_KIB} __max_record={MAX_RECORD_KIB}"
        text = f"__record={out.fileno()} __nothing={null.fileno()} {limits}\n{PROLOGUE.read_text(encoding='utf-8')}"
        options = ["--restricted", "--noprofile", "--norc", "-c", text]
        try:
            shell = subprocess.Popen(
                [bash, *options, script.name, script.text, *script.arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment, "PATH": NOWHERE}, pass_fds=(out.fileno(), null.fileno(), held.fileno()),
            )  # fmt: skip
            held.close()
        except (OSError, ValueError) as error:  # longer than an argument may be; a zero byte
            why = f"cannot be given to bash ({getattr(error, 'strerror', None) or 'no text'})"
            raise UserError(f"{script.name}: {why}; give the trainer's flags themselves.") from None
        with shell.stdout:
            try:
                said, waits = _listen(shell, alive)
            finally:
                _end_session(shell)
        record.seek(0)
        return record.read(), said.decode("utf-8", "replace"), None if waits else shell.wait()


def _open_high(file: IO[bytes]) -> IO[bytes]:
    """The same open file under a number that no script uses for a file of its own."""
    return open(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, MIN_DESCRIPTOR), "wb", buffering=0)


def _listen(shell: subprocess.Popen, alive: int) -> tuple[bytes, bool]:
    """(the end of what the script printed, whether the shell itself still waits for something).

    Jobs in the background have until SECONDS_FOR_JOBS after it. alive: the end of a pipe that closes with the last process.
    """
    said, deadline, running = b"", time.monotonic() + SECONDS, {shell.stdout.fileno(), alive}
    while alive in running and (left := deadline - time.monotonic()) > 0:
        for file in select.select(running, [], [], min(left, SECONDS_BETWEEN))[0]:
            new = os.read(file, MAX_SAID)
            said = (said + new)[-MAX_SAID:] if file != alive else said
            running -= set() if new else {file}
        if shell.poll() is not None:
            deadline = min(deadline, time.monotonic() + SECONDS_FOR_JOBS)
    if alive not in running:  # the shell ends, or has closed the pipe
        with suppress(subprocess.TimeoutExpired):
            shell.wait(max(deadline - time.monotonic(), SECONDS_BETWEEN))
    return said, shell.poll() is None


def _end_session(shell: subprocess.Popen):
    """All processes that the script has started: its process group, and where /proc shows it the groups of `set -m`, too."""
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


def _explain_nothing(bash: str, script: _Script, said: str, code: int | None) -> str:
    """Why a script that started no training did not: the line that bash stumbled over, or what the script says."""
    if f"{script.name}: eval: " in said:  # which counts the lines from elsewhere
        parsed = subprocess.run(  # -n: reads, runs nothing
            [bash, "--noprofile", "--norc", "-O", "extglob", "-n", "-c", script.text, script.name], check=False,
            stdin=subprocess.DEVNULL, capture_output=True, env={"PATH": NOWHERE, "LC_ALL": "C"}, text=True,
            errors="replace",
        )  # fmt: skip
        found = re.search(r"line (\d+): (.+)", parsed.stderr)
        if found:
            number, reason = int(found[1]), found[2]
            line = "".join(script.text.splitlines()[number - 1 : number]).strip()
            quoted = f": {_shorten(line, script.name)}" if line else ""
            remedy = "put a value there" if re.search("<[^<>()]+>", line) else "mend the script"
            return f"{script.name}: bash cannot read line {number}{quoted} ({reason}); {remedy}."
    if code is None:
        waits = f"still waits for something after {SECONDS} s, since none of its commands is run"
        return f"{script.name}: {waits}; give the trainer's flags themselves."
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code and lines:
        return f"{script.name}: {_shorten(lines[-1], script.name)} (the script says so, exit code {code})"
    if code:
        ended = f"ended with exit code {code} before it started pretrain_gpt.py"
        return f"{script.name}: {ended}; does it need arguments?"
    return f"{script.name}: {STARTS_NONE}; give a script that does, or the trainer's flags themselves."


def _shorten(line: str, script: str) -> str:
    line = line.removeprefix(f"{script}: ").removeprefix("error: ")
    line = re.sub(r"^((eval|environment): )?line \d+: ", "", line)
    return line if len(line) <= LONGEST_SAID else f"{line[:LONGEST_SAID]}..."
