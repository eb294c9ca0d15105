"""Causes that the evidence suggests, with the facts that show them: what a rule gives."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_lite.postmortem.evidence import LogEvent
from megatron_lite.postmortem.matched_calls import EnteredCall
from megatron_lite.postmortem.observed_job import ObservedJob
from megatron_lite.postmortem.postmortem_results import Fact, FailureKind
from megatron_lite.postmortem.rank_ends import RankEnd
from megatron_lite.units import duration

MAX_QUOTED = 200
MAX_SHORT = 120
MAX_QUOTES = 6
MAX_CITED = 3


class Confidence(enum.IntEnum):
    """How sure a conclusion is."""

    LOW = 0
    MEDIUM = 1
    # nothing else in the evidence could have made it, and the records of all concerned ranks were read
    HIGH = 2

    @property
    def word(self) -> str:
        """The word that is printed."""
        return self.name.lower()


@dataclass(frozen=True)
class Suspicion:
    """A cause that the evidence suggests."""

    kind: FailureKind
    # ranks to blame, ascending
    ranks: tuple[int, ...]
    # the verdict's line
    headline: str
    confidence: Confidence
    evidence: tuple[Fact, ...] = ()
    next_steps: tuple[str, ...] = ()
    # seconds since 1970 at which it began to show
    onset: float | None = None
    collective: str = ""
    call_site: str = ""
    alternatives: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    # machines on which it happened, where a record names no rank
    hosts: tuple[str, ...] = ()
    # concluded from ranks that wait, so that whatever kept the awaited ones explains it
    is_wait: bool = False
    # the failed process was ended by SIGABRT: libraries do so after an error of theirs
    is_abort: bool = False
    # the failed process was ended by SIGKILL: whoever ends a job that hangs sends it, too
    is_kill: bool = False
    # what is written where it only followed; "" for the headline
    short: str = ""
    # ends no job by itself: a loss that is not finite may be one of many
    may_be_harmless: bool = False
    # the wait is known to have lasted no longer than waits do
    is_brief: bool = False


Rule = Callable[[ObservedJob], Sequence[Suspicion]]


def cut(text: str, columns: int = MAX_SHORT) -> str:
    """Cut a text to so many columns."""
    text = text.strip()
    return text if len(text) <= columns else f"{text[: columns - 3]}..."


def quote_some(events: Iterable[LogEvent]) -> tuple[Fact, ...]:
    """Cite the first lines of logs, each text once."""
    facts: dict[str, Fact] = {}
    for event in events:
        text = cut(event.text, MAX_QUOTED)
        facts.setdefault(text, Fact(text=text, source=event.source))
    return tuple(facts.values())[:MAX_QUOTES]


def cite_call(job: ObservedJob, call: EnteredCall, said: str) -> Fact:
    """Cite a rank's call.

    Args:
        job: The job.
        call: The call.
        said: What is said of it: "waits in all_reduce #12".
    """
    at = f", called at {call.call_site}" if call.call_site else ""
    return Fact(text=f"rank {call.rank} {said}{at}", source=job.calls.find_source(call.rank))


def cite_end(job: ObservedJob, end: RankEnd, said: str) -> Fact:
    """Cite how a process ended.

    Args:
        job: The job.
        end: How it ended.
        said: What is said of it: "ended by SIGKILL".
    """
    who = job.name(() if end.rank is None else (end.rank,))
    return Fact(text=f"{who} {said}", source=end.source)


def write_wait(seconds: float | None) -> str:
    """Write how long something lasted: " for 12m00s"; "" where that is not known."""
    return f" for {duration(seconds)}" if seconds is not None and seconds > 0 else ""


def write_at(site: str) -> str:
    """Write a place in the program: " at train.py:88 in step"; "" for none."""
    return f" at {site}" if site else ""
