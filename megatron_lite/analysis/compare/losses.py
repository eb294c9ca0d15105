"""Do two runs compute the same? Losses and gradient norms of the same work in another layout differ by rounding
only."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.analysis.run.run_results import Run
from megatron_lite.units import significant

# groups of flags that decide the numbers, and those among them that do not
DECIDING = {
    "data": ("num_workers", "data_cache_path"),
    "model": (
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "attention_backend",
        "make_vocab_size_divisible_by",
    ),
    "optimizer": (),
    "precision": (),
}  # fmt: skip
# Relative differences of a first step that other orders of sums make, as tests allow between layouts;
# 16-bit sums of ranks are rounded
LOSS_ROUNDING = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}
NORM_ROUNDING = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 5e-3}
TOO_MUCH = 4  # times the rounding that is expected: another computation


@dataclass(frozen=True)
class Losses:
    """Of the steps that both runs did."""

    iterations: tuple[int, int]  # the first and the last
    first: tuple[float, float]  # losses of the first common step
    first_norms: tuple[float, float]
    largest: float  # difference of a loss
    largest_at: int  # iteration
    verdict: str
    is_error: bool


def compare_losses(a: Run | None, b: Run | None) -> Losses | None:
    """None where the runs were not meant to compute the same, or have no step in common."""
    if a is None or b is None or not _mean_the_same(a, b):
        return None
    common, of_a, of_b = np.intersect1d(a.iterations, b.iterations, return_indices=True)
    usable = np.isfinite(a.losses[of_a]) & np.isfinite(b.losses[of_b])
    common, of_a, of_b = common[usable], of_a[usable], of_b[usable]
    if not len(common):
        return None
    differences = np.abs(a.losses[of_a] - b.losses[of_b])
    first = float(a.losses[of_a[0]]), float(b.losses[of_b[0]])
    norms = float(a.grad_norms[of_a[0]]), float(b.grad_norms[of_b[0]])
    verdict, is_error = _judge(a, b, int(common[0]), first, norms)
    at = int(differences.argmax())
    return Losses(
        (int(common[0]), int(common[-1])), first, norms, float(differences[at]), int(common[at]), verdict, is_error
    )


def _judge(a: Run, b: Run, iteration: int, losses: tuple[float, float], norms: tuple[float, float]) -> tuple[str, bool]:
    """(what a first step's differences say, whether that is an error)."""
    precision = str(a.plan.precision)
    if precision not in LOSS_ROUNDING:
        return "", False
    found = []
    for name, (mine, theirs), expected in (
        ("loss", losses, LOSS_ROUNDING[precision]), ("gradient norm", norms, NORM_ROUNDING[precision])
    ):  # fmt: skip
        if mine and np.isfinite([mine, theirs]).all():
            found.append((name, abs(theirs / mine - 1), expected))
    told = " and ".join(f"the {name} by {significant(100 * difference, 2)}%" for name, difference, _ in found)
    if not any(difference > TOO_MUCH * expected for _, difference, expected in found):
        return f"step {iteration:,} differs in {told}: rounding in {precision}", False
    rounding = " and ".join(f"{significant(100 * expected, 1)}%" for _, _, expected in found)
    much = f"step {iteration:,} differs in {told}, where rounding in {precision} makes {rounding}"
    if _drops(a) and (a.plan.args.get("parallel"), a.world_size) != (b.plan.args.get("parallel"), b.world_size):
        return (
            (
                f"{much}: dropout draws other masks on another layout; "
                "--hidden-dropout 0 --attention-dropout 0 for a precise comparison"
            ),
            False,
        )
    if iteration != 1:
        return f"{much}; only runs compared from their first step can distinguish rounding from an error", False
    return f"{much}: one of them computes something else", True


def _mean_the_same(a: Run, b: Run) -> bool:
    """By the flags that decide the numbers."""
    if not a.plan.args or a.args.get("seed") != b.args.get("seed") or a.plan.precision != b.plan.precision:
        return False
    sides = [[_list_deciding(run, group, but) for group, but in DECIDING.items()] for run in (a, b)]
    return sides[0] == sides[1]


def _list_deciding(run: Run, group: str, but: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in run.plan.args.get(group, {}).items() if name not in but}


def _drops(run: Run) -> bool:
    return bool(run.args.get("hidden_dropout") or run.args.get("attention_dropout"))
