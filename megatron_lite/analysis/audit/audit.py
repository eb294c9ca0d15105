"""Eighteen questions that every training run should be able to answer. Pure: facts go in, answers come out.

What evidence answers a question stands in its function.
"""

import math
from collections.abc import Callable, Sequence

from megatron_lite.analysis.audit.audit_results import Answer, Case, Outcome, Point, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.batches import one_update_per_batch
from megatron_lite.analysis.audit.feeding import batches_in_time, few_copies, no_synchronisation, pinned_copies
from megatron_lite.analysis.audit.precision import few_overflows, sixteen_bits_pay
from megatron_lite.analysis.audit.recording import GPU_TRACE, RUN_FOLDER, SECOND_RUN, SHAPES, SNAPSHOT, TRACE
from megatron_lite.analysis.audit.timing import steady_state, timed_on_the_device, undisturbed_profile
from megatron_lite.analysis.audit.tokens import constant_shapes, effective_tokens
from megatron_lite.analysis.compare.settings import objections
from megatron_lite.analysis.contradictions import contradictions_of, rests_on_run_only
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.copy_share import TOO_MUCH as TOO_MUCH_COPYING
from megatron_lite.analysis.findings.copy_share import TOO_MUCH_ON_CPU
from megatron_lite.analysis.findings.fp32_products import WITHOUT_TENSOR_CORES
from megatron_lite.analysis.findings.matmul_shapes import is_off
from megatron_lite.analysis.findings.memory_growth import MIN_STEPS
from megatron_lite.analysis.findings.seen.planned import compiles
from megatron_lite.analysis.findings.seen.steady import MATTERS, counted, in_ms, of_step, share, where
from megatron_lite.analysis.findings.unfused_elementwise import TOO_MUCH as TOO_MUCH_ELEMENTWISE
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run.learning import learning_of
from megatron_lite.analysis.run.memory_growth import MIN_STEPS as MIN_OF_A_RUN
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.units import size

# --- points about what the device computes: layouts, small operators, shapes of products

SMALL_WORK = ("launch-bound", "unfused-elementwise", "unfused-optimizer", "tiny-micro-batches", "small-buckets")
ALIGN = "make the dimensions of products multiples of 64 (at least 8)"


def one_layout(case: Case) -> Outcome:
    """Copies, casts and .contiguous() against the step."""
    one = case.facts.critical
    if found := case.found("copy-share"):
        return blamed(found)
    if one is None or not _work_ms(one):
        return not_seen(TRACE)
    ms = one.kernels.roles.get(Role.CAST_COPY, 0.0)
    limit = TOO_MUCH_COPYING if one.time.on_gpu else TOO_MUCH_ON_CPU
    return passed(
        Evidence(f"copying, casting and reordering tensors: {of_step(ms, one)}; {limit:.0%} would be much", where(one))
    )


def fused_work(case: Case) -> Outcome:
    """Operators so small or so many that launching or memory traffic decides."""
    one = case.facts.critical
    if found := case.found(*SMALL_WORK):
        return blamed(found)
    if one is None or not _work_ms(one):
        return not_seen(TRACE)
    ms = one.kernels.roles.get(Role.ELEMENTWISE, 0.0)
    text = f"elementwise operators take {of_step(ms, one)}; {TOO_MUCH_ELEMENTWISE:.0%} would be much"
    if one.time.on_gpu:
        text += f"; {one.time.launches:,.0f} kernels per step, the median one of {one.time.median_kernel_us:.1f} us"
    seen = Evidence(text, where(one))
    if share(ms, one) >= TOO_MUCH_ELEMENTWISE:
        return failed("compile the layers: --torch-compile", seen, code="unfused-elementwise")
    return passed(seen)


def products_on_tensor_cores(case: Case) -> Outcome:
    """By the kernels' names on a GPU, by shapes elsewhere."""
    one = case.facts.critical
    if found := case.found("no-tensor-cores", "matmul-shapes"):
        return blamed(found)
    if one is None or one.time.on_gpu and WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return not_seen(GPU_TRACE if one is None else "this GPU has no tensor cores; audit a run on one that has")
    shapes = _shapes(one)
    if not one.time.on_gpu or not one.kernels.matrix_ms:
        return passed(*shapes) if shapes else not_seen(SHAPES)
    return _by_names(case, one, shapes)


