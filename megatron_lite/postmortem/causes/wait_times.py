"""Since when ranks wait, and whether that is longer than usual."""

from itertools import pairwise

from megatron_lite.postmortem.matched_calls import NANOSECONDS, EnteredCall
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.rank_lists import find_earliest

# a wait is out of the ordinary when it lasts so many times as long as the longest pause between calls before
UNUSUAL = 10.0
MIN_HANG_S = 5.0


def measure_wait(job: ObservedJob, call: EnteredCall | None) -> float | None:
    """Measure how long a rank waits in a call, in seconds, until the first sign that somebody noticed or ended it.

    Args:
        job: The job.
        call: What the rank waits in.

    Returns:
        The duration; None where the call, or anything after it, has no time.
    """
    if call is None or call.created_s is None:
        return None
    since = call.created_s
    times = [stacks.taken_at for stacks in job.evidence.stacks]
    times += [event.at for event in job.evidence.events]
    times += [end.at for end in job.ends]
    noticed = find_earliest(time for time in times if time is not None and time > since)
    return None if noticed is None else noticed - since


def is_brief(job: ObservedJob, call: EnteredCall | None) -> bool:
    """Tell whether a wait is known to have lasted no longer than waits do."""
    lasted = measure_wait(job, call)
    if call is None or lasted is None:
        return False
    usual_s = _measure_longest_pause(job, call.rank)
    return lasted < max(MIN_HANG_S, UNUSUAL * usual_s)


def _measure_longest_pause(job: ObservedJob, rank: int) -> float:
    """Measure the longest time between two calls of a rank, in seconds; 0.0 where none is known."""
    created = [call.created_ns for call in job.calls.by_rank.get(rank, ()) if call.created_ns]
    pauses = [later - before for before, later in pairwise(created)]
    return max(pauses, default=0) / NANOSECONDS
