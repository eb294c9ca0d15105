"""Matrix products and attention far below what the hardware can do.

Meaning: every kernel has a floor: its operations at the device's peak, or its bytes at the memory's bandwidth,
    whichever is longer. Good libraries reach 50 to 80% of it on large, regular shapes.
Measured: operations and bytes from the operators' shapes (needs --pytorch-profiler-collect-shapes), the device's
    peaks from the hardware table, device time from the trace. Cost is the time above the floor of those that reach
    little.
Cost: an upper bound: no kernel reaches its floor.
Do: larger products (micro-batch), dimensions in multiples of 64, 16 bits, another attention kernel; compile with
    max-autotune to try more kernels.
Flags: --micro-batch-size, --bf16, --attention-backend auto, --hidden-size and --kv-channels in multiples of 64.
False alarm: a GPU that is throttled or shared; then all kernels are low.
"""

from megatron_lite.analysis.findings.base import (
    MIN_SHARE_SHOWN,
    Evidence,
    Finding,
    find_lost_time,
    in_ms,
    of_step,
    share,
)
from megatron_lite.analysis.findings.matmul_shapes import is_off
from megatron_lite.analysis.findings.run_settings import name_layer
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, Role
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "below-roofline", "products far below the hardware's limit"
REACHES = 0.35  # of its floor's rate: libraries reach half on ordinary shapes
TOO_MUCH = 0.10  # of the step above the floor
MAX_SHOWN = 3


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    slow = [
        row
        for row in one.kernels.roofline
        if row.role in MATRIX_ROLES
        and row.efficiency is not None
        and row.efficiency < REACHES
        and share(row.ms, one) >= MIN_SHARE_SHOWN
    ]
    slow.sort(key=lambda row: row.bound_ms - row.ms)
    cost = sum(row.ms - row.bound_ms for row in slow)
    shown = (
        Evidence(
            f"{name_layer(facts, row.dims)} {row.operator} {row.shape}: {in_ms(row.ms)} where {in_ms(row.bound_ms)} is "
            f"the floor ({row.efficiency:.0%}, bound by {row.bound_by})",
            row.phase,
        )
        for row in slow[:MAX_SHOWN]
    )
    products = [row for row in slow if row.role is not Role.ATTENTION]
    remedies = {  # only what these rows do not have yet
        ("another attention kernel", "--attention-backend auto"): len(products) < len(slow),
        ("larger products", "--micro-batch-size"): bool(products),
        ("dimensions in multiples of 64", ""): any(is_off(size) for row in products for size in row.dims),
        ("16 bits", "--bf16"): any(row.dtype == "fp32" for row in slow),
    }
    fitting = [remedy for remedy, fits in remedies.items() if fits]
    advice = "; ".join(text for text, _ in fitting)
    flags = tuple(flag for _, flag in fitting if flag)
    seen = f"time above the floor: {of_step(cost, one)}"
    return find_lost_time(one, cost, seen, advice, *shown, flags=flags, certain=False, at_least=TOO_MUCH)
