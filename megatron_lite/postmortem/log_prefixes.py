"""Prefixes of log lines, by which launchers, containers and loggers tell whose line it is, and of when.

A job's log holds lines of many processes, one behind the other. In front of a line stand, in any order and one inside
of the other, the launcher's name of its process and a time: "3: [default1]:[rank7]:[E321 02:07:08.408 File.cpp:607]".
"""

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

# in front of one line
MAX_PREFIXES = 8
MAX_RANK_DIGITS = 7
MAX_HOSTS = 4096
# a file may be some hours ahead of the clock that its lines are read by
NEXT_DAY_S = 86_400.0

# colors, and what else moves a terminal's cursor
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]")
NUMBER = rf"\d{{1,{MAX_RANK_DIGITS}}}"

# [rank3]: of torch, [rank: 3] of Lightning, [RANK 3] and [Rank 3] of others
RANK = re.compile(rf"\[(?:rank|Rank|RANK)[: ]*(?P<rank>{NUMBER})\]:? ?")
# torchrun's --tee: the role, and the number on this node
LOCAL_RANK = re.compile(rf"\[(?P<role>default|trainer|worker|train)(?P<local>{NUMBER})\]:?")
# mpirun --tag-output
MPI_RANK = re.compile(rf"\[(?:[\w.-]+@)?\d+,(?P<rank>{NUMBER})\]<std(?:out|err)>:")
# srun --label
TASK = re.compile(rf" {{0,5}}(?P<task>{NUMBER}): (?!\d+\])")
RAY = re.compile(r"\((?P<actor>[\w.:<>]*) ?pid=(?P<pid>\d{1,9})(?:, ip=(?P<host>[\w.:-]+))?\) ?")
RAY_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
# kubectl logs --prefix, and what shows several pods' logs
POD = re.compile(r"\[(?:pod/)(?P<host>[\w.-]+)/[\w.-]+\] ?")
STERN = re.compile(r"(?P<host>[\w.-]+-\d+) (?:[\w.-]+ )?[›|] ")
# a container's runtime
CONTAINER = re.compile(r"std(?:out|err) [FP] ")
# pdsh: the host is certain only by what follows it
HOST = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]{0,252}): "
    r"(?P<sure>(?=\[(?:rank|default|[DIWEF]\d|20\d\d-)|Traceback \(most))?"
)
ADDRESS = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
# the journal and syslog: behind the time
SYSLOG = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]{0,252}) (?P<program>kernel|systemd[\w-]*|slurmd|slurmctld|[\w./-]{1,80}\[\d+\]): "
)
KERNEL_CLOCK = re.compile(r"(?:kernel: ?)?\[ *\d+\.\d{6}\] ")

ISO_TIME = re.compile(
    r"\[?(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<clock>\d\d:\d\d:\d\d)(?P<fraction>[.,]\d{1,9})?"
    r" ?(?P<zone>Z|UTC|[+-]\d\d:?\d\d)?\]?(?: -)?[ :|]*"
)
# dmesg -T, and Python's own: Sun Mar 30 08:24:00 2025
LONG_TIME = re.compile(
    r"\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<name>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d)"
    r"(?: (?P<zone>UTC))? (?P<year>20\d\d)\]? ?"
)
SYSLOG_TIME = re.compile(r"(?P<name>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d) ")
# glog, as torch writes it: [E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] ; torchrun has no bracket
GLOG_TIME = re.compile(
    r"\[?[DIWEFVC](?P<month_day>\d{3,4}) (?P<clock>\d\d:\d\d:\d\d)(?P<fraction>\.\d{1,9})?"
    r"(?: +\d+)? (?=[\w./<>-]+:\d+\])"
)
CLOCK = re.compile(r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]? ")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

RANK_IN_NAME = re.compile(rf"(?:^|[^A-Za-z])(?:rank|RANK)[-_. =]?(?P<rank>{NUMBER})(?!\d)")
ATTEMPT = re.compile(r"attempt_\d+")


@dataclass(frozen=True)
class LineOrigin:
    """Process and time of a line, as told in front of it; None: it does not say so."""

    rank: int | None = None
    # the number among the ranks of a node
    local_rank: int | None = None
    # srun's number of the process: of a rank, or of a launcher of several
    task: int | None = None
    host: str | None = None
    pid: int | None = None
    # seconds since 1970; of a line without a time zone by that of this machine
    at: float | None = None