def _by_names(case: Case, one: RankFacts, shapes: tuple[Evidence, ...]) -> Outcome:
    kernels = one.kernels
    slow = max(0.0, kernels.matrix_ms - kernels.tensor_core_ms - kernels.maybe_tensor_core_ms)
    seen = Evidence(
        f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products and attention per "
        f"step; {in_ms(kernels.maybe_tensor_core_ms)} have names that do not say",
        where(one),
    )
    if share(slow, one) >= MATTERS:
        reasons = [Evidence(f"{why}: {of_step(ms, one)}") for why, ms in list(kernels.without_tensor_cores.items())[:3]]
        return _without(case.found("fp32-products"), (seen, *reasons, *shapes))
    if 2 * slow > kernels.matrix_ms:
        return not_seen("a run whose products are in 16 bits, or a larger part of the step", seen, *shapes)
    if kernels.tensor_core_ms >= kernels.maybe_tensor_core_ms or shapes:
        return passed(seen, *shapes)
    return not_seen(SHAPES, seen)


def _without(found: tuple[Finding, ...], seen: tuple[Evidence, ...]) -> Outcome:
    if found:
        return failed(found[0].advice, *seen, code=found[0].code)
    return failed(ALIGN, *seen, code="no-tensor-cores")


def _shapes(one: RankFacts) -> tuple[Evidence, ...]:
    """Whether dimensions of products fit the tiles; () without shapes."""
    rows = [row for row in one.kernels.roofline if row.role is Role.GEMM and row.dims]
    if not rows:
        return ()
    odd = [row for row in rows if any(map(is_off, row.dims))]
    if not odd:
        return (
            Evidence(
                f"all dimensions of {counted(len(rows), 'shape')} of products are multiples of 64 (small ones of 8)",
                where(one),
            ),
        )
    odd_ms = of_step(sum(row.ms for row in odd), one)
    text = f"{len(odd)} of {len(rows)} shapes of products have other dimensions than multiples of 64: {odd_ms}"
    return (Evidence(text, where(one)),)


def _work_ms(one: RankFacts) -> float:
    """ms per step of all that has a role; 0: the trace shows no work, or no step."""
    return sum(one.kernels.roles.values()) if one.time.step_ms > 0 else 0.0


# --- the point about results: does the loss still go where the baseline's goes?

# Largest difference over 60 iterations of small models, measured on a CPU: the same command again 0, fp32 against bf16
# 0.03% to 2.0%, another seed 3.3%, twice the learning rate 21%.
TOLERANCE = 0.03
SAME_DATA = {
    "seed": "--seed",
    "mock_data": "--mock-data",
    "data_path": "--data-path",
    "train_data_path": "--train-data-path",
    "data_args_path": "--data-args-path",
    "per_split_data_args_path": "--per-split-data-args-path",
    "split": "--split",
    "dataloader_type": "--dataloader-type",
    "external_dataloader": "--external-dataloader",
    "data_sharding": "--no-data-sharding",
}


def same_losses(case: Case) -> Outcome:
    """Iteration by iteration against the other run, with the same seed and data."""
    if case.other is None:
        return not_seen(SECOND_RUN)
    run, base = case.facts.run, case.other.run
    if run is None or base is None:
        return not_seen("a run folder for each of the two: traces hold no losses")
    if other := _other_data(case.facts, case.other):
        return not_seen("--against a run with the same seed, data, model and batch", *map(Evidence, other))
    if any(run.not_finite) and not any(base.not_finite):
        told = Evidence(
            f"{learning_of(run).losses}; the baseline's are all finite", f"steps.jsonl, against {base.folder}"
        )
        return failed(
            "undo changes one by one until the losses are finite; megatron-lite compare A B", told, code="no-learning"
        )
    mine, theirs = _losses(run), _losses(base)
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return not_seen(
            "two runs that share iterations",
            Evidence(f"{len(mine)} iterations with a loss here, {len(theirs)} there, none in common"),
        )
    return _compared(case, [(at, mine[at], theirs[at]) for at in both])


def _compared(case: Case, losses: list[tuple[int, float, float]]) -> Outcome:
    """`losses`: (iteration, here, there)."""
    apart, at, mine, theirs = max((_apart(here, there), at, here, there) for at, here, there in losses)
    last, here, there = losses[-1]
    text = (
        f"the losses of {len(losses)} common iterations differ by at most {apart:.2%} "
        f"(iteration {at}: {mine:.6g} here, {theirs:.6g} there); "
        f"the last, iteration {last}, by {_apart(here, there):.2%}; {TOLERANCE:.0%} is taken for rounding"
    )
    seen = Evidence(text, f"steps.jsonl, against {case.other.run.folder}")
    if apart <= TOLERANCE:
        return passed(seen)
    if found := case.found("overflow-storm", "scale-collapse"):
        explained = blamed(found)
        return failed(explained.way_out, seen, *explained.evidence, code=explained.code)
    return failed(
        "undo changes one by one until the losses agree; megatron-lite compare A B lists the flags that differ", seen
    )


