"""Matrix products and attention far below what the hardware can do.

Meaning: every kernel has a floor: its operations at the device's peak, or its bytes at the
    memory's bandwidth, whichever is longer. Good libraries reach 50 to 80% of it on
    large, regular shapes.
Measured: operations and bytes from the operators' shapes (needs
    --pytorch-profiler-collect-shapes), the device's peaks from the hardware table, device time
    from the trace. Cost is the time above the floor of those that reach little.
Cost: an upper bound: no kernel reaches its floor.
Do: larger products (micro-batch), dimensions in multiples of 64, 16 bits, another attention
    kernel; compile with max-autotune to try more kernels.
Flags: --micro-batch-size, --bf16, --attention-backend auto, --hidden-size and --kv-channels in
    multiples of 64.
False alarm: a GPU that is throttled or shared; then all kernels are low.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.matmul_shapes import is_off
from megatron_lite.analysis.findings.run_settings import name_layer
from megatron_lite.analysis.findings.step_measurements import MIN_SHARE_SHOWN, in_ms, of_step, share, where
from megatron_lite.analysis.kernels.kernel_results import Role, RooflineRow
from megatron_lite.analysis.run_facts import Facts

CODE = "below-roofline"
TITLE = "products far below the hardware's limit"
REACHES = 0.35  # of its floor's rate: libraries reach half on ordinary shapes
TOO_MUCH = 0.10  # of the step above the floor
MAX_SHOWN = 3
ROLES = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    slow = [
        row
        for row in one.kernels.roofline
        if row.role in ROLES
        and row.efficiency is not None
        and row.efficiency < REACHES
        and share(row.ms, one) >= MIN_SHARE_SHOWN
    ]
    cost = sum(_above(row) for row in slow)
    if share(cost, one) < TOO_MUCH:
        return None
    shown = [
        Evidence(
            f"{name_layer(facts, row.dims)} {row.operator} {row.shape}: {in_ms(row.ms)} where "
            f"{in_ms(row.bound_ms)} is the floor "
            f"({row.efficiency:.0%}, bound by {row.bound_by})",
            row.phase,
        )
        for row in sorted(slow, key=_above, reverse=True)[:MAX_SHOWN]
    ]
    ways = _ways(slow)
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(f"time above the floor: {of_step(cost, one)}", where(one)), *shown),
        advice="; ".join(text for text, _ in ways),
        flags=tuple(flag for _, flag in ways if flag),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _ways(slow: list[RooflineRow]) -> list[tuple[str, str]]:
    """(advice, flag) for what is slow: only what these rows do not have yet."""
    products = [row for row in slow if row.role is not Role.ATTENTION]
    odd = any(is_off(size) for row in products for size in row.dims)
    ways = {
        ("another attention kernel", "--attention-backend auto"): len(products) < len(slow),
        ("larger products", "--micro-batch-size"): bool(products),
        ("dimensions in multiples of 64", ""): odd,
        ("16 bits", "--bf16"): any(row.dtype == "fp32" for row in slow),
    }
    return [way for way, fits in ways.items() if fits]


def _above(row: RooflineRow) -> float:
    return row.ms - row.bound_ms