class PrefixReader:
    """Takes prefixes off the lines of one log, whose hosts and year it remembers."""

    def __init__(self, written_at: float | None = None):
        """
        Args:
            written_at: When the log was written last, in seconds since 1970: gives lines their year that have none.
        """
        self._written_at = written_at
        self._year: int | None = None
        self._hosts: set[str] = set()

    def split(self, line: str) -> tuple[LineOrigin, str]:
        """Split a line without colors into what stands in front of it, and the rest."""
        origin = LineOrigin()
        has_time = False
        for _ in range(MAX_PREFIXES):
            taken = self._take_name(line, origin, has_time)
            if taken is None:
                taken = self._take_time(line, origin)
                has_time = True
            if taken is None:
                break
            origin, line = taken
        return origin, line

    def _take_name(self, line: str, origin: LineOrigin, has_time: bool) -> tuple[LineOrigin, str] | None:
        """Take one name of the process; None where there is none. has_time: whether a time stood in front of it."""
        for pattern in (RANK, LOCAL_RANK, MPI_RANK, RAY, POD, STERN):
            found = pattern.match(line)
            if found:
                return _add_names(origin, found.groupdict()), line[found.end() :]
        found = CONTAINER.match(line) or KERNEL_CLOCK.match(line)
        if found:
            return origin, line[found.end() :]
        if has_time:
            found = SYSLOG.match(line)
            if found:
                return replace(origin, host=found["host"]), line[found.end() :]
        found = TASK.match(line)
        if found and origin.task is None and origin.rank is None:
            return replace(origin, task=int(found["task"])), line[found.end() :]
        found = HOST.match(line)
        if found and origin.host is None and self._is_host(found["host"], found["sure"] is not None):
            return replace(origin, host=found["host"]), line[found.end() :]
        return None

    def _is_host(self, name: str, is_sure: bool) -> bool:
        """Whether a word in front of a colon is a host, rather than the beginning of a sentence."""
        if name in self._hosts:
            return True
        is_new = is_sure and any(letter.isdigit() for letter in name)
        if (is_new or ADDRESS.fullmatch(name)) and len(self._hosts) < MAX_HOSTS:
            self._hosts.add(name)
            return True
        return False

    def _take_time(self, line: str, origin: LineOrigin) -> tuple[LineOrigin, str] | None:
        """Take a time; None where there is none. The first one in a line with a date is the line's."""
        for pattern in (ISO_TIME, LONG_TIME, SYSLOG_TIME, GLOG_TIME):
            found = pattern.match(line)
            if found:
                at = self._read_time(found) if origin.at is None else origin.at
                return replace(origin, at=at), line[found.end() :]
        found = CLOCK.match(line)
        return (origin, line[found.end() :]) if found else None

    def _read_time(self, found: re.Match[str]) -> float | None:
        """Seconds since 1970 of a match of a time; None for a date that does not exist."""
        parts = found.groupdict()
        month, day = _read_date(parts)
        text = f"{month:02}-{day:02} {parts['clock']}"
        fraction = float(f"0.{(parts.get('fraction') or '.0')[1:]}")
        year = parts.get("year")
        if year is not None:
            self._year = int(year)
            return _convert_time(f"{year}-{text}", fraction, parts.get("zone"))
        if self._year is not None:
            return _convert_time(f"{self._year}-{text}", fraction, None)
        if self._written_at is None:
            return None
        last_year = datetime.fromtimestamp(self._written_at).year
        at = _convert_time(f"{last_year}-{text}", fraction, None)
        if at is not None and at <= self._written_at + NEXT_DAY_S:
            return at
        return _convert_time(f"{last_year - 1}-{text}", fraction, None)


def _add_names(origin: LineOrigin, found: dict[str, str | None]) -> LineOrigin:
    """The origin with the names that a prefix holds; those that are known stay."""

    def choose(known: int | None, name: str) -> int | None:
        text = found.get(name)
        return int(text) if known is None and text is not None else known

    return replace(
        origin,
        rank=choose(origin.rank, "rank"),
        local_rank=choose(origin.local_rank, "local"),
        pid=choose(origin.pid, "pid"),
        host=origin.host or found.get("host"),
    )


def _read_date(parts: dict[str, str | None]) -> tuple[int, int]:
    """Month and day; 0 for a month that does not exist."""
    month_day = parts.get("month_day")
    if month_day is not None:
        return int(month_day[:-2]), int(month_day[-2:])
    name = parts.get("name")
    day = int(parts["day"] or 0)
    if name is not None:
        return MONTHS.index(name) + 1 if name in MONTHS else 0, day
    return int(parts["month"] or 0), day


def _convert_time(text: str, fraction: float, zone: str | None) -> float | None:
    """Seconds since 1970 of a text such as "2025-03-30 08:24:00"; without a zone by this machine's."""
    try:
        time = datetime.strptime(text, "%Y-%m-%d %H:%M:%S")
        if zone in ("Z", "UTC"):
            time = time.replace(tzinfo=timezone.utc)
        elif zone:
            minutes = 60 * int(zone[1:3]) + int(zone[-2:])
            sign = -1 if zone[0] == "-" else 1
            time = time.replace(tzinfo=timezone(timedelta(minutes=sign * minutes)))
        return time.timestamp() + fraction
    except (ValueError, OverflowError, OSError):
        return None


def read_time(text: str) -> float | None:
    """Seconds since 1970 of a text that begins with a full date and time; None for another one."""
    origin, _ = PrefixReader().split(text)
    return origin.at


def strip_controls(line: str) -> str:
    """Take colors, cursor movements and NULs out of a line, and what a carriage return has written over."""
    line = line.replace("\0", "")
    if "\x1b" in line:
        line = CONTROL.sub("", line)
    return RAY_REPEATED.sub("", line) if "across cluster]" in line else line


def find_rank_in_path(path: Path) -> int | None:
    """The rank that a file is of, by its name and folders.

    "rank3.log", "rank_3/stderr.txt" say it. torchrun's folders, "RUN/attempt_0/3/stderr.log", name the rank among those
    of a node: it is taken where no folder of another node's launcher lies beside RUN.
    """
    for name in (path.name, path.parent.name):
        found = RANK_IN_NAME.search(name)
        if found:
            return int(found["rank"])
    local_rank = find_local_rank_in_path(path)
    if local_rank is None:
        return None
    run = path.parent.parent.parent
    runs = {folder.parent.resolve() for folder in run.parent.glob("*/attempt_*")}
    return None if runs - {run.resolve()} else local_rank


def find_local_rank_in_path(path: Path) -> int | None:
    """The rank among those of a node, by torchrun's folders "attempt_0/3"; None in other folders."""
    name = path.parent.name
    if ATTEMPT.fullmatch(path.parent.parent.name) and name.isdecimal() and len(name) <= MAX_RANK_DIGITS:
        return int(name)
    return None
