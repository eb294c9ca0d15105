"""Jobs that ended well."""

from megatron_lite.postmortem.causes.base import Confidence, Suspicion
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import EndKind
from megatron_lite.units import counted


def find_good_end(job: ObservedJob) -> list[Suspicion]:
    """Find a job all of whose processes ended with exit code 0."""
    ends = job.ends
    if not ends or any(end.kind is not EndKind.WELL for end in ends):
        return []
    ranks = [end.rank for end in ends if end.rank is not None]
    unknown = job.list_unknown(ranks)
    missing = (f"how {counted(len(unknown), 'rank')} ended.",) if unknown else ()
    return [
        Suspicion(
            kind=FailureKind.NONE,
            ranks=(),
            headline=f"the job ended well: {counted(len(ends), 'rank')} ended with exit code 0",
            confidence=Confidence.MEDIUM if unknown else Confidence.HIGH,
            evidence=(Fact(text=f"{counted(len(ends), 'rank')} ended with exit code 0", source=ends[0].source),),
            missing=missing,
        )
    ]
