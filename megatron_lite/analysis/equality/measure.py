"""How far a tensor is from the one that it should be, and what rounding allows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun

SAFETY = 16.0  # times the distance that other roundings were seen to make
# Times as much is allowed after the first update: Adam makes a whole step of the rounding of a zero
LATER_STEPS = 100.0
MOST_LATER = 0.3  # allowed then at most, unless another rounding made a quarter of it
# A tensor whose numbers are smaller than this part of what is usual in the model is judged by the usual: rounding
# comes from the terms of its sums, which may nearly cancel, as for the bias of attention's keys
USUAL_SHARE = 0.05
# Below this part of what is usual, a tensor is taken for one that is zero but for rounding
ZERO_SHARE = 1e-4
RATIO_SAFETY = 4.0  # times the deviation that a ratio may have by chance
# of its error: a tensor is a multiple of its reference where no more than this is left without the multiple
EXPLAINED_BY_RATIO = 0.3


@dataclass(frozen=True)
class Precision:
    """Differences of a dtype's numbers whose sums are in another order, as shares of a tensor's norm."""

    name: str
    # always allowed, where another rounding was measured and where not
    least: float
    unmeasured: float
    # never allowed to be more
    most: float
    # what the ratio of two tensors may be off by, over all their numbers
    ratio: float


PRECISIONS = {
    "float64": Precision("float64", 1e-12, 1e-10, 1e-6, 1e-9),
    "float32": Precision("float32", 2e-6, 3e-5, 1.5e-4, 1e-5),
    "float16": Precision("float16", 3e-3, 2e-2, 6e-2, 3e-3),
    "bfloat16": Precision("bfloat16", 1.6e-2, 1.2e-1, 2.5e-1, 1.5e-2),
}
COARSEST_LAST = tuple(PRECISIONS)


def find_precision(runs: Iterable[ProvedRun]) -> Precision:
    """Find the coarsest dtype in which runs computed."""
    dtypes = {"float64"}
    for run in runs:
        for rank in run.ranks.values():
            dtypes.update(part.dtype for part in rank.record.weights)
            dtypes.update(part.dtype for output in rank.record.outputs for part in output.parts)
            dtypes.update(part.dtype for step in rank.record.steps for part in step.gradients)
    names = {dtype.removeprefix("torch.") for dtype in dtypes}
    known = names.intersection(PRECISIONS)
    coarsest = max(known, key=COARSEST_LAST.index)
    return PRECISIONS[coarsest]


@dataclass(frozen=True)
class Measured:
    """A tensor beside the one that it should be."""

    # <proved, reference> / <reference, reference>; 0 where the reference is zero
    ratio: float
    # what is left of the tensor without ratio times the reference, as a share of its norm
    residual: float
    # distance of both, as a share of the reference's norm or of what is usual where that is more
    error: float
    # what rounding may make of the error
    tolerance: float
    # norms of both
    norm: float
    reference_norm: float
    # whether the reference is zero but for rounding, so that a ratio says nothing
    is_zero: bool
    # how many numbers
    count: int
    # whether it is judged by what is usual, as it is smaller
    is_small: bool
    # what rounding may make of the ratio
    ratio_tolerance: float

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain the difference."""
        return not self.error <= self.tolerance

    @property
    def is_scaled(self) -> bool:
        """Whether it is the reference times a number."""
        is_explained = not self.differs or self.residual <= EXPLAINED_BY_RATIO * self.error
        if self.is_zero or not self.norm > 0:
            return False
        return is_explained and self.residual <= self.tolerance

    @property
    def is_telling(self) -> bool:
        """Whether a ratio says something: of a single number, any other one is a multiple."""
        return self.count > 1 and not self.is_zero


