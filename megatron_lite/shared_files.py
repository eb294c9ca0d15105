"""Files that others wrote or write to: opened without waiting, read within a bound, locked."""

import contextlib
import enum
import errno
import fcntl
import os
import select
import stat
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MAX_WHOLE_FILE_BYTES = 2**26  # of a file that is read as a whole: the largest tokenizer.json has half of it
NOT_REGULAR = "Not a regular file"
PIPE_PAUSE_S = 0.05  # between two looks at a pipe
MAX_PIPE_BYTES = 2**16  # of one look
MAX_PIPE_S = 60  # a script that another program writes is there by then


class Lock(enum.Enum):
    """The answer to a request for a lock."""

    HELD = "ours until the end of the block"
    BUSY = "another process has it"
    NONE = "the file system has no locks"


def open_regular(path: str | Path, flags: int, *, follow_link: bool = False) -> int:
    """Open a regular file, without waiting for anyone.

    Args:
        path: The file.
        flags: Flags of os.open.
        follow_link: Whether a symbolic link is followed.

    Returns:
        The descriptor.

    Raises:
        OSError: The path is a pipe, a device, a folder, or a link that is not followed.
    """
    follow = 0 if follow_link else os.O_NOFOLLOW
    # a pipe without a peer would block the opening itself
    try:
        file = os.open(path, flags | follow | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # what the kernel says of a link, and of a pipe that nobody reads
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path)) from None
        raise
    kind = os.fstat(file).st_mode
    if stat.S_ISREG(kind):
        return file
    os.close(file)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_bounded(path: Path, max_bytes: int, *, follow_link: bool = False) -> str:
    """Read the text of a regular file; OSError as of open_regular.

    Args:
        path: The file.
        max_bytes: Bytes to read, at most.
        follow_link: Whether a symbolic link is followed.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY, follow_link=follow_link), "rb") as file:
        return file.read(max_bytes).decode("utf-8", errors="replace")


def open_foreign(path: str | Path) -> BufferedReader:
    """A file of any origin, for reading its bytes; a link to one is followed.

    OSError, at once, for what is no regular file: a pipe would wait for its writer, a device may never end.
    """
    return open(path, "rb", opener=lambda name, flags: open_regular(name, flags, follow_link=True))


def read_foreign(path: str | Path, max_bytes: int = MAX_WHOLE_FILE_BYTES) -> bytes:
    """The whole content of a file of any origin.

    OSError as of `open_foreign`, and for a file of more than `max_bytes`.
    """
    with open_foreign(path) as file:
        # read() sets aside as much memory as it is told, whatever the file's size; a file may grow meanwhile
        expected_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(expected_bytes, max_bytes) + 1)
        if expected_bytes < len(content) <= max_bytes:
            content += file.read(max_bytes + 1 - len(content))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB, which no such file has", str(path))
    return content


def is_pipe(path: str | Path) -> bool:
    """Whether a path names a pipe, such as a shell's `<(...)`."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_pipe(path: str | Path, max_bytes: int, patience_s: float) -> bytes:
    """Read all that a pipe's writers send until the last one closes it.

    Only for a path that the user gave as a pipe.

    Args:
        path: The pipe.
        max_bytes: Bytes that it may send.
        patience_s: Seconds for which it may send nothing.

    Raises:
        OSError: Nothing comes for so long, it lasts longer than MAX_PIPE_S, or sends more.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    content = b""
    first_s = last_s = time.monotonic()
    try:
        while time.monotonic() < min(last_s + patience_s, first_s + MAX_PIPE_S):
            # a pipe that nobody has opened for writing yet is readable, and at its end
            select.select([file], [], [], PIPE_PAUSE_S)
            try:
                new = os.read(file, MAX_PIPE_BYTES)
            except BlockingIOError:
                continue
            if not new and content:
                return content
            if not new:
                # its writer is still to come, or has come and gone without a word
                time.sleep(PIPE_PAUSE_S)
                continue
            content += new
            last_s = time.monotonic()
            if len(content) > max_bytes:
                raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB, which no such file has", str(path))
    finally:
        os.close(file)
    why = f"a pipe that did not end within {MAX_PIPE_S} s" if content else "a pipe from which nothing came"
    raise OSError(errno.ETIMEDOUT, why, str(path))


def read_foreign_text(path: str | Path, max_bytes: int = MAX_WHOLE_FILE_BYTES) -> str:
    """Read a file's content as text. OSError as of `read_foreign`, UnicodeDecodeError where it is no UTF-8."""
    return read_foreign(path, max_bytes).decode("utf-8")


def require_regular(path: str | Path) -> int:
    """The bytes of a file that a library will open. OSError, at once, for what is no regular file."""
    with open_foreign(path) as file:
        return os.fstat(file.fileno()).st_size


@contextlib.contextmanager
def try_lock(path: Path, holder: str = "") -> Iterator[Lock]:
    """Asks once, without waiting. The lock dies with its process, whatever it forked; its file goes with the lock.

    The locks of one node, or of all that share a file system with locks. `holder` is written into the file for whoever
    finds it locked. OSError if the file cannot be made.
    """
    files = [open_regular(path, os.O_RDWR | os.O_CREAT)]

    def close() -> None:
        while files:
            os.close(files.pop())

    try:
        fcntl.flock(files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it may have removed the file between our opening and our locking it: then it locks nothing.
        state = Lock.HELD if os.path.samestat(os.fstat(files[0]), os.stat(path)) else Lock.BUSY
    except (BlockingIOError, FileNotFoundError):
        state = Lock.BUSY
    except OSError:
        state = Lock.NONE
    try:
        if state is not Lock.BUSY:
            # A child that a killed process leaves behind would hold its lock for ever.
            os.register_at_fork(after_in_child=close)
            with contextlib.suppress(OSError):  # a full disk locks all the same
                os.ftruncate(files[0], 0)
                os.write(files[0], holder.encode())
                os.fsync(files[0])
        yield state
    finally:
        if state is not Lock.BUSY:
            path.unlink(missing_ok=True)
        close()
