"""Nineteen questions that every training run should be able to answer, as a table.

A finding with one of a question's codes answers it: failed. Without one, what the question's rule saw answers it, or,
where no rule looks for such a cause, a look of its own: passed, failed, or not visible, with what to record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_lite.analysis.contradictions import find_contradictions, rests_on_run_only
from megatron_lite.analysis.findings.base import CheckResult, Evidence, Finding, Observation, Recording, could_not_look
from megatron_lite.analysis.findings.check_case import Check, CheckCase, fail_by_findings
from megatron_lite.analysis.findings.rules import REPORT_BUG
from megatron_lite.analysis.findings.run_checks import (
    look_at_batches,
    look_at_compilation,
    look_at_hardware,
    look_at_peak,
    look_at_shapes,
    look_at_tokens,
)
from megatron_lite.analysis.findings.second_run_checks import look_at_losses, look_at_sixteen_bits
from megatron_lite.analysis.findings.timing_checks import look_at_clock, look_at_profile, look_at_steady_state
from megatron_lite.analysis.run_facts import Facts


@dataclass(frozen=True)
class Question:
    """A row of the table."""

    text: str
    name: str  # the same in a few words
    codes: tuple[str, ...] = ()  # of the rules whose findings answer it: failed
    look: Callable[[CheckCase], Observation] | None = (
        None  # without a finding; None: what the rule with the first code saw
    )
    record: str = ""  # what to record where the look does not say


LONGER_WINDOW = f"{Recording.LONGER_RUN}, or a longer window: --profile-step-end"
QUESTIONS: tuple[Question, ...] = (
    Question(
        "Are times taken on the device's clock, after a warm-up?",
        "device's clock, after a warm-up",
        look=look_at_clock,
        record=Recording.TRACE,
    ),
    Question(
        "Is there a step time of the steady state, without the first step?",
        "step time of the steady state",
        look=look_at_steady_state,
        record=LONGER_WINDOW,
    ),
    Question(
        "Do .item(), print and .cpu() in the hot path cost no time?",
        "no .item() or print in steps",
        ("sync-in-step", "log-stalls"),
    ),
    Question(
        "Are batches ready when the step needs them?",
        "batches ready in time",
        ("starved-loader", "too-many-workers"),
    ),
    Question(
        "Do batches travel from pinned memory, without the host waiting?",
        "batches from pinned memory",
        ("unpinned-copies",),
    ),
    Question(
        "Does a batch travel in few copies rather than many small ones?",
        "few copies per batch",
        ("small-copies",),
    ),
    Question(
        "Do tensors keep one layout, with little copying and .contiguous()?",
        "one layout, little copying",
        ("copy-share", "layout-copies"),
    ),
    Question(
        "Are small operators batched or fused?",
        "small operators fused",
        ("unfused-elementwise", "launch-bound", "unfused-optimizer", "tiny-micro-batches", "small-buckets"),
    ),
    Question(
        "Do matrix products have shapes that suit the tensor cores?",
        "shapes that suit tensor cores",
        ("no-tensor-cores", "matmul-shapes"),
    ),
    Question(
        "Do 16-bit formats save time and memory?",
        "16 bits save time and memory",
        ("fp32-products",),
        look_at_sixteen_bits,
        Recording.SECOND_RUN,
    ),
    Question(
        "Are overflows of the loss scale rare?",
        "overflows rare",
        ("overflow-storm", "scale-collapse"),
    ),
    Question(
        "Is the memory peak explained, and does memory not grow from step to step?",
        "peak explained, memory steady",
        ("memory-growth", "out-of-memory", "logits-peak", "recompute-activations"),
        look_at_peak,
        Recording.SNAPSHOT,
    ),
    Question(
        "Do batch, accumulation and schedule agree: one update per global batch?",
        "one update per global batch",
        ("reduce-every-micro-batch",),
        look_at_batches,
        Recording.RUN_FOLDER,
    ),
    Question(
        "Does an undisturbed profile show what to improve next?",
        "profile shows what to improve",
        ("profiler-overhead",),
        look_at_profile,
        Recording.TRACE,
    ),
    Question(
        "Is compilation excluded from steady steps, and over after the first?",
        "compiling over after first step",
        ("recompilation", "graph-breaks"),
        look_at_compilation,
        Recording.RUN_FOLDER,
    ),
    Question(
        "Are shapes constant, without recompilation and padding?",
        "constant shapes, no padding",
        ("recompilation", "vocabulary-padding"),
        look_at_shapes,
        Recording.SHAPES,
    ),
    Question(
        "Does throughput count the tokens that train?",
        "throughput of tokens that train",
        ("overflow-storm",),
        look_at_tokens,
        Recording.RUN_FOLDER,
    ),
    Question(
        "Does the loss still agree with the baseline's?",
        "loss agrees with the baseline",
        look=look_at_losses,
        record=Recording.SECOND_RUN,
    ),
    Question(
        "Do GPUs keep their clocks and hosts their cores, without errors?",
        "hardware at its speed",
        ("gpu-slowed", "gpu-low-clock", "gpu-errors", "cpu-quota", "stolen-time", "hot-cpu"),
        look_at_hardware,
        Recording.HARDWARE,
    ),
)


def answer_checks(
    facts: Facts, findings: Sequence[Finding], looks: Mapping[str, Observation], other: Facts | None = None
) -> tuple[Check, ...]:
    """Answer all questions of the table, in its order.

    Args:
        facts: the run.
        findings: what the rules found, most costly first.
        looks: what each rule saw, by code.
        other: a second run, which the questions about 16 bits and losses are answered against.
    """
    case = CheckCase(facts, tuple(findings), looks, other)
    doubts = find_contradictions(facts)
    return tuple(_answer(number, question, case, doubts) for number, question in enumerate(QUESTIONS, 1))


def _answer(number: int, question: Question, case: CheckCase, doubts: Sequence[str]) -> Check:
    """Answer one question. doubts: what speaks against the trace or snapshot, the most important first."""
    found = case.find(*question.codes)
    look = fail_by_findings(found) if found else _look(question, case)
    is_doubtful = bool(doubts) and not rests_on_run_only(look.evidence)
    if is_doubtful and look.outcome is not CheckResult.NOT_VISIBLE:
        look = could_not_look(*look.evidence, record=f"record again: {doubts[0]}")
    remedy = look.remedy
    if look.outcome is not CheckResult.PASSED and not remedy:
        remedy = question.record
    in_words = case.facts.in_words
    evidence = tuple(replace(one, text=in_words(one.text)) for one in look.evidence)
    return Check(number, question.text, look.outcome, evidence, look.code, in_words(remedy), question.name)


def _look(question: Question, case: CheckCase) -> Observation:
    """Look where no finding answers a question."""
    if question.look is None:
        return case.get_look(question.codes[0]) or could_not_look()
    try:
        return question.look(case)
    except Exception as error:  # noqa: BLE001  one check that a foreign file confuses must not silence the others
        return could_not_look(Evidence(f"failed ({type(error).__name__}: {error})"), record=REPORT_BUG)
