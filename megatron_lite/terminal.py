"""Output to a terminal: lines that it cannot take for commands, the version, the end of a process without a reader."""

import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

CUT_OFF = 141  # exit code: 128 + SIGPIPE
# Control characters, marks that turn the direction of text, line separators, halves of a letter.
_OBEYED = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_OWN_STYLE = re.compile(r"(\x1b\[(?:[0-2]|3[36])m)")  # bold, dim and the two colors of reports, and their end
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def escape(text: str, keep_style: bool = False) -> str:
    r"""Write escapes such as \x1b and \n for what a terminal would obey.

    Args:
        text: A line of any origin.
        keep_style: Whether colors of reports stay.
    """
    if keep_style and "\x1b" in text:
        return "".join(part if at % 2 else escape(part) for at, part in enumerate(_OWN_STYLE.split(text)))
    if text.isprintable():  # nothing of _OBEYED is, and most texts are
        return text
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def make_printable(text: str, most: int) -> str:
    """Cut a text that a hostile file may hold to `most` letters, and replace what cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def print_lines(lines: Sequence[str], stream: TextIO | None = None) -> None:
    """Print to standard output, or `stream`, at once; the one way in which commands and trainer print.

    Each of `lines` is one line on the screen, so that no foreign text can pretend to be another line of ours.
    A stream that cannot take a letter gets a question mark. BrokenPipeError is for end_quietly_without_reader.
    """
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    text = "\n".join(escape(line, keep_style=stream.isatty()) for line in lines).rstrip()
    print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


def print_text(text: str) -> None:
    """A piece of foreign text on standard output, at once: only its ends of lines and tabs are obeyed."""
    encoding = sys.stdout.encoding or "utf-8"
    safe = "".join(part if part in "\n\t" else escape(part) for part in re.split(r"([\n\t])", text))
    print(safe.encode(encoding, "replace").decode(encoding), end="", flush=True)


def end_quietly_without_reader(work: Callable[[], int]) -> int:
    """Do work, and return its exit code; CUT_OFF, without a traceback, where whoever read our output has left."""
    try:
        code = work()
        sys.stdout.flush()  # here, not while Python ends, a reader that left is noticed
        return code
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # some other pipe's, to a worker process say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again while it ends
        return CUT_OFF


def describe_version() -> str:
    """The versions of this package, torch and Python; imports none of them."""
    from importlib import metadata  # late: it costs as much as a parser

    try:
        found = re.search(r'^version = "(.+)"', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:  # installed, not a checkout
        found = None
    own = found[1] if found else metadata.version("megatron_lite")
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"megatron_lite {own} ({torch}, Python {sys.version.split()[0]})"