def _apart(here: float, there: float) -> float:
    return abs(here - there) / max(abs(there), 1e-12)


def _losses(run: Run) -> dict[int, float]:
    """Skipped steps have none."""
    return {at: loss for at, loss in zip(run.iterations, run.losses) if not math.isnan(loss)}


def _other_data(a: Facts, b: Facts) -> list[str]:
    """Why their losses need not agree."""
    ours, theirs = a.run.args, b.run.args
    told = [
        f"{flag} {ours[name]} here, {theirs[name]} there"
        for name, flag in SAME_DATA.items()
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
    if not (ours and theirs):
        told.append("the flags of one of the two are unknown: no plan in run.json")
    return [*told, *objections(a, b)]


# --- the point about the memory peak

CAUSES = ("memory-growth", "out-of-memory", "logits-peak", "recompute-activations")
MAX_SHOWN = 4


def explained_peak(case: Case) -> Outcome:
    """What holds the peak (a snapshot says it), and that nothing stays from step to step."""
    if found := case.found(*CAUSES):
        return blamed(found)
    facts = case.facts
    most, steady = facts.highest_snapshot, _does_not_grow(facts)
    held = _held(most) if most is not None and most.complete and most.peak_bytes > 0 else ()
    if held and steady:
        return passed(*held, *steady)
    return not_seen(SNAPSHOT, *held, *steady)


def _held(one: Snapshot) -> tuple[Evidence, ...]:
    parts = ", ".join(f"{part.category} {size(part.num_bytes)}" for part in one.held[:MAX_SHOWN])
    kind = "simulated peak" if one.simulated else "peak"
    return (
        Evidence(f"{kind} of {size(one.peak_bytes)} in {one.peak_phase or 'an unknown phase'}: {parts}", one.source),
    )


def _does_not_grow(facts: Facts) -> tuple[Evidence, ...]:
    """() where too few steps were seen to tell."""
    told = [
        Evidence(f"no growth over {len(one.steps)} steps", one.source)
        for one in facts.snapshots
        if len(one.steps) >= MIN_STEPS and one.growth is None
    ]
    run = facts.run
    for what, values in (
        (("the GPU's peak", run.peak_memory_bytes), ("the process's memory", run.host_memory_bytes)) if run else ()
    ):
        number = sum(plain and not math.isnan(value) for plain, value in zip(run.ordinary, values))
        if number >= MIN_OF_A_RUN:
            told.append(Evidence(f"{what} does not grow over {number} ordinary steps", "steps.jsonl"))
    return tuple(told)


# --- the point about torch.compile


def compiling_apart(case: Case) -> Outcome:
    """The first step's compiling apart from steady steps, and none later."""
    run, one = case.facts.run, case.facts.critical
    compiled = compiles(case.facts)
    regions = one.kernels.compiled_regions if one is not None else 0.0
    causes = ("recompilation", "graph-breaks", *(("first-step",) if compiled else ()))
    if found := case.found(*causes):
        return blamed(found)
    if compiled is False and not regions:
        return not_seen(
            "a run with --torch-compile", Evidence("nothing is compiled (--torch-compile none)", "run.json")
        )
    seen = (Evidence(f"{regions:,.3g} compiled regions per step", where(one)),) if regions else ()
    if not run or not (compiled or regions) or not run.first_step_ms or not run.steady_step_ms:
        return not_seen(RUN_FOLDER if run is None else "all steps of the run: start it with an empty --run-dir", *seen)
    late = [at for at, compiles in zip(run.iterations[1:], run.compiling[1:]) if compiles]
    told = f" (iterations {', '.join(map(str, late[:6]))})" if late else ""
    compiling_ms = run.compile_ms[0] if run.compile_ms else math.nan
    of_it = f" ({in_ms(compiling_ms)} of it compiling)" if compiling_ms > 0 else ""
    text = (
        f"first step {in_ms(run.first_step_ms)}{of_it}, ordinary ones {in_ms(run.steady_step_ms)}; "
        f"{len(late)} later steps compiled "
        f"something{told} and are left out"
    )
    return passed(Evidence(text, "steps.jsonl"), *seen)


# --- eighteen questions that every training run should be able to answer. Pure: facts go in, answers come out

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
