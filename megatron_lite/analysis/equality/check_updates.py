"""Says whether gradients that are right were clipped by the right norm, and weights updated by them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.equality.call_order import CallOrder
from megatron_lite.analysis.equality.check_gradients import MAX_OTHERS_SHOWING, describe_ranks, write_ratio
from megatron_lite.analysis.equality.compared_parts import ComparedPart, ComparedParts, group_replicas
from megatron_lite.analysis.equality.gradient_patterns import is_same_ratio
from megatron_lite.analysis.equality.measure import SAFETY, Precision, Rounding
from megatron_lite.analysis.equality.placing import is_same_start
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.analysis.equality.rows import build_row
from megatron_lite.formats.prove_report import ComparedRow, Difference, ErrorKind
from megatron_lite.units import significant

EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Updates are compared where the gradient is so many times what rounding may make of it: Adam makes a whole step of any
# gradient, of rounding, too
LARGE_GRADIENT = 30.0
# times the share of a gradient that is rounding may be that of an update
ROUNDING_OF_UPDATE = 4.0
LEAST_UPDATE_TOLERANCE = 1e-3
ROUNDED_WEIGHTS = 4  # times a weight is rounded between two updates
# above which nothing can be said of an update
MOST_UPDATE_TOLERANCE = 0.2
OWN_NORM = 1e-2  # relative: a norm this near to that of the rank's own gradients is theirs
NORM_REMEDY = "add up the squares of all ranks' parts, each once, between ranks before the root"


def compute_norm(entries: ComparedParts) -> float:
    """The norm of the whole gradient of the ranks' parts, each block once."""
    squares = [
        float(np.square(group[0].array).sum()) for parts in entries.compared.values() for group in group_replicas(parts)
    ]
    return float(np.sqrt(sum(squares)))


def compute_rank_norms(entries: ComparedParts) -> dict[int, float]:
    """The norm of each rank's own parts."""
    squares: dict[int, float] = {}
    for parts in entries.compared.values():
        for entry in parts:
            squares[entry.rank] = squares.get(entry.rank, 0.0) + float(np.square(entry.array).sum())
    return {rank: float(np.sqrt(square)) for rank, square in squares.items()}


@dataclass(frozen=True)
class NormCheck:
    """Norms of a step's gradients on both sides."""

    run: ProvedRun
    # None where gradients could not be laid beside another run's
    reference: ProvedRun | None
    entries: ComparedParts
    precision: Precision
    # from 0
    step: int

    @property
    def tolerance(self) -> float:
        """The relative difference that two norms may have."""
        return self.precision.most

    def read_norms(self) -> dict[int, float]:
        """The norms that clip_grad_norm_ returned, by rank."""
        steps = self.run.list_steps(self.step)
        return {rank: step.clipping.norm for rank, step in steps.items() if step.clipping is not None}

    def read_reference(self) -> float | None:
        """The norm that clip_grad_norm_ returned in the reference."""
        if self.reference is None:
            return None
        first = self.reference.ranks[min(self.reference.ranks)].record.steps[self.step]
        return None if first.clipping is None else first.clipping.norm

    def build_row(self) -> ComparedRow | None:
        """The row of the norms that were clipped by."""
        norms = self.read_norms()
        expected = self.read_reference()
        if not norms or expected is None:
            return None
        worst = max(norms.values(), key=lambda norm: abs(norm - expected))
        error = abs(worst - expected) / expected if expected else abs(worst)
        return build_row(f"step {self.step + 1}: gradient norm", error, self.tolerance, expected, worst)

    def check(self) -> list[Difference]:
        """Name errors of the norm and of what was clipped by it, for gradients that are right."""
        norms = self.read_norms()
        expected = self.read_reference()
        if expected is None:
            expected = compute_norm(self.entries)
        wrong = {rank: norm for rank, norm in norms.items() if not self._is_near(norm, expected)}
        if wrong:
            return [self._describe_norm(wrong, expected)]
        return self._check_coefficients()

    def _is_near(self, one: float, other: float) -> bool:
        return abs(one - other) <= self.tolerance * max(abs(one), abs(other))

    def _describe_norm(self, wrong: Mapping[int, float], expected: float) -> Difference:
        own = compute_rank_norms(self.entries)
        rank = min(wrong)
        figures = f"{describe_ranks(list(wrong))} clipped by a norm of {significant(wrong[rank], 6)}"
        evidence = f"{figures}, the whole gradient's is {significant(expected, 6)}"
        confidence = "medium"
        if all(self._is_near(norm, own.get(number, 0.0)) for number, norm in wrong.items()):
            evidence += "; it is the norm of the rank's own parts"
            confidence = "high"
        else:
            ratio = write_ratio(wrong[rank] / expected) if expected else "?"
            evidence += f", {ratio} times as much: parts are left out, or counted more than once"
        return Difference(
            kind=ErrorKind.LOCAL_NORM,
            where="",
            step=self.step + 1,
            evidence=evidence,
            remedy=NORM_REMEDY,
            confidence=confidence,
        )

    def _check_coefficients(self) -> list[Difference]:
        """Compare by how much ranks and the reference shortened their gradients."""
        if self.reference is None:
            return []
        first = self.reference.ranks[min(self.reference.ranks)].record.steps[self.step]
        if not first.updated_norm or not first.kept_norm:
            return []
        expected = first.updated_norm / first.kept_norm
        steps = self.run.list_steps(self.step)
        factors = {
            rank: step.updated_norm / step.kept_norm
            for rank, step in steps.items()
            if step.updated_norm and step.kept_norm and rank not in self.entries.adding_ranks
        }
        wrong = {rank: factor for rank, factor in factors.items() if not self._is_near(factor, expected)}
        if not wrong:
            return []
        figures = ", ".join(f"rank {rank} {write_ratio(factor)}" for rank, factor in sorted(factors.items())[:4])
        differ = any(not is_same_ratio(factor, next(iter(factors.values()))) for factor in factors.values())
        return [
            Difference(
                kind=ErrorKind.LOCAL_NORM if differ else ErrorKind.WRONG_UPDATE,
                where="",
                step=self.step + 1,
                evidence=f"gradients agree, and were multiplied before the update by {write_ratio(expected)} in the "
                f"reference, by {figures} on the ranks",
                remedy=NORM_REMEDY if differ else "look at what is done to the gradients between backward and update",
                confidence="high" if differ else "medium",
            )
        ]


