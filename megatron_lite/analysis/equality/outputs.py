"""Lays what modules returned on each rank beside what they returned in the reference."""

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.equality.fused_parts import BIAS
from megatron_lite.analysis.equality.measure import Measured, Precision, Rounding, measure_rounding
from megatron_lite.analysis.equality.placing import Places
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.analysis.equality.same_data import Roles
from megatron_lite.formats.prove_record import ModuleOutput, TensorPart

MAX_PERMUTED = 4  # ranks whose order is tried


class Likeness(enum.Enum):
    """Names what a module's output is of the reference's."""

    EQUAL = enum.auto()
    # only the sum over ranks is the reference's
    PARTIAL = enum.auto()
    # it is the reference's when ranks are put in another order
    PERMUTED = enum.auto()
    DIFFERS = enum.auto()
    UNMATCHED = enum.auto()


@dataclass(frozen=True)
class OutputKey:
    """A tensor that a module returned."""

    module: str
    # which of its calls in a micro-batch, from 0
    call: int
    # its number among the tensors that were returned
    number: int


@dataclass(frozen=True)
class ComparedOutput:
    """A module's output beside the reference's, over all ranks and micro-batches."""

    key: OutputKey
    class_name: str
    has_local_statistics: bool
    likeness: Likeness
    # None where it could not be laid beside the reference's
    measured: Measured | None
    # how many times it has what the module computes, and how many times its bias; None where it is made otherwise
    made_of: "MadeOf | None" = None


@dataclass(frozen=True)
class MadeOf:
    """An output as a sum of multiples: of the reference's without the bias of the module, and of that bias."""

    product: float
    bias: float


@dataclass(frozen=True)
class _Returned:
    output: ModuleOutput
    part: TensorPart
    array: Array


@dataclass(frozen=True)
class _Whole:
    """A module's output in the reference, of all its micro-batches; rows lie one behind the other."""

    arrays: list[Array]
    rows: list[int]


@dataclass(frozen=True)
class OutputMatcher:
    """Finds what a rank's output should be."""

    run: ProvedRun
    roles: Roles
    reference: ProvedRun
    rounding: Rounding
    # of modules, by name
    biases: Mapping[str, Array]

    def list_rows(self, run: ProvedRun, rank: int, micro_batch: int) -> tuple[object, ...]:
        """List what tells the samples of a micro-batch in the first step apart.

        Args:
            run: The records of either side.
            rank: A rank of it.
            micro_batch: Number of the micro-batch, from 0.
        """
        batches = run.ranks[rank].record.steps[0].micro_batches
        if micro_batch >= len(batches):
            return ()
        batch = batches[micro_batch]
        return batch.indices if self.roles.is_context and not self.run.has_slices else batch.rows

    def find_counterpart(self, rank: int) -> int | None:
        """The rank of the first stage that handles the same samples."""
        first = sorted(rank for group in self.roles.peers for rank in group)
        for stage in self.roles.stages:
            if rank in stage:
                return first[stage.index(rank)] if len(stage) == len(first) else None
        return None


def compare_outputs(
    run: ProvedRun,
    places: Places,
    roles: Roles,
    reference: ProvedRun,
    perturbed: ProvedRun | None,
    precision: Precision,
    start: Mapping[str, Array],
) -> list[ComparedOutput]:
    """Compare the outputs of the first step, in the order of the reference's calls.

    Args:
        run: The records of what is proved.
        places: What its parameters are of the reference.
        roles: What its ranks do alike.
        reference: The records of the reference, one rank of which is looked at.
        perturbed: The records of the reference with weights that differ by rounding.
        precision: The coarsest dtype of both.
        start: The weights with which both began, by name.
    """
    theirs = _index_outputs(reference, min(reference.ranks), {})
    wholes = {str(key): _join(values) for key, values in theirs.items()}
    other = None
    if perturbed is not None and perturbed.ranks:
        found = _index_outputs(perturbed, min(perturbed.ranks), {})
        other = {str(key): _join(values) for key, values in found.items()}
    # an output is judged by its own size, whatever that of others is
    rounding = replace(measure_rounding(precision, wholes, other), usual=0.0)
    matcher = OutputMatcher(run, roles, reference, rounding, _list_biases(start))
    aliases = reference.ranks[min(reference.ranks)].record.aliases
    mine: dict[OutputKey, dict[int, list[_Returned]]] = defaultdict(dict)
    for rank in run.ranks:
        held = {place.name for (owner, _), place in places.found.items() if owner == rank}
        absent = [name for name in start if name not in held] if len(roles.stages) > 1 else []
        for key, values in _index_outputs(run, rank, _learn_modules(places, rank, aliases)).items():
            if not _is_within(absent, key.module):
                mine[key][rank] = values
    return [_compare_key(key, mine[key], values, matcher) for key, values in theirs.items() if key in mine]


