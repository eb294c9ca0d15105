"""Findings, the rules that look for them, and how rules word what they find."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from typing import Literal

from megatron_lite.analysis.findings.settings import read_settings
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, EventPlace, RankFacts
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.setting import Setting
from megatron_lite.phases import Phase
from megatron_lite.units import counted

Needs = Literal["", "run", "snapshot", "trace", "gpu"]
MAX_SHOWN = 3  # pieces of evidence of one kind, and flags to try


class Recording:
    """Flags and files to record so that a rule can look: for this trainer, and for any PyTorch job."""

    TRACE = "a trace of some steps: --use-pytorch-profiler --profile-step-start 10 --profile-step-end 15"
    GPU_TRACE = "a trace of a run on a GPU with CUDA activities: --use-pytorch-profiler"
    SHAPES = "a trace with shapes: --use-pytorch-profiler --pytorch-profiler-collect-shapes"
    STACKS = "a trace with stacks: --use-pytorch-profiler --pytorch-profiler-collect-callstack"
    SNAPSHOT = "a memory snapshot over three steps or more: --record-memory-history"
    RUN_FOLDER = "the run's own record (run.json, steps.jsonl): the folder of --run-dir"
    HARDWARE = "clocks and errors of the GPUs beside steps: pip install nvidia-ml-py"
    LONGER_RUN = "a longer run: --train-iters"
    EVERY_RANK = "a trace of every rank: --profile-ranks -1"
    SECOND_RUN = "a second run to compare with: --against OTHER_RUN"
    LOADER = (
        f'a trace that names the loader (a DataLoader does; else record_function("{Phase.DATA.value}")), '
        "or the run's own record (steps.jsonl)"
    )


# what a rule lacks that was not given what it needs
NEEDED: dict[Needs, str] = {
    "": "",
    "run": Recording.RUN_FOLDER,
    "snapshot": Recording.SNAPSHOT,
    "trace": Recording.TRACE,
    "gpu": Recording.GPU_TRACE,
}


@dataclass(frozen=True)
class Evidence:
    """A thing that was seen, where, and how it was measured."""

    text: str  # one line, numbers with units
    where: EventPlace | str = ""  # "rank 0, step 12, stream 7 at 1,204.3 ms", a source line, a file


@dataclass(frozen=True)
class Edit:
    """A remedy as a change of the dependency graph of the measured steps, whose replay tells what it saves."""

    change: str  # of the program, an instruction in a few words: "load with 2 workers"
    apply: Callable[[Graph], Graph]
    # adds to the steps what they do not hold and the remedy changes, as checkpoints between them; None: nothing
    prepare: Callable[[Graph], Graph] | None = None
    # it says which rank is late, not why: a change that saves as much is made before it
    is_of_late_ranks: bool = False


@dataclass(frozen=True)
class Finding:
    """A cause of lost time or memory."""

    code: str = ""
    title: str = ""
    cost_ms: float | None = None  # per step; None for what costs memory or trust rather than time
    cost_bytes: int | None = None  # at the peak; None if it is about time
    evidence: tuple[Evidence, ...] = ()  # never empty, what counts most first
    advice: str = ""  # never empty: one line, the flag to try first
    flags: tuple[str, ...] = ()  # ("--num-workers 4",)
    # that the remedy saves of a step if nothing else changes; see gain_is_bound
    gain_ms: float | None = None
    gain_bytes: int | None = None
    certain: bool = True  # False: likely, and the text says what would settle it
    rank: int | None = None  # if it is one rank's
    once_ms: float | None = None  # of the trace, if it is paid once rather than by each step: then cost_ms is None
    # what `flags` set, those of one flag together; of this trainer also where a script of others has no such flags
    settings: tuple[tuple[Setting, ...], ...] = ()
    # True: gain_ms is an upper bound, and bounds of several findings do not add up; False: it is what a replay of the
    # measured steps with the remedy says
    gain_is_bound: bool = True
    edit: Edit | None = field(default=None, compare=False)  # None: no change of the graph stands for the remedy


@dataclass(frozen=True)
class Remedy:
    """A change that removes a cause."""

    advice: str  # one line
    flags: tuple[str, ...] = ()  # the same as flags: ("--num-workers 4",)
    edit: Edit | None = None  # the same as a change of the graph


NO_STEADY_STEP = "the trace has no steady step"


class CheckResult(str, enum.Enum):
    """The answer of a run to a question."""

    PASSED = "pass"  # the run shows it
    FAILED = "fail"  # the run shows the opposite
    NOT_VISIBLE = "not seen"  # the run shows neither

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Observation:
    """A rule's look: what it saw where it found no cause worth a finding, or why it could not look."""

    outcome: CheckResult
    evidence: tuple[Evidence, ...] = ()  # never empty for passed and failed
    remedy: str = ""  # failed: what to change; not visible: what to record; "" for passed
    code: str = ""  # failed: the rule whose page explains it; "" where none does


