"""Waits of the tests, none of which ends before what it waits for, unless that hangs; full disks and terminals."""

import contextlib
import io
import resource
import time
from collections.abc import Callable

LIMIT_S = 900  # far beyond anything that a busy machine needs


def wait_until(is_true: Callable[[], object], limit_s: float = LIMIT_S):
    """Poll `is_true` until it is."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, f"{is_true} never came true"
        time.sleep(0.01)


@contextlib.contextmanager
def full_disk(num_bytes: int):
    """Files of this process become no longer than so many bytes."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def wait_for(process, text: str) -> str:
    """What a run has printed until it prints `text`."""
    head = ""
    for line in process.stdout:
        head += line
        if text in line:
            return head
    raise AssertionError(f"{text!r} never came: {head} {process.stderr.read()}")
