"""Ranks that keep others waiting: who, and what they do meanwhile."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lite.postmortem.call_sites import Activity, StackPlace, find_call_site, find_main_thread
from megatron_lite.postmortem.causes.base import (
    MAX_CITED,
    Confidence,
    Suspicion,
    cite_call,
    quote_some,
    write_wait,
)
from megatron_lite.postmortem.causes.wait_times import HOW_LONG, is_brief, may_end, measure_wait
from megatron_lite.postmortem.evidence import EventKind, ProcessStacks
from megatron_lite.postmortem.matched_calls import EnteredCall, MatchedGroup, count_records
from megatron_lite.postmortem.observed_job import ObservedJob, ObservedRank
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.postmortem.rank_lists import does, list_ranks, name_ranks
from megatron_lite.postmortem.waits import Wait
from megatron_lite.units import counted

MAY_WAIT = (Activity.WAITS_FOR_RANKS, Activity.BACKWARD)
WORDS_OF_ACTIVITY = {
    Activity.LOADS_DATA: "loads data",
    Activity.WAITS_FOR_DEVICE: "waits for its GPU",
    Activity.SAVES: "reads or writes a checkpoint",
    Activity.COMPILES: "compiles",
    Activity.BACKWARD: "is in backward",
    Activity.RUNS: "is",
    Activity.WAITS_FOR_RANKS: "waits for other ranks",
    Activity.UNKNOWN: "is",
}
KIND_OF_ACTIVITY = {
    Activity.LOADS_DATA: FailureKind.DATA_LOADER,
    Activity.WAITS_FOR_DEVICE: FailureKind.STUCK_IN_KERNEL,
    # in a call that no recording shows
    Activity.WAITS_FOR_RANKS: FailureKind.OTHER_ORDER,
}
NEXT_STEPS = {
    FailureKind.NEVER_ENTERED: "Look at {site}: what keeps {who} there, or lets it leave out the call.",
    FailureKind.DATA_LOADER: "Look at what {who} reads at {site}: a slow disk, an endless search, a worker that hangs.",
    FailureKind.STUCK_IN_KERNEL: "Look at the GPU of {who}: nvidia-smi, Xid lines of dmesg, py-spy --native.",
    FailureKind.SLOW: "Find what makes {who} slow at {site}, or raise the timeout of the process group.",
    FailureKind.OTHER_ORDER: "Let all ranks make the same calls in the same order: {who} waits at {site}.",
}
RECORD = "Run it under `megatron-lite watch -- COMMAND`, which records collectives and stacks of all ranks."
ELSE_STUCK = "all ranks of the group have entered it, and the network or a kernel does not go on."
WHICH_MEMBERS = "which ranks the group has: those that recorded a call in it are taken."
WHICH_STATE = "the state of its process (ps -o stat= -p PID): a stopped one (T) stands at any line."
WHICH_CALL = "flight recordings (TORCH_FR_BUFFER_SIZE=2000): the call in which the others wait."
ONLY_LOGS = "flight recordings and stacks: logs alone do not tell who entered which call."


@dataclass(frozen=True)
class Absence:
    """The ranks that others wait for in the end, and how that is known."""

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    # a wait that ends at them; None where only stacks or logs tell
    wait: Wait | None = None
    # they left no record: they may be the absent ones, too
    unread: tuple[int, ...] = ()
    # their name is a guess: nothing was read of them
    is_guess: bool = False
    by_log_only: bool = False


def find_absent_ranks(job: ObservedJob) -> list[Suspicion]:
    """Find ranks that keep others waiting."""
    absence = find_absence(job)
    if absence is None or is_inside_of_call(job, absence.ranks):
        return []
    return [_suspect(job, absence)]


def is_inside_of_call(job: ObservedJob, ranks: Sequence[int]) -> bool:
    """Tell whether these ranks are all in a call that every member of its group has entered, on the device: what they
    wait for is no rank."""
    inside: set[int] = set()
    for group in job.calls.groups:
        calls = list(group.calls.get(group.entered_by_all, {}).values())
        is_pending = all(call.is_started and not call.has_ended for call in calls)
        if is_pending and not group.unread:
            inside.update(call.rank for call in calls)
    return set(ranks) <= inside


def find_absence(job: ObservedJob) -> Absence | None:
    """Find who is waited for: by the recordings, else by stacks, else by what logs say of it."""
    absence = _find_by_records(job)
    if absence is None or absence.is_guess or absence.by_log_only:
        return _find_named_by_library(job) or absence
    return absence


def _find_by_records(job: ObservedJob) -> Absence | None:
    """Find who is waited for by what ranks recorded, and by their logs, without what a library says of them."""
    if job.waits:
        return _find_by_recordings(job)
    for find in (_find_unread_member, _find_by_stacks, _find_by_logs):
        absence = find(job)
        if absence is not None:
            return absence
    return None


def _find_by_recordings(job: ObservedJob) -> Absence | None:
    """Find who is at the end of all waiting; None where that is nobody, but a circle."""
    roots = job.roots.idle
    if not roots:
        return None
    # who is in a call that gloo does not record waits, too
    waiting_elsewhere = job.list_at(Activity.WAITS_FOR_RANKS)
    busy = tuple(rank for rank in roots if rank not in waiting_elsewhere) or roots
    wait = _choose_wait(job.waits.values(), busy)
    unread = wait.group.unread if wait.group else ()
    return Absence(busy, tuple(sorted(job.waits)), wait, unread, is_guess=wait.is_guess)


def _choose_wait(waits: Iterable[Wait], ranks: Sequence[int]) -> Wait:
    """Choose the earliest wait for some of these ranks, else any that ends at them through others."""
    candidates = list(waits)
    direct = [wait for wait in candidates if set(wait.awaited) & set(ranks)]
    return min(direct or candidates, key=_order_by_time)


def _order_by_time(wait: Wait) -> tuple[bool, int, int]:
    return wait.call.has_ended, wait.call.created_ns, wait.rank


def _find_unread_member(job: ObservedJob) -> Absence | None:
    """Find a call that all read members of a group have entered while others are unread: those may be absent."""
    for group in job.calls.groups:
        calls = group.calls.get(group.entered_by_all, {})
        pending = [call for call in calls.values() if not call.has_ended]
        if group.unread and pending:
            return _suppose_unread(job, group, pending)
    return None


def _suppose_unread(job: ObservedJob, group: MatchedGroup, pending: Sequence[EnteredCall]) -> Absence | None:
    """Suppose that unread ranks are absent: those whose stack shows them elsewhere, else all."""
    unread = group.unread
    busy = tuple(rank for rank in unread if rank in job.places and job.places[rank].activity not in MAY_WAIT)
    first = min(pending, key=lambda call: call.created_ns)
    wait = Wait(first.rank, first, busy or unread, group)
    waiting = tuple(sorted(call.rank for call in pending))
    if busy:
        return Absence(busy, waiting, wait)
    return Absence(unread, waiting, wait, unread, is_guess=True)


def _find_by_stacks(job: ObservedJob) -> Absence | None:
    """Find ranks that are elsewhere while others are in a call of torch.distributed."""
    # autograd waits for gradients of others without a frame that says so
    waiting = job.list_at(Activity.WAITS_FOR_RANKS) or job.list_at(Activity.BACKWARD)
    busy = tuple(rank for rank, place in job.places.items() if place.activity not in MAY_WAIT)
    if not waiting or not busy:
        return None
    return Absence(busy, waiting, unread=tuple(job.list_unknown(job.places)))


def _find_named_by_library(job: ObservedJob) -> Absence | None:
    """Find ranks of which a library says that they did not come: a monitored barrier, or NCCL's report of a desync."""
    named = set(list_ranks(job.list_events(EventKind.RANK_BEHIND)))
    waiting = tuple(sorted(set(job.ranks) - named))
    if not named or not waiting:
        return None
    return Absence(tuple(sorted(named)), waiting)


