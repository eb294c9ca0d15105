"""The way from a job's evidence to one conclusion: which cause came first, and what only followed.

Every rule says what it suspects. A suspicion that another one explains is a consequence of it; of the others the first
in time is the cause.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.postmortem.causes.absent_ranks import RECORD, find_absent_ranks
from megatron_lite.postmortem.causes.base import Confidence, Rule, Suspicion
from megatron_lite.postmortem.causes.deadlocks import find_circles, find_senders, find_stack_circles
from megatron_lite.postmortem.causes.entered_calls import find_half_completed, find_late_ranks, find_stuck_calls
from megatron_lite.postmortem.causes.healthy_jobs import find_good_end, find_progress, find_silence
from megatron_lite.postmortem.causes.machines import (
    find_device_errors,
    find_device_faults,
    find_device_memory,
    find_divergence,
    find_lost_nodes,
    find_network_errors,
    find_preemption,
    find_stopped,
)
from megatron_lite.postmortem.causes.mismatches import find_mismatches
from megatron_lite.postmortem.causes.process_errors import (
    find_deaths,
    find_exceptions,
    find_first_seen,
    find_lost_loaders,
    find_lost_memory,
)
from megatron_lite.postmortem.causes.slow_ranks import find_slow_ranks
from megatron_lite.postmortem.causes.unheard_ranks import find_unheard_ranks
from megatron_lite.postmortem.causes.wait_times import MIN_HANG_S
from megatron_lite.postmortem.evidence import EventKind, JobEvidence
from megatron_lite.postmortem.observed_job import ObservedJob, observe_job
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind, Postmortem
from megatron_lite.postmortem.rank_ends import EndKind, RankEnd
from megatron_lite.postmortem.rank_lists import find_earliest, list_ranks, name_ranks
from megatron_lite.postmortem.rank_rows import build_rows

RULES: tuple[Rule, ...] = (
    find_lost_memory,
    find_device_faults,
    find_lost_nodes,
    find_lost_loaders,
    find_device_memory,
    find_exceptions,
    find_device_errors,
    find_deaths,
    find_stopped,
    find_unheard_ranks,
    find_preemption,
    find_mismatches,
    find_circles,
    find_half_completed,
    find_late_ranks,
    find_slow_ranks,
    find_absent_ranks,
    find_stack_circles,
    find_senders,
    find_stuck_calls,
    find_network_errors,
    find_divergence,
    find_good_end,
    find_progress,
    find_silence,
)
# one is the reason of the other, on the same rank or machine
REASONS = {
    FailureKind.HOST_MEMORY: (FailureKind.DIED, FailureKind.DATA_LOADER, FailureKind.USER_EXCEPTION),
    FailureKind.DEVICE_FAULT: (FailureKind.USER_EXCEPTION, FailureKind.DIED, FailureKind.DEVICE_MEMORY),
    FailureKind.DATA_LOADER: (FailureKind.USER_EXCEPTION, FailureKind.DIED),
    FailureKind.DEVICE_MEMORY: (FailureKind.USER_EXCEPTION, FailureKind.DIED),
    FailureKind.USER_EXCEPTION: (FailureKind.DIED,),
    # whoever loses patience with a stopped process kills it
    FailureKind.STOPPED: (FailureKind.DIED,),
}
# between two clocks, and of records that know whole seconds only
SAME_MOMENT_S = 1.0
# what is left of a job says little of when the first sign of trouble was
DISAGREEMENTS = (FailureKind.OTHER_ARGUMENTS, FailureKind.OTHER_ORDER)
MAX_FACTS_KEPT = 12
MAX_CONSEQUENCES = 12
TO_RECORD = (
    (
        "flight recordings",
        "TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_TEMP_FILE=DIR/rank_",
        "who entered which collective",
    ),
    ("stacks", "py-spy dump --pid PID of each rank, or `megatron-lite watch`", "where each rank was"),
    ("console logs", "torchrun --log-dir DIR --tee 3", "what each rank said at its end"),
)


def conclude(evidence: JobEvidence) -> Postmortem:
    """Draw the conclusion on a job from all that is known of it.

    Args:
        evidence: What readers found in files, or ranks told each other.

    Returns:
        One verdict, with what shows it, what only followed, and what is missing.
    """
    job = observe_job(evidence)
    suspicions: list[Suspicion] = []
    for rule in RULES:
        for suspicion in rule(job):
            _add_suspicion(suspicions, suspicion)
    if not suspicions:
        return _conclude_nothing(job)
    cause, rivals, consequences = choose_cause(job, suspicions)
    return _write_postmortem(job, cause, rivals, consequences)


def _add_suspicion(suspicions: list[Suspicion], suspicion: Suspicion) -> None:
    """Add a suspicion; to one of the same class and rank only its facts are added, and the surer one stays."""
    for place, former in enumerate(suspicions):
        is_alike = former.kind is suspicion.kind and former.is_wait == suspicion.is_wait
        if is_alike and _are_together(former, suspicion):
            suspicions[place] = _unite_suspicions(former, suspicion)
            return
    suspicions.append(suspicion)


def _unite_suspicions(former: Suspicion, latter: Suspicion) -> Suspicion:
    """Unite two suspicions of one thing: the surer one with the facts of both."""
    best, other = sorted((former, latter), key=_measure_strength, reverse=True)
    return replace(
        best,
        evidence=(*best.evidence, *other.evidence),
        call_site=best.call_site or other.call_site,
        onset=find_earliest((best.onset, other.onset)),
    )


def _measure_strength(suspicion: Suspicion) -> tuple[Confidence, bool]:
    return suspicion.confidence, bool(suspicion.call_site)


def choose_cause(
    job: ObservedJob, suspicions: Sequence[Suspicion]
) -> tuple[Suspicion, list[Suspicion], list[Suspicion]]:
    """Choose the cause among suspicions.

    Args:
        job: The job.
        suspicions: At least one.

    Returns:
        The cause, the suspicions that nothing explains beside it, and those that it explains.
    """
    roots = []
    for suspicion in suspicions:
        if not any(explains(other, suspicion) for other in suspicions if other is not suspicion):
            roots.append(suspicion)
    if not roots:
        # each explains another one: times contradict each other
        roots = list(suspicions)
    first_seen = find_first_seen(job)
    cause = min(roots, key=lambda one: _rank_suspicion(one, first_seen))
    rivals = [one for one in roots if one is not cause and not explains(cause, one)]
    consequences = [one for one in suspicions if one is not cause and one not in rivals]
    return cause, rivals, consequences


def _rank_suspicion(suspicion: Suspicion, first_seen: int | None) -> tuple[bool, bool, bool, float, int]:
    """Order suspicions that nothing explains: whom the launcher saw first, then the earliest, then the surest."""
    return (
        suspicion.may_be_harmless,
        suspicion.kind is FailureKind.NONE,
        suspicion.is_wait or first_seen is None or first_seen not in suspicion.ranks,
        suspicion.onset if suspicion.onset is not None else float("inf"),
        -suspicion.confidence,
    )


def explains(one: Suspicion, other: Suspicion) -> bool:
    """Tell whether one cause makes another one a mere consequence."""
    if other.kind is FailureKind.NONE:
        return not _is_over(other, one)
    if one.kind is FailureKind.NONE and _is_over(one, other):
        return True
    if one.kind is FailureKind.NONE or one.may_be_harmless:
        return False
    if _is_reason(one, other):
        return not _is_much_later(one, other)
    if _is_reason(other, one):
        return False
    if one.kind is FailureKind.NETWORK and not one.is_wait and other.is_abort:
        return True
    if other.is_wait and one.is_wait:
        return _explains_wait(one, other)
    if other.is_wait:
        return _ends_wait(one, other)
    if one.is_wait:
        return _wait_ends(one, other)
    return _is_much_later(other, one)


def _is_reason(one: Suspicion, other: Suspicion) -> bool:
    """Whether one is of a kind that makes the other, at the same place. What ranks wait for, others tell."""
    return not one.is_wait and other.kind in REASONS.get(one.kind, ()) and _are_together(one, other)


def _is_over(well: Suspicion, other: Suspicion) -> bool:
    """Whether a job that is well shows that a wait, or a disagreement, did no harm: it was brief, or all ended well."""
    return other.is_brief or (other.is_wait and well.confidence is Confidence.HIGH)


def _are_together(one: Suspicion, other: Suspicion) -> bool:
    """Whether two befell the same rank, or the same machine where one names no rank."""
    if one.ranks and other.ranks:
        return bool(set(one.ranks) & set(other.ranks))
    if one.hosts and other.hosts:
        return bool(set(one.hosts) & set(other.hosts))
    return True


def _is_much_later(one: Suspicion, other: Suspicion) -> bool:
    """Whether one is known to have begun after the other, by more than clocks differ."""
    if one.onset is None or other.onset is None:
        return False
    return one.onset - other.onset > SAME_MOMENT_S


def _explains_wait(one: Suspicion, other: Suspicion) -> bool:
    """Order two that ranks' waiting suggests: ranks that disagree wait, a late rank was absent before."""
    if one.kind in DISAGREEMENTS and other.kind not in DISAGREEMENTS:
        return True
    if one.kind in DISAGREEMENTS and other.kind in DISAGREEMENTS:
        return one.confidence > other.confidence
    if other.kind in DISAGREEMENTS:
        return False
    order = (FailureKind.SLOW, FailureKind.DATA_LOADER, FailureKind.NEVER_ENTERED, FailureKind.STUCK_IN_KERNEL)
    places = {kind: place for place, kind in enumerate(order)}
    return places.get(one.kind, len(order)) < places.get(other.kind, len(order))


