"""Since when ranks wait, and whether that is longer than usual."""

from itertools import pairwise

from megatron_lite.postmortem.evidence import EventKind
from megatron_lite.postmortem.matched_calls import NANOSECONDS, EnteredCall
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.postmortem.rank_lists import find_earliest

# a wait is out of the ordinary when it lasts so many times as long as the longest pause between calls before
UNUSUAL = 10.0
MIN_HANG_S = 2.0
# of the calls before, the latest: a first step may take minutes
SHARE_OF_LATEST = 0.5
# kinds of files
LOGS = "console logs"
RECORDINGS = "flight recordings"
LOOKS = (RECORDINGS, "dumps of stacks", "debug dumps")
MILLISECONDS = 1e3
# between times of files
MIN_LATER_S = 2.0
HOW_LONG = "how long the others wait: a second look, or the time of the stacks."
# somebody gave up waiting, or ended the job
ENDING = (
    EventKind.COLLECTIVE_TIMEOUT,
    EventKind.CONNECTION_LOST,
    EventKind.JOB_TIME_LIMIT,
    EventKind.JOB_CANCELED,
    EventKind.JOB_PREEMPTED,
    EventKind.SIGNAL,
)


def measure_wait(job: ObservedJob, call: EnteredCall | None) -> float | None:
    """Measure how long a rank waits in a call, in seconds: until somebody gave up or ended it, else until looked at.

    Args:
        job: The job.
        call: What the rank waits in.

    Returns:
        The duration; None where the call, or anything after it, has no time.
    """
    if call is None or call.created_s is None:
        return None
    since = call.created_s
    ended = [event.at for event in job.list_events(*ENDING)]
    ended += [end.at for end in job.ends]
    until = find_earliest(time for time in ended if time is not None and time > since)
    if until is None:
        until = max((one.taken_at for one in job.evidence.stacks if one.taken_at is not None), default=None)
    if until is None or until < since:
        return None
    return until - since


def may_end(job: ObservedJob, call: EnteredCall | None) -> bool:
    """Tell whether a wait may have ended a moment later: the job was looked at once, and nobody gave up waiting.

    Args:
        job: The job.
        call: What is waited in.
    """
    if job.ends or job.events or measure_wait(job, call) is not None:
        return False
    # NCCL writes recordings when it gives up, others when asked
    backends = {recording.backend for recording in job.calls.recordings.values()}
    return backends != {"nccl"} or _is_before_limits(job)


def _is_before_limits(job: ObservedJob) -> bool:
    """Whether recordings were written before any call had reached its limit: somebody asked for them."""
    written_at = job.evidence.written_at.get(RECORDINGS)
    pending = [call for calls in job.calls.by_rank.values() for call in calls if not call.has_ended]
    if written_at is None or not pending:
        return False
    for call in pending:
        limit_ms = call.call.timeout_ms
        if limit_ms is None or call.created_s is None:
            return False
        if not 0 <= written_at - call.created_s < limit_ms / MILLISECONDS:
            return False
    return True


def is_brief(job: ObservedJob, call: EnteredCall | None) -> bool:
    """Tell whether a wait is known to have lasted no longer than waits do, or to have ended."""
    if has_gone_on(job):
        return True
    lasted = measure_wait(job, call)
    if call is None or lasted is None:
        return False
    usual_s = _measure_longest_pause(job, call.rank)
    return lasted < max(MIN_HANG_S, UNUSUAL * usual_s)


def has_gone_on(job: ObservedJob) -> bool:
    """Tell whether logs go on, without a word of a failure, after recordings and stacks were made."""
    has_failed = any(kind is not EventKind.NOT_FINITE for kind in job.events)
    if has_failed or any(end.kind is not EndKind.WELL for end in job.ends):
        return False
    logged = [at for kind, at in job.evidence.written_at.items() if kind == LOGS]
    made = [at for kind, at in job.evidence.written_at.items() if kind in LOOKS]
    return bool(logged and made) and logged[0] - max(made) > MIN_LATER_S


def _measure_longest_pause(job: ObservedJob, rank: int) -> float:
    """Measure the longest time between two of the latest calls of a rank, in seconds; 0.0 where none is known."""
    created = [call.created_ns for call in job.calls.by_rank.get(rank, ()) if call.created_ns]
    first = int(len(created) * (1 - SHARE_OF_LATEST))
    pauses = [later - before for before, later in pairwise(created[first:])]
    return max(pauses, default=0) / NANOSECONDS
