"""16-bit matrix products that do not run on tensor cores.

Meaning: the data are fp16 or bf16, but the kernel's name says CUDA cores: the library found no
    tensor-core kernel for the shape, the alignment or the layout. A 16-bit product without tensor
    cores is no faster than fp32.
Measured: time of such kernels against all matrix products and attention. Names decide (s1688,
    16816, xmma, nvjet, wgmma are tensor cores; sgemm, simt, ffma are not); what a name does not
    say counts as tensor cores here.
Cost: their time; how much remains on tensor cores depends on the shape, so that this is an upper
    bound.
Do: make dimensions multiples of 8 (16 bytes), better of 64; keep tensors contiguous in their last
    dimension; see matmul-shapes for the dimensions.
Flags: --make-vocab-size-divisible-by 128, --hidden-size and --ffn-hidden-size in multiples of 64.
False alarm: matrix-vector products, which memory limits anyway.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.matmul_shapes import better, is_off
from megatron_lite.analysis.findings.run_settings import suggest_size
from megatron_lite.analysis.findings.step_measurements import MATTERS, in_ms, of_step, share, where
from megatron_lite.analysis.kernels.kernel_results import KernelRow, TensorCores
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE = "no-tensor-cores"
TITLE = "16-bit matrix products without tensor cores"
SIXTEEN_BITS = ("fp16", "bf16")
MAX_SHOWN = 3


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    rows = [row for row in one.kernels.rows if _is_slow(row)] if one is not None and one.time.on_gpu else []
    cost = sum(row.ms for row in rows)
    if not rows or share(cost, one) < MATTERS:
        return None
    text = (
        f"{of_step(cost, one)}; tensor cores run {in_ms(one.kernels.tensor_core_ms)} of "
        f"{in_ms(one.kernels.matrix_ms)} of products"
    )
    shown = [
        Evidence(
            f"{row.short}: {in_ms(row.ms)}, {row.per_step:,.3g} per step, from {row.operator or 'no operator'}",
            row.phase,
        )
        for row in rows[:MAX_SHOWN]
    ]
    changes = _changes(facts, one, rows)
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one)), *shown),
        advice="; ".join(changes) or "make the dimensions of these products multiples of 64 (at least 8)",
        flags=tuple(change.partition(" (")[0] for change in changes if change.startswith("--")),
        gain_ms=cost,
        rank=one.time.rank,
    )


def _changes(facts: Facts, one: RankFacts, rows: list[KernelRow]) -> list[str]:
    """The odd dimensions of these kernels' own operators, and what makes them; [] without shapes."""
    asked = {row.operator for row in rows}
    odd = [size for row in one.kernels.roofline if row.operator in asked for size in row.dims if is_off(size)]
    return [suggest_size(facts, size, better(size)) for size in dict.fromkeys(odd)][:MAX_SHOWN]


def _is_slow(row: KernelRow) -> bool:
    return row.tensor_cores is TensorCores.NO and row.precision in SIXTEEN_BITS
