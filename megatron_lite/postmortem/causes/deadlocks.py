"""Ranks that wait for each other, each in a call that the other has not entered."""

from collections import Counter, defaultdict

from megatron_lite.postmortem.call_sites import DISTRIBUTED, Activity, find_call_site
from megatron_lite.postmortem.causes.absent_ranks import WHICH_CALL, cite_places
from megatron_lite.postmortem.causes.base import (
    MAX_CITED,
    Confidence,
    Suspicion,
    cite_call,
    cite_end,
    write_at,
    write_wait,
)
from megatron_lite.postmortem.causes.call_habits import sign_place
from megatron_lite.postmortem.causes.wait_times import HOW_LONG, is_brief, may_end, measure_wait
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import FailureKind
from megatron_lite.postmortem.rank_lists import name_ranks

SENDS = ("send", "isend")
SAME_ORDER = "Make these calls in the same order on all ranks."
MAX_SITES_NAMED = 3


def find_circles(job: ObservedJob) -> list[Suspicion]:
    """Find ranks whose recordings show that they wait for each other."""
    circle = job.roots.circle
    if not circle:
        return []
    waits = [job.waits[rank] for rank in circle]
    first = waits[0]
    other = next((wait for wait in waits if wait.title != first.title), waits[-1])
    evidence = []
    for wait in waits[:MAX_CITED]:
        evidence.append(cite_call(job, wait.call, f"waits in {wait.title} for {name_ranks(wait.awaited)}"))
    earliest = min(waits, key=lambda wait: wait.call.created_ns)
    lasted = write_wait(measure_wait(job, earliest.call))
    each = f"rank {first.rank} in {first.title}, rank {other.rank} in {other.title}"
    ranks = _find_departing(job, circle)
    departs = "" if ranks == circle else f"; no other rank makes the call of {name_ranks(ranks)} there"
    # where members of a group have no recording, one of the circle may depart from what those do
    is_unread = any(wait.is_guess or (wait.group is not None and wait.group.unread) for wait in waits)
    confidence = Confidence.MEDIUM if is_unread or ranks != circle else Confidence.HIGH
    missing: tuple[str, ...] = ()
    # ranks may call ahead of each other, and wait later
    if may_end(job, earliest.call):
        confidence = Confidence.LOW
        missing = (HOW_LONG,)
    return [
        Suspicion(
            kind=FailureKind.OTHER_ORDER,
            ranks=ranks,
            headline=f"{job.name(circle)} wait for each other{lasted}: {each}{departs}",
            confidence=confidence,
            evidence=tuple(evidence),
            next_steps=(SAME_ORDER,),
            missing=missing,
            onset=earliest.call.created_s,
            collective=first.title,
            call_site=first.call.call_site,
            is_wait=True,
            is_brief=is_brief(job, earliest.call),
        )
    ]


def _find_departing(job: ObservedJob, circle: tuple[int, ...]) -> tuple[int, ...]:
    """Find the one rank of a circle whose call the fewest ranks have made as often; all of it where none stands out.

    Args:
        job: The job.
        circle: Ranks that wait for each other.
    """
    if any(job.calls.is_partial(rank) for rank in job.calls.by_rank):
        return circle
    made = {}
    for rank, calls in job.calls.by_rank.items():
        made[rank] = Counter(sign_place(call) for call in calls)
    support = {}
    for rank in circle:
        sign = sign_place(job.waits[rank].call)
        own = made[rank][sign]
        support[rank] = sum(counts[sign] >= own for counts in made.values())
    fewest = min(support.values())
    departing = tuple(rank for rank in circle if support[rank] == fewest)
    return departing if len(departing) == 1 else circle


def find_stack_circles(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that all wait, at different lines, as their stacks show; recordings would tell more."""
    # autograd waits for gradients of others without a frame that says so
    waiting = tuple(sorted((*job.list_at(Activity.WAITS_FOR_RANKS), *job.list_at(Activity.BACKWARD))))
    if job.calls.recordings or len(waiting) < 2 or len(waiting) < len(job.places):
        return []
    by_site: dict[str, list[int]] = defaultdict(list)
    for rank in waiting:
        by_site[job.places[rank].call_site].append(rank)
    if len(by_site) < 2:
        return []
    sizes = sorted(len(ranks) for ranks in by_site.values())
    ranks = waiting
    if sizes[0] < sizes[1]:
        (ranks,) = (tuple(several) for several in by_site.values() if len(several) == sizes[0])
    unread = job.list_unknown(waiting)
    missing = [WHICH_CALL]
    if unread:
        missing.append(f"stacks of {name_ranks(unread)}: whether they wait, too.")
    sites = " and ".join(list(by_site)[:MAX_SITES_NAMED])
    return [
        Suspicion(
            kind=FailureKind.OTHER_ORDER,
            ranks=ranks,
            headline=f"all ranks wait for others, at different lines: {sites}",
            confidence=Confidence.LOW if unread or job.list_at(Activity.BACKWARD) else Confidence.MEDIUM,
            evidence=tuple(cite_places(job, waiting)),
            next_steps=(SAME_ORDER,),
            call_site=job.places[ranks[0]].call_site,
            missing=tuple(missing),
            is_wait=True,
        )
    ]


def find_senders(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that all gave up sending, or still send, while nobody takes: gloo does not record messages."""
    senders = []
    for rank, one in job.ranks.items():
        frames = one.end.frames if one.end is not None else ()
        if any(frame.function in SENDS and DISTRIBUTED.search(frame.file) for frame in frames):
            senders.append(rank)
    if len(senders) < 2 or len(senders) < len(job.ranks):
        return []
    end = job.ranks[senders[0]].end
    site = find_call_site(end.frames) if end is not None else ""
    evidence = []
    for rank in senders[:MAX_CITED]:
        sent = job.ranks[rank].end
        if sent is not None:
            evidence.append(cite_end(job, sent, f"ended in a send{write_at(find_call_site(sent.frames))}"))
    return [
        Suspicion(
            kind=FailureKind.OTHER_ORDER,
            ranks=tuple(senders),
            headline=f"{name_ranks(senders)} all send, and nobody takes: each waits for the next one{write_at(site)}",
            confidence=Confidence.MEDIUM,
            evidence=tuple(evidence),
            next_steps=("Let every second rank take before it sends, or use batch_isend_irecv.",),
            call_site=site,
            is_wait=True,
        )
    ]
