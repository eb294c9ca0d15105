"""Eighteen questions that every training run should be able to answer, as a table.

A finding with one of a question's codes answers it with a fail. Without one the question's examiner looks whether the
files hold what it needs: evidence is a pass, no evidence is "not seen", and then the point names what to record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_lite.analysis.audit.answers import (
    GPU_TRACE,
    LOADER,
    LONGER_RUN,
    RUN_FOLDER,
    SECOND_RUN,
    SHAPES,
    SNAPSHOT,
    TRACE,
    Answer,
    Case,
    Point,
    fail_by_findings,
    not_seen,
)
from megatron_lite.analysis.audit.run_examiners import (
    examine_batches,
    examine_compilation,
    examine_losses,
    examine_overflows,
    examine_peak,
    examine_shapes,
    examine_sixteen_bits,
    examine_tokens,
)
from megatron_lite.analysis.audit.trace_examiners import (
    examine_clock,
    examine_fusion,
    examine_layout,
    examine_loader,
    examine_number_of_copies,
    examine_pinned_copies,
    examine_profile,
    examine_steady_state,
    examine_synchronization,
    examine_tensor_cores,
)
from megatron_lite.analysis.contradictions import find_contradictions, rests_on_run_only
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.run_facts import Facts

AUDIT_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong


@dataclass(frozen=True)
class Question:
    text: str
    codes: tuple[str, ...]  # of the findings that answer it with a fail
    record: str  # what to record where the files hold too little
    examine: Callable[[Case], Point | Sequence[Evidence]]  # no evidence: not seen


SMALL_WORK = ("launch-bound", "unfused-elementwise", "unfused-optimizer", "tiny-micro-batches", "small-buckets")
KEPT_MEMORY = ("memory-growth", "out-of-memory", "logits-peak", "recompute-activations")
QUESTIONS = (
    Question("Are times taken on the device's clock, after a warm-up?", (), TRACE, examine_clock),
    Question(
        "Is there a step time of the steady state, without the first step?",
        (),
        f"{LONGER_RUN}, or a longer window: --profile-step-end",
        examine_steady_state,
    ),
    Question(
        "Do .item(), print and .cpu() in the hot path cost no time?", ("sync-in-step",), TRACE, examine_synchronization
    ),
    Question(
        "Are batches ready when the step wants them?", ("starved-loader", "too-many-workers"), LOADER, examine_loader
    ),
    Question(
        "Do batches travel from pinned memory, without the host waiting?",
        ("unpinned-copies",),
        GPU_TRACE,
        examine_pinned_copies,
    ),
    Question(
        "Does a batch travel in few copies rather than many small ones?",
        ("small-copies",),
        GPU_TRACE,
        examine_number_of_copies,
    ),
    Question(
        "Do tensors keep one layout, with little copying and .contiguous()?",
        ("copy-share",),
        TRACE,
        examine_layout,
    ),
    Question(
        "Are small operators batched or fused?",
        SMALL_WORK,
        TRACE,
        examine_fusion,
    ),
    Question(
        "Do products have shapes that the tensor cores take?",
        ("no-tensor-cores", "matmul-shapes"),
        GPU_TRACE,
        examine_tensor_cores,
    ),
    Question("Do 16-bit formats save time and memory?", ("fp32-products",), SECOND_RUN, examine_sixteen_bits),
    Question(
        "Are overflows of the loss scale rare?", ("overflow-storm", "scale-collapse"), RUN_FOLDER, examine_overflows
    ),
    Question("Is the memory peak explained, with nothing kept from step to step?", KEPT_MEMORY, SNAPSHOT, examine_peak),
    Question(
        "Do batch, accumulation and schedule agree: one update per global batch?",
        ("reduce-every-micro-batch",),
        RUN_FOLDER,
        examine_batches,
    ),
    Question("Does an undisturbed profile say where to go on?", ("profiler-overhead",), TRACE, examine_profile),
    Question(
        "Is compiling told apart from steady steps, and over after the first?",
        ("recompilation", "graph-breaks"),
        RUN_FOLDER,
        examine_compilation,
    ),
    Question(
        "Are shapes constant, without recompilation and padding?",
        ("recompilation", "vocabulary-padding"),
        SHAPES,
        examine_shapes,
    ),
    Question("Does throughput count the tokens that train?", ("overflow-storm",), RUN_FOLDER, examine_tokens),
    Question("Does the loss still agree with the baseline's?", (), SECOND_RUN, examine_losses),
)


def audit_run(facts: Facts, findings: Sequence[Finding], other: Facts | None = None) -> tuple[Point, ...]:
    """A Point per question, in order. `other`: a second run, against which questions 10 and 18 are answered."""
    case, doubts = Case(facts, tuple(findings), other), find_contradictions(facts)
    points = []
    for number, question in enumerate(QUESTIONS, 1):
        outcome = _answer(question, case)
        if outcome.answer is not Answer.NOT_SEEN and doubts and not rests_on_run_only(outcome.evidence):
            outcome = not_seen(f"record anew: {doubts[0]}", *outcome.evidence)
        points.append(replace(outcome, number=number, question=question.text))
    return tuple(points)


def _answer(question: Question, case: Case) -> Point:
    if found := case.found(*question.codes):
        return fail_by_findings(found)
    try:
        outcome = question.examine(case)
    except Exception as error:  # noqa: BLE001  one point that a foreign file confuses must not silence the others
        seen = Evidence(f"could not be asked ({type(error).__name__}: {error})")
        return not_seen("please report it: a mistake of this program", seen)
    if isinstance(outcome, Point):
        return outcome
    return Point(0, "", Answer.PASS, tuple(outcome)) if outcome else not_seen(question.record)
