"""What a finding is, what a rule is, and how rules word what they find."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from inspect import cleandoc
from typing import Literal

from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts
from megatron_lite.analysis.run_facts import Facts

Needs = Literal["", "run", "snapshot", "trace", "gpu"]


@dataclass(frozen=True)
class Evidence:
    """One thing that was seen, where, and how it was measured."""

    text: str  # one line, numbers with units
    where: str = ""  # "rank 0, step 12, stream 7 at 1,204.3 ms", a source line, a file


@dataclass(frozen=True)
class Finding:
    """One cause of lost time or memory."""

    code: str = ""
    title: str = ""
    cost_ms: float | None = None  # per step; None for what costs memory or trust rather than time
    cost_bytes: int | None = None  # at the peak; None if it is about time
    evidence: tuple[Evidence, ...] = ()  # never empty, what counts most first
    advice: str = ""  # never empty: one line, the flag to try first
    flags: tuple[str, ...] = ()  # ("--num-workers 4",)
    gain_ms: float | None = None  # upper bound per step; ceilings of several findings do not add
    gain_bytes: int | None = None
    certain: bool = True  # False: likely, and the text says what would settle it
    rank: int | None = None  # if it is one rank's
    once_ms: float | None = None  # of the trace, if it is paid once rather than by each step: then cost_ms is None


@dataclass(frozen=True)
class Rule:
    """Looks for one cause, and finds nothing wherever it cannot know."""

    code: str
    title: str  # a few words
    subjects: tuple[str, ...]  # the report's sections with its evidence
    needs: Needs
    function: Callable[..., Finding | None]  # (facts), or (facts, what it needs)

    def __call__(self, facts: Facts) -> Finding | None:
        one = facts.critical
        known = {"run": facts.run, "snapshot": facts.highest_snapshot}.get(self.needs, one)
        if not self.needs:
            found = self.function(facts)
        elif known is None or (self.needs == "gpu" and one is not None and not one.time.on_gpu):
            found = None
        else:
            found = self.function(facts, known)
        return found and replace(found, code=self.code, title=found.title or self.title)

    @property
    def page(self) -> str:
        """What `megatron-lite explain CODE` prints."""
        return cleandoc(self.function.__doc__ or "")


def rule(code: str, title: str, *subjects: str, needs: Needs = "") -> Callable[[Callable[..., Finding | None]], Rule]:
    """Make a function a rule, whose docstring is its page.

    subjects: the keys of the report's sections that show its evidence; the page leads from it to them.
    needs: its second argument, without which it is not asked: the run's record, the snapshot with the highest peak, or the
        rank whose time is the run's ("trace"; "gpu" if the trace is of one).
    """
    return lambda function: Rule(code, title, subjects, needs, function)


def build_time_finding(
    cost_ms: float | None,
    evidence: Iterable[Evidence],
    advice: str,
    flags: tuple[str, ...] = (),
    certain: bool = True,
    rank: int | None = None,
) -> Finding:
    """What costs `cost_ms` of each step, and gains that if it goes."""
    return Finding("", "", cost_ms, None, tuple(evidence), advice, flags, cost_ms, None, certain, rank)


def find_lost_time(
    one: RankFacts,
    cost: float,
    seen: str,
    advice: str,
    *more: Evidence,
    row: int | None = None,
    flags: tuple[str, ...] = (),
    certain: bool = True,
    cheap: bool = False,
    at_least: float = MATTERS,
    title: str = "",
) -> Finding | None:
    """What costs `cost` ms of each step, and gains that if it goes; None below the share `at_least` of the step.

    Args: seen: the first piece of evidence, which stands at the event `row`; more: the other pieces; cheap: to remove, so
    that MIN_SHARE_SHOWN of the step is enough.
    """
    if one.share(cost) < (MIN_SHARE_SHOWN if cheap else at_least):
        return None
    evidence, rank = (Evidence(seen, one.where(row)), *more), one.time.rank
    return Finding("", title, cost, None, evidence, advice, flags, gain_ms=cost, certain=certain, rank=rank)


def find_lost_memory(
    most: Snapshot,
    num_bytes: int,
    gain_bytes: int | None,
    seen: str,
    advice: str,
    *more: Evidence,
    flags: tuple[str, ...] = (),
    certain: bool = True,
) -> Finding:
    """What holds `num_bytes` in a snapshot. seen: the first piece of evidence; more: the other pieces."""
    evidence, rank = (Evidence(seen, most.source), *more), most.rank
    return Finding("", "", None, num_bytes, evidence, advice, flags, None, gain_bytes, certain, rank)
