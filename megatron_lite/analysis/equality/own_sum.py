"""Compares gradients with the mean of the ranks' own ones, which plain data parallelism makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.equality.compared_parts import ComparedPart, ComparedParts
from megatron_lite.analysis.equality.measure import Rounding
from megatron_lite.analysis.equality.placing import Places
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.analysis.equality.same_data import Roles, find_part

SAME_WEIGHT = 1e-3  # weights of a rank that are nearer than this are one
MAX_RANKS_SOLVED = 16  # whose weights in a sum are looked for


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
    for name, local in read_local_gradients(run, places, step).items():
        if len(local) != len(run.ranks):
            continue
        expected = np.mean(list(local.values()), axis=0)
        for (rank, own_name), place in places.found.items():
            if place.name != name:
                continue
            part = find_part(run.ranks[rank].record.steps[step].gradients, own_name)
            array = None if part is None else run.ranks[rank].read(part)
            if array is None or array.shape != expected.shape:
                continue
            measured = rounding.measure(array, expected, name)
            entry = ComparedPart(rank, own_name, place, array, expected, expected, measured)
            entries.compared.setdefault(name, []).append(entry)
    return entries


def read_local_gradients(run: ProvedRun, places: Places, step: int) -> dict[str, dict[int, Array]]:
    """Read what autograd alone added up, by the parameter's name and rank, where ranks hold the whole parameter.

    Args:
        run: The records of the ranks.
        places: What their parameters are of the whole.
        step: Number of the step, from 0.
    """
    found: dict[str, dict[int, Array]] = {}
    for (rank, own_name), place in places.found.items():
        part = find_part(run.ranks[rank].record.steps[step].local_gradients, own_name)
        array = None if part is None else run.ranks[rank].read(part)
        if array is not None and place.is_whole and array.shape == place.whole:
            found.setdefault(place.name, {})[rank] = array
    return found


@dataclass(frozen=True)
class RankWeights:
    """Weights by which the ranks' own gradients add up to a gradient."""

    weights: dict[int, float]

    def is_near(self, other: "RankWeights") -> bool:
        """Whether each rank weighs the same as in another sum."""
        return all(abs(weight - other.weights[rank]) <= SAME_WEIGHT for rank, weight in self.weights.items())


def _is_known(local: Mapping[int, Array], whole: Array, ranks: Sequence[int]) -> bool:
    """Whether all ranks have a gradient of their own of one shape."""
    return all(rank in local and local[rank].shape == whole.shape for rank in ranks)


def find_weights(
    target: Mapping[str, Array], local: Mapping[str, Mapping[int, Array]], ranks: Sequence[int], tolerance: float
) -> RankWeights | None:
    """Find the weights by which ranks' own gradients add up to another one; None where none do.

    Args:
        target: The gradient by name.
        local: The ranks' own gradients by name and rank.
        ranks: Ranks whose gradients are added up.
        tolerance: What may be left, as a share of the gradient's norm.
    """
    names = [name for name, whole in target.items() if _is_known(local.get(name, {}), whole, ranks)]
    if not names or len(ranks) > MAX_RANKS_SOLVED:
        return None
    columns = [np.concatenate([local[name][rank].ravel() for name in names]) for rank in ranks]
    right = np.concatenate([target[name].ravel() for name in names])
    if not np.isfinite(right).all() or not all(np.isfinite(column).all() for column in columns):
        return None
    matrix = np.stack(columns, axis=1)
    if matrix.shape[0] < 2 * len(ranks):
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix, right, rcond=1e-6)
    rest = np.linalg.norm(matrix @ solution - right)
    if rank < len(ranks) or rest > tolerance * np.linalg.norm(right):
        return None
    return RankWeights({number: float(weight) for number, weight in zip(ranks, solution)})
