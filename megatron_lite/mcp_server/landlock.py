"""Rules of the Linux kernel (Landlock) by which a process, and all that it starts, reaches only some folders.

Any process may give up rights so, without privileges; none can take them back. The numbers below are those of the
kernel's interface, https://docs.kernel.org/userspace-api/landlock.html.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

# system calls, which have the same numbers on all processors
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
VERSION_FLAG = 1  # of CREATE_RULESET: answer with the version of the interface
PATH_BENEATH = 1  # the kind of rule that allows something beneath a path
NO_NEW_PRIVILEGES = 38  # of prctl
MAY_EXECUTE = 1 << 0
MAY_WRITE_FILE = 1 << 1
MAY_READ_FILE = 1 << 2
MAY_READ_FOLDER = 1 << 3
MAY_TRUNCATE = 1 << 14
OF_FILES = MAY_EXECUTE | MAY_WRITE_FILE | MAY_READ_FILE | MAY_TRUNCATE  # a rule for a file may name no others
RIGHTS_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
RIGHTS_SINCE_VERSION_3 = (1 << 15) - 1
NETWORK_VERSION = 4  # since which connections can be forbidden
BIND_AND_CONNECT = 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64)]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]


def find_version() -> int:
    """The version of the kernel's interface; 0 where this kernel, or container, has none."""
    library = ctypes.CDLL(None, use_errno=True)
    version: int = library.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG)
    return max(version, 0)


def confine_process(
    listable: Iterable[Path], readable: Iterable[Path], runnable: Iterable[Path], writable: Iterable[Path]
) -> None:
    """Give up the rights to all files but these, and to connections over TCP where the kernel knows of them.

    Args:
        listable: Folders of which only the names in them may be read.
        readable: Folders and files whose content may be read.
        runnable: Folders whose content may be read and whose programs may be started.
        writable: Folders and files in which anything may be done.

    Raises:
        OSError: The kernel refuses it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    version = find_version()
    every_right = RIGHTS_OF_VERSION.get(version, RIGHTS_SINCE_VERSION_3)
    wanted = _Ruleset(every_right, BIND_AND_CONNECT)
    size = ctypes.sizeof(_Ruleset) if version >= NETWORK_VERSION else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _call(library, CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(size), 0)
    for paths, rights in (
        (listable, MAY_READ_FOLDER),
        (readable, MAY_READ_FILE | MAY_READ_FOLDER),
        (runnable, MAY_READ_FILE | MAY_READ_FOLDER | MAY_EXECUTE),
        (writable, every_right & ~MAY_EXECUTE),
    ):
        for path in paths:
            _allow(library, ruleset, path, rights)
    if library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    _call(library, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(library: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    """Add a rule for a path, if it is there."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= OF_FILES
    rule = _PathRule(rights, descriptor)
    _call(library, ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(descriptor)


def _call(library: ctypes.CDLL, number: int, *arguments: object) -> int:
    answer: int = library.syscall(number, *arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