def _is_end_of_hang(one: Suspicion, wait: Suspicion) -> bool:
    """Whether a process was killed only after others had waited for long, as whoever ends a hung job does it."""
    if not one.is_kill or wait.is_brief or wait.onset is None or one.onset is None:
        return False
    return one.onset - wait.onset > MIN_HANG_S


def _ends_wait(one: Suspicion, wait: Suspicion) -> bool:
    """Whether what befell a rank explains why others wait: it is awaited, or it came before the waiting."""
    if one.kind is FailureKind.PREEMPTED:
        return wait.is_brief or (not _is_much_later(one, wait) and wait.onset is not None and one.onset is not None)
    if _is_end_of_hang(one, wait):
        return False
    if not wait.ranks or wait.kind is FailureKind.NETWORK or set(one.ranks) & set(wait.ranks):
        return not one.is_abort or wait.kind not in (*DISAGREEMENTS, FailureKind.NETWORK)
    if one.is_abort and not set(one.ranks) & set(wait.ranks):
        return False
    if one.onset is None or wait.onset is None:
        return wait.kind not in DISAGREEMENTS
    return not _is_much_later(one, wait)


def _wait_ends(wait: Suspicion, other: Suspicion) -> bool:
    """Whether waiting explains an end: a job that hangs is ended by somebody, and libraries abort who disagree."""
    if other.kind is FailureKind.PREEMPTED:
        return not _ends_wait(other, wait)
    if other.is_abort and not set(other.ranks) & set(wait.ranks):
        # libraries abort a process whose call has waited for too long
        return True
    if wait.kind in DISAGREEMENTS and other.is_abort:
        return True
    return not _ends_wait(other, wait) and _is_much_later(other, wait)


