"""Ranks that go on, so much slower than the others that these wait for them most of the time."""

from dataclasses import dataclass
from statistics import median

from megatron_lite.postmortem.causes.base import Confidence, Suspicion, cite_call
from megatron_lite.postmortem.evidence import EventKind
from megatron_lite.postmortem.matched_calls import NANOSECONDS, EnteredCall, MatchedGroup
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.postmortem.rank_lists import find_earliest
from megatron_lite.units import duration

MAX_CALLS_COMPARED = 64
MIN_CALLS_COMPARED = 6
# of the time: what others wait for the rank
MIN_SHARE = 0.5
MIN_LOST_S = 0.5
ENDED_BADLY = (EndKind.OWN_ERROR, EndKind.SIGNAL, EndKind.CODE, EndKind.DISAGREEMENT)
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
    is_over = any(end.kind in ENDED_BADLY for end in job.ends)
    if is_over or job.list_events(EventKind.COLLECTIVE_TIMEOUT):
        return []
    for group in job.calls.groups:
        lateness = _measure_lateness(group)
        if lateness is not None and lateness.share >= MIN_SHARE and lateness.lost_s >= MIN_LOST_S:
            return [_suspect_slow(job, group, lateness)]
    return []


def _measure_lateness(group: MatchedGroup) -> Lateness | None:
    """Measure for which rank the others wait most, by when each entered the calls of a group."""
    numbers = [number for number in group.numbers if number <= group.entered_by_all]
    lost_ns: dict[int, float] = {}
    latest: dict[int, EnteredCall] = {}
    times = []
    for number in numbers[-MAX_CALLS_COMPARED:]:
        calls = sorted(group.calls[number].values(), key=lambda call: call.created_ns)
        if len(calls) < max(2, len(group.last)) or not calls[0].created_ns:
            continue
        *others, last = calls
        usual = median(call.created_ns for call in others)
        lost_ns[last.rank] = lost_ns.get(last.rank, 0.0) + last.created_ns - usual
        latest[last.rank] = last
        times.append(last.created_ns)
    if len(times) < MIN_CALLS_COMPARED:
        return None
    rank = max(lost_ns, key=lambda one: lost_ns[one])
    lasted_s = (times[-1] - times[0]) / NANOSECONDS
    return Lateness(rank, lost_ns[rank] / NANOSECONDS, lasted_s, latest[rank])


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
            f"Find what makes {who} slow: its share of data, its GPU's clocks, its machine's other jobs.",
            "`megatron-lite watch -- COMMAND` and `report` show where its steps go.",
        ),
        onset=find_earliest((lateness.last.created_s,)),
        call_site=site or lateness.last.call_site,
        alternatives=tuple(alternatives),
        is_wait=True,
    )