def _list_biases(start: Mapping[str, Array]) -> dict[str, Array]:
    """List the biases by their modules."""
    biases = {}
    for name, array in start.items():
        module, _, last = name.rpartition(".")
        if last == BIAS and array.any():
            biases[module] = array
    return biases


def _is_within(names: Sequence[str], module: str) -> bool:
    """Whether a parameter is one of a module, which a stage without it has only in part."""
    return any(not module or name.startswith(f"{module}.") for name in names)


def _learn_modules(places: Places, rank: int, aliases: Mapping[str, str]) -> dict[str, str]:
    """The reference's names of a rank's modules, where they differ."""
    modules = {}
    for (owner, name), place in places.found.items():
        module = name.rpartition(".")[0]
        other = place.name.rpartition(".")[0]
        if owner == rank and module != other and name not in aliases:
            modules[module] = other
    return modules


def _index_outputs(run: ProvedRun, rank: int, modules: dict[str, str]) -> dict[OutputKey, list[_Returned]]:
    """List a rank's outputs by module, in the order of the calls; each has one for each micro-batch."""
    calls: dict[tuple[str, int], int] = defaultdict(int)
    found: dict[OutputKey, list[_Returned]] = defaultdict(list)
    own = run.ranks[rank]
    for output in own.record.outputs:
        if modules and output.module not in modules:
            continue
        module = modules.get(output.module, output.module)
        call = calls[module, output.micro_batch]
        calls[module, output.micro_batch] += 1
        for number, part in enumerate(output.parts):
            array = own.read(part)
            if array is not None:
                found[OutputKey(module, call, number)].append(_Returned(output, part, array))
    return dict(found)


def _join(values: Sequence[_Returned]) -> Array:
    return np.concatenate([value.array.ravel() for value in values])


def _compare_key(
    key: OutputKey, mine: dict[int, list[_Returned]], theirs: list[_Returned], matcher: OutputMatcher
) -> ComparedOutput:
    """Compare one tensor over all ranks and micro-batches; the worst of them counts."""
    results = [
        _compare_peers(key, [mine[rank][number] for rank in peers], peers, theirs, matcher)
        for peers, number in _list_peers(mine, matcher)
    ]
    outputs = [value.output for values in mine.values() for value in values]
    unmatched = _Result(Likeness.UNMATCHED)
    worst = max(results, key=lambda result: _rank_likeness(result.likeness, result.measured), default=unmatched)
    return ComparedOutput(
        key,
        outputs[0].class_name,
        any(output.has_local_statistics for output in outputs),
        worst.likeness,
        worst.measured,
        worst.made_of,
    )


def _rank_likeness(likeness: Likeness, measured: Measured | None) -> tuple[int, float]:
    order = (Likeness.UNMATCHED, Likeness.EQUAL, Likeness.PARTIAL, Likeness.PERMUTED, Likeness.DIFFERS)
    return order.index(likeness), 0.0 if measured is None else measured.error


def _list_peers(mine: dict[int, list[_Returned]], matcher: OutputMatcher) -> Iterator[tuple[list[int], int]]:
    """List the groups of ranks that handled the same samples, with the number of the micro-batch among the outputs."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(mine):
        counterpart = matcher.find_counterpart(rank)
        if counterpart is not None:
            groups[matcher.roles.find_peers(counterpart)[0]].append(rank)
    for peers in groups.values():
        for number in range(min(len(mine[rank]) for rank in peers)):
            yield peers, number


@dataclass(frozen=True)
class _Result:
    """An output of ranks with the same samples, as it is of the reference's."""

    likeness: Likeness
    measured: Measured | None = None
    made_of: MadeOf | None = None


def _compare_peers(
    key: OutputKey, values: list[_Returned], peers: list[int], theirs: list[_Returned], matcher: OutputMatcher
) -> _Result:
    """Compare what ranks with the same samples returned."""
    micro_batch = values[0].output.micro_batch
    counterpart = matcher.find_counterpart(peers[0])
    rows = () if counterpart is None else matcher.list_rows(matcher.run, counterpart, micro_batch)
    best = _Result(Likeness.UNMATCHED)
    for expected in _list_expected(rows, values[0].array.shape, theirs, matcher):
        likeness, measured = _lay_beside(str(key), values, expected, matcher.rounding)
        if likeness is Likeness.EQUAL:
            return _Result(likeness, measured)
        if likeness is not Likeness.UNMATCHED and best.measured is None:
            bias = matcher.biases.get(key.module)
            made_of = None if bias is None else _find_multiples(values[0].array, expected, bias, measured)
            best = _Result(likeness, measured, made_of)
    return best


