"""The conclusion on a job that failed or hangs: what `megatron-lite postmortem` prints and writes as JSON."""

import enum

import msgspec


class FailureKind(enum.Enum):
    """The classes of failure."""

    # a rank did not begin a collective that the others wait in
    NEVER_ENTERED = "never entered"
    # ranks met in a collective with other shapes, types, roots or operations
    OTHER_ARGUMENTS = "other arguments"
    # ranks called the same collectives in another order
    OTHER_ORDER = "other order"
    # a process was gone without an error of its own
    DIED = "died"
    # a rank goes on, much slower than the others
    SLOW = "slow"
    # all ranks entered, and the device does not finish
    STUCK_IN_KERNEL = "stuck in a kernel"
    NETWORK = "network"
    HOST_MEMORY = "out of memory on the host"
    DEVICE_MEMORY = "out of memory on the device"
    # a GPU or its driver failed
    DEVICE_FAULT = "device fault"
    DATA_LOADER = "data loader"
    USER_EXCEPTION = "exception of the program"
    # the batch system, or a person, ended it
    PREEMPTED = "preempted"
    # a process is stopped by a signal or a debugger
    STOPPED = "stopped"
    # the loss or the gradients are no longer finite
    DIVERGED = "diverged"
    UNKNOWN = "unknown"
    # the job ended well, or goes on
    NONE = "no failure"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence with the file that shows it."""

    text: str
    # a file, with the line where one is known; "" where several together show it
    source: str = ""


class LastOfRank(msgspec.Struct, frozen=True, kw_only=True):
    """The last known state of one rank."""

    rank: int
    host: str = ""
    # step and phase, as far as known
    place: str = ""
    # the last collective that it entered, and where its program called it
    last_call: str = ""
    call_site: str = ""
    # how it ended, or what it waits for
    fate: str = ""


class Postmortem(msgspec.Struct, frozen=True, kw_only=True):
    """The answer on one job."""

    kind: FailureKind
    # who is to blame, ascending; () where no rank is, or none can be named
    ranks: tuple[int, ...]
    # one line: who, what, where
    verdict: str
    # of the verdict: high, medium or low
    confidence: str
    # the collective in question: "all_reduce #1204 of group 3 (TENSOR_MODEL_PARALLEL_GROUP)"; "" without one
    collective: str = ""
    # the line of the program that explains it: "train.py:88 in step"; "" where nothing tells
    call_site: str = ""
    evidence: tuple[Fact, ...] = ()
    # what looks like a failure, and only followed
    consequences: tuple[Fact, ...] = ()
    # what to do next, most useful first
    next_steps: tuple[str, ...] = ()
    # what was not there or could not be read, and what it would have told
    missing: tuple[str, ...] = ()
    rows: tuple[LastOfRank, ...] = ()
    # other explanations that the evidence leaves open
    alternatives: tuple[str, ...] = ()
