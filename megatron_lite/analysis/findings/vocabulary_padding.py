"""Rows of the vocabulary that no token uses.

Meaning: the vocabulary is padded to a multiple, so that its product fits the hardware. A small vocabulary padded to a
    large multiple (or --padded-vocab-size far above it) multiplies and stores rows for nothing.
Measured: padded against real vocabulary in the run's plan, times the time of the products with that dimension in the
    trace (needs --pytorch-profiler-collect-shapes).
Cost: that share of the output projection and its gradients.
Do: a multiple that fits the vocabulary: 128 for fp16 and bf16 is enough.
Flags: --make-vocab-size-divisible-by 128; no --padded-vocab-size beyond it.
False alarm: padding that a checkpoint or tensor parallelism asks for.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.run_settings import part, whole
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.units import count

CODE, TITLE = "vocabulary-padding", "vocabulary rows that are only padding"
FIT = 128  # the multiple that is enough


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    padded, used = whole(part(facts, "shape", "padded_vocab_size")), whole(facts.plan.get("vocab_size"))
    if not padded or not used or padded <= -(-used // FIT) * FIT:
        return None
    ms = sum(row.ms for row in one.kernels.roofline if row.role is Role.GEMM and padded in row.dims)
    cost = ms * (padded - used) / padded
    text = (
        f"{count(used)} of {count(padded)} rows are used; products with them take {in_ms(ms)}, the padding "
        f"{of_step(cost, one)}"
    )
    advice = f"pad the vocabulary to a multiple of {FIT} only: --make-vocab-size-divisible-by {FIT}"
    flags = (f"--make-vocab-size-divisible-by {FIT}",)
    return find_lost_time(one, cost, text, advice, flags=flags, cheap=True)
