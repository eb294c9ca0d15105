"""The comparison as text."""

from benchmarks.training.summary import CLOSE_LOSSES, CLOSE_TIMES, Line, Ratio, loss_distance
from megatron_lite.units import count, size

UNKNOWN = "-"
STEPS_SHOWN = 6


def speeds(lines: list[Line], threads: int, device: str) -> list[str]:
    """A line per contestant. `threads`: of all ranks together."""
    memory = "GPU memory" if device == "cuda" else "ranks' memory"
    with_mfu = any(line.mfu_full is not None for line in lines)
    head = ["", "ranks x threads", "tokens/s", "of 80% of steps", "step", "first step", memory]
    rows = [[*head, *(["MFU full, causal"] if with_mfu else []), "of the ceiling"]]
    for line in lines:
        many = f"{line.ranks} x {max(threads // line.ranks, 1)}"
        mfu = [_shares(line.mfu_full, line.mfu_causal)] if with_mfu else []
        rows.append(
            [
                line.name,
                many,
                _count(line.tokens_s),
                _span(line),
                _milliseconds(line.step_s),
                _seconds(line.first_step_s),
                UNKNOWN if line.peak_bytes is None else size(line.peak_bytes),
                *mfu,
                _shares(line.ceiling_full, line.ceiling_causal),
            ]
        )
    return _aligned(rows)


def ceiling(tflops: list[float | None], device: str) -> list[str]:
    """What the last column is a share of. `tflops`: measured before and after the contestants ran."""
    where = "one GPU" if device == "cuda" else "this machine"
    found = " and ".join(f"{1000 * one:,.0f}" for one in tflops if one is not None)
    words = (
        f"ceiling: {where} multiplies the model's own matrices at {found} GFLOP/s, before and after; shares are of the "
        "larger, attention counted in full and causally"
    )
    return [words] if found else []


def ratios(ratios: list[Ratio]) -> list[str]:
    """A line per pair."""
    if not ratios:
        return []
    rows = [["tokens/s of", "over those of", "median", "in each round"]]
    for ratio in ratios:
        each = "  ".join(f"{value:.2f}" for value in ratio.rounds) or UNKNOWN
        rows.append([ratio.ours, ratio.other, UNKNOWN if ratio.median is None else f"{ratio.median:.2f}", each])
    return _aligned(rows, left=2)


def bars(found: list[tuple[Ratio, float | None]]) -> list[str]:
    """A line per pair and goal."""
    if not found:
        return []
    rows = [["goal: tokens/s of", "over those of", "median", "range", "goal", ""]]
    for ratio, goal in found:
        known = ratio.median is not None
        rows.append(
            [
                ratio.ours,
                ratio.other,
                f"{ratio.median:.2f}" if known else UNKNOWN,
                f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}" if known else UNKNOWN,
                UNKNOWN if goal is None else f"{goal:g}",
                "" if goal is None or not known else "reached" if ratio.median >= goal else "missed",
            ]
        )
    return _aligned(rows, left=2)


def losses(columns: dict[str, list[float | None]]) -> list[str]:
    """A line per step, of at most STEPS_SHOWN steps; a column per contestant."""
    steps = len(next(iter(columns.values()), []))
    if not steps:
        return []
    shown = sorted({round(1 + k * (steps - 1) / max(STEPS_SHOWN - 1, 1)) for k in range(STEPS_SHOWN)})
    rows = [["loss at step", *columns]]
    rows += [
        [
            str(step),
            *(UNKNOWN if column[step - 1] is None else f"{column[step - 1]:.3f}" for column in columns.values()),
        ]
        for step in shown
    ]
    return _aligned(rows)


def remarks(lines: list[Line], columns: dict[str, list[float | None]], load_before: float, cores: int) -> list[str]:
    """What speaks against the figures; nothing if nothing does."""
    found = []
    apart = loss_distance(columns)
    if apart is not None and apart > CLOSE_LOSSES:
        found.append(f"note: the last half's losses are {apart:.0%} apart: the contestants may not do the same work")
    for line in lines:
        if line.unexplained is not None and abs(line.unexplained) > CLOSE_TIMES:
            share = f"{1 - line.unexplained:.0%}"
            found.append(f"note: {line.name}: its steps add up to {share} of the time seen from outside")
    if load_before > 0.25 * cores:
        found.append(
            f"note: this machine was not idle (load {load_before:.1f} on {cores} cores before the start): the "
            "ratios count, not the absolute figures"
        )
    return found


def _aligned(rows: list[list[str]], left: int = 1) -> list[str]:
    """Columns as wide as needed, numbers to the right but the first `left` ones."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "   ".join(
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else count(value)


def _span(line: Line) -> str:
    return UNKNOWN if line.slow_tokens_s is None else f"{count(line.slow_tokens_s)} to {count(line.fast_tokens_s)}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1000 * seconds:,.0f} ms"


def _shares(full: float | None, causal: float | None) -> str:
    return UNKNOWN if full is None else f"{full:.1%}, {causal:.1%}"
