"""Check whether two runs compute the same, by their losses and gradient norms.

Those of the same work in another layout differ by rounding only.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Losses of the steps that both runs did."""

    iterations: tuple[int, int]  # the first and the last
    first: tuple[float, float]  # losses of the first common step
    first_norms: tuple[float, float]
    largest: float  # difference of a loss
    largest_at: int  # iteration
    verdict: str
    is_error: bool


def compare_losses(a: Run | None, b: Run | None) -> Losses | None:
    """Compare losses and gradient norms.

    None where the runs were not meant to compute the same, or have no step in common.
    """
    if a is None or b is None or not _mean_the_same(a, b):
        return None
    common, of_a, of_b = np.intersect1d(a.iterations, b.iterations, return_indices=True)
    losses_a = a.losses[of_a]
    losses_b = b.losses[of_b]
    usable = np.flatnonzero(np.isfinite(losses_a) & np.isfinite(losses_b))
    if not len(usable):
        return None
    iterations = common[usable]
    differences = np.abs(losses_a[usable] - losses_b[usable])
    first = usable[0]
    first_losses = (float(losses_a[first]), float(losses_b[first]))
    norm_a = a.grad_norms[of_a[first]]
    norm_b = b.grad_norms[of_b[first]]
    first_norms = (float(norm_a), float(norm_b))
    verdict, is_error = _judge(a, b, int(iterations[0]), first_losses, first_norms)
    worst = int(differences.argmax())
    return Losses(
        iterations=(int(iterations[0]), int(iterations[-1])),
        first=first_losses,
        first_norms=first_norms,
        largest=float(differences[worst]),
        largest_at=int(iterations[worst]),
        verdict=verdict,
        is_error=is_error,
    )


class _Difference(NamedTuple):
    """A quantity of the first common step."""

    name: str
    relative: float  # difference of B from A
    rounding: float  # that another order of sums makes

    @property
    def is_too_much(self) -> bool:
        """Whether another computation made it."""
        return self.relative > TOO_MUCH * self.rounding


def _judge(
    a: Run,
    b: Run,
    iteration: int,
    losses: tuple[float, float],
    norms: tuple[float, float],
) -> tuple[str, bool]:
    """Judge what a first step's differences say: a sentence, and whether that is an error."""
    precision = str(a.plan.precision)
    if precision not in LOSS_ROUNDING:
        return "", False
    found = []
    for name, (of_a, of_b), rounding in (
        ("loss", losses, LOSS_ROUNDING[precision]),
        ("gradient norm", norms, NORM_ROUNDING[precision]),
    ):
        if of_a and np.isfinite([of_a, of_b]).all():
            found.append(_Difference(name, abs(of_b / of_a - 1), rounding))
    told = " and ".join(f"the {one.name} by {significant(100 * one.relative, 2)}%" for one in found)
    if not any(one.is_too_much for one in found):
        return f"step {iteration:,} differs in {told}: rounding in {precision}", False
    expected = " and ".join(f"{significant(100 * one.rounding, 1)}%" for one in found)
    much = f"step {iteration:,} differs in {told}, where rounding in {precision} makes {expected}"
    if _drops(a) and not _have_same_layout(a, b):
        advice = "--hidden-dropout 0 --attention-dropout 0 for a precise comparison"
        return f"{much}: dropout draws other masks on another layout; {advice}", False
    if iteration != 1:
        return f"{much}; only runs compared from their first step can distinguish rounding from an error", False
    return f"{much}: one of them computes something else", True


def _mean_the_same(a: Run, b: Run) -> bool:
    """Tell by the flags that decide the numbers whether two runs are meant to compute the same."""
    if not a.plan.args or a.plan.settings.seed != b.plan.settings.seed:
        return False
    if a.plan.precision != b.plan.precision:
        return False
    return all(_list_deciding(a, group) == _list_deciding(b, group) for group in DECIDING)


def _list_deciding(run: Run, group: str) -> dict[str, Any]:
    """The flags of a group that decide the numbers, with their values."""
    flags = run.plan.args.get(group, {})
    return {name: value for name, value in flags.items() if name not in DECIDING[group]}


def _have_same_layout(a: Run, b: Run) -> bool:
    """Whether two runs spread the model in the same way over as many ranks."""
    if a.world_size != b.world_size:
        return False
    return bool(a.plan.args.get("parallel") == b.plan.args.get("parallel"))


def _drops(run: Run) -> bool:
    """Whether dropout is on."""
    settings = run.plan.settings
    return bool(settings.hidden_dropout or settings.attention_dropout)
