"""16-bit matrix products that do not run on tensor cores.

Meaning: the data are fp16 or bf16, but the kernel's name says CUDA cores: the library found no tensor-core kernel for
    the shape, the alignment or the layout. A 16-bit product without tensor cores is no faster than fp32.
Measured: time of such kernels against all matrix products and attention. Names decide (s1688, 16816, xmma, nvjet,
    wgmma are tensor cores; sgemm, simt, ffma are not); what a name does not say counts as tensor cores here.
Cost: their time; how much remains on tensor cores depends on the shape, so that this is an upper bound.
Do: make dimensions multiples of 8 (16 bytes), better of 64; keep tensors contiguous in their last dimension; see
    matmul-shapes for the dimensions.
Flags: --make-vocab-size-divisible-by 128, --hidden-size and --ffn-hidden-size in multiples of 64.
False alarm: matrix-vector products, which memory limits anyway.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.matmul_shapes import enlarge, is_off
from megatron_lite.analysis.findings.run_settings import suggest_size
from megatron_lite.analysis.kernels.kernel_results import TensorCores
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "no-tensor-cores", "16-bit matrix products without tensor cores"
SIXTEEN_BITS = ("fp16", "bf16")
MAX_SHOWN = 3


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    kernels = one.kernels
    rows = [row for row in kernels.rows if row.tensor_cores is TensorCores.NO and row.precision in SIXTEEN_BITS]
    cost = sum(row.ms for row in rows)
    shown = (
        Evidence(
            f"{row.short}: {in_ms(row.ms)}, {row.per_step:,.3g} per step, from {row.operator or 'no operator'}",
            row.phase,
        )
        for row in rows[:MAX_SHOWN]
    )
    # The odd dimensions of these kernels' own operators, and what makes them; none without shapes.
    asked = {row.operator for row in rows}
    odd = [size for row in kernels.roofline if row.operator in asked for size in row.dims if is_off(size)]
    changes = [suggest_size(facts, size, enlarge(size)) for size in dict.fromkeys(odd)][:MAX_SHOWN]
    on_cores = f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products"
    text = f"{of_step(cost, one)}; {on_cores}"
    advice = "; ".join(changes) or "make the dimensions of these products multiples of 64 (at least 8)"
    flags = tuple(change.partition(" (")[0] for change in changes if change.startswith("--"))
    return find_lost_time(one, cost, text, advice, *shown, flags=flags)
