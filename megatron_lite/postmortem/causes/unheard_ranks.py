"""Ranks that were asked how they are and did not answer, and ranks that never met the others."""

from megatron_lite.postmortem.causes.base import Confidence, Suspicion
from megatron_lite.postmortem.evidence import UnansweredRequest
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_lists import does, find_earliest, list_ranks

MEETING = "See that {who} {was} started with the same MASTER_ADDR and MASTER_PORT, and can reach them."
LOOK_AT_PROCESS = "Look at the process of {who}: ps, /proc/PID/stack, py-spy dump --pid PID, its machine's console."
STOPPED_ELSE = "its process is stopped, by a signal or a debugger."
CUT_OFF_ELSE = "its machine is cut off from the others."
BUSY_ELSE = "a call into C keeps its interpreter, and it would answer later."


def find_unheard_ranks(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that never arrived, that are gone, or that are silent."""
    absent = []
    refusing = []
    silent = []
    for request in job.evidence.unanswered:
        observed = job.ranks.get(request.rank)
        is_known = observed is not None and (observed.end is not None or observed.process_state in ("stopped", "dead"))
        if is_known:
            continue
        if request.never_arrived:
            absent.append(request)
        elif request.was_refused:
            refusing.append(request)
        else:
            silent.append(request)
    found = []
    if absent:
        found.append(_suspect_absence(job, absent))
    if refusing:
        found.append(_suspect_death(job, refusing))
    if silent:
        found.append(_suspect_silence(job, silent))
    return found


def _cite_requests(requests: list[UnansweredRequest]) -> tuple[Fact, ...]:
    facts = []
    for request in requests:
        facts.append(Fact(text=f"rank {request.rank}: {request.why}", source=request.source))
    return tuple(facts)


def _suspect_absence(job: ObservedJob, absent: list[UnansweredRequest]) -> Suspicion:
    """Suspect ranks that never met the others."""
    ranks = list_ranks(absent)
    who = job.name(ranks)
    of_all = f" of {job.world_size}" if job.world_size else ""
    return Suspicion(
        kind=FailureKind.NEVER_ENTERED,
        ranks=ranks,
        headline=f"{who}{of_all} never arrived at the meeting of all ranks",
        confidence=Confidence.HIGH,
        evidence=_cite_requests(absent),
        next_steps=(MEETING.format(who=who, was=does(ranks, "was", "were")),),
        onset=find_earliest(request.asked_at for request in absent),
    )


def _suspect_death(job: ObservedJob, refusing: list[UnansweredRequest]) -> Suspicion:
    """Suspect ranks where nothing listens any more."""
    ranks = list_ranks(refusing)
    who = job.name(ranks)
    return Suspicion(
        kind=FailureKind.DIED,
        ranks=ranks,
        headline=f"{who} {does(ranks, 'is', 'are')} gone: nothing listens where {does(ranks, 'it', 'they')} did",
        confidence=Confidence.MEDIUM,
        evidence=_cite_requests(refusing),
        next_steps=(LOOK_AT_PROCESS.format(who=who),),
        onset=find_earliest(request.asked_at for request in refusing),
        alternatives=(CUT_OFF_ELSE,),
    )


def _suspect_silence(job: ObservedJob, silent: list[UnansweredRequest]) -> Suspicion:
    """Suspect ranks that say nothing: where the process is seen to run, its interpreter does not."""
    ranks = list_ranks(silent)
    who = job.name(ranks)
    states = {job.ranks[rank].process_state for rank in ranks if rank in job.ranks}
    kind = FailureKind.DIED
    why = "its process has died, is stopped, or is cut off"
    alternatives: tuple[str, ...] = (STOPPED_ELSE, CUT_OFF_ELSE, BUSY_ELSE)
    if states == {"running"}:
        kind = FailureKind.STUCK_IN_KERNEL
        why = "its process runs, and its interpreter does not: a call into C or CUDA does not return"
        alternatives = ()
    return Suspicion(
        kind=kind,
        ranks=ranks,
        headline=f"{who} {does(ranks, 'does', 'do')} not answer: {why}",
        confidence=Confidence.MEDIUM,
        evidence=_cite_requests(silent),
        next_steps=(LOOK_AT_PROCESS.format(who=who),),
        onset=find_earliest(request.asked_at for request in silent),
        alternatives=alternatives,
    )