def _find_multiples(array: Array, expected: Array, bias: Array, measured: Measured | None) -> MadeOf | None:
    """Find how often an output has the product of a module, and how often its bias; None where it is made otherwise."""
    if measured is None or array.shape != expected.shape or expected.shape[-1:] != bias.shape:
        return None
    added = np.broadcast_to(bias, expected.shape).ravel()
    terms = np.stack([expected.ravel() - added, added], axis=1)
    if not np.isfinite(terms).all() or not np.isfinite(array).all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(terms, array.ravel(), rcond=None)
    rest = np.linalg.norm(terms @ solution - array.ravel())
    if rank < terms.shape[1] or rest > measured.tolerance * np.linalg.norm(array):
        return None
    return MadeOf(float(solution[0]), float(solution[1]))


def _list_expected(
    rows: tuple[object, ...], shape: tuple[int, ...], theirs: list[_Returned], matcher: OutputMatcher
) -> Iterator[Array]:
    """List what a micro-batch's output may be in the reference, most likely first."""
    rank = min(matcher.reference.ranks)
    known = [matcher.list_rows(matcher.reference, rank, value.output.micro_batch) for value in theirs]
    if not rows:
        return
    for value, own in zip(theirs, known):
        if own == rows:
            yield value.array
            return
    where = {row: (at, number) for at, own in enumerate(known) for number, row in enumerate(own)}
    if any(row not in where for row in rows):
        return
    for axis in range(len(shape)):
        gathered = _gather_rows([where[row] for row in rows], axis, theirs, [len(own) for own in known])
        if gathered is not None and gathered.ndim == len(shape) and gathered.shape[axis] == shape[axis]:
            yield gathered


def _gather_rows(
    rows: Sequence[tuple[int, int]], axis: int, theirs: list[_Returned], counts: Sequence[int]
) -> Array | None:
    """Gather samples out of the reference's micro-batches, along a dimension; None where samples do not lie in it."""
    pieces = []
    for at, number in rows:
        array = theirs[at].array
        if axis >= array.ndim or not counts[at] or array.shape[axis] % counts[at]:
            return None
        each = array.shape[axis] // counts[at]
        pieces.append(np.take(array, range(number * each, (number + 1) * each), axis=axis))
    try:
        return np.concatenate(pieces, axis=axis)
    except ValueError:
        return None


def _lay_beside(
    name: str, values: list[_Returned], expected: Array, rounding: Rounding
) -> tuple[Likeness, Measured | None]:
    """Compare what peers returned with what they should, together or each."""
    arrays = [value.array for value in values]
    if any(value.part.is_partial for value in values):
        return (
            _judge(rounding.measure(np.sum(arrays, axis=0), expected, name)) if _fits(arrays, expected) else UNMATCHED
        )
    if _fits(arrays, expected):
        worst = max((rounding.measure(array, expected, name) for array in arrays), key=lambda one: one.error)
        if worst.differs and len(arrays) > 1:
            total = rounding.measure(np.sum(arrays, axis=0), expected, name)
            if not total.differs:
                return Likeness.PARTIAL, worst
        return _judge(worst)
    dim = _find_split(arrays, expected.shape)
    if dim is None:
        return UNMATCHED
    measured = rounding.measure(np.concatenate(arrays, axis=dim), expected, name)
    if not measured.differs:
        return Likeness.EQUAL, measured
    zigzag = _join_zigzag(arrays, dim)
    if zigzag is not None and not rounding.measure(zigzag, expected, name).differs:
        return Likeness.EQUAL, rounding.measure(zigzag, expected, name)
    if len(arrays) <= MAX_PERMUTED:
        for order in itertools.permutations(arrays):
            if not rounding.measure(np.concatenate(order, axis=dim), expected, name).differs:
                return Likeness.PERMUTED, measured
    return Likeness.DIFFERS, measured


UNMATCHED: tuple[Likeness, Measured | None] = (Likeness.UNMATCHED, None)


def _judge(measured: Measured) -> tuple[Likeness, Measured | None]:
    return (Likeness.DIFFERS if measured.differs else Likeness.EQUAL), measured


def _fits(arrays: Sequence[Array], expected: Array) -> bool:
    return all(array.shape == expected.shape for array in arrays)


def _find_split(arrays: Sequence[Array], whole: tuple[int, ...]) -> int | None:
    """The dimension in which ranks' arrays together have the whole's length; None for none or several."""
    if any(array.ndim != len(whole) for array in arrays):
        return None
    cut = [dim for dim, room in enumerate(whole) if any(array.shape[dim] != room for array in arrays)]
    if len(cut) != 1 or sum(array.shape[cut[0]] for array in arrays) != whole[cut[0]]:
        return None
    return cut[0]


def _join_zigzag(arrays: Sequence[Array], dim: int) -> Array | None:
    """Join pieces of sequences of which rank r has piece r from the front and piece r from the back."""
    if any(array.shape[dim] % 2 for array in arrays):
        return None
    halves = [np.split(array, 2, axis=dim) for array in arrays]
    return np.concatenate([half[0] for half in halves] + [half[1] for half in reversed(halves)], axis=dim)