def _write_postmortem(
    job: ObservedJob, cause: Suspicion, rivals: Sequence[Suspicion], consequences: Sequence[Suspicion]
) -> Postmortem:
    """Write the conclusion down."""
    confidence = cause.confidence
    serious = [one for one in rivals if not one.may_be_harmless]
    if serious:
        confidence = min(confidence, Confidence.MEDIUM if _is_clearly_first(cause, serious) else Confidence.LOW)
    corroboration = _corroborate(job, cause)
    if cause.kind is not FailureKind.NONE and job.list_unknown(job.ranks) and not corroboration:
        # a rank of which nothing was read may have failed before
        confidence = min(confidence, Confidence.MEDIUM)
    missing = [*cause.missing, *_list_missing(job, cause)]
    alternatives = [*cause.alternatives, *(f"{one.kind.value}: {one.headline}" for one in rivals)]
    evidence = [*cause.evidence, *corroboration]
    return Postmortem(
        kind=cause.kind,
        ranks=cause.ranks,
        verdict=cause.headline[:1].upper() + cause.headline[1:],
        confidence=confidence.word,
        collective=cause.collective,
        call_site=cause.call_site,
        evidence=tuple(dict.fromkeys(evidence))[:MAX_FACTS_KEPT],
        consequences=tuple(_list_consequences(job, cause, consequences)),
        next_steps=tuple(dict.fromkeys(cause.next_steps)),
        missing=tuple(dict.fromkeys(missing)),
        rows=build_rows(job, cause.ranks),
        alternatives=tuple(dict.fromkeys(alternatives)),
    )


