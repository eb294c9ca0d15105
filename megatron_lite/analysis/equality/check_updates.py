"""Says whether gradients that are right were clipped by the right norm, and weights updated by them."""

import itertools
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
from megatron_lite.formats.prove_record import ProvedStep
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
MAX_RANKS_WRITTEN = 4  # with a figure of each
NORM_REMEDY = "add up the squares of all ranks' parts, each once, between ranks before the root"


def compute_norm(entries: ComparedParts) -> float:
    """The norm of the whole gradient of the ranks' parts, each block once."""
    squares = []
    for parts in entries.compared.values():
        for group in group_replicas(parts):
            # replicas of a block are the same, as gradients are right
            block = group[0].array
            squares.append(_sum_squares(block))
    return float(np.sqrt(sum(squares)))


def compute_rank_norms(entries: ComparedParts) -> dict[int, float]:
    """The norm of each rank's own parts."""
    squares: dict[int, float] = {}
    for parts in entries.compared.values():
        for entry in parts:
            before = squares.get(entry.rank, 0.0)
            squares[entry.rank] = before + _sum_squares(entry.array)
    return {rank: float(np.sqrt(square)) for rank, square in squares.items()}


def _sum_squares(array: Array) -> float:
    return float(np.square(array).sum())


def _write_by_rank(figures: Mapping[int, str]) -> str:
    """Write what the first ranks have: "rank 0 0.5, rank 1 0.25"."""
    first = sorted(figures.items())[:MAX_RANKS_WRITTEN]
    return ", ".join(f"rank {rank} {figure}" for rank, figure in first)


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
        norms = {}
        for rank, step in self.run.list_steps(self.step).items():
            if step.clipping is not None:
                norms[rank] = step.clipping.norm
        return norms

    def read_reference(self) -> float | None:
        """The norm that clip_grad_norm_ returned in the reference."""
        first = self._get_reference_step()
        if first is None or first.clipping is None:
            return None
        return first.clipping.norm

    def _get_reference_step(self) -> ProvedStep | None:
        """The step of the reference's first rank, which stands for all of them."""
        if self.reference is None:
            return None
        rank = min(self.reference.ranks)
        return self.reference.ranks[rank].record.steps[self.step]

    def build_row(self) -> ComparedRow | None:
        """The row of the norms that were clipped by."""
        norms = self.read_norms()
        expected = self.read_reference()
        if not norms or expected is None:
            return None
        worst = max(norms.values(), key=lambda norm: abs(norm - expected))
        error = abs(worst - expected)
        if expected:
            error /= expected
        return build_row(
            f"step {self.step + 1}: gradient norm",
            error,
            self.tolerance,
            reference=expected,
            proved=worst,
        )

    def check(self) -> list[Difference]:
        """Name errors of the norm and of what was clipped by it, for gradients that are right."""
        norms = self.read_norms()
        expected = self.read_reference()
        if expected is None:
            expected = compute_norm(self.entries)
        wrong = self._select_wrong(norms, expected)
        if wrong:
            return [self._describe_norm(wrong, expected)]
        return self._check_coefficients()

    def _select_wrong(self, figures: Mapping[int, float], expected: float) -> dict[int, float]:
        """The ranks' figures that rounding does not explain."""
        return {rank: figure for rank, figure in figures.items() if not self._is_near(figure, expected)}

    def _is_near(self, one: float, other: float) -> bool:
        larger = max(abs(one), abs(other))
        return abs(one - other) <= self.tolerance * larger

    def _describe_norm(self, wrong: Mapping[int, float], expected: float) -> Difference:
        own = compute_rank_norms(self.entries)
        first = wrong[min(wrong)]
        ranks = describe_ranks(list(wrong))
        evidence = (
            f"{ranks} clipped by a norm of {significant(first, 6)}, the whole gradient's is {significant(expected, 6)}"
        )
        are_own = all(self._is_near(norm, own.get(rank, 0.0)) for rank, norm in wrong.items())
        if are_own:
            evidence += "; it is the norm of the rank's own parts"
        else:
            ratio = write_ratio(first / expected) if expected else "?"
            evidence += f", {ratio} times as much: parts are left out, or counted more than once"
        return Difference(
            kind=ErrorKind.LOCAL_NORM,
            where="",
            step=self.step + 1,
            evidence=evidence,
            remedy=NORM_REMEDY,
            confidence="high" if are_own else "medium",
        )

    def _check_coefficients(self) -> list[Difference]:
        """Compare by how much ranks and the reference shortened their gradients."""
        first = self._get_reference_step()
        expected = None if first is None else _compute_coefficient(first)
        if expected is None:
            return []
        factors = {}
        for rank, step in self.run.list_steps(self.step).items():
            factor = _compute_coefficient(step)
            if factor is not None and rank not in self.entries.adding_ranks:
                factors[rank] = factor
        if not self._select_wrong(factors, expected):
            return []
        return [self._describe_coefficients(factors, expected)]

    def _describe_coefficients(self, factors: Mapping[int, float], expected: float) -> Difference:
        figures = _write_by_rank({rank: write_ratio(factor) for rank, factor in factors.items()})
        kind = ErrorKind.WRONG_UPDATE
        remedy = "look at what is done to the gradients between backward and update"
        confidence = "medium"
        first = next(iter(factors.values()))
        # one factor of all ranks is no rank's own norm
        if not all(is_same_ratio(factor, first) for factor in factors.values()):
            kind = ErrorKind.LOCAL_NORM
            remedy = NORM_REMEDY
            confidence = "high"
        return Difference(
            kind=kind,
            where="",
            step=self.step + 1,
            evidence=f"gradients agree, and were multiplied before the update by {write_ratio(expected)} in the "
            f"reference, by {figures} on the ranks",
            remedy=remedy,
            confidence=confidence,
        )


