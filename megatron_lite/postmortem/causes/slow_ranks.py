"""Ranks that go on, so much slower than the others that these wait for them most of the time."""

from collections import Counter
from dataclasses import dataclass
from statistics import median

from megatron_lite.postmortem.causes.base import Confidence, Suspicion, cite_call
from megatron_lite.postmortem.evidence import EventKind, RankProgress
from megatron_lite.postmortem.matched_calls import NANOSECONDS, EnteredCall, MatchedGroup
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.postmortem.rank_lists import find_earliest
from megatron_lite.units import duration

MAX_CALLS_COMPARED = 64
MIN_CALLS_COMPARED = 6
SHARE_OF_START = 0.25
# of the time: what others wait for the rank
MIN_SHARE = 0.5
MIN_LOST_S = 0.5
ENDED = (EndKind.WELL, EndKind.OWN_ERROR, EndKind.SIGNAL, EndKind.CODE, EndKind.DISAGREEMENT)
MIN_TIMES_SLOWER = 2.0
MIN_SLOWER_S = 0.2
LOOK_AT_SLOW = "Find what makes {who} slow: its share of data, its GPU's clocks, other jobs on its machine."
REPORT = "`megatron-lite watch -- COMMAND` and `report` show where its steps go."
ELSE_CLOCKS = "the clocks of the machines differ: ranks on several machines were compared by their own."
ELSE_ABSENT = "it does not go on any more: two recordings, apart in time, would tell."


@dataclass(frozen=True)
class Lateness:
    """How much the others wait for the rank that comes last, over some calls."""

    rank: int
    lost_s: float
    lasted_s: float
    last: EnteredCall

    @property
    def share(self) -> float:
        """The share of the time that is lost to it."""
        return self.lost_s / self.lasted_s if self.lasted_s > 0 else 0.0


def find_slow_ranks(job: ObservedJob) -> list[Suspicion]:
    """Find a rank for which the others wait most of the time, in a job that nothing says to have failed."""
    if any(end.kind in ENDED for end in job.ends) or job.list_events(EventKind.COLLECTIVE_TIMEOUT):
        return []
    by_steps = _find_by_steps(job)
    if by_steps:
        return by_steps
    for group in job.calls.groups:
        lateness = _measure_lateness(group)
        if lateness is not None and lateness.share >= MIN_SHARE and lateness.lost_s >= MIN_LOST_S:
            return [_suspect_slow(job, group, lateness)]
    return []


def _find_by_steps(job: ObservedJob) -> list[Suspicion]:
    """Find a rank whose own work in a step takes several times as long as that of the others."""
    own_s: dict[int, RankProgress] = {}
    for rank, one in job.ranks.items():
        told = [progress for progress in one.progress if progress.own_step_s is not None]
        if told:
            own_s[rank] = told[-1]
    if len(own_s) < 2:
        return []
    durations = {rank: progress.own_step_s or 0.0 for rank, progress in own_s.items()}
    slowest = max(durations, key=lambda rank: durations[rank])
    others_s = median(seconds for rank, seconds in durations.items() if rank != slowest)
    if durations[slowest] < MIN_TIMES_SLOWER * others_s or durations[slowest] - others_s < MIN_SLOWER_S:
        return []
    who = job.name((slowest,))
    said = f"its own work takes {duration(durations[slowest])} of a step, that of the others {duration(others_s)}"
    return [
        Suspicion(
            kind=FailureKind.SLOW,
            ranks=(slowest,),
            headline=f"{who} goes on, slower than the others: {said}",
            confidence=Confidence.MEDIUM,
            evidence=(Fact(text=f"rank {slowest}: {said}", source=own_s[slowest].source),),
            next_steps=(LOOK_AT_SLOW.format(who=who), REPORT),
            is_wait=True,
        )
    ]


def _measure_lateness(group: MatchedGroup) -> Lateness | None:
    """Measure for which rank the others wait most, by when each entered the calls of a group."""
    entered = _list_entered(group)
    # the first calls wait for who starts last
    entered = entered[int(len(entered) * SHARE_OF_START) :]
    if len(entered) < MIN_CALLS_COMPARED:
        return None
    lost_ns: Counter[int] = Counter()
    for *others, last in entered:
        usual = median(call.created_ns for call in others)
        lost_ns[last.rank] += int(last.created_ns - usual)
    ((rank, lost),) = lost_ns.most_common(1)
    lasted_ns = entered[-1][-1].created_ns - entered[0][-1].created_ns
    latest = next(calls[-1] for calls in reversed(entered) if calls[-1].rank == rank)
    return Lateness(rank, lost / NANOSECONDS, lasted_ns / NANOSECONDS, latest)


def _list_entered(group: MatchedGroup) -> list[list[EnteredCall]]:
    """List the latest calls that all read members have entered, each by rank in the order of entering."""
    entered = []
    for number in group.numbers:
        calls = sorted(group.calls[number].values(), key=lambda call: call.created_ns)
        is_whole = len(calls) > 1 and len(calls) == len(group.last)
        if is_whole and calls[0].created_ns:
            entered.append(calls)
    return entered[-MAX_CALLS_COMPARED:]


def _suspect_slow(job: ObservedJob, group: MatchedGroup, lateness: Lateness) -> Suspicion:
    """Make a suspicion of a slow rank.

    Args:
        job: The job.
        group: The group whose calls were compared.
        lateness: How late it comes.
    """
    rank = lateness.rank
    who = job.name((rank,))
    said = f"{duration(lateness.lost_s)} of {duration(lateness.lasted_s)}"
    place = job.places.get(rank)
    site = place.call_site if place else ""
    absent = any(rank in wait.awaited for wait in job.waits.values())
    alternatives = [ELSE_CLOCKS] if job.has_several_hosts else []
    if absent:
        alternatives.append(ELSE_ABSENT)
    evidence = [
        Fact(text=f"others waited for rank {rank} for {said}", source=job.calls.find_source(rank)),
        cite_call(job, lateness.last, f"entered {group.describe(lateness.last.name, lateness.last.number)} last"),
    ]
    return Suspicion(
        kind=FailureKind.SLOW,
        ranks=(rank,),
        headline=f"{who} goes on, and the others wait for it {lateness.share:.0%} of the time ({said})",
        confidence=Confidence.LOW if job.has_several_hosts else Confidence.MEDIUM,
        evidence=tuple(evidence),
        next_steps=(
            LOOK_AT_SLOW.format(who=who),
            REPORT,
        ),
        onset=find_earliest((lateness.last.created_s,)),
        call_site=site or lateness.last.call_site,
        alternatives=tuple(alternatives),
        is_wait=True,
    )