def find_early_clipping(
    run: ProvedRun, entries: ComparedParts, found: Sequence[Difference], step: int
) -> Difference | None:
    """Find out that ranks clip their own gradients before these are brought together.

    Then the gradients that differ between ranks are those before the sum. After the update all ranks have the same
    weights.

    Args:
        run: The records of what is proved.
        entries: The gradients beside the reference's.
        found: What these seem to show.
        step: Number of the step, from 0.
    """
    steps = run.list_steps(step)
    clippings = {rank: own.clipping for rank, own in steps.items() if own.clipping is not None}
    are_unreduced = bool(found) and all(one.kind is ErrorKind.MISSING_REDUCTION for one in found)
    if len(clippings) < max(len(steps), 2) or not are_unreduced or len(entries.differing) < len(entries.compared):
        return None
    updated = [{part.name: run.ranks[rank].read(part) for part in own.weights} for rank, own in steps.items()]
    if not updated[0] or not all(_are_same(updated[0], other) for other in updated[1:]):
        return None
    own_norms = compute_rank_norms(entries)
    are_own = all(np.isclose(one.norm, own_norms.get(rank, 0.0), rtol=OWN_NORM) for rank, one in clippings.items())
    shortening = {rank: one.norm for rank, one in clippings.items() if 0 < one.max_norm < one.norm}
    if not are_own or not shortening:
        return None
    figures = ", ".join(f"rank {rank} {significant(norm, 6)}" for rank, norm in sorted(shortening.items())[:4])
    return Difference(
        kind=ErrorKind.LOCAL_NORM,
        where="",
        step=step + 1,
        evidence=f"ranks clip their own gradients before these are brought together, each by its own norm: {figures}",
        remedy="bring the gradients together between ranks first, then clip",
    )


def _are_same(one: Mapping[str, Array | None], other: Mapping[str, Array | None]) -> bool:
    """Whether two ranks have the same weights."""
    pairs = [(array, other.get(name)) for name, array in one.items()]
    return all(array is not None and mine is not None and is_same_start(mine, array) for array, mine in pairs)


@dataclass(frozen=True)
class UpdateResult:
    """How far updates of the weights are apart."""

    row: ComparedRow | None
    differences: list[Difference]


