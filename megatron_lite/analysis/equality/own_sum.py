"""Compares gradients with the mean of the ranks' own ones, which plain data parallelism makes of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.equality.compared_parts import ComparedPart, ComparedParts
from megatron_lite.analysis.equality.measure import Rounding
from megatron_lite.analysis.equality.placing import Places
from megatron_lite.analysis.equality.proved_run import Array, Parts, ProvedRun, RankRun
from megatron_lite.analysis.equality.same_data import Roles, find_part

SAME_WEIGHT = 1e-3  # weights of a rank that are nearer than this are one
MAX_RANKS_SOLVED = 16  # whose weights in a sum are looked for
SMALLEST_SINGULAR = 1e-6  # beside the largest singular value: gradients of ranks that are nearer depend on each other


def collect_own_sums(run: ProvedRun, places: Places, roles: Roles, rounding: Rounding, step: int) -> ComparedParts:
    """Lay gradients beside the means of what autograd alone added up on the ranks.

    Only parameters that every rank holds as a whole are compared, where ranks split no layers.

    Args:
        run: The records of the ranks.
        places: What their parameters are of the whole.
        roles: What ranks do alike.
        rounding: What rounding allows.
        step: Number of the step, from 0.
    """
    entries = ComparedParts()
    if roles.is_cut or len(roles.stages) > 1:
        return entries
    groups = places.group()
    for name, local in read_local_gradients(run, places, step).items():
        if len(local) != len(run.ranks):
            continue
        expected = np.mean(list(local.values()), axis=0)
        for rank, own_name, place in groups[name]:
            own = run.ranks[rank]
            array = _read_part(own, own.record.steps[step].gradients, own_name)
            if array is None or array.shape != expected.shape:
                continue
            entry = ComparedPart(
                rank=rank,
                own_name=own_name,
                place=place,
                array=array,
                reference=expected,
                whole=expected,
                measured=rounding.measure(array, expected, name),
            )
            entries.compared.setdefault(name, []).append(entry)
    return entries


def _read_part(rank: RankRun, parts: Parts, name: str) -> Array | None:
    """Read a rank's part of a name; None where it has none."""
    part = find_part(parts, name)
    if part is None:
        return None
    return rank.read(part)


def read_local_gradients(run: ProvedRun, places: Places, step: int) -> dict[str, dict[int, Array]]:
    """Read what autograd alone added up, by the parameter's name and rank, where ranks hold the whole parameter.

    Args:
        run: The records of the ranks.
        places: What their parameters are of the whole.
        step: Number of the step, from 0.
    """
    found: dict[str, dict[int, Array]] = {}
    for (rank, own_name), place in places.found.items():
        own = run.ranks[rank]
        array = _read_part(own, own.record.steps[step].local_gradients, own_name)
        if array is None:
            continue
        if place.is_whole and array.shape == place.whole:
            of_ranks = found.setdefault(place.name, {})
            of_ranks[rank] = array
    return found


@dataclass(frozen=True)
class RankWeights:
    """Weights by which the ranks' own gradients add up to a gradient."""

    weights: dict[int, float]

    def is_near(self, other: "RankWeights") -> bool:
        """Whether each rank weighs the same as in another sum."""
        for rank, weight in self.weights.items():
            if abs(weight - other.weights[rank]) > SAME_WEIGHT:
                return False
        return True


def _is_known(local: Mapping[int, Array], whole: Array, ranks: Sequence[int]) -> bool:
    """Whether all ranks have a gradient of their own of one shape."""
    for rank in ranks:
        if rank not in local or local[rank].shape != whole.shape:
            return False
    return True


def find_weights(
    target: Mapping[str, Array],
    local: Mapping[str, Mapping[int, Array]],
    ranks: Sequence[int],
    tolerance: float,
) -> RankWeights | None:
    """Find the weights by which ranks' own gradients add up to another one; None where none do.

    Args:
        target: The gradient by name.
        local: The ranks' own gradients by name and rank.
        ranks: Ranks whose gradients are added up.
        tolerance: What may be left, as a share of the gradient's norm.
    """
    if len(ranks) > MAX_RANKS_SOLVED:
        return None
    names = []
    for name, whole in target.items():
        if _is_known(local.get(name, {}), whole, ranks):
            names.append(name)
    if not names:
        return None
    right = _join(target[name] for name in names)
    columns = []
    for rank in ranks:
        own = _join(local[name][rank] for name in names)
        columns.append(own)
    matrix = np.stack(columns, axis=1)
    if not np.isfinite(right).all() or not np.isfinite(matrix).all():
        return None
    # with fewer numbers than that, weights may fit by chance
    if len(right) < 2 * len(ranks):
        return None
    solution, _, independent, _ = np.linalg.lstsq(matrix, right, rcond=SMALLEST_SINGULAR)
    if independent < len(ranks):
        return None
    rest = np.linalg.norm(matrix @ solution - right)
    if rest > tolerance * np.linalg.norm(right):
        return None
    weights = map(float, solution)
    return RankWeights(dict(zip(ranks, weights)))


def _join(arrays: Iterable[Array]) -> Array:
    """Lay the numbers of several tensors one behind the other."""
    flat = [array.ravel() for array in arrays]
    return np.concatenate(flat)
