"""What an audit says: the answer to a question, what it rests on, and what to change or to record."""

import enum
from dataclasses import dataclass

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase


class Record:
    """What to record so that a question can be answered: for this trainer, and for any PyTorch job."""

    TRACE = "a trace of some steps: --use-pytorch-profiler --profile-step-start 10 --profile-step-end 15"
    GPU_TRACE = "a trace of a run on a GPU with CUDA activities: --use-pytorch-profiler"
    SHAPES = "a trace with shapes: --use-pytorch-profiler --pytorch-profiler-collect-shapes"
    SNAPSHOT = "a memory snapshot over three steps or more: --record-memory-history"
    RUN_FOLDER = "the run's own record (run.json, steps.jsonl): the folder of --run-dir"
    LONGER_RUN = "a longer run: --train-iters"
    SECOND_RUN = "a second run to compare with: --against OTHER_RUN"
    LOADER = (
        f'a trace that names the loader (a DataLoader does; else record_function("{Phase.DATA.value}")), '
        "or the run's own record (steps.jsonl)"
    )


class Answer(str, enum.Enum):
    PASS = "pass"  # the run shows it
    FAIL = "fail"  # the run shows the opposite
    NOT_SEEN = "not seen"  # the run shows neither

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Point:
    """A question to the run and its answer; examiners leave number and question open."""

    number: int
    question: str
    answer: Answer
    evidence: tuple[Evidence, ...]  # never empty for pass and fail
    code: str = ""  # of the finding that explains a fail; "" where no rule does
    way_out: str = ""  # fail: what to change; not seen: what to record; "" for pass


@dataclass(frozen=True)
class Case:
    """What is audited."""

    facts: Facts
    findings: tuple[Finding, ...] = ()  # most costly first
    other: Facts | None = None  # the run to compare with

    def found(self, *codes: str) -> tuple[Finding, ...]:
        """The findings that have one of the codes, most costly first."""
        return tuple(one for one in self.findings if one.code in codes)


def not_seen(*evidence: Evidence, record: str = "") -> Point:
    """record: what to record; "" for what the table of questions says."""
    return Point(0, "", Answer.NOT_SEEN, evidence, way_out=record)


def failed(remedy: str, *evidence: Evidence, code: str = "") -> Point:
    return Point(0, "", Answer.FAIL, evidence, code, remedy)


def fail_by_findings(findings: tuple[Finding, ...]) -> Point:
    """The most costly finding in full, and a line of each other one."""
    first, *more = findings
    also = (Evidence(f"also {one.code}: {one.evidence[0].text}", one.evidence[0].where) for one in more)
    return failed(first.advice, *first.evidence, *also, code=first.code)
