"""A lock between processes, of one node or of several that share a file system with locks."""

import contextlib
import enum
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Lock(enum.Enum):
    """What came of asking."""

    HELD = "ours until the end of the block"
    BUSY = "another process has it"
    NONE = "the file system has no locks"


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[Lock]:
    """Asks once, without waiting. The lock dies with its process; its file goes with the lock.

    OSError if the file cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        state = _ask(file, path)
        try:
            yield state
        finally:
            if state is not Lock.BUSY:
                path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _ask(file: int, path: Path) -> Lock:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it may have removed the file between our opening and our locking it: then it locks nothing.
        same = os.path.samestat(os.fstat(file), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return Lock.BUSY
    except OSError:
        return Lock.NONE
    return Lock.HELD if same else Lock.BUSY
