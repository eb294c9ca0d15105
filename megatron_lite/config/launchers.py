"""The place of a process among all ranks, as torchrun's variables say it, or those of Slurm, MPI and other launchers.

torchrun's names are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What is set of them
counts; launchers.tsv has the names by which other launchers say the same.
"""

import functools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.errors import ConfigError, UserError
from megatron_lite.shared_files import read_bounded
from megatron_lite.units import counted

FILE = Path(__file__).with_name("launchers.tsv")
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
THIS_MACHINE = "127.0.0.1"
# above those that Linux gives to connections by itself (up to 60999)
FIRST_PORT = 61440
PORTS = 4096
USUAL_PORT = 29500  # torch's
MAX_PORT = 65535
MAX_LIST_BYTES = 2**16  # read of a file of hosts
STARTED_OTHERWISE = "start with torchrun, or set it"


@dataclass(frozen=True)
class Launcher:
    """A row of launchers.tsv: the variables that say something, by column."""

    name: str
    variables: Mapping[str, tuple[str, ...]]

    def find(self, environment: Mapping[str, str], column: str) -> str | None:
        """The name of the first variable of that column that is set."""
        return next((name for name in self.variables[column] if environment.get(name)), None)

    def read(self, environment: Mapping[str, str], column: str) -> str | None:
        """Read the variable of a column; None where it is not set."""
        name = self.find(environment, column)
        return None if name is None else environment[name].strip()

    def read_number(self, environment: Mapping[str, str], column: str) -> int | None:
        """Read the variable of a column; None where it is not set, or no whole number."""
        value = self.read(environment, column)
        return int(value) if value is not None and value.isascii() and value.isdecimal() else None


@dataclass(frozen=True)
class LauncherVariables:
    """Variables that a launcher other than torchrun gives, in torchrun's names."""

    variables: Mapping[str, str]  # those that are not set yet
    remark: str  # on it, to be printed once


@dataclass(frozen=True)
class LaunchNumbers:
    """Numbers of one process, as torchrun counts them."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@functools.cache
def read_launchers() -> tuple[Launcher, ...]:
    """The rows of launchers.tsv."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    header, *rows = (line.split("\t") for line in lines)
    return tuple(
        Launcher(row[0], {column: tuple(cell.split()) for column, cell in zip(header[1:], row[1:], strict=True)})
        for row in rows
    )


def find_launch(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Find what to add to the environment of a rank that Slurm, MPI or the like started.

    Returns:
        None where there is nothing to add.

    Raises:
        UserError: The launcher does not say enough.
    """
    launcher = next((one for one in read_launchers() if one.find(environment, "rank")), None)
    if launcher is None or BY_TORCHRUN in environment:
        return None
    rank = launcher.read_number(environment, "rank")
    size = _read_size(launcher, environment)
    if rank is None or size == 1:
        return None
    wanted = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    # whoever set torchrun's variables to something else has started this process
    if any(environment.get(name, value) != value for name, value in wanted.items()):
        return None
    if rank == 0 and _is_lone_task(launcher, environment):
        return LauncherVariables({}, _describe_lone_task(launcher, environment, size))
    given = wanted | _find_local(launcher, environment, size)
    if rank >= size:
        raise UserError(
            f"{launcher.find(environment, 'rank')}={rank}: {launcher.name} started {counted(size, 'rank')}, "
            f"0 to {size - 1}; unset it, or start with torchrun."
        )
    added = {name: value for name, value in given.items() if not environment.get(name)}
    if not added:
        return None
    shown = " ".join(f"{name}={value}" for name, value in added.items())
    return LauncherVariables(added, f"ranks are those that {launcher.name} started; on this one {shown}")


def _is_lone_task(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    """Whether the job has several tasks, of which the launcher did not start this process."""
    says_who_started = bool(launcher.variables["started"])
    has_not_started = launcher.find(environment, "started") is None
    return says_who_started and has_not_started and "RANK" not in environment


def _find_local(launcher: Launcher, environment: Mapping[str, str], size: int) -> dict[str, str]:
    """Find torchrun's variables of this machine, and where rank 0 is met.

    Args:
        launcher: The one that started this process.
        environment: This process's variables.
        size: How many ranks there are.

    Raises:
        UserError: Nothing says where rank 0 is.
    """
    local_rank = launcher.read_number(environment, "local_rank")
    local_size = _read_local_size(launcher, environment, size)
    host = environment.get("MASTER_ADDR")
    if not host:
        host = _find_first_host(launcher, environment, on_one_machine=local_size == size)
    given = {}
    if local_rank is not None:
        given["LOCAL_RANK"] = str(local_rank)
    if local_size is not None:
        given["LOCAL_WORLD_SIZE"] = str(local_size)
    given["MASTER_ADDR"] = host
    given["MASTER_PORT"] = str(_choose_port(launcher, environment))
    return given


def _read_size(launcher: Launcher, environment: Mapping[str, str]) -> int:
    """How many ranks there are. UserError where nothing says it."""
    size = launcher.read_number(environment, "size")
    typed = environment.get("WORLD_SIZE", "")
    if size is not None and size > 0:
        return size
    if typed.isdecimal() and int(typed) > 0:
        return int(typed)
    place = f"{launcher.find(environment, 'rank')}={launcher.read(environment, 'rank')}"
    names = " or ".join(launcher.variables["size"]) or "no variable"
    raise UserError(
        f"{place}: {launcher.name} started this process, and {names} says how many there are; start with torchrun, or "
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
    )


def _describe_lone_task(launcher: Launcher, environment: Mapping[str, str], size: int) -> str:
    name = launcher.find(environment, "size")
    return (
        f"{name}={size}, but {launcher.name} did not start this process as one of those tasks (none of "
        f"{', '.join(launcher.variables['started'][:3])} is set): it trains alone; srun in front starts {size} ranks."
    )


def _read_local_size(launcher: Launcher, environment: Mapping[str, str], size: int) -> int | None:
    """How many ranks this machine has; None where nothing says it."""
    number = launcher.read_number(environment, "local_size")
    nodes = launcher.read_number(environment, "nodes")
    if number is not None:
        return number
    if nodes == 1:
        return size
    tasks = expand_tasks(launcher.read(environment, "tasks_per_node") or "")
    node = launcher.read_number(environment, "node")
    if sum(tasks) == size and node is not None and node < len(tasks):
        return tasks[node]
    return size // nodes if nodes and size % nodes == 0 and not tasks else None


def expand_tasks(text: str) -> list[int]:
    """Slurm's numbers of tasks by node: '4(x2),3' -> [4, 4, 3]; [] for anything else."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d{1,6})\))?", part.strip())
        if found is None:
            return []
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _find_first_host(launcher: Launcher, environment: Mapping[str, str], on_one_machine: bool) -> str:
    """The host of rank 0. UserError where nothing says it."""
    name = launcher.find(environment, "hosts")
    host = None
    if name is not None and name.endswith("FILE"):
        try:
            host = next(iter(read_bounded(Path(environment[name]), MAX_LIST_BYTES, follow_link=True).split()), None)
        except OSError:
            host = None
    elif name is not None:
        host = find_first_host(environment[name])
    if on_one_machine or host is not None:
        return host or THIS_MACHINE
    lists = f" ({' or '.join(launcher.variables['hosts'])} is not set)" if launcher.variables["hosts"] else ""
    size = launcher.read(environment, "size")
    raise UserError(
        f"{launcher.name} started {size} ranks, and the host of rank 0 is unknown{lists}; set MASTER_ADDR to it, or "
        "start with torchrun: each would train alone."
    )


def find_first_host(hosts: str) -> str | None:
    """The first of Slurm's list of hosts: 'gpu[07-12,20]-ib,cpu1' -> 'gpu07-ib'."""
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts.strip())
    return None if found is None else re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0])


