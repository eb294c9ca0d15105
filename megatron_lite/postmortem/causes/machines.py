"""GPUs, machines and batch systems: what befalls a job from outside."""

import re
from collections.abc import Sequence

from megatron_lite.postmortem.causes.base import MAX_CITED, Confidence, Suspicion, cite_end, cut, quote_some
from megatron_lite.postmortem.evidence import EventKind, LogEvent
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind, RankEnd, name_signal
from megatron_lite.postmortem.rank_lists import does, find_earliest, list_ranks
from megatron_lite.xid_errors import XID_NAMES, is_of_hardware

BATCH_EVENTS = {
    EventKind.JOB_PREEMPTED: "the batch system preempted the job",
    EventKind.JOB_TIME_LIMIT: "the job reached its time limit",
    EventKind.JOB_CANCELED: "the job was canceled",
}
BROKEN = re.compile(r"closed|reset|Broken pipe|pair closure|got 0 bytes", re.IGNORECASE)
ON_DEVICE = re.compile(r"CUDA|cuBLAS|cuDNN|NCCL|\bGPU\b", re.IGNORECASE)
POLITE = (2, 10, 12, 15)
MAX_STATES_NAMED = 3


def find_device_faults(job: ObservedJob) -> list[Suspicion]:
    """Find GPUs that their driver reports to have failed, by Xid."""
    events = job.list_recent_events(EventKind.XID)
    hard = [event for event in events if is_of_hardware(event.code)]
    chosen = hard or events
    if not chosen:
        return []
    first = chosen[0]
    ranks = _find_ranks_of(job, chosen)
    hosts = tuple(sorted({event.host for event in chosen if event.host}))
    name = XID_NAMES.get(first.code or 0, "")
    number = "" if first.code is None else f" {first.code}"
    what = f"Xid{number}" + (f" ({name})" if name else "")
    where = ", ".join(part for part in (first.device, first.host or "") if part)
    at = f" of {where}" if where else ""
    confidence = Confidence.HIGH if hard else Confidence.MEDIUM
    alternatives = () if hard else ("a kernel of the program made it: this Xid need not be the GPU's fault.",)
    missing: tuple[str, ...] = ()
    if not ranks:
        confidence = Confidence.MEDIUM
        missing = (f"which rank used the GPU{at}: no record connects them.",)
    who = f", of {job.name(ranks)}" if ranks else ""
    return [
        Suspicion(
            kind=FailureKind.DEVICE_FAULT,
            ranks=ranks,
            headline=f"the GPU{at}{who} failed with {what}",
            confidence=confidence,
            evidence=quote_some(chosen),
            next_steps=(f"Drain {hosts[0] if hosts else 'the machine'} and test the GPU (dcgmi diag -r 3).",),
            onset=first.at,
            hosts=hosts,
            alternatives=alternatives,
            missing=missing,
            may_be_harmless=not ranks and _has_failed_elsewhere(job),
        )
    ]


def _has_failed_elsewhere(job: ObservedJob) -> bool:
    """Whether a rank ended with an exception that speaks of no GPU, so that a GPU need not be the reason."""
    return any(end.kind is EndKind.OWN_ERROR and not ON_DEVICE.search(end.words) for end in job.ends)


def _find_ranks_of(job: ObservedJob, events: Sequence[LogEvent]) -> tuple[int, ...]:
    """Find the ranks of events: those named, else the only rank whose GPU may have failed it on their machines."""
    named = list_ranks(events)
    if named:
        return named
    hosts = {event.host for event in events if event.host}
    failed = {*list_ranks(end for end in job.ends if _has_failed_on(end, hosts))}
    failed.update(list_ranks(job.list_events(EventKind.DEVICE_ERROR)))
    return tuple(failed) if len(failed) == 1 else ()


def _has_failed_on(end: RankEnd, hosts: set[str]) -> bool:
    """Whether a process failed of its own, perhaps for its GPU, and may have run on one of these machines."""
    speaks_of_device = end.kind is EndKind.OWN_ERROR and ON_DEVICE.search(end.words) is not None
    return end.may_be_on(hosts) and (speaks_of_device or end.kind is EndKind.SIGNAL)


def find_device_errors(job: ObservedJob) -> list[Suspicion]:
    """Find ranks on which CUDA reports that a kernel failed, where no exception says so."""
    events = job.list_events(EventKind.DEVICE_ERROR)
    is_told = any(end.kind is EndKind.OWN_ERROR for end in job.ends)
    if not events or is_told:
        return []
    first = events[0]
    ranks = tuple(sorted({event.rank for event in events if event.rank is not None and event.at == first.at}))
    is_hard = "ECC" in first.text
    is_assert = "assert" in first.text.lower()
    who = job.name(ranks)
    return [
        Suspicion(
            kind=FailureKind.USER_EXCEPTION if is_assert else FailureKind.DEVICE_FAULT,
            ranks=ranks,
            headline=f"a kernel of {who} failed: {cut(first.text)}",
            confidence=Confidence.HIGH if is_hard and ranks else Confidence.MEDIUM,
            evidence=quote_some(events),
            next_steps=("Run with CUDA_LAUNCH_BLOCKING=1 once to see the line; look for Xid lines in dmesg.",),
            onset=first.at,
            alternatives=() if is_hard else ("a kernel of the program reads beyond its tensors.",),
            missing=("kernel log (dmesg) of the machine: an Xid line tells a broken GPU from a broken kernel.",),
        )
    ]


