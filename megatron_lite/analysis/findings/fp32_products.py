"""Matrix products run in fp32 where 16 bits would be faster.

Meaning: weights and activations are fp32. Tensor cores multiply fp16 and bf16 many times faster
    than CUDA cores multiply fp32; processors with AVX512-BF16 or AMX have such units too.
    Activations and copies are half as large besides.
Measured: time of fp32 matrix products and attention per steady step, by kernel names, or without
    a GPU by the operators' types; the operators' types need --pytorch-profiler-collect-shapes,
    else the run's plan says it.
Cost: what 16 bits could save of it at best, by the peaks in the hardware table, or by the FLOPs
    at the 16-bit peak; all of it where that peak is unknown, and then no bound of the gain is given.
Do: bf16 (no loss scale needed), or fp16 with a dynamic loss scale; masters and moments stay fp32.
Flags: --bf16, or --fp16 on GPUs before Ampere.
False alarm: an fp32 reference run, made on purpose.
"""

import re

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import hardware
from megatron_lite.analysis.findings.step_measurements import of_step, share, where
from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.estimate.hardware import peak_tflops

CODE = "fp32-products"
TITLE = "matrix products in fp32"
TOO_MUCH = 0.10  # of the step: a few fp32 products (router, loss) belong to mixed precision
MATRIX = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)
# before Volta: no faster 16-bit products
WITHOUT_TENSOR_CORES = re.compile(r"\b(K[0-9]{2}|M[0-9]{2}|P100|P40|P4|GTX|Titan Xp?)\b")


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return None
    ms = _gpu_ms(one) if one.time.on_gpu else _cpu_ms(facts, one)
    if share(ms, one) < TOO_MUCH:
        return None
    flag = "--fp16" if "V100" in (one.time.device or "") else "--bf16"
    gain = _gain_ms(one, ms, flag)
    return Finding(
        cost_ms=ms if gain is None else gain,
        evidence=(
            Evidence(f"fp32 products (matrices, attention, convolution) take {of_step(ms, one)}", where(one)),
            *_dearest(one),
        ),
        advice=f"train in mixed precision: {flag}",
        flags=(flag,),
        gain_ms=gain,
        rank=one.time.rank,
    )


def _gpu_ms(one: RankFacts) -> float:
    return sum(row.ms for row in one.kernels.rows if row.tensor_cores is TensorCores.NO and row.precision == "fp32")


def _cpu_ms(facts: Facts, one: RankFacts) -> float:
    """0 unless the run says that its processor multiplies bf16 faster."""
    if hardware(facts, "bf16_products") is not True:
        return 0.0
    rows = [row for row in one.kernels.roofline if row.role in MATRIX]
    if rows:
        return sum(row.ms for row in rows if row.dtype == "fp32")
    if facts.plan.get("precision") != "fp32":
        return 0.0
    return sum(one.kernels.roles.get(role, 0.0) for role in MATRIX)


def _dearest(one: RankFacts) -> list[Evidence]:
    rows = [row for row in one.kernels.rows if row.tensor_cores is TensorCores.NO and row.precision == "fp32"][:2]
    return [Evidence(f"{row.short}: {row.ms:,.2f} ms, {row.per_step:,.3g} per step", row.phase) for row in rows]


def _gain_ms(one: RankFacts, ms: float, flag: str) -> float | None:
    """What 16 bits save of `ms` at best: by both peaks, else by the FLOPs at the 16-bit peak; None where it is unknown."""
    full, half = (peak_tflops(one.time.device or "", precision) for precision in ("fp32", flag.removeprefix("--")))
    if half is None:
        return None
    if full:
        return ms * (1 - full / half)
    flops = sum(row.flops for row in one.kernels.roofline if row.role in MATRIX and row.dtype == "fp32")
    return max(0.0, ms - flops / half / 1e9)