def saw(*evidence: Evidence) -> Observation:
    """Build the look of a rule that could look and found nothing wrong."""
    return Observation(CheckResult.PASSED, evidence)


def saw_wrong(remedy: str, *evidence: Evidence, code: str = "") -> Observation:
    """Build the look of a rule that saw something wrong, whose cost is unknown or too small for a finding.

    Args:
        remedy: what to change, one line.
        evidence: what was seen, what counts most first.
        code: the rule whose page explains it; "" where none does.
    """
    return Observation(CheckResult.FAILED, evidence, remedy, code)


def could_not_look(*evidence: Evidence, record: str = "") -> Observation:
    """Build the look of a rule that could not look.

    Args:
        evidence: what was seen all the same, and why it does not answer.
        record: what to record, one line; "" for what the rule itself names.
    """
    return Observation(CheckResult.NOT_VISIBLE, evidence, record)


def saw_nothing(one: RankFacts, what: str) -> Observation:
    """Build the look of a rule that found nothing of its kind among the operators of a trace's steady steps.

    Args:
        one: the rank of the trace.
        what: what is not there, as in "no graph is captured".
    """
    if not one.time.step_ms > 0:
        return could_not_look(Evidence(NO_STEADY_STEP, one.where()))
    if not len(one.trace.rows[Kind.OP]):
        return could_not_look(Evidence("the trace has no operators", one.where()))
    return saw(Evidence(f"{what} in {counted(one.steady_steps, 'steady step')}", one.where()))


def told_by(code: str, what: str) -> Observation:
    """Build the look of a rule whose cause another rule tells.

    Args:
        code: the other rule.
        what: what was seen of the cause.
    """
    return saw_wrong(f"see {code}", Evidence(what), code=code)


def tell_more(answer: Finding | Observation, look: Observation) -> Finding | Observation:
    """Keep a finding; put a look that says more in the place of one that found nothing."""
    return answer if isinstance(answer, Finding) else look


@dataclass(frozen=True)
class Rule:
    """Looks for one cause. It says what it found; or what it saw, where it could look and found nothing;
    or what it lacks."""

    code: str
    title: str  # a few words
    subjects: tuple[str, ...]  # the report's sections with its evidence
    needs: Needs
    function: Callable[..., Finding | Observation]  # (facts), or (facts, what it needs)
    record: str = ""  # what to record so that it can look

    def __call__(self, facts: Facts) -> Finding | None:
        found = self.examine(facts)
        return found if isinstance(found, Finding) else None

    def examine(self, facts: Facts) -> Finding | Observation:
        """Find the cause, or say what was seen in its place."""
        answer = self._ask(facts)
        if isinstance(answer, Finding):
            settings = tuple(read_settings(flag) for flag in answer.flags)
            return replace(answer, code=self.code, title=answer.title or self.title, settings=settings)
        if answer.outcome is CheckResult.NOT_VISIBLE and not answer.remedy:
            return replace(answer, remedy=self.record)
        return answer

    def _ask(self, facts: Facts) -> Finding | Observation:
        """Call the function with what it needs, where the run has it."""
        if not self.needs:
            return self.function(facts)
        one = facts.critical
        if self.needs == "gpu" and one is not None and not one.time.on_gpu:
            return could_not_look()
        needed = {"run": facts.run, "snapshot": facts.highest_snapshot}.get(self.needs, one)
        if needed is None:
            return could_not_look()
        return self.function(facts, needed)

    @property
    def page(self) -> str:
        """The text that `megatron-lite explain CODE` prints."""
        return cleandoc(self.function.__doc__ or "")