def _find_by_logs(job: ObservedJob) -> Absence | None:
    """Find ranks that gave up on nobody while others say that they waited too long."""
    gave_up = set()
    others = set(job.list_unknown(job.ranks))
    # a recording would show who is absent
    unrecorded = [one for rank, one in job.ranks.items() if rank not in job.calls.recordings]
    for one in unrecorded:
        if _has_timed_out(one):
            gave_up.add(one.rank)
        elif not _has_lost_others(one):
            others.add(one.rank)
    if not others or len(others) > len(gave_up):
        return None
    return Absence(tuple(sorted(others)), tuple(sorted(gave_up)), by_log_only=True)


def _has_lost_others(one: ObservedRank) -> bool:
    return one.end is not None and one.end.kind is EndKind.LOST_OTHERS


def _has_timed_out(one: ObservedRank) -> bool:
    if one.has_event(EventKind.COLLECTIVE_TIMEOUT):
        return True
    return one.end is not None and _has_lost_others(one) and "timed out" in one.end.words.lower()


def _suspect(job: ObservedJob, absence: Absence) -> Suspicion:
    """Make a suspicion of the ranks that others wait for."""
    ranks = absence.ranks
    who = job.name(ranks)
    call = absence.wait.call if absence.wait else None
    place = next((job.places[rank] for rank in ranks if rank in job.places), None)
    kind, why = _choose_kind(job, absence, place)
    site = place.call_site if place else _find_last_site(job, ranks)
    confidence, missing, alternatives = _weigh(absence, place)
    if may_end(job, call):
        confidence = Confidence.LOW
        missing = (*missing, HOW_LONG)
    if place is not None and place.activity is Activity.RUNS and not _is_known_to_run(job, ranks):
        confidence = min(confidence, Confidence.MEDIUM)
        missing = (*missing, WHICH_STATE)
    remedy = NEXT_STEPS[kind].format(site=site or "its last calls", who=who)
    has_records = bool(job.calls.recordings and job.places)
    return Suspicion(
        kind=kind,
        ranks=ranks,
        headline=f"{who} {_describe_absence(job, absence, kind)}{why}",
        confidence=confidence,
        evidence=(*_cite_wait(job, absence), *cite_places(job, ranks)),
        next_steps=(remedy,) if has_records else (remedy, RECORD),
        onset=call.created_s if call else None,
        collective=absence.wait.title if absence.wait else "",
        call_site=site,
        alternatives=alternatives,
        missing=missing,
        is_wait=True,
        is_brief=is_brief(job, call),
    )


