"""How each rank's process ended: of its own, by a signal, or because of others."""

import enum
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_lite.postmortem.call_sites import DISTRIBUTED
from megatron_lite.postmortem.evidence import ProcessEnd, StackFrame
from megatron_lite.postmortem.rank_lists import find_earliest

# what libraries say when other ranks are gone or late
LOST_OTHERS = re.compile(
    r"Connection (?:closed|reset) by (?:remote )?peer|Broken pipe|Connection refused|pair closure|gloo/transport|"
    r"Timed? ?out waiting|timed out|connectFullMesh failed|remote process has terminated|ncclRemoteError|"
    r"ncclSystemError|Socket Timeout|wait timeout|watchdog|NCCL communicator was aborted|Rank \d+ .*monitoredBarrier|"
    r"store might be down|failed to recv, got 0 bytes|unhandled system error|remote error",
    re.IGNORECASE,
)
# what befell this rank alone, also where a library's watchdog says it: a worker of its loader, its GPU
OF_ITSELF = re.compile(r"DataLoader timed out|CUDA error: ")
LIBRARY_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
# Python's own, which storage and web services raise, too
CLASSES_OF_ANYBODY = ("TimeoutError", "ConnectionError")
# what libraries say when ranks do not agree on a call; other parts of torch "enforce", too: memory, files
DISAGREEMENT = re.compile(
    r"mismatch between collectives|collectives? differ|collective mismatch|enforce fail at \S*gloo|preamble\.length|"
    r"inconsistent \d* ?params|verif\w* (?:model )?(?:params|parameter)|DDP expects same model|ncclInvalidArgument|"
    r"ncclInvalidUsage|Received data size doesn't match",
    re.IGNORECASE,
)
# exceptions, and what ranks of this package write of a signal
ENDED_BY_OTHERS = ("SignalException", "KeyboardInterrupt", "SIGTERM", "SIGINT")
# of this package's trainer, and of torchrun: always of other processes
OF_OTHERS = ("RanksError", "ChildFailedError")
# faulthandler's words for a signal
FATAL = "Fatal Python error"
SIGNALS_OF_WORDS = {
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
# this package's trainer names the rank that others wait for
RANK_AT_FRONT = re.compile(r"(?:error: )?[Rr]ank (\d{1,7})\b")
# what a launcher says of a process that has left no words
WITHOUT_WORDS = re.compile(r"^(?:Signal \d+|To enable traceback|<N/A>|it is gone)")
POLITE_SIGNALS = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)
# a batch system or a launcher that loses its patience; also the kernel for want of memory
KILL = (-signal.SIGKILL, 128 + signal.SIGKILL)
ABORT = (-signal.SIGABRT, 128 + signal.SIGABRT)
WORST_MESSAGE = 300
# names any machine
LOOPBACK = "localhost"
# gloo's own place in front of its words, and its advice behind them
SOURCE_FILE = re.compile(r"^\[\S+\.(?:cc|cpp|h):\d+\] ")
ADVICE = ". This is typically caused by"


class EndKind(enum.Enum):
    """The kinds of ends of a process."""

    WELL = "ended well"
    # an exception that speaks of this rank alone
    OWN_ERROR = "exception"
    # ranks did not agree on a call, as a library saw
    DISAGREEMENT = "disagreement"
    # others were gone or late
    LOST_OTHERS = "lost others"
    # asked to end, by a launcher or a person
    ENDED = "was ended"
    SIGNAL = "signal"
    # an exit code without words
    CODE = "exit code"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RankEnd:
    """How a rank's process ended, all that was said of it in one."""

    kind: EndKind
    # the best source of it
    source: str
    rank: int | None
    host: str = ""
    pid: int | None = None
    exit_code: int | None = None
    error: str = ""
    message: str = ""
    frames: tuple[StackFrame, ...] = ()
    # seconds since 1970
    at: float | None = None

    @property
    def words(self) -> str:
        """The exception in a line: "ValueError: no such shard"; "" where there is none."""
        lines = self.message.strip().splitlines() or [""]
        first = SOURCE_FILE.sub("", lines[0]).partition(ADVICE)[0][:WORST_MESSAGE]
        if not self.error or first.startswith(self.error):
            return first
        return f"{self.error}: {first}" if first else self.error

    @property
    def is_consequence(self) -> bool:
        """Whether it only followed others."""
        return self.kind in (EndKind.LOST_OTHERS, EndKind.ENDED)

    def may_be_on(self, hosts: Collection[str]) -> bool:
        """Tell whether the process may have run on one of some machines, where they are known."""
        return not hosts or not self.host or self.host in hosts


