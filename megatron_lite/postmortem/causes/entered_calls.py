"""Calls that all ranks of a group have entered: late, or without an end."""

from collections.abc import Mapping, Sequence

from megatron_lite.postmortem.causes.absent_ranks import is_inside_of_call
from megatron_lite.postmortem.causes.base import MAX_CITED, Confidence, Suspicion, cite_call, write_at, write_wait
from megatron_lite.postmortem.causes.wait_times import HOW_LONG, MILLISECONDS, is_brief, may_end, measure_wait
from megatron_lite.postmortem.matched_calls import NANOSECONDS, EnteredCall, MatchedGroup, list_pairs
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import FailureKind
from megatron_lite.postmortem.rank_lists import does, list_ranks, name_ranks
from megatron_lite.postmortem.waits import describe_message
from megatron_lite.units import duration

# a rank came late, not never, when it entered after the others had given up
MIN_LATE_S = 1.0
WITH_ROOT = ("broadcast", "scatter")
ELSE_NETWORK = "the network between the ranks: lines of NCCL (NCCL_DEBUG=WARN) and counters of the links tell."
ELSE_HOST = "the host of the rank was held up between the records of its call and of its start."
ELSE_ROOT = "ranks called it with other roots, which recorders do not note."
ELSE_MEMBER = "a rank of the group has not entered it: the recorder does not tell the group's ranks."
LOOK = "Look at the GPUs (nvidia-smi, Xid lines of dmesg) and at the network between the machines."