def _is_known_to_run(job: ObservedJob, ranks: Sequence[int]) -> bool:
    """Whether a rank's process is known not to be stopped, as it may be at any line: its state, or a core that it
    uses."""
    for rank in ranks:
        one = job.ranks.get(rank)
        is_busy = one is not None and one.place is not None and one.place.is_idle is False
        if one is not None and (is_busy or one.process_state == "running" or one.end is not None):
            return True
    return False


def _describe_absence(job: ObservedJob, absence: Absence, kind: FailureKind) -> str:
    """Write what the ranks did not do: "did not enter all_reduce #5 of all ranks, in which rank 0 waits for 35.0s"."""
    wait = absence.wait
    title = wait.title if wait else "a collective"
    said = f"did not enter {title}"
    if wait is not None and not set(wait.awaited) & set(absence.ranks):
        said = f"{does(absence.ranks, 'keeps', 'keep')} others waiting, in the end in {title}"
    if kind is FailureKind.SLOW:
        said = f"{does(absence.ranks, 'goes', 'go')} on, too slow for {title}"
    if absence.is_guess:
        said = f"may not have entered {title}"
    waiting = [rank for rank in absence.waiting if rank not in absence.ranks]
    if not waiting:
        return said
    lasted = write_wait(measure_wait(job, wait.call if wait else None))
    return f"{said}, in which {name_ranks(waiting)} {does(waiting, 'waits', 'wait')}{lasted}"


def _choose_kind(job: ObservedJob, absence: Absence, place: StackPlace | None) -> tuple[FailureKind, str]:
    """Choose the class by what absent ranks do.

    Args:
        job: The job.
        absence: The absent ranks.
        place: Where the first of them with a stack is.

    Returns:
        The class, and the end of the sentence, which says what they do.
    """
    ranks = absence.ranks
    ended_well = [rank for rank in ranks if _has_ended_well(job, rank)]
    if ended_well:
        return FailureKind.NEVER_ENTERED, f": {name_ranks(ended_well)} had ended with exit code 0"
    movement = _find_movement(job, absence)
    if movement:
        return FailureKind.SLOW, f": {movement}"
    it = does(ranks, "it", f"rank {ranks[0]}")
    if place is None:
        site = _find_last_site(job, ranks)
        return FailureKind.NEVER_ENTERED, f": the last call of {name_ranks(ranks[:1])} was at {site}" if site else ""
    at = place.call_site or place.innermost
    kind = KIND_OF_ACTIVITY.get(place.activity, FailureKind.NEVER_ENTERED)
    return kind, f": {it} {WORDS_OF_ACTIVITY[place.activity]} at {at}"


def _has_ended_well(job: ObservedJob, rank: int) -> bool:
    one = job.ranks.get(rank)
    return one is not None and one.end is not None and one.end.kind is EndKind.WELL


def _find_movement(job: ObservedJob, absence: Absence) -> str:
    """Write how two looks at an absent rank, both while others wait, show that it goes on; "" where they do not."""
    since = _find_beginning(job, absence)
    for rank in absence.ranks:
        sites = _list_sites(job, rank, since)
        if len(set(sites)) > 1:
            return f"it was at {sites[0]}, and later at {sites[-1]}"
        earlier = [count_records(recording) for recording in job.calls.earlier.get(rank, ())]
        if earlier and earlier[-1] < count_records(job.calls.recordings[rank]):
            more = count_records(job.calls.recordings[rank]) - earlier[-1]
            return f"between two recordings it called {counted(more, 'collective')}"
    return ""