def name_signal(code: int) -> str:
    """Write an exit code as people know it: -9 and 137 are "SIGKILL", 3 is "exit code 3"."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"


def classify_end(end: ProcessEnd) -> EndKind:
    """Find out of what kind an end is."""
    name = end.error.rpartition(".")[2]
    said = f"{end.error} {end.message}"
    if name in ENDED_BY_OTHERS:
        return EndKind.ENDED
    if name in OF_OTHERS:
        return EndKind.LOST_OTHERS
    if end.error.startswith(FATAL):
        return EndKind.SIGNAL
    if end.error or end.message:
        if DISAGREEMENT.search(said):
            return EndKind.DISAGREEMENT
        if end.is_consequence or (end.is_consequence is None and _tells_of_others(name, said, end.frames)):
            return EndKind.LOST_OTHERS
        if end.error:
            return EndKind.OWN_ERROR
    code = end.exit_code
    if code == 0:
        return EndKind.WELL
    if code is None:
        return EndKind.ENDED if end.is_consequence else EndKind.UNKNOWN
    if end.is_consequence or code in POLITE_SIGNALS:
        return EndKind.ENDED
    if code < 0 or name_signal(code).startswith("SIG"):
        return EndKind.SIGNAL
    if not end.message or WITHOUT_WORDS.match(end.message):
        return EndKind.CODE
    named = RANK_AT_FRONT.match(end.message)
    is_of_other = named is not None and int(named[1]) != end.rank
    return EndKind.LOST_OTHERS if is_of_other else EndKind.OWN_ERROR


def _tells_of_others(name: str, said: str, frames: Sequence[StackFrame]) -> bool:
    """Whether an error is a library's, on ranks that are gone or late; the program may time out, too.

    Args:
        name: The class of the error, without its module.
        said: The class and what it says.
        frames: Its traceback.
    """
    if OF_ITSELF.search(said):
        return False
    is_elsewhere = bool(frames) and not any(DISTRIBUTED.search(frame.file) for frame in frames)
    if name in CLASSES_OF_ANYBODY and is_elsewhere:
        return False
    is_of_library = name in (*LIBRARY_CLASSES, *CLASSES_OF_ANYBODY, "RuntimeError", "")
    return is_of_library and LOST_OTHERS.search(said) is not None


# which of several records of one end says most
TELLING = (
    EndKind.OWN_ERROR,
    EndKind.DISAGREEMENT,
    EndKind.LOST_OTHERS,
    EndKind.ENDED,
    EndKind.SIGNAL,
    EndKind.CODE,
    EndKind.UNKNOWN,
    EndKind.WELL,
)


def _order_ends(end: ProcessEnd) -> tuple[bool, int, int]:
    """Order records by what they tell, then by how long their tracebacks are; words on others come last."""
    is_of_others = end.error.rpartition(".")[2] in OF_OTHERS
    return is_of_others, TELLING.index(classify_end(end)), -len(end.frames)


def unite_ends(ends: Sequence[ProcessEnd]) -> RankEnd:
    """Unite the records of one process's end: a traceback, an error file, what a launcher saw.

    Args:
        ends: At least one record.
    """
    records = sorted(ends, key=_order_ends)
    best = records[0]
    with_frames = [end for end in records if end.frames]
    return RankEnd(
        kind=classify_end(best),
        source=best.source,
        rank=best.rank,
        host=next((end.host for end in records if end.host and end.host != LOOPBACK), ""),
        pid=next((end.pid for end in records if end.pid is not None), None),
        exit_code=_choose_code(records),
        error=best.error,
        message=best.message,
        frames=with_frames[0].frames if with_frames else (),
        at=find_earliest(end.ended_at for end in records),
    )


def _choose_code(records: Sequence[ProcessEnd]) -> int | None:
    """Choose the exit code: that of the record that tells most, else any."""
    codes = [end.exit_code for end in records if end.exit_code is not None]
    for end in records:
        _, _, words = end.error.partition(f"{FATAL}: ")
        said = words or end.message
        if end.error.startswith(FATAL) and said in SIGNALS_OF_WORDS:
            codes.append(-SIGNALS_OF_WORDS[said])
    return codes[0] if codes else None
