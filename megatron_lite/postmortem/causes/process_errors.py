"""Processes that ended of their own: by an exception, by a signal, or with an exit code and no words."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_lite.postmortem.call_sites import LOADERS, OWN_DATA, find_call_site, find_main_thread
from megatron_lite.postmortem.causes.base import (
    MAX_CITED,
    MAX_QUOTED,
    Confidence,
    Suspicion,
    cite_end,
    cut,
    quote_some,
    write_at,
)
from megatron_lite.postmortem.causes.wait_times import LOGS, MIN_LATER_S
from megatron_lite.postmortem.evidence import EventKind, LogEvent, StackFrame
from megatron_lite.postmortem.observed_job import ObservedJob, ObservedRank
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import ABORT, KILL, EndKind, RankEnd, name_signal
from megatron_lite.postmortem.rank_lists import find_earliest, list_ranks, name_ranks

DEVICE_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP|XPU|MPS) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"cuda ?Malloc.*out of memory|^:? ?(?:error: )?out of memory on rank",
    re.IGNORECASE,
)
HOST_MEMORY = re.compile(r"^MemoryError|Cannot allocate memory|can't allocate memory|bad_alloc|DefaultCPUAllocator")
LOADER = re.compile(r"DataLoader worker|pin memory thread")
HARDWARE = re.compile(r"uncorrectable ECC|fell off|GPU is lost|hardware", re.IGNORECASE)
DEVICE = re.compile(
    r"CUDA error: (?:an illegal memory|unspecified launch|misaligned|unknown error)|illegal memory access|"
    r"unspecified launch failure|" + HARDWARE.pattern,
    re.IGNORECASE,
)
DIVERGENCE = re.compile(
    r"\b(?:loss|norm|grad\w*)\b.{0,40}\b(?:nan|inf|not finite|non-finite)\b|FloatingPointError", re.IGNORECASE
)
# in this order: the first that matches decides
CLASSES = (
    (FailureKind.DEVICE_MEMORY, DEVICE_MEMORY),
    (FailureKind.HOST_MEMORY, HOST_MEMORY),
    (FailureKind.DATA_LOADER, LOADER),
    (FailureKind.DEVICE_FAULT, DEVICE),
    (FailureKind.DIVERGED, DIVERGENCE),
)
LOWER_HOST_MEMORY = "Lower num_workers, prefetch_factor or what each process holds on the host, or ask for more memory."
LOWER_DEVICE_MEMORY = (
    "Lower the micro-batch or turn on recomputation; `megatron-lite report` on a memory snapshot says what holds the "
    "memory."
)
NEXT_STEPS = {
    FailureKind.USER_EXCEPTION: "Mend what the exception names{at}, then start again from the newest checkpoint.",
    FailureKind.DATA_LOADER: "Look at what the loader was reading{at}; num_workers=0 shows its traceback.",
    FailureKind.DEVICE_MEMORY: LOWER_DEVICE_MEMORY,
    FailureKind.HOST_MEMORY: LOWER_HOST_MEMORY,
    FailureKind.DEVICE_FAULT: "Run once with CUDA_LAUNCH_BLOCKING=1; if only one machine fails, drain that one.",
    FailureKind.DIVERGED: "Look at the batch, the learning rate and the gradients of the steps before.",
}
WENT_ON = "the program caught it and went on: its process was seen later, or ended well."
A_KERNEL = "a kernel of the program reads beyond its tensors: CUDA_LAUNCH_BLOCKING=1 names it."
# a launcher waits so long for its SIGTERM to end a process
MIN_PATIENCE_S = 5.0
BY_LIBRARY = "a library aborted it, as gloo does where ranks give a call different amounts: its last words would tell."
WHICH_RANK = "which rank it was: torchrun --log-dir DIR --tee 3 marks each line with its rank."


def find_exceptions(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that ended with an exception of their own, alike ones together."""
    alike: dict[tuple[FailureKind, str, str], list[RankEnd]] = defaultdict(list)
    for end in _list_own_errors(job):
        kind = classify_exception(end)
        # ranks see one divergence, each in its own words
        error = "" if kind is FailureKind.DIVERGED else end.error
        alike[kind, error, find_call_site(end.frames)].append(end)
    found = []
    for (kind, _, site), ends in alike.items():
        found.append(_suspect_exception(job, kind, site, ends))
    return found


def classify_exception(end: RankEnd) -> FailureKind:
    """Find the class of failure that an exception speaks of."""
    said = f"{end.error}: {end.message}"
    for kind, pattern in CLASSES:
        if pattern.search(said):
            return kind
    if any(_is_of_loader(frame) for frame in end.frames):
        return FailureKind.DATA_LOADER
    return FailureKind.USER_EXCEPTION