def _find_beginning(job: ObservedJob, absence: Absence) -> float:
    """Find since when others wait, in seconds since 1970, by the recording or by who stands still; inf: unknown."""
    if absence.wait is not None and absence.wait.call.created_s is not None:
        return absence.wait.call.created_s
    since = math.inf
    for rank in absence.waiting:
        stacks = job.ranks[rank].stacks if rank in job.ranks else ()
        for earlier in reversed(stacks):
            if earlier.taken_at is None or _find_site(earlier) != _find_site(stacks[-1]):
                break
            since = min(since, earlier.taken_at)
    return since


def _list_sites(job: ObservedJob, rank: int, since: float) -> list[str]:
    """List the lines at which a rank was since a time, in seconds since 1970."""
    stacks = job.ranks[rank].stacks if rank in job.ranks else ()
    sites = [_find_site(one) for one in stacks if one.taken_at is not None and one.taken_at >= since]
    return [site for site in sites if site]


def _find_site(stacks: ProcessStacks) -> str:
    thread = find_main_thread(stacks)
    return find_call_site(thread.frames) if thread else ""


def _find_last_site(job: ObservedJob, ranks: Sequence[int]) -> str:
    """Find the line of the last call that the first of these ranks recorded."""
    for rank in ranks:
        calls = job.calls.by_rank.get(rank, ())
        if calls:
            return calls[-1].call_site
    return ""


def _weigh(absence: Absence, place: StackPlace | None) -> tuple[Confidence, tuple[str, ...], tuple[str, ...]]:
    """Weigh who is waited for.

    Args:
        absence: Who is waited for.
        place: Where they are; None where no stack tells.

    Returns:
        How sure it is, what is missing, and what stays open.
    """
    limits = [Confidence.HIGH]
    missing = []
    alternatives = []
    if absence.unread:
        limits.append(Confidence.LOW if absence.is_guess else Confidence.MEDIUM)
        named = name_ranks(absence.unread)
        it = does(absence.unread, "it", "they")
        missing.append(f"flight recordings of {named}: whether {it} entered the call.")
        alternatives.append(f"{named} may not have entered it either.")
    if absence.is_guess:
        limits.append(Confidence.LOW)
        alternatives.append(ELSE_STUCK)
    if absence.by_log_only:
        limits.append(Confidence.LOW)
        missing.append(ONLY_LOGS)
    elif absence.wait is None:
        limits.append(Confidence.MEDIUM)
        missing.append(WHICH_CALL)
    if place is None or place.is_guess:
        limits.append(Confidence.MEDIUM)
    if place is None:
        named = name_ranks(absence.ranks)
        missing.append(f"stacks of {named} (py-spy dump --pid PID): the line of the program.")
    if absence.wait and absence.wait.group and absence.wait.group.members_are_guessed:
        limits.append(Confidence.MEDIUM)
        missing.append(WHICH_MEMBERS)
    if len(absence.ranks) > len(absence.waiting):
        limits.append(Confidence.LOW)
    return min(limits), tuple(missing), tuple(alternatives)


def _cite_wait(job: ObservedJob, absence: Absence) -> list[Fact]:
    """Cite the recording of who waits, and how far those are who do not; without recordings, what logs say."""
    wait = absence.wait
    if wait is None:
        events = job.list_events(EventKind.RANK_BEHIND, EventKind.COLLECTIVE_TIMEOUT)
        return list(quote_some(events)[:MAX_CITED])
    facts = [cite_call(job, wait.call, f"waits in {wait.title}")]
    for rank in absence.ranks[:MAX_CITED]:
        if rank in job.calls.recordings:
            said = _describe_last(job, rank, wait.group)
            facts.append(Fact(text=f"rank {rank} {said}", source=job.calls.find_source(rank)))
    return facts


def _describe_last(job: ObservedJob, rank: int, group: MatchedGroup | None) -> str:
    """Write how far an absent rank is in a group; None: in its own calls."""
    if group is None:
        calls = job.calls.by_rank[rank]
        return f"called {calls[-1].name} last" if calls else "has recorded no call"
    last = group.last.get(rank, 0)
    return f"has entered #{last} of {group.title} last" if last else f"has entered no call of {group.title}"


def cite_places(job: ObservedJob, ranks: Sequence[int]) -> list[Fact]:
    """Cite the stacks of the first of some ranks."""
    facts = []
    for rank in ranks[:MAX_CITED]:
        place = job.places.get(rank)
        if place is not None:
            at = place.call_site or place.innermost
            said = f"rank {rank} {WORDS_OF_ACTIVITY[place.activity]} at {at}"
            facts.append(Fact(text=said, source=job.ranks[rank].stacks[-1].source))
    return facts