@dataclass(frozen=True)
class Rounding:
    """Tolerances for the tensors of a kind, such as the gradients of a step."""

    precision: Precision
    # root of the mean square of all numbers of the reference
    usual: float
    # by name: distance of another rounding, as a share of norm; {}: not measured
    seen: Mapping[str, float]
    # times as much is allowed
    factor: float = 1.0

    def allow(self, name: str) -> float:
        """The tolerance of a tensor."""
        if self.factor > 1.0:
            return self._allow_later(name)
        most = self.precision.most
        if name not in self.seen:
            return min(self.precision.unmeasured, most)
        return min(max(self.precision.least, SAFETY * self.seen[name]), most)

    def _allow_later(self, name: str) -> float:
        """The tolerance behind an update."""
        if name not in self.seen:
            return min(self.precision.unmeasured * self.factor, MOST_LATER)
        seen = self.seen[name]
        allowed = max(self.precision.least * self.factor, SAFETY * seen)
        least = SAFETY / 4 * seen
        return max(min(allowed, MOST_LATER), least)

    def _allow_ratio(self, rest: float, norm: float, count: int) -> float:
        """Compute the error that rounding may make of a ratio: the rest beside it, over the root of the count."""
        if not norm or not count:
            return 1.0
        spread = norm * float(np.sqrt(count))
        return max(self.precision.ratio, RATIO_SAFETY * rest / spread)

    def get_noise(self, reference: Array, name: str) -> float:
        """Compute the error that rounding may make of one number of a tensor.

        Args:
            reference: The tensor.
            name: The tensor's name in the reference.
        """
        mean_square = float(np.square(reference).mean()) if reference.size else 0.0
        own_size = float(np.sqrt(mean_square))
        size = max(own_size, USUAL_SHARE * self.usual)
        return self.allow(name) * size

    def measure(self, proved: Array, reference: Array, name: str) -> Measured:
        """Lay a tensor beside the one that it should be.

        Args:
            proved: The tensor.
            reference: What it should be, of the same shape.
            name: The tensor's name in the reference.
        """
        one = proved.ravel()
        other = reference.ravel()
        norm = float(np.linalg.norm(one))
        reference_norm = float(np.linalg.norm(other))
        usual_norm = self.usual * np.sqrt(max(other.size, 1))
        floor = max(reference_norm, USUAL_SHARE * usual_norm)
        distance = float(np.linalg.norm(one - other))
        ratio = float(one @ other) / reference_norm**2 if reference_norm else 0.0
        rest = float(np.linalg.norm(one - ratio * other))
        residual = rest / max(norm, USUAL_SHARE * usual_norm) if norm else 0.0
        if not np.isfinite(distance):
            is_same = np.array_equal(one, other, equal_nan=True)
            distance = 0.0 if is_same else float("inf")
            residual = distance
        return Measured(
            ratio=ratio,
            residual=residual,
            error=distance / floor if floor else distance,
            tolerance=self.allow(name),
            norm=norm,
            reference_norm=reference_norm,
            is_zero=reference_norm <= ZERO_SHARE * usual_norm,
            count=other.size,
            is_small=floor > reference_norm,
            ratio_tolerance=self._allow_ratio(rest, reference_norm, other.size),
        )


def measure_rounding(
    precision: Precision,
    reference: Mapping[str, Array],
    perturbed: Mapping[str, Array] | None,
    factor: float = 1.0,
) -> Rounding:
    """Measure what rounding makes of the tensors of a kind.

    Args:
        precision: The coarsest dtype of the runs.
        reference: The reference's wholes by name.
        perturbed: Wholes of a run with weights that differ by rounding; None where there is none.
        factor: Times as much is allowed, as behind an update.
    """
    squares = sum(float(np.square(array).sum()) for array in reference.values())
    count = sum(array.size for array in reference.values())
    usual = float(np.sqrt(squares / count)) if count else 0.0
    bare = Rounding(precision, usual, {}, factor)
    seen = {}
    for name, array in reference.items():
        other = (perturbed or {}).get(name)
        if other is not None and other.shape == array.shape:
            seen[name] = bare.measure(other, array, name).error
    return Rounding(precision, usual, seen, factor)
