"""Jobs that ended well, or go on."""

from megatron_lite.postmortem.causes.base import Confidence, Suspicion
from megatron_lite.postmortem.causes.wait_times import has_gone_on
from megatron_lite.postmortem.evidence import EventKind
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.units import counted

WHEN_WRITTEN = "whether logs went on after the recordings: times of files, if copies keep them (cp -p), tell."
# the launcher or the batch system would say how a job ended
LATER = "how the job ended, if it has: its logs tell."


def find_good_end(job: ObservedJob) -> list[Suspicion]:
    """Find a job all of whose processes ended with exit code 0."""
    ends = job.ends
    if not ends or any(end.kind is not EndKind.WELL for end in ends):
        return []
    ranks = [end.rank for end in ends if end.rank is not None]
    unknown = job.list_unknown(ranks)
    said = f"{counted(len(ends), 'process')} ended with exit code 0"
    missing = (f"how {counted(len(unknown), 'rank')} ended.",) if unknown else ()
    return [
        Suspicion(
            kind=FailureKind.NONE,
            ranks=(),
            headline=f"the job ended well: {said}",
            confidence=Confidence.MEDIUM if unknown else Confidence.HIGH,
            evidence=(Fact(text=said, source=ends[0].source),),
            missing=missing,
        )
    ]


def find_silence(job: ObservedJob) -> list[Suspicion]:
    """Find a job whose logs have no line that speaks of a failure."""
    logs = sum(number for kind, number in job.evidence.read.items() if "log" in kind)
    if not logs or job.ends or any(kind is not EventKind.NOT_FINITE for kind in job.events):
        return []
    said = f"nothing in {counted(logs, 'log')} speaks of a failure"
    return [
        Suspicion(
            kind=FailureKind.NONE,
            ranks=(),
            headline=said,
            confidence=Confidence.LOW,
            missing=("how the processes ended: a job that is killed as a whole has no last words.",),
        )
    ]


def find_progress(job: ObservedJob) -> list[Suspicion]:
    """Find a job whose recordings show that ranks go on: nobody waits, or no longer than usual."""
    recordings = job.calls.recordings
    if not recordings or job.ends or any(kind is not EventKind.NOT_FINITE for kind in job.events):
        return []
    unread = job.list_unknown(recordings)
    said = f"the recordings of {counted(len(recordings), 'rank')} show nobody who waits longer than usual"
    source = next(iter(recordings.values())).source
    missing = [LATER]
    # times of files are those of copying, where nobody kept them
    is_by_files = bool(job.waits) and has_gone_on(job)
    if is_by_files:
        missing.append(WHEN_WRITTEN)
    if unread:
        missing.append(f"recordings of {counted(len(unread), 'rank')}.")
    return [
        Suspicion(
            kind=FailureKind.NONE,
            ranks=(),
            headline=said,
            confidence=Confidence.LOW if unread or is_by_files else Confidence.MEDIUM,
            evidence=(Fact(text=said, source=source),),
            missing=tuple(missing),
        )
    ]
