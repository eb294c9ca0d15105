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


# of the results of several ranks and micro-batches, the last of these counts
LEAST_TELLING_FIRST = (
    Likeness.UNMATCHED,
    Likeness.EQUAL,
    Likeness.PARTIAL,
    Likeness.PERMUTED,
    Likeness.DIFFERS,
)


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
        # the rows of ranks that split sequences are pieces of samples, unless they were named by their whole samples
        if self.roles.is_context and not self.run.has_slices:
            return batch.indices
        return batch.rows

    def find_counterpart(self, rank: int) -> int | None:
        """The rank of the first stage that handles the same samples."""
        first = sorted(rank for group in self.roles.peers for rank in group)
        for stage in self.roles.stages:
            if rank not in stage:
                continue
            if len(stage) != len(first):
                return None
            return first[stage.index(rank)]
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
    first = min(reference.ranks)
    theirs = _index_outputs(reference, first, {})
    wholes = _join_all(theirs)
    other = None
    if perturbed is not None and perturbed.ranks:
        found = _index_outputs(perturbed, min(perturbed.ranks), {})
        other = _join_all(found)
    rounding = measure_rounding(precision, wholes, other)
    matcher = OutputMatcher(
        run=run,
        roles=roles,
        reference=reference,
        # an output is judged by its own size, whatever that of others is
        rounding=replace(rounding, usual=0.0),
        biases=_list_biases(start),
    )
    aliases = reference.ranks[first].record.aliases
    mine: dict[OutputKey, dict[int, list[_Returned]]] = defaultdict(dict)
    for rank in run.ranks:
        absent = _list_absent(places, rank, start) if len(roles.stages) > 1 else []
        modules = _learn_modules(places, rank, aliases)
        returned = _index_outputs(run, rank, modules)
        for key, values in returned.items():
            if not _is_within(absent, key.module):
                mine[key][rank] = values
    compared = []
    for key, values in theirs.items():
        if key in mine:
            compared.append(_compare_key(key, mine[key], values, matcher))
    return compared


def _join_all(found: Mapping[OutputKey, list[_Returned]]) -> dict[str, Array]:
    """Join what each tensor was in all micro-batches."""
    return {str(key): _join(values) for key, values in found.items()}


def _list_absent(places: Places, rank: int, start: Mapping[str, Array]) -> list[str]:
    """List the reference's parameters that a rank does not have."""
    held = set()
    for (owner, _), place in places.found.items():
        if owner == rank:
            held.add(place.name)
    return [name for name in start if name not in held]


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
    # all are within the model itself, which has no name
    if not module:
        return bool(names)
    prefix = f"{module}."
    return any(name.startswith(prefix) for name in names)


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
        place = (module, output.micro_batch)
        call = calls[place]
        calls[place] += 1
        for number, part in enumerate(output.parts):
            array = own.read(part)
            if array is None:
                continue
            key = OutputKey(module, call, number)
            returned = _Returned(output, part, array)
            found[key].append(returned)
    return dict(found)


def _join(values: Sequence[_Returned]) -> Array:
    return np.concatenate([value.array.ravel() for value in values])


def _compare_key(
    key: OutputKey, mine: dict[int, list[_Returned]], theirs: list[_Returned], matcher: OutputMatcher
) -> ComparedOutput:
    """Compare one tensor over all ranks and micro-batches; the worst of them counts."""
    results = []
    for peers, number in _list_peers(mine, matcher):
        values = [mine[rank][number] for rank in peers]
        result = _compare_peers(key, values, peers, theirs, matcher)
        results.append(result)
    outputs = [value.output for values in mine.values() for value in values]
    worst = max(
        results,
        key=_rank_result,
        default=_Result(Likeness.UNMATCHED),
    )
    return ComparedOutput(
        key=key,
        class_name=outputs[0].class_name,
        has_local_statistics=any(output.has_local_statistics for output in outputs),
        likeness=worst.likeness,
        measured=worst.measured,
        made_of=worst.made_of,
    )