def _is_of_loader(frame: StackFrame) -> bool:
    return LOADERS.search(frame.file) is not None or OWN_DATA.search(frame.file) is not None


def find_first_seen(job: ObservedJob) -> int | None:
    """Find the rank that the launcher saw fail first; None where it names none, or several."""
    ranks = list_ranks(job.list_events(EventKind.LAUNCHER_SAW_FAILURE))
    return ranks[0] if len(ranks) == 1 else None


def _list_own_errors(job: ObservedJob) -> Iterator[RankEnd]:
    """The exceptions of ranks; one whose rank nothing tells is of the rank that the launcher saw fail first."""
    of_ranks = [end for end in job.ends if end.kind is EndKind.OWN_ERROR and end.rank is not None]
    yield from of_ranks
    said = {end.words for end in of_ranks}
    first = find_first_seen(job)
    for end in job.unplaced_ends:
        # a log that several ranks share repeats what an error file says
        if end.kind is not EndKind.OWN_ERROR or end.words in said:
            continue
        if first is not None and not of_ranks:
            yield replace(end, rank=first)
        else:
            yield end


def _suspect_exception(job: ObservedJob, kind: FailureKind, site: str, ends: Sequence[RankEnd]) -> Suspicion:
    """Make one suspicion of alike exceptions.

    Args:
        job: The job.
        kind: What they speak of.
        site: The line of the program that they come from.
        ends: The ends of the ranks.
    """
    ranks = list_ranks(ends)
    first = min(ends, key=lambda end: (end.at is None, end.at or 0.0))
    at = write_at(site)
    confidence = Confidence.HIGH
    alternatives: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    if not ranks:
        confidence = Confidence.MEDIUM
        missing = (WHICH_RANK,)
    may_be_harmless = all(_went_on(job, end) for end in ends)
    if may_be_harmless:
        confidence = Confidence.LOW
        alternatives = (WENT_ON,)
    elif kind is FailureKind.DEVICE_FAULT and not HARDWARE.search(first.message):
        confidence = Confidence.MEDIUM
        alternatives = (A_KERNEL,)
    return Suspicion(
        kind=kind,
        ranks=ranks,
        headline=f"{job.name(ranks)} ended with {cut(first.words, MAX_QUOTED)}{at}",
        confidence=confidence,
        evidence=tuple(cite_end(job, end, f"ended with {cut(end.words, MAX_QUOTED)}") for end in ends[:MAX_CITED]),
        next_steps=(NEXT_STEPS[kind].format(at=at),),
        onset=first.at,
        call_site=site,
        alternatives=alternatives,
        missing=missing,
        hosts=tuple(sorted({end.host for end in ends if end.host})),
        may_be_harmless=may_be_harmless,
    )


def _went_on(job: ObservedJob, end: RankEnd) -> bool:
    """Whether a process is known to have gone on after an exception that a log shows."""
    if end.rank is None or end.exit_code is not None or end.at is None:
        return end.exit_code == 0
    calls = job.calls.by_rank.get(end.rank, ())
    seen = [call.created_s for call in calls[-1:]]
    for stacks in job.ranks[end.rank].stacks:
        thread = find_main_thread(stacks)
        # at its end Python is in no line of the program
        if thread is not None and find_call_site(thread.frames):
            seen.append(stacks.taken_at)
    return any(time is not None and time - end.at > MIN_LATER_S for time in seen)


def find_deaths(job: ObservedJob) -> list[Suspicion]:
    """Find processes that were gone without an error of their own."""
    alike: dict[tuple[EndKind, int], list[RankEnd]] = defaultdict(list)
    for end in job.ends:
        if end.exit_code is not None and _is_death(job, end):
            alike[end.kind, end.exit_code].append(end)
    found = []
    for (kind, code), ends in alike.items():
        found.append(_suspect_death(job, kind, code, ends))
    gone = tuple(rank for rank, one in job.ranks.items() if _is_gone(one))
    return [*found, _suspect_loss(job, gone)] if gone else found


def _is_gone(one: ObservedRank) -> bool:
    """Whether the process is known to be gone, and nobody knows how it ended."""
    if one.end is not None:
        return one.end.kind is EndKind.UNKNOWN
    return one.process_state == "dead"