@dataclass(frozen=True)
class Updates:
    """The changes of a step's update, on both sides."""

    # weights after it beside the reference's
    after: ComparedParts
    # the weights before it, of a rank by its own name, and of the reference by name
    before: Callable[[ComparedPart], Array | None]
    reference_before: Mapping[str, Array]
    # the reference's gradients by name, and what rounding makes of them
    gradients: Mapping[str, Array]
    rounding: Rounding
    # changes of the reference with weights that differ by rounding, by name; {}: not measured
    perturbed: Mapping[str, Array]
    dtypes: Mapping[str, str]
    # from 1
    step: int

    def compare(self, order: CallOrder) -> UpdateResult:
        """Compare the changes of all weights, and name the error that they show."""
        errors: dict[str, list[_Update]] = {}
        for name, parts in self.after.compared.items():
            found = [update for entry in parts if (update := self._measure(entry)) is not None]
            if found:
                errors[name] = found
        if not errors:
            return UpdateResult(None, [])
        worst = max((one for found in errors.values() for one in found), key=lambda one: one.error / one.tolerance)
        name = f"step {self.step}: update of the weights"
        row = build_row(name, worst.error, worst.tolerance, tensors=len(errors))
        names = [name for name, found in errors.items() if any(one.differs for one in found)]
        names = order.sort_backward(names)
        return UpdateResult(row, [_describe_update(names, errors, self.step)] if names else [])

    def _measure(self, entry: ComparedPart) -> "_Update | None":
        """Compare the change of one part; None where rounding hides it."""
        name = entry.place.name
        whole_before = self.reference_before.get(name)
        before = self.before(entry)
        if whole_before is None or before is None or whole_before.shape != entry.whole.shape:
            return None
        block = tuple(slice(start, start + length) for start, length in zip(entry.place.starts, entry.array.shape))
        mine = entry.array - before
        theirs = entry.reference - whole_before[block]
        gradient = self.gradients.get(name)
        if gradient is None or gradient.shape != entry.whole.shape:
            return None
        is_large = np.abs(gradient[block]) > LARGE_GRADIENT * self.rounding.get_noise(gradient, name)
        norm = _compute_norm(theirs, is_large)
        if not norm:
            return None
        tolerance = self._allow(name, _compute_norm(entry.reference, is_large) / norm)
        other = self.perturbed.get(name)
        if other is not None and other.shape == entry.whole.shape:
            tolerance = max(tolerance, SAFETY * _compute_norm(other[block] - theirs, is_large) / norm)
        if tolerance > MOST_UPDATE_TOLERANCE:
            return None
        error = _compute_norm(mine - theirs, is_large) / norm
        ratio = float((mine * theirs)[is_large].sum()) / norm**2
        return _Update(entry.rank, error, tolerance, ratio, not mine.any())

    def _allow(self, name: str, weights: float) -> float:
        """Compute what rounding may make of an update of weights that are so many times as large."""
        dtype = self.dtypes.get(name, "").removeprefix("torch.")
        epsilon = EPSILONS.get(dtype, EPSILONS["float32"])
        from_gradient = ROUNDING_OF_UPDATE * self.rounding.allow(name)
        return max(LEAST_UPDATE_TOLERANCE, from_gradient, ROUNDED_WEIGHTS * epsilon * weights)


def _compute_norm(array: Array, chosen: Array) -> float:
    return float(np.linalg.norm(array[chosen]))


@dataclass(frozen=True)
class _Update:
    rank: int
    error: float
    tolerance: float
    ratio: float
    is_none: bool

    @property
    def differs(self) -> bool:
        return not self.error <= self.tolerance


def _describe_update(names: Sequence[str], errors: Mapping[str, Sequence[_Update]], step: int) -> Difference:
    """Say what is wrong with updates of right gradients."""
    first = names[0]
    wrong = [one for one in errors[first] if one.differs]
    still = [one.rank for one in wrong if one.is_none]
    worst = max(wrong, key=lambda one: one.error)
    evidence = (
        f"gradients agree; the update of {first} on {describe_ranks([one.rank for one in wrong])} differs by "
        f"{significant(worst.error, 2)} of its norm and is {write_ratio(worst.ratio)} times the reference's"
    )
    if still:
        evidence = f"gradients agree; {describe_ranks(still)} did not update {first}"
    by_rank: dict[int, list[float]] = {}
    for found in errors.values():
        for one in found:
            by_rank.setdefault(one.rank, []).append(one.ratio)
    return Difference(
        kind=ErrorKind.WRONG_UPDATE,
        where=first,
        step=step,
        evidence=evidence,
        remedy="look at the optimizer: learning rate, state, and whether ranks get the weights that others updated",
        others=tuple(names[1 : MAX_OTHERS_SHOWING + 1]),
        confidence="high" if not still or len(errors) > 1 else "medium",
    )
