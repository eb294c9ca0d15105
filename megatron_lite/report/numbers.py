"""Numbers as a report writes them: '' for what is not known."""

import math


def milliseconds(value: float | None, of: float | None = None) -> str:
    """As many decimals as make sense beside the largest value `of` its table."""
    if value is None or not math.isfinite(value):
        return ""
    largest = abs(value if of is None else of)
    return f"{value:,.{1 if largest >= 100 else 2 if largest >= 10 else 3}f}"


def percent(share: float | None) -> str:
    """0.123 -> '12%', 0.004 -> '<1%'."""
    if share is None or not math.isfinite(share):
        return ""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def share(part: float, whole: float) -> float | None:
    """part / whole, None of nothing."""
    return part / whole if whole else None


def calls(per_step: float) -> str:
    """0.5, 3, 96, 1,234."""
    return f"{per_step:,.3g}" if per_step < 10 else f"{per_step:,.0f}"


def flops(value: float) -> str:
    """3.1e13 -> '31 TFLOP'."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    return f"{value:.3g} PFLOP"