def _suspect_loss(job: ObservedJob, gone: tuple[int, ...]) -> Suspicion:
    """Make a suspicion of processes that are gone without a word: killed, most likely."""
    last = [job.ranks[rank].progress[-1] for rank in gone if job.ranks[rank].progress]
    facts = []
    for one in last[:MAX_CITED]:
        facts.append(Fact(text=f"rank {one.rank}: process {one.pid} is gone", source=one.source))
    suspicion = Suspicion(
        kind=FailureKind.DIED,
        ranks=gone,
        headline=f"{job.name(gone)} died: the process is gone without a word",
        confidence=Confidence.HIGH,
        evidence=tuple(facts),
        onset=find_earliest(one.seen_at for one in last),
        hosts=tuple(sorted({job.ranks[rank].host for rank in gone if job.ranks[rank].host})),
    )
    look = "The launcher's summary names the signal or exit code; `dmesg -T | grep -i oom` on its machine, a kill."
    suspicion = replace(_name_killers(job, suspicion), next_steps=(look,))
    unknown = [rank for rank, one in job.ranks.items() if rank not in gone and not _is_heard_of(job, one)]
    if not unknown:
        return suspicion
    missing = f"what became of {name_ranks(unknown)}."
    return replace(
        suspicion,
        confidence=Confidence.LOW,
        missing=(missing, *suspicion.missing),
        alternatives=(*suspicion.alternatives, "the job was ended as a whole."),
    )


def _is_heard_of(job: ObservedJob, one: ObservedRank) -> bool:
    """Whether something tells what became of a rank: its end, its state, or that it waits."""
    return one.end is not None or one.process_state is not None or one.rank in job.list_waiting()


def _is_death(job: ObservedJob, end: RankEnd) -> bool:
    """Whether an end is a death of its own: not by a library that gave up on others, nor by who ended the job."""
    if end.kind not in (EndKind.SIGNAL, EndKind.CODE):
        return False
    observed = None if end.rank is None else job.ranks.get(end.rank)
    gave_up = observed is not None and observed.has_event(EventKind.COLLECTIVE_TIMEOUT)
    if gave_up and end.exit_code in ABORT:
        return False
    # a launcher kills whom its SIGTERM does not reach
    return end.exit_code not in KILL or not _was_another_first(job, end)


def _was_another_first(job: ObservedJob, end: RankEnd) -> bool:
    """Whether a launcher saw another rank fail, and then ended the others."""
    first = find_first_seen(job)
    if first is None or first == end.rank:
        return False
    if job.list_events(EventKind.LAUNCHER_ENDED_OTHERS):
        return True
    first_end = job.ranks[first].end if first in job.ranks else None
    if first_end is None or first_end.at is None or end.at is None:
        return False
    return end.at - first_end.at > MIN_PATIENCE_S


def _suspect_death(job: ObservedJob, kind: EndKind, code: int, ends: Sequence[RankEnd]) -> Suspicion:
    """Make one suspicion of processes that ended alike.

    Args:
        job: The job.
        kind: By a signal, or with an exit code.
        code: The signal or code, as Python has it.
        ends: The ends of the ranks.
    """
    ranks = list_ranks(ends)
    who = job.name(ranks)
    how = f"by {name_signal(code)}" if kind is EndKind.SIGNAL else f"with {name_signal(code)}"
    with_frames = [end for end in ends if end.frames]
    suspicion = Suspicion(
        kind=FailureKind.DIED,
        ranks=ranks,
        headline=f"{who} died {how}, without an error of its own",
        confidence=Confidence.HIGH if ranks else Confidence.MEDIUM,
        evidence=tuple(cite_end(job, end, f"ended {how}") for end in ends[:MAX_CITED]),
        next_steps=("Look at the last lines of its log, and for a core file.",),
        onset=find_earliest(end.at for end in ends),
        hosts=tuple(sorted({end.host for end in ends if end.host})),
        is_abort=code in ABORT,
        is_kill=code in KILL,
        call_site=find_call_site(with_frames[0].frames) if with_frames else "",
    )
    if code in ABORT:
        suspicion = replace(suspicion, confidence=Confidence.MEDIUM, alternatives=(BY_LIBRARY,))
    if code in KILL:
        return _name_killers(job, suspicion)
    if kind is EndKind.CODE and not _has_logs(job):
        return _doubt_words(suspicion, code, f"{who} ended {how}; what it said was not read")
    return suspicion


def _name_killers(job: ObservedJob, suspicion: Suspicion) -> Suspicion:
    """Name who may have killed a process, which only the kernel's log tells."""
    look = "Look who sent SIGKILL: `dmesg -T | grep -i oom` on its machine, the batch system, a person."
    suspicion = replace(suspicion, next_steps=(look,))
    if any("kernel" in kind for kind in job.evidence.read):
        return suspicion
    missing = "the kernel's log (dmesg) of its machine: whether it was killed for want of memory."
    doubt = "the kernel killed it for want of memory."
    return replace(suspicion, missing=(missing,), alternatives=(doubt,))


