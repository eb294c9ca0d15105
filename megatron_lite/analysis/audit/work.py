"""Points about what the device computes: layouts, small operators, shapes of products."""

from megatron_lite.analysis.audit.figures import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import GPU_TRACE, SHAPES, TRACE
from megatron_lite.analysis.facts import RankFacts
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.copy_share import TOO_MUCH as TOO_MUCH_COPYING
from megatron_lite.analysis.findings.copy_share import TOO_MUCH_ON_CPU
from megatron_lite.analysis.findings.fp32_products import WITHOUT_TENSOR_CORES
from megatron_lite.analysis.findings.matmul_shapes import is_off
from megatron_lite.analysis.findings.seen.steady import MATTERS, counted, in_ms, of_step, share, where
from megatron_lite.analysis.findings.unfused_elementwise import TOO_MUCH as TOO_MUCH_ELEMENTWISE
from megatron_lite.analysis.kernels.figures import Role

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
