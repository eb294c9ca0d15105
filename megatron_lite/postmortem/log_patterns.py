"""The table log_patterns.tsv: which lines of logs bear on a failure, and what they tell."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.postmortem.evidence import EventKind
from megatron_lite.postmortem.log_prefixes import MAX_RANK_DIGITS, read_time

SIGNAL_NUMBERS = {
    "SIGHUP": 1,
    "SIGINT": 2,
    "SIGQUIT": 3,
    "SIGILL": 4,
    "SIGABRT": 6,
    "SIGBUS": 7,
    "SIGFPE": 8,
    "SIGKILL": 9,
    "SIGUSR1": 10,
    "SIGSEGV": 11,
    "SIGUSR2": 12,
    "SIGPIPE": 13,
    "SIGTERM": 15,
    # as libc and shells call them
    "Illegal instruction": 4,
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
    "Killed": 9,
    "Segmentation fault": 11,
    "Terminated": 15,
}
MAX_DIGITS_OF_NUMBER = 15
MAX_TASKS = 4_096
# of a long line, in front of the word that it was found by, and behind
CHARACTERS_IN_FRONT = 1_000
CHARACTERS_BEHIND = 3_000
FIXED_CODE = re.compile(r"code_(\d+)")


@dataclass(frozen=True)
class LineFields:
    """Values of the named groups of a pattern."""

    rank: int | None = None
    ranks: tuple[int, ...] = ()
    group_rank: int | None = None
    local_rank: int | None = None
    tasks: tuple[int, ...] = ()
    peer: int | None = None
    host: str | None = None
    pid: int | None = None
    device: str = ""
    code: int | None = None
    group: str = ""
    number: int | None = None
    call: str = ""
    lasted_s: float | None = None
    # seconds since 1970
    at: float | None = None


@dataclass(frozen=True)
class LinePattern:
    """A row of the table."""

    kind: EventKind
    # every line that matches holds it
    word: str
    pattern: re.Pattern[str]
    # what the named groups mean, and where such lines were looked up
    meaning: str
    source: str

    def read_fields(self, match: re.Match[str]) -> LineFields:
        """Read the named groups of a match."""
        found = match.groupdict()
        code = _read_number(found.get("code"))
        signal = found.get("signal")
        if signal is not None:
            code = SIGNAL_NUMBERS.get(signal, _read_number(signal))
        for name in found:
            fixed = FIXED_CODE.fullmatch(name)
            code = int(fixed[1]) if fixed else code
        milliseconds = _read_number(found.get("ms"))
        seconds = _read_number(found.get("s"))
        at = found.get("at")
        return LineFields(
            rank=_read_number(found.get("rank")),
            ranks=_read_ranks(found.get("ranks")),
            group_rank=_read_number(found.get("group_rank")),
            local_rank=_read_number(found.get("local")),
            tasks=_read_tasks(found.get("tasks")),
            peer=_read_number(found.get("peer")),
            host=found.get("host"),
            pid=_read_number(found.get("pid")),
            device=found.get("device") or "",
            code=code,
            group=found.get("group") or "",
            number=_read_number(found.get("number")),
            call=found.get("call") or "",
            lasted_s=seconds if milliseconds is None else milliseconds / 1000,
            at=None if at is None else read_time(at),
        )


def _read_number(text: str | None) -> int | None:
    """A whole number; None for a text that is none, or for one that is far too long."""
    if text is None or len(text) > MAX_DIGITS_OF_NUMBER or not text.lstrip("-").isdecimal():
        return None
    return int(text)


def _read_ranks(text: str | None) -> tuple[int, ...]:
    """The ranks of a list such as "4, 5, 6"."""
    words = (text or "").replace(",", " ").split()
    return tuple(int(word) for word in words if len(word) <= MAX_RANK_DIGITS)


def _read_tasks(text: str | None) -> tuple[int, ...]:
    """The numbers of a list such as "1-3,5"."""
    tasks: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or len(first) > MAX_RANK_DIGITS:
            continue
        end = int(last) if last.isdecimal() and len(last) <= MAX_RANK_DIGITS else int(first)
        tasks += range(int(first), min(end, int(first) + MAX_TASKS) + 1)
    return tuple(tasks[:MAX_TASKS])


def read_patterns() -> tuple[LinePattern, ...]:
    """Read the table, in its order."""
    rows = []
    for line in (Path(__file__).parent / "log_patterns.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, word, pattern, meaning, source = line.split("\t")
        rows.append(LinePattern(EventKind[kind], word, re.compile(pattern), meaning, source))
    return tuple(rows)


LINE_PATTERNS = read_patterns()
# Every line that a row matches holds one of these; they are few, since each is looked for in the whole log.
LINE_SEEDS = (
    "rror",
    "NCCL WARN",
    "NCCL communicator was aborted",
    "atchdog",
    "collective",
    "monitoredBarrier",
    "gloo/transport",
    "imed out ",
    "pair closure",
    "op.preamble.length",
    "clients joined",
    "wait timeout after",
    "[c10d]",
    "TCP client failed",
    "EADDRINUSE",
    "f memory",
    "low on memory",
    "memory pressure",
    "e memory",
    "gh memory",
    "Assertion `",
    "CUBLAS_STATUS_",
    "DataLoader",
    "NVRM: ",
    "SXid",
    "illed process",
    "oom-kill",
    "EDAC",
    "Link DOWN",
    "segfault at",
    "OOMKilled",
    "srun: ",
    "this job is ",
    "SYSTEM_ERROR",
    ": line ",
    "exitcode: ",
    " signal",
    "terminate",
    "No route to host",
    "uncorrectable ECC",
    ": nan",
    ": 'nan",
    "=nan",
    "= nan",
    ":nan",
    "is nan",
    "is NaN",
    "is Inf",
    "found NaN",
    "Unexpected result",
    "at minimum",
    "minimum loss",
)


def match_line(line: str) -> tuple[LinePattern, re.Match[str]] | None:
    """The first row that matches a line without prefixes, with its match; None where none does."""
    for row in LINE_PATTERNS:
        at = line.find(row.word)
        if at < 0:
            continue
        # some patterns try each place of a line, up to its end
        match = row.pattern.search(line[max(0, at - CHARACTERS_IN_FRONT) : at + CHARACTERS_BEHIND])
        if match:
            return row, match
    return None
