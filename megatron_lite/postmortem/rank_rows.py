"""The last known state of each rank, those to blame first."""

from collections.abc import Iterable

from megatron_lite.postmortem.causes.absent_ranks import WORDS_OF_ACTIVITY
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import LastOfRank
from megatron_lite.postmortem.rank_ends import EndKind, RankEnd, name_signal
from megatron_lite.postmortem.rank_lists import name_ranks


def build_rows(job: ObservedJob, blamed: Iterable[int]) -> tuple[LastOfRank, ...]:
    """Build a row for each rank of the job, those to blame first."""
    first = set(blamed)
    ranks = set(job.ranks) | first | set(range(job.world_size or 0))
    ordered = sorted(ranks, key=lambda rank: (rank not in first, rank))
    return tuple(_build_row(job, rank) for rank in ordered)


def _build_row(job: ObservedJob, rank: int) -> LastOfRank:
    one = job.ranks.get(rank)
    if one is None:
        return LastOfRank(rank=rank, fate="nothing was read of it")
    last_call, site = _find_last_call(job, rank)
    return LastOfRank(
        rank=rank,
        host=one.host,
        place=one.step_place,
        last_call=last_call,
        call_site=site,
        fate=_describe_fate(job, rank),
    )


def _find_last_call(job: ObservedJob, rank: int) -> tuple[str, str]:
    """Find the call that a rank waits in, else the last one that it entered, and its line."""
    wait = job.waits.get(rank)
    if wait is not None:
        return wait.title, wait.call.call_site
    calls = job.calls.by_rank.get(rank, ())
    if not calls:
        return "", ""
    last = calls[-1]
    group = job.calls.find_group(last)
    title = group.describe(last.call.name, last.call.number) if group else last.call.name
    return title, last.call_site


def _describe_fate(job: ObservedJob, rank: int) -> str:
    """Describe how a rank ended or, where nothing tells, what it waits for or does."""
    one = job.ranks[rank]
    if one.end is not None and one.end.kind is not EndKind.UNKNOWN:
        return _describe_end(one.end)
    if one.process_state in ("stopped", "dead"):
        return one.process_state
    wait = job.waits.get(rank)
    if wait is not None:
        return f"waits for {name_ranks(wait.awaited)}"
    if one.place is not None:
        at = one.place.call_site or one.place.innermost
        return f"{WORDS_OF_ACTIVITY[one.place.activity]} at {at}"
    return ""


def _describe_end(end: RankEnd) -> str:
    if end.kind is EndKind.WELL:
        return "ended well"
    if end.words:
        return end.words
    if end.kind is EndKind.ENDED:
        return "was ended" + (f" by {name_signal(end.exit_code)}" if end.exit_code is not None else "")
    return f"ended by {name_signal(end.exit_code)}" if end.exit_code is not None else "ended"
