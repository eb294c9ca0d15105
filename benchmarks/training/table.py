"""The comparison as text."""

from benchmarks.training.summary import CLOSE_LOSSES, CLOSE_TIMES, Line, Ratio, loss_distance
from megatron_lite.units import count, size

UNKNOWN = "-"
STEPS_SHOWN = 6


def speeds(lines: list[Line], threads: int, device: str) -> list[str]:
    """A line per contestant. `threads`: of all ranks together."""
    memory = "GPU memory" if device == "cuda" else "ranks' memory"
    with_mfu = any(line.mfu_full is not None for line in lines)
    mfu = ["MFU full, causal"] if with_mfu else []
    rows = [
        ["", "ranks x threads", "tokens/s", "of 80% of steps", "step", "first step", memory, *mfu, "of the ceiling"]
    ]
    for line in lines:
        many = f"{line.ranks} x {max(threads // line.ranks, 1)}"
        row = [line.name, many, *[UNKNOWN] * (len(rows[0]) - 2)]
        if line.tokens_s is not None:
            row[2:5] = [
                count(line.tokens_s),
                f"{count(line.slow_tokens_s)} to {count(line.fast_tokens_s)}",
                f"{1000 * line.step_s:,.0f} ms",
            ]
        if line.first_step_s is not None:
            row[5] = f"{line.first_step_s:.1f} s"
        if line.peak_bytes is not None:
            row[6] = size(line.peak_bytes)
        if line.mfu_full is not None:
            row[7] = f"{line.mfu_full:.1%}, {line.mfu_causal:.1%}"
        if line.ceiling_full is not None:
            row[-1] = f"{line.ceiling_full:.1%}, {line.ceiling_causal:.1%}"
        rows.append(row)
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


def ratios(found: list[Ratio]) -> list[str]:
    """A line per pair."""
    rows = [["tokens/s of", "over those of", "median", "in each round"]]
    for ratio in found:
        each = "  ".join(f"{value:.2f}" for value in ratio.rounds) or UNKNOWN
        rows.append([ratio.ours, ratio.other, UNKNOWN if ratio.median is None else f"{ratio.median:.2f}", each])
    return _aligned(rows, left=2)


def bars(found: list[tuple[Ratio, float | None]]) -> list[str]:
    """A line per pair and goal."""
    rows = [["goal: tokens/s of", "over those of", "median", "range", "goal", ""]]
    for ratio, goal in found:
        row = [ratio.ours, ratio.other, UNKNOWN, UNKNOWN, UNKNOWN if goal is None else f"{goal:g}", ""]
        if ratio.median is not None:
            row[2:4] = f"{ratio.median:.2f}", f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}"
        if ratio.median is not None and goal is not None:
            row[-1] = "reached" if ratio.median >= goal else "missed"
        rows.append(row)
    return _aligned(rows, left=2)


def losses(columns: dict[str, list[float | None]]) -> list[str]:
    """A line per step, of at most STEPS_SHOWN steps; a column per contestant."""
    steps = len(next(iter(columns.values()), []))
    rows = [["loss at step", *columns]]
    for step in sorted({round(1 + k * (steps - 1) / max(STEPS_SHOWN - 1, 1)) for k in range(STEPS_SHOWN) if steps}):
        values = [column[step - 1] for column in columns.values()]
        rows.append([str(step), *(UNKNOWN if value is None else f"{value:.3f}" for value in values)])
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
    """Columns as wide as needed, numbers to the right but the first `left` ones; nothing for a head without rows."""
    if len(rows) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("   ".join(cells).rstrip())
    return lines
