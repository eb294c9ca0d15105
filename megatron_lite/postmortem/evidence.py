"""Records of what a job that failed or hangs has left behind: one form, whatever program wrote it.

Readers make these records of files; the trainer makes them of what its ranks tell each other. Conclusions are drawn
from them alone. None means unknown: what nobody wrote down is neither zero nor absent. Each record names its source,
a file with the line where one is known ("train.log:1204"), so that a conclusion can cite it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

# torch's name of the group of all ranks, and its description
ALL_RANKS_GROUP = "0"
ALL_RANKS_DESCRIPTION = "default_pg"


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A call on a stack."""

    function: str
    file: str
    line: int | None = None


@dataclass(frozen=True)
class RecordedGroup:
    """A group of ranks that run collectives together."""

    # as torch names it: "0", "17", or a hash; ranks may give groups of different members the same name
    name: str
    # what its maker calls it: "default_pg", "TENSOR_MODEL_PARALLEL_GROUP"; "" where nobody says so
    description: str = ""
    # ranks of the job, in the group's order; () where the recorder does not tell
    ranks: tuple[int, ...] = ()


class CallState(enum.Enum):
    """How far a recorded call has come."""

    # the host has called it
    SCHEDULED = "scheduled"
    # the device has begun it
    STARTED = "started"
    COMPLETED = "completed"


