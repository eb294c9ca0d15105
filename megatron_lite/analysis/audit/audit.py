"""Eighteen questions that every training run should be able to answer, as a table.

A finding with one of a question's codes answers it with a fail. Without one the question's examiner looks whether the
files hold what it needs: evidence is a pass, no evidence is "not seen", and then the point names what to record.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_lite.analysis.audit import run_examiners as run
from megatron_lite.analysis.audit import trace_examiners as trace
from megatron_lite.analysis.audit.answers import Answer, Case, Point, Record, fail_by_findings, not_seen
from megatron_lite.analysis.contradictions import find_contradictions, rests_on_run_only
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.run_facts import Facts

AUDIT_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong
LONGER_WINDOW = f"{Record.LONGER_RUN}, or a longer window: --profile-step-end"
# question, its examiner, codes of the findings that answer it with a fail, what to record where the files hold too little, and
# what the examiner is given, if anything: without it, it is not asked
Examiner = Callable[..., Point | list[Evidence]]
QUESTIONS: tuple[tuple[str, Examiner, str, str] | tuple[str, Examiner, str, str, str], ...] = (
    ("Are times taken on the device's clock, after a warm-up?", trace.examine_clock, "", Record.TRACE),
    ("Is there a step time of the steady state, without the first step?", trace.examine_steady_state, "", LONGER_WINDOW),
    ("Do .item(), print and .cpu() in the hot path cost no time?", trace.examine_synchronization, "sync-in-step", Record.TRACE, "trace"),
    ("Are batches ready when the step needs them?", trace.examine_loader, "starved-loader too-many-workers", Record.LOADER),
    ("Do batches travel from pinned memory, without the host waiting?", trace.examine_pinned_copies, "unpinned-copies", Record.GPU_TRACE, "trace"),
    ("Does a batch travel in few copies rather than many small ones?", trace.examine_number_of_copies, "small-copies", Record.GPU_TRACE, "trace"),
    ("Do tensors keep one layout, with little copying and .contiguous()?", trace.examine_layout, "copy-share", Record.TRACE, "trace"),
    ("Are small operators batched or fused?", trace.examine_fusion,
     "launch-bound unfused-elementwise unfused-optimizer tiny-micro-batches small-buckets", Record.TRACE, "trace"),
    ("Do matrix products have shapes that suit the tensor cores?", trace.examine_tensor_cores, "no-tensor-cores matmul-shapes", Record.GPU_TRACE, "trace"),
    ("Do 16-bit formats save time and memory?", run.examine_sixteen_bits, "fp32-products", Record.SECOND_RUN),
    ("Are overflows of the loss scale rare?", run.examine_overflows, "overflow-storm scale-collapse", Record.RUN_FOLDER, "run"),
    ("Is the memory peak explained, and does memory not grow from step to step?", run.examine_peak,
     "memory-growth out-of-memory logits-peak recompute-activations", Record.SNAPSHOT),
    ("Do batch, accumulation and schedule agree: one update per global batch?", run.examine_batches, "reduce-every-micro-batch", Record.RUN_FOLDER),
    ("Does an undisturbed profile show what to improve next?", trace.examine_profile, "profiler-overhead", Record.TRACE, "trace"),
    ("Is compilation excluded from steady steps, and over after the first?", run.examine_compilation, "recompilation graph-breaks", Record.RUN_FOLDER),
    ("Are shapes constant, without recompilation and padding?", run.examine_shapes, "recompilation vocabulary-padding", Record.SHAPES),
    ("Does throughput count the tokens that train?", run.examine_tokens, "overflow-storm", Record.RUN_FOLDER, "run"),
    ("Does the loss still agree with the baseline's?", run.examine_losses, "", Record.SECOND_RUN),
)  # fmt: skip


def audit_run(facts: Facts, findings: Sequence[Finding], other: Facts | None = None) -> tuple[Point, ...]:
    """A Point per question, in order. `other`: a second run, against which questions 10 and 18 are answered."""
    case, doubts = Case(facts, tuple(findings), other), find_contradictions(facts)
    known, points = {"run": facts.run, "trace": facts.critical}, []
    for number, (question, examine, codes, record, *needs) in enumerate(QUESTIONS, 1):
        try:
            found, given = case.found(*codes.split()), [known[name] for name in needs]
            answer = fail_by_findings(found) if found else None not in given and examine(case, *given)
        except Exception as error:  # noqa: BLE001  one point that a foreign file confuses must not silence the others
            seen = Evidence(f"failed ({type(error).__name__}: {error})")
            answer = not_seen(seen, record="please report this: it is a bug in megatron_lite")
        if not isinstance(answer, Point):
            answer = Point(0, "", Answer.PASS, tuple(answer)) if answer else not_seen()
        if answer.answer is not Answer.NOT_SEEN and doubts and not rests_on_run_only(answer.evidence):
            answer = not_seen(*answer.evidence, record=f"record again: {doubts[0]}")
        way_out = answer.way_out or ("" if answer.answer is Answer.PASS else record)
        points.append(
            replace(_in_words(answer, facts), number=number, question=question, way_out=facts.in_words(way_out))
        )
    return tuple(points)


def _in_words(answer: Point, facts: Facts) -> Point:
    """The same evidence without flags that the job does not take."""
    return replace(answer, evidence=tuple(replace(one, text=facts.in_words(one.text)) for one in answer.evidence))
