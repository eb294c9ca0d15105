"""Runs one command of megatron-lite, confined or not: `python -m megatron_lite.mcp_server.confined_command FILE`.

The process has a folder of its own as its current one until all is imported, so that nothing of a named folder can be
taken for a module.
"""

import os
import resource
import sys
from pathlib import Path

import msgspec

from megatron_lite.cli.main import main
from megatron_lite.machine import read_machine
from megatron_lite.mcp_server.confine import Confinement

SHARE_OF_MEMORY = 2  # a process of a call may have one part in so many of the machine's memory


class CommandRequest(msgspec.Struct, frozen=True):
    """A command, and what it may reach."""

    # The words behind `megatron-lite`.
    argv: tuple[str, ...]
    # Folders that may be read, absolute and without links.
    readable: tuple[str, ...]
    # The only folder that may be written, absolute and without links.
    writable: str
    # The current folder of the command.
    folder: str
    # Whether it is held to these folders.
    confined: bool
    # Whether it starts programs.
    starts_programs: bool


def run_request(file: Path) -> int:
    """Run the command that a file asks for, confined.

    Returns:
        Its exit code.
    """
    request = msgspec.json.decode(file.read_bytes(), type=CommandRequest)
    if request.confined:
        limit_own_memory()
        readable = tuple(map(Path, request.readable))
        Confinement(readable, Path(request.writable), request.starts_programs).apply()
    os.chdir(request.folder)
    return main(list(request.argv))


def limit_own_memory() -> None:
    """Have this process, and each that it starts, fail with MemoryError rather than take the machine's memory."""
    memory_bytes = read_machine().memory_bytes
    if memory_bytes is None:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = memory_bytes // SHARE_OF_MEMORY
    if most == resource.RLIM_INFINITY or wanted < most:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


if __name__ == "__main__":
    sys.exit(run_request(Path(sys.argv[1])))
