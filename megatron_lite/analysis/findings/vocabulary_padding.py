"""Rows of the vocabulary that no token uses.

Meaning: the vocabulary is padded to a multiple, so that its product fits the hardware. A small
    vocabulary padded to a large multiple (or --padded-vocab-size far above it) multiplies and
    stores rows for nothing.
Measured: padded against real vocabulary in the run's plan, times the time of the products with
    that dimension in the trace (needs --pytorch-profiler-collect-shapes).
Cost: that share of the output projection and its gradients.
Do: a multiple that fits the vocabulary: 128 for fp16 and bf16 is enough.
Flags: --make-vocab-size-divisible-by 128; no --padded-vocab-size beyond it.
False alarm: padding that a checkpoint or tensor parallelism asks for.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import part, whole
from megatron_lite.analysis.findings.step_measurements import MIN_SHARE_SHOWN, in_ms, of_step, share, where
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import count

CODE = "vocabulary-padding"
TITLE = "vocabulary rows that are only padding"
FIT = 128  # the multiple that is enough


def find(facts: Facts) -> Finding | None:
    one, padded = facts.critical, whole(part(facts, "shape", "padded_vocab_size"))
    used = whole(facts.plan.get("vocab_size"))
    if one is None or not padded or not used or padded < -(-used // FIT) * FIT + 1:
        return None
    ms = sum(row.ms for row in one.kernels.roofline if row.role is Role.GEMM and padded in row.dims)
    cost = ms * (padded - used) / padded
    if share(cost, one) < MIN_SHARE_SHOWN:
        return None
    text = (
        f"{count(used)} of {count(padded)} rows are used; products with them take {in_ms(ms)}, the padding "
        f"{of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one)),),
        advice=f"pad the vocabulary to a multiple of {FIT} only: --make-vocab-size-divisible-by {FIT}",
        flags=(f"--make-vocab-size-divisible-by {FIT}",),
        gain_ms=cost,
        rank=one.time.rank,
    )
