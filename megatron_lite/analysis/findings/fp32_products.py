"""Matrix products run in fp32 where 16 bits would be faster.

Meaning: weights and activations are fp32. Tensor cores multiply fp16 and bf16 many times faster than CUDA cores
    multiply fp32; processors with AVX512-BF16 or AMX have such units too. Activations and copies are half as large
    besides.
Measured: time of fp32 matrix products and attention per steady step, by kernel names, or without a GPU by the
    operators' types; the operators' types need --pytorch-profiler-collect-shapes, else the run's plan says it.
Cost: what 16 bits could save of it at best, by the peaks in the hardware table, or by the FLOPs at the 16-bit peak;
    all of it where that peak is unknown, and then no bound of the gain is given.
Do: bf16 (no loss scale needed), or fp16 with a dynamic loss scale; masters and moments stay fp32.
Flags: --bf16, or --fp16 on GPUs before Ampere.
False alarm: an fp32 reference run, made on purpose.
"""

import re

from megatron_lite.analysis.findings.base import Evidence, Finding, of_step, share, where
from megatron_lite.analysis.findings.run_settings import hardware
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, TensorCores
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.estimate.hardware import peak_tflops

CODE, TITLE = "fp32-products", "matrix products in fp32"
TOO_MUCH = 0.10  # of the step: a few fp32 products (router, loss) belong to mixed precision
# before Volta: no faster 16-bit products
WITHOUT_TENSOR_CORES = re.compile(r"\b(K[0-9]{2}|M[0-9]{2}|P100|P40|P4|GTX|Titan Xp?)\b")


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    device = one.time.device or ""
    rows = [row for row in one.kernels.rows if row.tensor_cores is TensorCores.NO and row.precision == "fp32"]
    shaped = [row for row in one.kernels.roofline if row.role in MATRIX_ROLES]
    ms = 0.0
    if one.time.on_gpu:
        ms = sum(row.ms for row in rows)
    elif hardware(facts, "bf16_products") is True:  # the run says that its processor multiplies bf16 faster
        if shaped:
            ms = sum(row.ms for row in shaped if row.dtype == "fp32")
        elif facts.plan.get("precision") == "fp32":
            ms = sum(one.kernels.roles.get(role, 0.0) for role in MATRIX_ROLES)
    if WITHOUT_TENSOR_CORES.search(device) or share(ms, one) < TOO_MUCH:
        return None
    flag = "--fp16" if "V100" in device else "--bf16"
    # What 16 bits save at best: by both peaks, else by the FLOPs at the 16-bit peak; None where that is unknown.
    full, half = peak_tflops(device, "fp32"), peak_tflops(device, flag.removeprefix("--"))
    gain = None
    if half and full:
        gain = ms * (1 - full / half)
    elif half:
        gain = max(0.0, ms - sum(row.flops for row in shaped if row.dtype == "fp32") / half / 1e9)
    seen = Evidence(f"fp32 products (matrices, attention, convolution) take {of_step(ms, one)}", where(one))
    shown = (Evidence(f"{row.short}: {row.ms:,.2f} ms, {row.per_step:,.3g} per step", row.phase) for row in rows[:2])
    advice = f"train in mixed precision: {flag}"
    return Finding(
        cost_ms=ms if gain is None else gain,
        evidence=(seen, *shown),
        advice=advice,
        flags=(flag,),
        gain_ms=gain,
        rank=one.time.rank,
    )