def _rank_result(result: "_Result") -> tuple[int, float]:
    """A key that is largest for the worst result."""
    error = 0.0 if result.measured is None else result.measured.error
    return LEAST_TELLING_FIRST.index(result.likeness), error


def _list_peers(mine: dict[int, list[_Returned]], matcher: OutputMatcher) -> Iterator[tuple[list[int], int]]:
    """List the groups of ranks that handled the same samples, with the number of the micro-batch among the outputs."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(mine):
        counterpart = matcher.find_counterpart(rank)
        if counterpart is None:
            continue
        leader = matcher.roles.find_peers(counterpart)[0]
        groups[leader].append(rank)
    for peers in groups.values():
        shared = min(len(mine[rank]) for rank in peers)
        for number in range(shared):
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
    rows: tuple[object, ...] = ()
    if counterpart is not None:
        rows = matcher.list_rows(matcher.run, counterpart, micro_batch)
    bias = matcher.biases.get(key.module)
    array = values[0].array
    best = _Result(Likeness.UNMATCHED)
    for expected in _list_expected(rows, array.shape, theirs, matcher):
        likeness, measured = _lay_beside(str(key), values, expected, matcher.rounding)
        if likeness is Likeness.EQUAL:
            return _Result(likeness, measured)
        if likeness is Likeness.UNMATCHED or best.measured is not None:
            continue
        made_of = None
        if bias is not None:
            made_of = _find_multiples(array, expected, bias, measured)
        best = _Result(likeness, measured, made_of)
    return best


def _find_multiples(array: Array, expected: Array, bias: Array, measured: Measured | None) -> MadeOf | None:
    """Find how often an output has the product of a module, and how often its bias; None where it is made otherwise."""
    if measured is None or array.shape != expected.shape:
        return None
    if expected.shape[-1:] != bias.shape:
        return None
    added = np.broadcast_to(bias, expected.shape).ravel()
    product = expected.ravel() - added
    terms = np.stack([product, added], axis=1)
    if not np.isfinite(terms).all() or not np.isfinite(array).all():
        return None
    numbers = array.ravel()
    solution, _, rank, _ = np.linalg.lstsq(terms, numbers, rcond=None)
    # with a bias that is a multiple of the product, nothing tells how much of each there is
    if rank < terms.shape[1]:
        return None
    rest = np.linalg.norm(terms @ solution - numbers)
    if rest > measured.tolerance * np.linalg.norm(array):
        return None
    return MadeOf(
        product=float(solution[0]),
        bias=float(solution[1]),
    )


def _list_expected(
    rows: tuple[object, ...], shape: tuple[int, ...], theirs: list[_Returned], matcher: OutputMatcher
) -> Iterator[Array]:
    """List what a micro-batch's output may be in the reference, most likely first."""
    if not rows:
        return
    rank = min(matcher.reference.ranks)
    known = []
    for value in theirs:
        own = matcher.list_rows(matcher.reference, rank, value.output.micro_batch)
        if own == rows:
            yield value.array
            return
        known.append(own)
    where = {}
    for at, own in enumerate(known):
        for number, row in enumerate(own):
            where[row] = (at, number)
    if any(row not in where for row in rows):
        return
    wanted = [where[row] for row in rows]
    counts = [len(own) for own in known]
    # nothing tells which dimension is that of the samples
    for axis, room in enumerate(shape):
        gathered = _gather_rows(wanted, axis, theirs, counts)
        if gathered is None or gathered.ndim != len(shape):
            continue
        if gathered.shape[axis] == room:
            yield gathered


def _gather_rows(
    rows: Sequence[tuple[int, int]], axis: int, theirs: list[_Returned], counts: Sequence[int]
) -> Array | None:
    """Gather samples out of the reference's micro-batches, along a dimension; None where samples do not lie in it."""
    pieces = []
    for at, number in rows:
        array = theirs[at].array
        count = counts[at]
        if axis >= array.ndim or not count:
            return None
        room = array.shape[axis]
        if room % count:
            return None
        each = room // count
        begin = number * each
        piece = np.take(array, range(begin, begin + each), axis=axis)
        pieces.append(piece)
    try:
        return np.concatenate(pieces, axis=axis)
    except ValueError:
        return None


