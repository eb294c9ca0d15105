"""The result of an analysis: everything a renderer shows, nothing that it has to work out."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.analysis.findings.base import Finding, Observation
from megatron_lite.analysis.findings.check_case import Check
from megatron_lite.analysis.findings.rules import RulePage, find_page
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.verdict_word import VerdictWord, describe_headline
from megatron_lite.postmortem.postmortem_results import Postmortem

REPORT_SCHEMA = 1  # of report.json; raised when a reader of the old form would be wrong


@dataclass(frozen=True)
class Verdict:
    """The first line. INCONCLUSIVE is a legal verdict, with its reason."""

    sentence: str  # "31% of peak; 20% of each step waits for the gradient all-reduce, 10% for the host"
    bound: str  # "compute", "communication", "host", "data", "copy", "sync", "memory", "inconclusive"
    confidence: str  # "high", "low"
    why: str  # "3 steady steps"; for low and inconclusive the reason
    word: VerdictWord = VerdictWord.INCONCLUSIVE  # "INPUT-BOUND": what limits the run, in one word of a closed set
    # "First load with 2 workers, then fuse the optimizer: 41 instead of 78 ms per step"; "" where no gains are claimed
    next_steps: str = ""

    @property
    def headline(self) -> str:
        """The word and the sentence, as a renderer shows them."""
        return describe_headline(self.word, self.sentence)


@dataclass(frozen=True)
class OrderedChange:
    """A finding's remedy in the order in which remedies are worth it."""

    code: str  # of the finding
    change: str  # that was replayed: "load with 2 workers"
    alone_ms: float  # that it saves of a step if nothing else is changed
    ms: float  # that it saves on top of those before it: these add up
    step_ms: float  # a step after it and those before it


NOTABLE_RECORDING = 0.01  # of a step


@dataclass(frozen=True)
class Gains:
    """Gains of the findings' remedies together, by replays of the measured steps with their changes."""

    step_ms: float  # as measured, with stalls_ms and without recording_ms
    order: tuple[OrderedChange, ...]  # those that save something on top of the others, the first to make first
    confidence: str  # "high", "low"
    doubts: tuple[str, ...]  # what lowers the confidence
    # why nothing is claimed, so that all findings' gains are upper bounds; "": gains are what replays say
    why_not: str = ""
    # of the mean step, what saving and evaluating take in some steps only, which the profiled ones do not show; 0 where
    # no change is about it
    stalls_ms: float = 0.0
    # of a profiled step, what the profiler itself takes, by the run's other steps; 0 where no run tells
    recording_ms: float = 0.0

    @property
    def is_without_profiler(self) -> bool:
        """Whether steps are notably shorter without the profiler, so that theirs is another time than the report's."""
        return self.recording_ms > NOTABLE_RECORDING * self.step_ms


@dataclass(frozen=True)
class Report:
    """Everything that was found out about one run or trace."""

    paths: tuple[str, ...]
    title: str  # "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024"
    verdict: Verdict
    findings: tuple[Finding, ...]  # the one that saves most first; see findings/order.py
    facts: Facts
    read_s: float  # how long reading and analyzing took
    looks: Mapping[str, Observation]  # by code: what each rule saw
    checks: tuple[Check, ...]  # the list of questions in its order
    gains: Gains | None = None  # None: no finding's remedy could be replayed
    failure: Postmortem | None = None  # why the job failed, where its folder holds evidence of that

    def find_page(self, finding: Finding) -> RulePage | None:
        """Find what is known of the rule behind a finding; None for what no rule found."""
        return find_page(finding.code)
