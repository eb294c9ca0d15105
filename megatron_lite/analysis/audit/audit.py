"""Eighteen questions that every training run should be able to answer. Pure: facts go in, answers come out.

What evidence answers a question stands in its function.
"""

from collections.abc import Callable, Sequence

from megatron_lite.analysis.audit.baseline import same_losses
from megatron_lite.analysis.audit.batches import one_update_per_batch
from megatron_lite.analysis.audit.compiling import compiling_apart
from megatron_lite.analysis.audit.feeding import batches_in_time, few_copies, no_synchronisation, pinned_copies
from megatron_lite.analysis.audit.figures import Answer, Case, Outcome, Point, not_seen
from megatron_lite.analysis.audit.memory import explained_peak
from megatron_lite.analysis.audit.precision import few_overflows, sixteen_bits_pay
from megatron_lite.analysis.audit.timing import steady_state, timed_on_the_device, undisturbed_profile
from megatron_lite.analysis.audit.tokens import constant_shapes, effective_tokens
from megatron_lite.analysis.audit.work import fused_work, one_layout, products_on_tensor_cores
from megatron_lite.analysis.contradictions import contradictions_of, rests_on_run_only
from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.base import Evidence, Finding

QUESTIONS: tuple[tuple[str, Callable[[Case], Outcome]], ...] = (
    ("Are times taken on the device's clock, after a warm-up?", timed_on_the_device),
    ("Is there a step time of the steady state, without the first step?", steady_state),
    ("Do .item(), print and .cpu() in the hot path cost no time?", no_synchronisation),
    ("Are batches ready when the step wants them?", batches_in_time),
    ("Do batches travel from pinned memory, without the host waiting?", pinned_copies),
    ("Does a batch travel in few copies rather than many small ones?", few_copies),
    ("Do tensors keep one layout, with little copying and .contiguous()?", one_layout),
    ("Are small operators batched or fused?", fused_work),
    ("Do products have shapes that the tensor cores take?", products_on_tensor_cores),
    ("Do 16-bit formats save time and memory?", sixteen_bits_pay),
    ("Are overflows of the loss scale rare?", few_overflows),
    ("Is the memory peak explained, with nothing kept from step to step?", explained_peak),
    ("Do batch, accumulation and schedule agree: one update per global batch?", one_update_per_batch),
    ("Does an undisturbed profile say where to go on?", undisturbed_profile),
    ("Is compiling told apart from steady steps, and over after the first?", compiling_apart),
    ("Are shapes constant, without recompilation and padding?", constant_shapes),
    ("Does throughput count the tokens that train?", effective_tokens),
    ("Does the loss still agree with the baseline's?", same_losses),
)


def audit_of(facts: Facts, findings: Sequence[Finding], other: Facts | None = None) -> tuple[Point, ...]:
    """A Point per question, in order. `other`: a second run, against which points 10 and 18 are answered."""
    case = Case(facts, tuple(findings), other, tuple(contradictions_of(facts)))
    return tuple(_point(number, question, answer, case) for number, (question, answer) in enumerate(QUESTIONS, 1))


def _point(number: int, question: str, answer: Callable[[Case], Outcome], case: Case) -> Point:
    try:
        found = answer(case)
    except Exception as error:  # noqa: BLE001  one point that a foreign file confuses must not silence the others
        found = not_seen(
            "please report it: a mistake of this program",
            Evidence(f"could not be asked ({type(error).__name__}: {error})"),
        )
    if found.answer is not Answer.NOT_SEEN and case.doubts and not rests_on_run_only(found.evidence):
        found = not_seen(f"record anew: {case.doubts[0]}", *found.evidence)
    return Point(number, question, found.answer, found.evidence, found.code, found.way_out)