def _doubt_words(suspicion: Suspicion, code: int, headline: str) -> Suspicion:
    """Say of an exit code that its reason was not read: Python's for any exception is 1."""
    kind = FailureKind.USER_EXCEPTION if code == 1 else FailureKind.DIED
    missing = "its console log, whose traceback names the line: torchrun --log-dir DIR --tee 3 keeps it."
    return replace(suspicion, kind=kind, headline=headline, confidence=Confidence.LOW, missing=(missing,))


def _has_logs(job: ObservedJob) -> bool:
    """Whether what ranks wrote was read; ranks that tell of themselves have no logs."""
    return not job.evidence.read or LOGS in job.evidence.read


def find_lost_memory(job: ObservedJob) -> list[Suspicion]:
    """Find processes that the kernel, or a batch system, killed for want of memory."""
    events = job.list_recent_events(EventKind.HOST_OUT_OF_MEMORY)
    if not events:
        return []
    ranks = _find_killed(job, events)
    whom = job.name(ranks) if ranks else "a process of the job"
    loaders = list_ranks(job.list_events(EventKind.LOADER_FAILED))
    if not ranks and loaders:
        ranks = loaders
        whom = f"a loader's worker of {job.name(loaders)}"
    return [
        Suspicion(
            kind=FailureKind.HOST_MEMORY,
            ranks=ranks,
            headline=f"the machine had no memory left, and {whom} was killed",
            confidence=_weigh_kill(job, events, ranks),
            evidence=quote_some(events),
            next_steps=(LOWER_HOST_MEMORY,),
            onset=find_earliest(event.at for event in events),
            hosts=tuple(sorted({event.host for event in events if event.host})),
            may_be_harmless=not ranks and any(end.exit_code in KILL for end in job.ends),
        )
    ]


def _weigh_kill(job: ObservedJob, events: Sequence[LogEvent], ranks: Sequence[int]) -> Confidence:
    """Weigh who was killed: a process that is gone without a word need not be the one.

    Args:
        job: The job.
        events: The kills.
        ranks: Who is thought to be killed.
    """
    is_named = bool(list_ranks(events))
    known = [job.ranks[rank] for rank in ranks if rank in job.ranks]
    gone = [one.rank for one in known if _is_gone(one)]
    killed = {event.pid for event in events}
    pids = {one.end.pid for one in known if one.end is not None}
    # a container numbers its processes by itself
    may_be_another = None not in (*killed, *pids) and bool(pids) and killed.isdisjoint(pids)
    is_sure = bool(ranks) and (is_named or not gone) and not may_be_another
    return Confidence.HIGH if is_sure else Confidence.MEDIUM


def _find_killed(job: ObservedJob, events: Sequence[LogEvent]) -> tuple[int, ...]:
    """Find the ranks that want of memory killed: named ones, else those that SIGKILL ended on these machines, or
    that are gone without a word."""
    hosts = {event.host for event in events if event.host}
    first = find_first_seen(job)
    first_end = job.ranks[first].end if first is not None and first in job.ranks else None
    if first is not None and first_end is not None and first_end.exit_code in KILL and first_end.may_be_on(hosts):
        # a batch system may number launchers, not ranks
        return (first,)
    named = list_ranks(events)
    if named:
        return named
    killed = []
    for end in job.ends:
        may_be_killed = end.exit_code in KILL or end.kind is EndKind.UNKNOWN
        if may_be_killed and end.may_be_on(hosts):
            killed.append(end)
    return list_ranks(killed)


def find_lost_loaders(job: ObservedJob) -> list[Suspicion]:
    """Find loaders whose worker died or did not answer."""
    events = job.list_events(EventKind.LOADER_FAILED)
    if not events:
        return []
    ranks = list_ranks(events)
    sites = [find_call_site(end.frames) for end in job.ends if end.rank in ranks and end.frames]
    site = sites[0] if sites else ""
    missing: tuple[str, ...] = () if ranks else (WHICH_RANK,)
    return [
        Suspicion(
            kind=FailureKind.DATA_LOADER,
            ranks=ranks,
            headline=f"the data loader of {job.name(ranks)} failed{write_at(site)}: {cut(events[0].text)}",
            confidence=Confidence.HIGH if ranks else Confidence.MEDIUM,
            evidence=quote_some(events),
            next_steps=(NEXT_STEPS[FailureKind.DATA_LOADER].format(at=write_at(site)),),
            onset=find_earliest(event.at for event in events),
            call_site=site,
            missing=missing,
        )
    ]