def find_late_ranks(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that entered a call only after the others had given up on it."""
    found = []
    for group in job.calls.groups:
        calls = group.calls.get(group.entered_by_all, {})
        late = _find_late(calls)
        if late:
            found.append(_suspect_late(job, group, calls, late))
    return found


def _find_late(calls: Mapping[int, EnteredCall]) -> list[EnteredCall]:
    """Find who entered a call after the timeout of the first; [] where everybody came in time."""
    if len(calls) < 2 or any(call.created_s is None for call in calls.values()):
        return []
    first = min(calls.values(), key=lambda call: call.created_ns)
    limit_ms = first.call.timeout_ms
    if limit_ms is None:
        return []
    limit_s = max(limit_ms / MILLISECONDS, MIN_LATE_S)
    until_ns = first.created_ns + limit_s * NANOSECONDS
    return [call for call in calls.values() if call.created_ns >= until_ns]


def _suspect_late(
    job: ObservedJob, group: MatchedGroup, calls: Mapping[int, EnteredCall], late: Sequence[EnteredCall]
) -> Suspicion:
    """Make a suspicion of ranks that came late to a call.

    Args:
        job: The job.
        group: The group of the call.
        calls: The call of each rank.
        late: Those of the late ranks.
    """
    first = min(calls.values(), key=lambda call: call.created_ns)
    ranks = tuple(sorted(call.rank for call in late))
    behind = duration((late[0].created_ns - first.created_ns) / NANOSECONDS)
    title = group.describe(late[0].name, late[0].number)
    who = job.name(ranks)
    evidence = [cite_call(job, first, f"entered {title} first")]
    for call in late[:MAX_CITED]:
        evidence.append(cite_call(job, call, f"entered it {behind} later"))
    site = late[0].call_site or "the call"
    return Suspicion(
        kind=FailureKind.SLOW,
        ranks=ranks,
        headline=f"{who} entered {title} {behind} after the others, who had given up",
        confidence=Confidence.MEDIUM if group.unread else Confidence.HIGH,
        evidence=tuple(evidence),
        next_steps=(f"Find what {who} does before {site}, or raise the timeout of the process group.",),
        onset=first.created_s,
        collective=title,
        call_site=late[0].call_site,
        is_wait=True,
    )


def find_half_completed(job: ObservedJob) -> list[Suspicion]:
    """Find calls with a root that some ranks have left, for a later one, while others of the group are still inside."""
    for group in job.calls.groups:
        number = group.entered_by_all
        calls = group.calls.get(number, {})
        inside = [
            call for call in calls.values() if not call.has_ended and any(word in call.name for word in WITH_ROOT)
        ]
        have_left = [call for call in calls.values() if group.last.get(call.rank, 0) > number]
        if inside and have_left:
            return [_suspect_root(job, group, inside, have_left)]
    return []


def _suspect_root(
    job: ObservedJob, group: MatchedGroup, inside: Sequence[EnteredCall], have_left: Sequence[EnteredCall]
) -> Suspicion:
    """Make a suspicion of ranks that call with another root.

    Args:
        job: The job.
        group: The group of the call.
        inside: The call of each rank that is still in it.
        have_left: The call of each rank that has gone on.
    """
    ranks = list_ranks(inside)
    others = list_ranks(have_left)
    title = group.describe(inside[0].name, inside[0].number)
    # who sends a broadcast may leave before the others have it
    is_open = may_end(job, inside[0])
    evidence = [cite_call(job, call, f"is still in {title}") for call in inside[:MAX_CITED]]
    evidence += [cite_call(job, call, f"has left {title} and gone on") for call in have_left[:MAX_CITED]]
    return Suspicion(
        kind=FailureKind.OTHER_ARGUMENTS,
        ranks=ranks,
        headline=f"{job.name(ranks)} {does(ranks, 'is', 'are')} still in {title}, which {name_ranks(others)} "
        f"{does(others, 'has', 'have')} left: another root keeps ranks in a call that others complete",
        confidence=Confidence.LOW if is_open else Confidence.MEDIUM,
        evidence=tuple(evidence),
        next_steps=(f"Give {inside[0].name} the same src or dst on all ranks{write_at(inside[0].call_site)}.",),
        onset=inside[0].created_s,
        collective=title,
        call_site=inside[0].call_site,
        alternatives=(ELSE_NETWORK,),
        missing=(HOW_LONG,) if is_open else (),
        is_wait=True,
        is_brief=is_brief(job, inside[0]),
    )


def find_stuck_calls(job: ObservedJob) -> list[Suspicion]:
    """Find calls that all ranks of a group have entered, or both ends of a message, and none has completed."""
    for group in job.calls.groups:
        pending = _find_pending(group)
        if job.waits and not is_inside_of_call(job, list_ranks(pending)):
            continue
        if pending and not group.unread:
            title = group.describe(pending[0].name, pending[0].number)
            said = f"all ranks have entered {title} and none has completed it"
            alternatives = (ELSE_ROOT, ELSE_MEMBER) if group.members_are_guessed else (ELSE_ROOT,)
            return [_suspect_stuck(job, pending, title, said, alternatives)]
    messages = _find_pending_messages(job)
    if messages:
        first = min(messages, key=lambda call: call.created_ns)
        title = describe_message(first)
        said = f"rank {first.rank} and its peer have entered {title}, and it does not complete"
        return [_suspect_stuck(job, messages, title, said, ())]
    return []


def _find_pending_messages(job: ObservedJob) -> list[EnteredCall]:
    """Find the first message of each rank that has not ended, of those whose both ends have a recording."""
    recorded = set(job.calls.recordings)
    pending = []
    for calls in job.calls.messages.values():
        for call in calls:
            ends = {rank for pair in list_pairs(call) for rank in pair}
            if ends <= recorded:
                pending.append(call)
                break
    return pending


def _find_pending(group: MatchedGroup) -> list[EnteredCall]:
    """Find the first call that all have entered and nobody has left; [] without one."""
    for number in group.numbers:
        calls = list(group.calls[number].values())
        # a group of which one rank alone is known has others
        is_pending = len(calls) > 1 and all(not call.has_ended for call in calls)
        are_alike = len({call.names for call in calls}) == 1
        if is_pending and are_alike and number <= group.entered_by_all:
            return calls
    return []


def _suspect_stuck(
    job: ObservedJob, pending: Sequence[EnteredCall], title: str, said: str, alternatives: Sequence[str]
) -> Suspicion:
    """Make a suspicion of a call that nobody completes: of ranks whose device has not begun it, where some have not.

    Args:
        job: The job.
        pending: The call of each rank.
        title: What it is called.
        said: What is seen of it.
        alternatives: What else it may be where no device is watched.
    """
    first = min(pending, key=lambda call: call.created_ns)
    unstarted = tuple(sorted(call.rank for call in pending if not call.is_started))
    kind = FailureKind.STUCK_IN_KERNEL
    confidence = Confidence.MEDIUM
    ranks: tuple[int, ...] = ()
    others: Sequence[str] = (ELSE_NETWORK,)
    if len(unstarted) == len(pending):
        # the recorder does not watch the device, or there is none
        kind = FailureKind.NETWORK
        confidence = Confidence.LOW
        others = alternatives
    elif unstarted:
        ranks = unstarted
        have = does(unstarted, "has", "have")
        said = f"{job.name(unstarted)} {have} not begun {title} on the device, which the others run"
        others = (ELSE_HOST,)
    is_open = may_end(job, first)
    if is_open:
        confidence = Confidence.LOW
    evidence = []
    for call in pending[:MAX_CITED]:
        evidence.append(cite_call(job, call, f"has entered {_name_call(call, title)}, state {call.call.state.value}"))
    return Suspicion(
        kind=kind,
        ranks=ranks,
        headline=said + write_wait(measure_wait(job, first)),
        confidence=confidence,
        evidence=tuple(evidence),
        next_steps=(LOOK,),
        onset=first.created_s,
        collective=title,
        call_site=first.call_site,
        alternatives=tuple(others),
        missing=(HOW_LONG,) if is_open else (),
        is_wait=True,
        is_brief=is_brief(job, first),
    )


def _name_call(call: EnteredCall, title: str) -> str:
    """The title, or what a message is to this end of it."""
    return describe_message(call) if call.messages else title
