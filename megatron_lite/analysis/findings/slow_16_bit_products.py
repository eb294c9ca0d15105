"""16-bit matrix products on a processor that has no units for them.

Meaning: without AVX512-FP16, AVX512-BF16 or AMX a CPU converts 16-bit operands and multiplies in fp32, or multiplies
    them one by one: slower than fp32 from the start, fp16 several times.
Measured: the run's precision, what it wrote down of its processor, and the time of matrix products and attention per
    steady step.
Cost: that time; fp32 would take a part of it that only a run tells.
Do: train in fp32 on this machine, or in bf16 where the processor has units for it.
Flags: without --fp16 and --bf16; --bf16 where the processor multiplies it.
False alarm: a rehearsal on a CPU of what a GPU is meant to run.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, of_step, share, where
from megatron_lite.analysis.findings.fp32_products import TOO_MUCH
from megatron_lite.analysis.findings.run_settings import hardware
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "slow-16-bit-products", "16-bit products without units for them"


def find(facts: Facts) -> Finding | None:
    precision, one = facts.plan.get("precision"), facts.critical
    if facts.plan.get("device") != "cpu" or precision not in ("fp16", "bf16"):
        return None
    has_units = hardware(facts, f"{precision}_products")
    # a run of before says nothing of fp16, for which hardly any processor has units
    if has_units is True or has_units is None and precision == "bf16":
        return None
    cost, seen = None, [Evidence(f"the run is in {precision}, for which this processor has no units", "run.json")]
    if one is not None:
        cost = sum(one.kernels.roles.get(role, 0.0) for role in MATRIX_ROLES)
        if share(cost, one) < TOO_MUCH:
            return None
        seen.append(Evidence(f"matrix products and attention take {of_step(cost, one)}", where(one)))
    flag = "--bf16" if hardware(facts, "bf16_products") is True else ""
    advice = f"use {flag} instead of --{precision}" if flag else f"try fp32: leave out --{precision}"
    return Finding(
        cost_ms=cost,
        evidence=tuple(seen),
        advice=advice,
        flags=(flag,) if flag else (),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank if one is not None else None,
    )