def _choose_port(launcher: Launcher, environment: Mapping[str, str]) -> int:
    """The same on all ranks of a job, and on others' most likely another one."""
    job = launcher.read(environment, "job")
    step = launcher.read_number(environment, "step") or 0
    if job is None:
        return USUAL_PORT
    number = int(job) if job.isascii() and job.isdecimal() else zlib.crc32(job.encode())
    return FIRST_PORT + (number + step) % PORTS


def read_ranks(environment: Mapping[str, str]) -> LaunchNumbers:
    """Read torchrun's numbers; without any of them the process is the only one.

    Raises:
        ConfigError: Some of them cannot be; a line for each.
    """
    mistakes: list[str] = []

    def read(name: str, default: int, least: int, most: int | None = None, why: str = "") -> int:
        text = environment.get(name)
        if text is None:
            return default
        number = text.strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", number):
            mistakes.append(f"{name}={text!r}: is no whole number; {STARTED_OTHERWISE} to one, or unset it.")
            return default
        if int(number) < least or most is not None and int(number) > most:
            bound = f"at least {least}" if most is None else f"at least {least} and at most {most}{why}"
            mistakes.append(f"{name}={number}: must be {bound}; {STARTED_OTHERWISE} so, or unset it.")
            return default
        return int(number)

    size = read("WORLD_SIZE", 1, 1)
    is_sized = not mistakes
    rank = read("RANK", 0, 0, size - 1 if is_sized else None, f", as WORLD_SIZE is {size}")
    if size > 1 and "RANK" not in environment:
        mistakes.append(f"WORLD_SIZE={size} without RANK: which of the ranks this is, is unknown; {STARTED_OTHERWISE}.")
    local_size = read("LOCAL_WORLD_SIZE", 1, 1, size if is_sized else None, f", as WORLD_SIZE is {size}")
    is_locally_sized = "LOCAL_WORLD_SIZE" in environment and not any("LOCAL_WORLD_SIZE=" in text for text in mistakes)
    local_rank = read(
        "LOCAL_RANK", 0, 0, local_size - 1 if is_locally_sized else None, f", as LOCAL_WORLD_SIZE is {local_size}"
    )
    if size > 1 or "MASTER_ADDR" in environment:
        read("MASTER_PORT", USUAL_PORT, 1, MAX_PORT)
    if mistakes:
        raise ConfigError(mistakes)
    return LaunchNumbers(rank, size, local_rank, local_size)
