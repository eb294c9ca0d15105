"""Keeps a process within the folders that it may read: by rules of the kernel, and by a hook of Python's own.

The kernel's rules hold for all that the process starts, too. The hook holds where the kernel has no such rules; it
sees what Python opens, and so lets no other program start there. It also says why, where the kernel only says no.
"""

import errno
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_lite.mcp_server.landlock import confine_process, find_version
from megatron_lite.mcp_server.socket_filter import refuse_sockets
from megatron_lite.terminal import PYPROJECT

OUTSIDE = "outside of the folders that the server was started with"
READ_ONLY = "the server writes nothing"
NO_PROGRAMS = "programs are started only where the kernel can confine them (Landlock, Linux 5.13 or newer)"
NO_PYTHON = "the server runs no Python in named folders"
SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/opt/nvidia")))
SYSTEM_FILES = tuple(map(Path, ("/etc/ld.so.cache", "/etc/localtime", "/sys/fs/cgroup", "/sys/devices")))
# Of other processes not even their environment may be read.
PROCESSES = Path("/proc")
OWN_PROCESS_AND_MACHINE = tuple(PROCESSES / name for name in ("self", "cpuinfo", "meminfo", "stat"))
DEVICES = tuple(map(Path, ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")))
SEMAPHORES = Path("/dev/shm")  # of pools of processes
# Figures of the machine and of processes, without their environment, memory and open files.
PUBLIC_FILE = re.compile(
    r"/proc(/\d+/(stat|status|cgroup)|/cpuinfo|/meminfo|/stat)?|/sys/(fs/cgroup|devices/system)(/.*)?"
)
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python that change the paths among their arguments.
CHANGING = ("chmod", "chown", "link", "mkdir", "remove", "rename", "rmdir", "symlink", "truncate", "utime")
CHANGES = {f"os.{name}" for name in CHANGING}
LISTINGS = ("os.listdir", "os.scandir", "os.chdir")
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn"}


@dataclass(frozen=True)
class Confinement:
    """The places that a process may reach.

    Attributes:
        readable: Folders that may be read.
        writable: The only folder that may be written, absolute and without links.
        starts_programs: Whether it starts programs, as `plan` does to read a launch script. They could read shared
            memory of other jobs, so that it then has none, and no pools of processes.
    """

    readable: tuple[Path, ...]
    writable: Path
    starts_programs: bool

    def apply(self) -> None:
        """Confine this process for the rest of its life."""
        has_rules = find_version() > 0
        installation = list_installation()
        if has_rules:
            readable = [*self.readable, *SYSTEM_FILES, *OWN_PROCESS_AND_MACHINE, PYPROJECT]
            runnable = [*installation, *SYSTEM]
            writable = [self.writable, *DEVICES]
            if not self.starts_programs:
                writable.append(SEMAPHORES)
            confine_process([PROCESSES], readable, runnable, writable)
        refuse_sockets()
        places = [*self.readable, *installation, self.writable]
        sys.addaudithook(self._make_hook(places, self.starts_programs and has_rules))

    def _make_hook(self, readable: Sequence[Path], starts_programs: bool) -> Callable[[str, tuple[object, ...]], None]:
        """Make the function that Python asks before it opens, lists or changes something.

        Args:
            readable: Folders that may be read.
            starts_programs: Whether other programs may be started.
        """

        def check(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                changes = isinstance(flags, int) and bool(flags & WRITING_FLAGS)
                self._check_path(path, readable, changes)
            elif event in LISTINGS:
                self._check_path(arguments[0], readable, changes=False)
            elif event == "sqlite3.connect":
                self._check_path(_find_database(arguments[0]), readable, changes=False)
            elif event in CHANGES:
                for argument in arguments:
                    self._check_path(_join_folder(argument, arguments[-1]), readable, changes=True)
            elif event in STARTS and not starts_programs:
                raise PermissionError(errno.EACCES, NO_PROGRAMS)
            elif event in STARTS and sys.executable in arguments[:1]:
                # another Python would take what lies in its current folder for modules
                raise PermissionError(errno.EACCES, NO_PYTHON)

        return check

    def _check_path(self, path: object, readable: Sequence[Path], changes: bool) -> None:
        """PermissionError where a path may not be read, or changed."""
        if not isinstance(path, (str, bytes)):
            # a descriptor of what was opened before, or the current folder
            return
        name = os.fsdecode(path)
        place = os.path.realpath(name)
        if Path(place) in DEVICES:
            return
        if changes:
            if not _lies_in(place, self.writable):
                raise PermissionError(errno.EACCES, READ_ONLY, name)
            return
        is_inside = any(_lies_in(place, folder) for folder in readable)
        if not is_inside and not PUBLIC_FILE.fullmatch(place):
            raise PermissionError(errno.EACCES, OUTSIDE, name)


def _find_database(name: object) -> object:
    """The path of a database, which may be written as file:///path?mode=ro."""
    if isinstance(name, str) and name.startswith("file:"):
        return unquote(urlsplit(name).path)
    return name


def _join_folder(path: object, descriptor: object) -> object:
    """The path of a call that may be relative to an open folder, whose descriptor is its last argument, or -1."""
    if not isinstance(path, (str, bytes)) or not isinstance(descriptor, int) or descriptor < 0:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))


def _lies_in(place: str, folder: Path) -> bool:
    # on every file that is opened: is_relative_to takes 14 times as long
    whole = str(folder).rstrip(os.sep)
    return place == whole or place.startswith(whole + os.sep)


def list_installation() -> list[Path]:
    """List the folders of Python, its packages and this one; not those in which somebody's other files lie."""
    own = Path(__file__).parents[1]
    names = [str(own), sys.prefix, sys.base_prefix, sys.exec_prefix]
    names += sysconfig.get_paths().values()
    names += site.getsitepackages()
    if site.ENABLE_USER_SITE:
        names.append(site.getusersitepackages())
    places = map(os.path.realpath, names)
    return [Path(place) for place in dict.fromkeys(places)]