def _is_clearly_first(cause: Suspicion, rivals: Sequence[Suspicion]) -> bool:
    return all(_is_much_later(rival, cause) for rival in rivals) or all(
        rival.confidence < cause.confidence for rival in rivals
    )


def _corroborate(job: ObservedJob, cause: Suspicion) -> list[Fact]:
    """Cite the launcher where it saw the same rank fail first."""
    facts = []
    for event in job.list_events(EventKind.LAUNCHER_SAW_FAILURE):
        if event.rank is not None and event.rank in cause.ranks and not cause.is_wait:
            facts.append(Fact(text=f"the launcher saw rank {event.rank} fail first", source=event.source))
    return facts[:1]


def _list_consequences(job: ObservedJob, cause: Suspicion, suspicions: Sequence[Suspicion]) -> list[Fact]:
    """List what only followed: explained suspicions, and ranks that ended because of others."""
    facts = []
    for one in suspicions:
        if one.kind is not FailureKind.NONE:
            source = one.evidence[0].source if one.evidence else ""
            facts.append(Fact(text=one.short or one.headline, source=source))
    alike: dict[str, list[RankEnd]] = defaultdict(list)
    for rank, observed in job.ranks.items():
        end = observed.end
        if end is not None and end.is_consequence and rank not in cause.ranks:
            alike[end.words or "ended by who ended the others"].append(end)
    for words, ends in alike.items():
        facts.append(Fact(text=f"{name_ranks(list_ranks(ends))}: {words}", source=ends[0].source))
    return facts[:MAX_CONSEQUENCES]


def _list_missing(job: ObservedJob, cause: Suspicion) -> list[str]:
    """List what could not be read, or of whom nothing was."""
    missing = list(job.evidence.unread)
    known = set(job.ranks)
    silent = job.list_unknown(known)
    if silent and cause.kind is not FailureKind.NONE:
        missing.append(
            f"anything of {name_ranks(silent)}: whether {'it' if len(silent) == 1 else 'they'} failed before."
        )
    return missing


def _conclude_nothing(job: ObservedJob) -> Postmortem:
    """The answer where no rule suspects anything: what was seen, and what would tell more."""
    missing = [f"{kind} ({how}): {tells}." for kind, how, tells in TO_RECORD if not _has_read(job, kind)]
    ends = [end for end in job.ends if end.kind not in (EndKind.WELL, EndKind.UNKNOWN)]
    seen = _describe_ends(job)
    verdict = "Nothing that was read shows a failure"
    if ends:
        verdict = f"The job failed, and nothing that was read tells why: {seen}"
    return Postmortem(
        kind=FailureKind.UNKNOWN,
        ranks=(),
        verdict=verdict,
        confidence=Confidence.LOW.word,
        consequences=tuple(_list_consequences(job, _NOBODY, ())),
        next_steps=(RECORD,),
        missing=(*missing, *job.evidence.unread),
        rows=build_rows(job, ()),
    )


def _describe_ends(job: ObservedJob) -> str:
    followers = [rank for rank, one in job.ranks.items() if one.end is not None and one.end.is_consequence]
    if followers:
        return f"{name_ranks(followers)} only followed others"
    return "no process said why it ended"


def _has_read(job: ObservedJob, kind: str) -> bool:
    of_kind = {"flight recordings": job.evidence.recordings, "stacks": job.evidence.stacks}
    return bool(of_kind.get(kind, ())) or kind in job.evidence.read


_NOBODY = Suspicion(FailureKind.UNKNOWN, (), "", Confidence.LOW)