# a job of 1,000 ranks has millions of these
@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A collective, or a message between two ranks, as one rank's flight recorder has it."""

    # name of the group that ran it
    group: str
    # counts collectives of the group from 1, alike on all ranks; of a message, this rank's own messages in the group
    number: int
    # all_reduce, _all_gather_base, send, coalesced, ...; without the backend
    name: str
    state: CallState
    # the recorder's own count of this rank's calls, over all groups
    record: int
    # counts the operations of the group one by one, also those inside of a coalesced call
    operation: int = 0
    is_message: bool = False
    # an operation inside of a coalesced call, which follows it and has the same number; its state is that of the call
    is_part: bool = False
    # ranks of the job between which a message goes; None of a collective
    sender: int | None = None
    receiver: int | None = None
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    # as torch writes them: Float, BFloat16
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    # the recorder no longer watches it, since it has ended; gloo also retires a call that failed, and says no more
    is_retired: bool = False
    # the library gave it up: it took longer than its limit, or a connection broke
    has_failed: bool = False
    # nanoseconds since 1970
    created_ns: int | None = None
    started_ns: int | None = None
    completed_ns: int | None = None
    timeout_ms: float | None = None
    # innermost first, as recorded
    frames: tuple[StackFrame, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether this rank has nothing more to wait for in this call."""
        return (self.is_retired or self.state is CallState.COMPLETED) and not self.has_failed


@dataclass(frozen=True)
class GroupProgress:
    """The numbers of a group's collectives that one rank enqueued, started and completed last; None: not told."""

    # NCCL counts one when its own call has returned: a recorded call beyond it is still inside of the library
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None


@dataclass(frozen=True)
class FlightRecording:
    """The flight recorder of one rank."""

    source: str
    # None where neither the file nor its name says so
    rank: int | None
    # gloo, nccl, ...
    backend: str
    # oldest first; a ring buffer forgets
    calls: tuple[RecordedCall, ...]
    groups: Mapping[str, RecordedGroup] = field(default_factory=dict)
    progress: Mapping[str, GroupProgress] = field(default_factory=dict)
    # older calls were recorded, and are no longer there
    has_forgotten: bool = False
    # only calls that had not ended were written
    is_only_active: bool = False
    # it tells of starts on the device (TORCH_NCCL_ENABLE_TIMING); otherwise a call may run and be SCHEDULED
    tells_starts: bool = False
    # the form of the file, as torch numbers it; "" where it does not say so
    version: str = ""


@dataclass(frozen=True)
class ThreadStack:
    """Where a thread is."""

    name: str
    # innermost first
    frames: tuple[StackFrame, ...]
    is_main: bool = False
    # waits without using a core; None where the writer does not tell
    is_idle: bool | None = None
    holds_interpreter: bool | None = None


@dataclass(frozen=True)
class ProcessStacks:
    """Where the threads of a process are, at one moment."""

    source: str
    threads: tuple[ThreadStack, ...]
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    # the command line, as far as the writer shows it
    command: str = ""
    # seconds since 1970
    taken_at: float | None = None


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended, by its own words or by those of who watched it."""

    source: str
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    # negative for a signal, as Python's subprocess has it
    exit_code: int | None = None
    # class of the exception: "RuntimeError", "torch.OutOfMemoryError"
    error: str = ""
    # what it says, first line first
    message: str = ""
    # of the exception's traceback, innermost first
    frames: tuple[StackFrame, ...] = ()
    # seconds since 1970
    ended_at: float | None = None
    # it only followed others: a launcher ended it, or a collective failed because another rank had gone; None: unknown
    is_consequence: bool | None = None


class EventKind(enum.Enum):
    """Kinds of lines in logs that bear on a failure."""

    # a collective took longer than its limit: NCCL's watchdog, gloo, a store's barrier
    COLLECTIVE_TIMEOUT = "collective timeout"
    # the library names a rank that did not come to a collective that others wait in
    RANK_BEHIND = "rank behind"
    # ranks called different collectives, or with other arguments, as the library saw itself
    COLLECTIVE_MISMATCH = "collective mismatch"
    # a connection to another rank broke
    CONNECTION_LOST = "connection lost"
    # an error of NCCL that is none of the above
    LIBRARY_ERROR = "library error"
    # an adapter or a link failed: IB completions with errors, unreachable, ibv_*
    NETWORK_ERROR = "network error"
    # the driver reports an error of a GPU
    XID = "xid"
    # CUDA reports that a kernel failed: illegal address, device-side assert, uncorrectable ECC
    DEVICE_ERROR = "device error"
    DEVICE_OUT_OF_MEMORY = "device out of memory"
    # the kernel, a cgroup or a batch system killed a process for want of memory
    HOST_OUT_OF_MEMORY = "host out of memory"
    # a worker of a data loader died, or did not answer in time
    LOADER_FAILED = "loader failed"
    # the batch system ended the job: its time was over, somebody canceled it, another job came first
    JOB_TIME_LIMIT = "job time limit"
    JOB_CANCELED = "job canceled"
    JOB_PREEMPTED = "job preempted"
    NODE_FAILED = "node failed"
    # a launcher tells which process failed first
    LAUNCHER_SAW_FAILURE = "launcher saw failure"
    # a launcher ends the others
    LAUNCHER_ENDED_OTHERS = "launcher ended others"
    # a signal reached a process
    SIGNAL = "signal"
    # the loss or the norm of gradients is not finite
    NOT_FINITE = "not finite"


@dataclass(frozen=True)
class LogEvent:
    """A line of a log that bears on a failure."""

    kind: EventKind
    source: str
    # the line, without colors
    text: str
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    # PCI address or number of a GPU
    device: str = ""
    # number of an Xid, of a signal, or of an error, by kind
    code: int | None = None
    # seconds since 1970
    at: float | None = None
    # the collective that it is about, as far as it is named
    group: str = ""
    number: int | None = None
    call: str = ""
    # how long it lasted, in seconds
    lasted_s: float | None = None
    # of a broken connection: the rank at its other end
    peer: int | None = None
    # how often it was said, where the same lines, or many of this kind, are one event
    count: int = 1


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank when it was heard last."""

    source: str
    rank: int
    host: str | None = None
    pid: int | None = None
    # seconds since 1970
    seen_at: float | None = None
    step: int | None = None
    # the part of the step that it was in, and how long it had been there, in seconds
    phase: str | None = None
    phase_s: float | None = None
    # how long it had been in its step, in seconds
    step_s: float | None = None
    # time in seconds for which no step, phase or collective of it had begun or ended
    still_s: float | None = None
    # median duration of its steps before, in seconds
    usual_step_s: float | None = None
    # duration of its last steps without what it waited for others, in seconds
    own_step_s: float | None = None
    # coordinates in the layout: "pp 1, tp 0"; "" where all ranks hold the same
    place: str = ""
    # the process: running, stopped, dead
    process_state: str | None = None


@dataclass(frozen=True)
class UnansweredRequest:
    """A rank that was asked for its state, and did not answer: torch.distributed.debug asks all ranks by HTTP, ranks of
    the trainer each other by the store where they met."""

    source: str
    rank: int
    # what the asking side saw: "TimeoutError", or which connection failed
    why: str
    # nothing listens where its server was: the process is gone. False: something does, and is silent. None: unknown
    was_refused: bool | None = None
    host: str | None = None
    # seconds since 1970
    asked_at: float | None = None
    # the rank never met the others, as the place where they meet knows
    never_arrived: bool = False


@dataclass(frozen=True)
class JobEvidence:
    """All that was read of one job."""

    recordings: tuple[FlightRecording, ...] = ()
    stacks: tuple[ProcessStacks, ...] = ()
    ends: tuple[ProcessEnd, ...] = ()
    events: tuple[LogEvent, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    unanswered: tuple[UnansweredRequest, ...] = ()
    # ranks of the job; None where nothing says so
    world_size: int | None = None
    # one line for each file, or part of one, that was there and could not be read
    unread: tuple[str, ...] = ()
    # files that were read, by kind: "flight recordings": 4
    read: Mapping[str, int] = field(default_factory=dict)
    # when the newest file of each kind was written last, in seconds since 1970; copies may have the time of copying
    written_at: Mapping[str, float] = field(default_factory=dict)