def _lay_beside(
    name: str, values: list[_Returned], expected: Array, rounding: Rounding
) -> tuple[Likeness, Measured | None]:
    """Compare what peers returned with what they should, together or each."""
    arrays = [value.array for value in values]
    is_partial = any(value.part.is_partial for value in values)
    if _fits(arrays, expected):
        if is_partial:
            total = np.sum(arrays, axis=0)
            return _judge(rounding.measure(total, expected, name))
        return _judge_copies(name, arrays, expected, rounding)
    dim = None if is_partial else _find_split(arrays, expected.shape)
    if dim is None:
        return UNMATCHED
    return _judge_pieces(name, arrays, dim, expected, rounding)


UNMATCHED: tuple[Likeness, Measured | None] = (Likeness.UNMATCHED, None)


def _judge(measured: Measured) -> tuple[Likeness, Measured | None]:
    likeness = Likeness.DIFFERS if measured.differs else Likeness.EQUAL
    return likeness, measured


def _judge_copies(
    name: str, arrays: Sequence[Array], expected: Array, rounding: Rounding
) -> tuple[Likeness, Measured | None]:
    """Compare arrays that each should be the whole; they may be terms of it instead."""
    measured = [rounding.measure(array, expected, name) for array in arrays]
    worst = max(measured, key=lambda one: one.error)
    if worst.differs and len(arrays) > 1:
        total = np.sum(arrays, axis=0)
        if not rounding.measure(total, expected, name).differs:
            return Likeness.PARTIAL, worst
    return _judge(worst)


def _judge_pieces(
    name: str, arrays: Sequence[Array], dim: int, expected: Array, rounding: Rounding
) -> tuple[Likeness, Measured | None]:
    """Compare arrays that should be the whole when they are joined along a dimension."""
    joined = np.concatenate(arrays, axis=dim)
    measured = rounding.measure(joined, expected, name)
    if not measured.differs:
        return Likeness.EQUAL, measured
    zigzag = _join_zigzag(arrays, dim)
    if zigzag is not None:
        of_zigzag = rounding.measure(zigzag, expected, name)
        if not of_zigzag.differs:
            return Likeness.EQUAL, of_zigzag
    # the number of orders grows too fast to try those of many ranks
    if len(arrays) > MAX_PERMUTED:
        return Likeness.DIFFERS, measured
    for order in itertools.permutations(arrays):
        permuted = np.concatenate(order, axis=dim)
        if not rounding.measure(permuted, expected, name).differs:
            return Likeness.PERMUTED, measured
    return Likeness.DIFFERS, measured


def _fits(arrays: Sequence[Array], expected: Array) -> bool:
    return all(array.shape == expected.shape for array in arrays)


def _find_split(arrays: Sequence[Array], whole: tuple[int, ...]) -> int | None:
    """The dimension in which ranks' arrays together have the whole's length; None for none or several."""
    if any(array.ndim != len(whole) for array in arrays):
        return None
    cut = []
    for dim, room in enumerate(whole):
        if any(array.shape[dim] != room for array in arrays):
            cut.append(dim)
    if len(cut) != 1:
        return None
    found = cut[0]
    length = sum(array.shape[found] for array in arrays)
    return found if length == whole[found] else None


def _join_zigzag(arrays: Sequence[Array], dim: int) -> Array | None:
    """Join pieces of sequences of which rank r has piece r from the front and piece r from the back."""
    if any(array.shape[dim] % 2 for array in arrays):
        return None
    front = []
    back = []
    for array in arrays:
        first, last = np.split(array, 2, axis=dim)
        front.append(first)
        back.append(last)
    # the last rank's pieces meet in the middle
    back.reverse()
    return np.concatenate([*front, *back], axis=dim)