def find_device_memory(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that ran out of device memory by a line of a log, where no exception says so."""
    events = job.list_events(EventKind.DEVICE_OUT_OF_MEMORY)
    is_told = any("OutOfMemory" in end.error or "out of memory" in end.message for end in job.ends)
    if not events or is_told:
        return []
    ranks = list_ranks(events)
    who = job.name(ranks)
    return [
        Suspicion(
            kind=FailureKind.DEVICE_MEMORY,
            ranks=ranks,
            headline=f"{who} ran out of device memory",
            confidence=Confidence.HIGH if ranks else Confidence.MEDIUM,
            evidence=quote_some(events),
            next_steps=("Lower the micro-batch or turn on recomputation; a memory snapshot says what holds it.",),
            onset=events[0].at,
        )
    ]


def find_preemption(job: ObservedJob) -> list[Suspicion]:
    """Find a job that the batch system, or a person, ended."""
    found = []
    for kind, words in BATCH_EVENTS.items():
        events = job.list_events(kind)
        if events:
            found.append(_suspect_preemption(words, events, Confidence.HIGH))
    if found:
        return found[:1]
    signals = [event for event in job.list_events(EventKind.SIGNAL) if event.code in POLITE or event.code is None]
    from_outside = [event for event in signals if event.rank is None]
    if from_outside:
        number = from_outside[0].code
        name = name_signal(-number) if number else "a signal"
        return [_suspect_preemption(f"the launcher was asked to end by {name}", from_outside, Confidence.MEDIUM)]
    return _find_polite_ends(job)


def _suspect_preemption(words: str, events: Sequence[LogEvent], confidence: Confidence) -> Suspicion:
    return Suspicion(
        kind=FailureKind.PREEMPTED,
        ranks=(),
        headline=words,
        confidence=confidence,
        evidence=quote_some(events),
        next_steps=(
            "Submit it again from the newest checkpoint.",
            "--exit-signal-handler (or a handler of your own) saves a checkpoint when the signal comes.",
        ),
        onset=find_earliest(event.at for event in events),
    )


def _name_signal_of(asked: Sequence[RankEnd]) -> str:
    """Name the signal that ended processes, where all that tell it agree."""
    names = {end.error for end in asked if end.error.startswith("SIG")}
    names |= {name_signal(end.exit_code) for end in asked if end.exit_code is not None}
    return names.pop() if len(names) == 1 else "a signal"


def _find_polite_ends(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that were all asked to end, where no rank failed before."""
    ends = [one.end for one in job.ranks.values() if one.end is not None]
    asked = [end for end in ends if end.kind is EndKind.ENDED]
    saw_failure = job.list_events(EventKind.LAUNCHER_SAW_FAILURE)
    if job.list_unknown(list_ranks(asked)):
        # one of the others may have failed first
        saw_failure += job.list_events(EventKind.LAUNCHER_ENDED_OTHERS)
    is_all = bool(asked) and len(asked) == len(ends)
    if not is_all or saw_failure:
        return []
    times = [end.at for end in asked if end.at is not None]
    facts = tuple(Fact(text=f"rank {end.rank} was asked to end", source=end.source) for end in asked[:MAX_STATES_NAMED])
    ranks = list_ranks(asked)
    everybody = len(ranks) == (job.world_size or len(ranks))
    who = "all ranks" if everybody else job.name(ranks)
    was = "were" if everybody else does(ranks, "was", "were")
    return [
        Suspicion(
            kind=FailureKind.PREEMPTED,
            ranks=() if everybody else ranks,
            headline=f"{who} {was} asked to end by {_name_signal_of(asked)}, and none had failed before",
            confidence=Confidence.MEDIUM,
            evidence=facts,
            next_steps=("Find who sent it, a person or a batch system; then start from the newest checkpoint.",),
            onset=min(times, default=None),
            missing=("the batch system's own words (slurm-JOB.out, sacct): they tell who ended the job, and why.",),
        )
    ]


def find_lost_nodes(job: ObservedJob) -> list[Suspicion]:
    """Find machines that failed as a whole."""
    events = job.list_events(EventKind.NODE_FAILED)
    if not events:
        return []
    hosts = tuple(sorted({event.host for event in events if event.host}))
    ranks = tuple(rank for rank, one in job.ranks.items() if one.host and one.host in hosts)
    named = ", ".join(hosts) or "a machine of the job"
    return [
        Suspicion(
            kind=FailureKind.DIED,
            ranks=ranks,
            headline=f"{named} failed as a whole" + (f", with {job.name(ranks)}" if ranks else ""),
            confidence=Confidence.HIGH if hosts else Confidence.MEDIUM,
            evidence=quote_some(events),
            next_steps=(f"Exclude {named} and submit again from the newest checkpoint.",),
            onset=events[0].at,
            hosts=hosts,
        )
    ]


def find_stopped(job: ObservedJob) -> list[Suspicion]:
    """Find processes that a signal or a debugger has stopped."""
    ranks = tuple(rank for rank, one in job.ranks.items() if one.was_stopped)
    if not ranks:
        return []
    facts = []
    for rank in ranks[:MAX_STATES_NAMED]:
        last = job.ranks[rank].progress[-1]
        facts.append(Fact(text=f"rank {rank}: process {last.pid} is stopped", source=last.source))
    last = job.ranks[ranks[0]].progress[-1]
    advice = "Find who stopped it, a debugger or a batch system."
    if job.ranks[ranks[0]].end is None:
        advice = f"`kill -CONT {last.pid}` lets it go on; find who stopped it, a debugger or a batch system."
    was = does(ranks, "is", "are") if job.ranks[ranks[0]].end is None else does(ranks, "was", "were")
    return [
        Suspicion(
            kind=FailureKind.STOPPED,
            ranks=ranks,
            headline=f"{job.name(ranks)} {was} stopped by a signal or a debugger",
            confidence=Confidence.HIGH,
            evidence=tuple(facts),
            next_steps=(advice,),
            onset=None,
        )
    ]


def find_divergence(job: ObservedJob) -> list[Suspicion]:
    """Find a loss or gradients that are no longer finite."""
    events = job.list_events(EventKind.NOT_FINITE)
    if not events:
        return []
    ranks = tuple(sorted({event.rank for event in events if event.rank is not None and event.at == events[0].at}))
    everybody = len(ranks) == (job.world_size or len(ranks) + 1)
    return [
        Suspicion(
            kind=FailureKind.DIVERGED,
            ranks=() if everybody else ranks,
            headline=f"the training diverged: {cut(events[0].text)}",
            confidence=Confidence.HIGH,
            evidence=quote_some(events),
            next_steps=_advise_on_divergence(job, events[0]),
            onset=events[0].at,
            may_be_harmless=True,
        )
    ]


def _advise_on_divergence(job: ObservedJob, event: LogEvent) -> tuple[str, ...]:
    """Advise what to look at; runs of this package's trainer can be replayed."""
    look = "Look at the batch, the learning rate and the gradients of the steps before."
    is_own = any("runs" in kind for kind in job.evidence.read)
    if not is_own or event.code is None:
        return (look,)
    replay = (
        f"`megatron-lite replay RUN --step {event.code}` says whether data, numerics, the rate or hardware made it."
    )
    return (replay, look)


def find_network_errors(job: ObservedJob) -> list[Suspicion]:
    """Find adapters and links that failed, and connections that broke without a rank that had gone."""
    errors = job.list_events(EventKind.NETWORK_ERROR)
    if errors:
        ranks = list_ranks(errors)
        hosts = tuple(sorted({event.host for event in errors if event.host}))
        where = f" on {hosts[0]}" if len(hosts) == 1 else ""
        who = f", as {job.name(ranks)} saw" if ranks else ""
        return [
            Suspicion(
                kind=FailureKind.NETWORK,
                ranks=ranks if len(ranks) == 1 else (),
                headline=f"the network failed{where}{who}: {cut(errors[0].text)}",
                confidence=Confidence.MEDIUM,
                evidence=quote_some(errors),
                next_steps=(
                    "Look at the link: ibstat, ethtool, the switch's counters; exclude the machine and retry.",
                ),
                onset=errors[0].at,
                hosts=hosts,
                alternatives=("the peer's process had ended first: its log would say so.",),
            )
        ]
    return _find_lost_connections(job)


def _find_lost_connections(job: ObservedJob) -> list[Suspicion]:
    """Find connections that broke although no process is known to have gone before."""
    lost = job.list_events(EventKind.CONNECTION_LOST)
    ends = [end for end in job.ends if end.kind is EndKind.LOST_OTHERS and BROKEN.search(end.words)]
    if not lost and not ends:
        return []
    peers = {event.peer for event in lost if event.peer is not None}
    ranks = tuple(sorted(peers)) if len(peers) == 1 else ()
    # whoever lost a connection was there until then
    all_lost = set(list_ranks(ends)) == set(range(job.world_size or 0)) != set()
    evidence = quote_some(lost)
    evidence += tuple(cite_end(job, end, f"ended with {cut(end.words)}") for end in ends[:MAX_CITED])
    what = f"connections to {job.name(ranks)} broke" if ranks else "connections between ranks broke"
    return [
        Suspicion(
            kind=FailureKind.NETWORK,
            ranks=ranks,
            headline=f"{what}, and nothing that was read says that a process had gone before",
            confidence=Confidence.MEDIUM if all_lost else Confidence.LOW,
            evidence=evidence,
            next_steps=("Read the log of the rank at the other end; look at the network between the machines.",),
            onset=find_earliest((*(event.at for event in lost), *(end.at for end in ends))),
            is_wait=True,
            short=what,
            alternatives=("the process at the other end had ended: its log or exit code would say so.",),
        )
    ]