def _compute_coefficient(step: ProvedStep) -> float | None:
    """Compute the factor of a step's gradients between backward and update; None where norms are unknown or zero."""
    if not step.updated_norm or not step.kept_norm:
        return None
    return step.updated_norm / step.kept_norm


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
    if len(clippings) < max(len(steps), 2):
        return None
    are_unreduced = all(one.kind is ErrorKind.MISSING_REDUCTION for one in found)
    if not found or not are_unreduced:
        return None
    if len(entries.differing) < len(entries.compared):
        return None
    updated = []
    for rank, own in steps.items():
        weights = {part.name: run.ranks[rank].read(part) for part in own.weights}
        updated.append(weights)
    first = updated[0]
    if not first or not all(_are_same(first, other) for other in updated[1:]):
        return None
    own_norms = compute_rank_norms(entries)
    figures = {}
    for rank, clipping in clippings.items():
        if not np.isclose(clipping.norm, own_norms.get(rank, 0.0), rtol=OWN_NORM):
            return None
        # a larger limit than the norm changes nothing
        if 0 < clipping.max_norm < clipping.norm:
            figures[rank] = significant(clipping.norm, 6)
    if not figures:
        return None
    each = _write_by_rank(figures)
    return Difference(
        kind=ErrorKind.LOCAL_NORM,
        where="",
        step=step + 1,
        evidence=f"ranks clip their own gradients before these are brought together, each by its own norm: {each}",
        remedy="bring the gradients together between ranks first, then clip",
    )


def _are_same(one: Mapping[str, Array | None], other: Mapping[str, Array | None]) -> bool:
    """Whether two ranks have the same weights."""
    for name, array in one.items():
        beside = other.get(name)
        if array is None or beside is None:
            return False
        if not is_same_start(beside, array):
            return False
    return True


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
            measured = [self._measure(entry) for entry in parts]
            found = [update for update in measured if update is not None]
            if found:
                errors[name] = found
        if not errors:
            return UpdateResult(None, [])
        updates = list(itertools.chain.from_iterable(errors.values()))
        worst = max(updates, key=lambda one: one.error / one.tolerance)
        row = build_row(
            f"step {self.step}: update of the weights",
            worst.error,
            worst.tolerance,
            tensors=len(errors),
        )
        wrong = [name for name, found in errors.items() if any(one.differs for one in found)]
        if not wrong:
            return UpdateResult(row, [])
        names = order.sort_backward(wrong)
        difference = _describe_update(names, errors, self.step)
        return UpdateResult(row, [difference])

    def _measure(self, entry: ComparedPart) -> "_Update | None":
        """Compare the change of one part; None where rounding hides it."""
        name = entry.place.name
        whole_before = self.reference_before.get(name)
        before = self.before(entry)
        whole_shape = entry.whole.shape
        if whole_before is None or before is None or whole_before.shape != whole_shape:
            return None
        gradient = self.gradients.get(name)
        if gradient is None or gradient.shape != whole_shape:
            return None
        bounds = zip(entry.place.starts, entry.array.shape)
        block = tuple(slice(start, start + length) for start, length in bounds)
        mine = entry.array - before
        theirs = entry.reference - whole_before[block]
        noise = self.rounding.get_noise(gradient, name)
        is_large = np.abs(gradient[block]) > LARGE_GRADIENT * noise
        norm = _compute_norm(theirs, is_large)
        if not norm:
            return None
        weights = _compute_norm(entry.reference, is_large) / norm
        tolerance = self._allow(name, weights)
        other = self.perturbed.get(name)
        if other is not None and other.shape == whole_shape:
            moved = _compute_norm(other[block] - theirs, is_large)
            tolerance = max(tolerance, SAFETY * moved / norm)
        if tolerance > MOST_UPDATE_TOLERANCE:
            return None
        product = (mine * theirs)[is_large]
        return _Update(
            rank=entry.rank,
            error=_compute_norm(mine - theirs, is_large) / norm,
            tolerance=tolerance,
            ratio=float(product.sum()) / norm**2,
            is_none=not mine.any(),
        )

    def _allow(self, name: str, weights: float) -> float:
        """Compute what rounding may make of an update of weights that are so many times as large."""
        dtype = self.dtypes.get(name, "").removeprefix("torch.")
        epsilon = EPSILONS.get(dtype, EPSILONS["float32"])
        from_gradient = ROUNDING_OF_UPDATE * self.rounding.allow(name)
        from_weights = ROUNDED_WEIGHTS * epsilon * weights
        return max(LEAST_UPDATE_TOLERANCE, from_gradient, from_weights)


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
    if still:
        evidence = f"gradients agree; {describe_ranks(still)} did not update {first}"
    else:
        ranks = describe_ranks([one.rank for one in wrong])
        error = significant(worst.error, 2)
        ratio = write_ratio(worst.ratio)
        evidence = (
            f"gradients agree; the update of {first} on {ranks} differs by {error} of its norm "
            f"and is {ratio} times the reference's"
        )
    # a script may keep one weight out of the optimizer on purpose
    is_certain = not still or len(errors) > 1
    return Difference(
        kind=ErrorKind.WRONG_UPDATE,
        where=first,
        step=step,
        evidence=evidence,
        remedy="look at the optimizer: learning rate, state, and whether ranks get the weights that others updated",
        others=tuple(names[1 : MAX_OTHERS_SHOWING + 1]),
        confidence="high" if is_certain else "medium",
    )