def rule(
    code: str, title: str, *subjects: str, needs: Needs = "", record: str = ""
) -> Callable[[Callable[..., Finding | Observation]], Rule]:
    """Make a function a rule, whose docstring is its page.

    Args:
        code: what `megatron-lite explain` calls it.
        title: a few words.
        subjects: the keys of the report's sections that show its evidence; the page leads from it to them.
        needs: its second argument, without which it is not asked: the run's record, the snapshot with the highest peak,
            or the rank whose time is the run's ("trace"; "gpu" if the trace is of one).
        record: what to record so that it can look; by default what it needs.
    """
    return lambda function: Rule(code, title, subjects, needs, function, record or NEEDED[needs])


def build_time_finding(
    cost_ms: float | None,
    evidence: Iterable[Evidence],
    advice: str,
    flags: tuple[str, ...] = (),
    certain: bool = True,
    rank: int | None = None,
    edit: Edit | None = None,
) -> Finding:
    """Build the finding of what costs `cost_ms` of each step, and gains that if it goes.

    Args:
        cost_ms: ms per step; None for unknown.
        evidence: what was seen, what counts most first.
        advice: what to change.
        flags: what to change, as flags.
        certain: whether nothing else can have made it.
        rank: the rank that it is of; None where it is of all.
        edit: the remedy as a change of the graph; None where none stands for it.
    """
    return Finding(
        cost_ms=cost_ms,
        gain_ms=cost_ms,
        evidence=tuple(evidence),
        advice=advice,
        flags=flags,
        certain=certain,
        rank=rank,
        edit=edit,
    )


def measure_longest_step(facts: Facts) -> float:
    """Measure the longest step among the ranks with a trace, ms; 0 without traces."""
    rows = facts.ranks.rows if facts.ranks else ()
    return max((row.step_ms for row in rows), default=0.0)


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
    edit: Edit | None = None,
) -> Finding | Observation:
    """Find what costs `cost` ms of each step, and gains that if it goes; of less than a notable share say what was
    seen.

    Args:
        one: the rank whose steps lose the time.
        cost: ms per step.
        seen: the first piece of evidence.
        advice: what to change.
        more: the other pieces of evidence.
        row: the event at which the first piece stands.
        flags: what to change, as flags.
        certain: whether nothing else can have made it.
        cheap: it is cheap to remove, so that MIN_SHARE_SHOWN of the step is notable.
        at_least: the notable share of a step, where it is not cheap.
        title: "" for the rule's.
        edit: the remedy as a change of the graph; None where none stands for it.
    """
    evidence = (Evidence(seen, one.where(row)), *more)
    if one.share(cost) < (MIN_SHARE_SHOWN if cheap else at_least):
        if not one.time.step_ms > 0:
            return could_not_look(Evidence(NO_STEADY_STEP, one.where()))
        return saw(evidence[0])
    return Finding(
        title=title,
        cost_ms=cost,
        evidence=evidence,
        advice=advice,
        flags=flags,
        gain_ms=cost,
        certain=certain,
        rank=one.time.rank,
        edit=edit,
    )


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
    """Build the finding of what holds memory in a snapshot.

    Args:
        most: the snapshot.
        num_bytes: what is held.
        gain_bytes: what would be free without it; None for unknown.
        seen: the first piece of evidence.
        advice: what to change.
        more: the other pieces of evidence.
        flags: what to change, as flags.
        certain: whether nothing else can have made it.
    """
    return Finding(
        cost_bytes=num_bytes,
        evidence=(Evidence(seen, most.source), *more),
        advice=advice,
        flags=flags,
        gain_bytes=gain_bytes,
        certain=certain,
        rank=most.rank,
    )
