"""Finds for each rank's parameters what they are of the reference: its name, and the block of the whole."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, RankRun, get_parameter_name
from megatron_lite.analysis.equality.wholes import find_cut_dims, get_starts, select_block
from megatron_lite.formats.prove_record import TensorPart

Shape = tuple[int, ...]  # or where a block begins in each dimension
SAME_START = 1e-6  # relative: weights that differ by less are the same


@dataclass(frozen=True)
class Place:
    """The name and the block of the reference that a rank's parameter is."""

    # the parameter's name in the reference
    name: str
    # of the whole, and where the rank's block begins
    whole: Shape
    starts: Shape
    # of the rank's block
    shape: Shape
    # whether the weights at the start are those of the reference's block
    is_same: bool
    # whether the place was guessed from the order of the ranks
    is_guessed: bool = False
    # whether all its weights are one number, which says nothing of its place
    is_constant: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the rank has all of it."""
        return self.shape == self.whole


@dataclass
class Places:
    """Places of all parameters, by rank and the name that the rank gave."""

    found: dict[tuple[int, str], Place] = field(default_factory=dict)
    # (rank, name) that are nowhere in the reference
    unknown: list[tuple[int, str]] = field(default_factory=list)
    # number of each of the reference's parameters in the order of its model
    order: dict[str, int] = field(default_factory=dict)

    def group(self) -> dict[str, list[tuple[int, str, Place]]]:
        """List the ranks' parameters under the name of the reference."""
        groups = defaultdict(list)
        for (rank, name), place in self.found.items():
            groups[place.name].append((rank, name, place))
        return dict(groups)

    @property
    def are_same(self) -> bool:
        """Whether all ranks begin with the reference's weights."""
        return not self.unknown and all(place.is_same for place in self.found.values())


def is_same_start(one: Array, other: Array) -> bool:
    """Whether two parameters of one shape begin with the same weights."""
    if one.shape != other.shape:
        return False
    if np.array_equal(one, other):
        return True
    distance = np.linalg.norm(one - other)
    allowed = SAME_START * np.linalg.norm(other)
    return bool(distance <= allowed)


def is_constant(array: Array) -> bool:
    """Whether all numbers of an array are the same."""
    if array.size == 0:
        return True
    first = array.flat[0]
    return bool((array == first).all())


def place_parameters(run: ProvedRun, start: Mapping[str, Array], aliases: Mapping[str, str]) -> Places:
    """Find what each rank's parameters are of the reference.

    A name is taken for the same name, unless the weights say otherwise: stages of a pipeline may each call their first
    layer "0".

    Args:
        run: The records of the ranks.
        start: The reference's whole weights at the start, by name.
        aliases: Other names of the reference's parameters, to the name in `start`.
    """
    places = Places(order={name: number for number, name in enumerate(start)})
    reference = _Reference(start, aliases, run.world)
    for number, rank in sorted(run.ranks.items()):
        _place_rank(number, rank, reference, places)
    _order_guesses(run, places)
    return places


def _order_guesses(run: ProvedRun, places: Places) -> None:
    """Give blocks of which nothing tells the place to ranks in order: the first different one is the first block."""
    for parts in places.group().values():
        if not all(place.is_guessed for _, _, place in parts):
            continue
        contents = {}
        for rank, name, _ in parts:
            contents[rank, name] = _read_content(run.ranks[rank], name)
        different = list(dict.fromkeys(contents.values()))
        _, _, first = parts[0]
        starts = list(list_equal_blocks(first.whole, first.shape))
        if len(different) != len(starts):
            continue
        for rank, name, place in parts:
            number = different.index(contents[rank, name])
            places.found[rank, name] = replace(place, starts=starts[number])


def _read_content(rank: RankRun, name: str) -> bytes:
    """The bytes of a weight at the start, as a key to find the same ones by."""
    own = next(part for part in rank.record.weights if part.name == name)
    return rank.tensors[own.key].tobytes()


@dataclass(frozen=True)
class _Reference:
    start: Mapping[str, Array]
    aliases: Mapping[str, str]
    world: int

    def get_name(self, name: str) -> str:
        own = get_parameter_name(name)
        return self.aliases.get(own, own)


@dataclass(frozen=True)
class _OwnWeight:
    """A weight of a rank at the start."""

    rank: int
    part: TensorPart
    array: Array
    # whether all its numbers are the same
    is_constant: bool


def _place_rank(number: int, rank: RankRun, reference: _Reference, places: Places) -> None:
    """Place one rank's parameters: by content where it tells, else by name."""
    weights = _read_weights(number, rank)
    by_name = {}
    by_content = {}
    for name, weight in weights.items():
        place = _place_by_name(weight, reference, name)
        if place is not None:
            by_name[name] = place
            if place.is_same:
                continue
        if weight.is_constant:
            continue
        other = _find_content(weight, reference)
        if other is not None:
            by_content[name] = other
    moved = {name: place.name for name, place in by_content.items()}
    shift = _Shift.learn(moved)
    for name, weight in weights.items():
        chosen = by_content.get(name)
        if chosen is None:
            chosen = _place_by_shift(weight, reference, shift, by_name.get(name))
        if chosen is None:
            places.unknown.append((number, name))
        else:
            places.found[number, name] = chosen


def _read_weights(number: int, rank: RankRun) -> dict[str, _OwnWeight]:
    """Read a rank's weights at the start by name, without those of which it has nothing."""
    weights = {}
    for part in rank.record.weights:
        array = rank.read(part)
        if array is not None:
            weights[part.name] = _OwnWeight(number, part, array, is_constant(array))
    return weights


def _place_by_shift(
    weight: _OwnWeight,
    reference: _Reference,
    shift: "_Shift",
    by_name: Place | None,
) -> Place | None:
    """Place a weight by the name that others of its rank suggest, unless its content confirms its own name."""
    name = weight.part.name
    if by_name is not None and by_name.is_same and not by_name.is_constant:
        return by_name
    if not shift.says(name):
        return by_name
    renamed = _place_by_name(weight, reference, shift.rename(name))
    return renamed or by_name


def _place_by_name(weight: _OwnWeight, reference: _Reference, name: str) -> Place | None:
    """Place a part in the reference's parameter of that name; None where it does not fit."""
    name = reference.get_name(name)
    whole = reference.start.get(name)
    shape = weight.array.shape
    if whole is None or whole.ndim != len(shape):
        return None
    part = weight.part
    if part.is_placed and part.whole != whole.shape:
        return None
    if part.is_placed or shape == whole.shape:
        starts = get_starts(part, shape)
        if select_block(whole, starts, shape) is None:
            return None
        return _build_place(weight, name, whole, starts)
    candidates = list(list_equal_blocks(whole.shape, shape))
    if not candidates:
        return None
    # a constant block is the same as all others, so that its content does not tell
    if not weight.is_constant:
        for starts in candidates:
            place = _build_place(weight, name, whole, starts)
            if place.is_same:
                return place
    starts = _guess_block(candidates, weight.rank, reference.world)
    place = _build_place(weight, name, whole, starts)
    return replace(place, is_guessed=True)


def _guess_block(candidates: list[Shape], rank: int, world: int) -> Shape:
    """Guess which block a rank has: neighbors have different ones where that comes out even."""
    count = len(candidates)
    if world % count == 0:
        return candidates[rank % count]
    number = rank * count // max(world, 1)
    return candidates[number % count]


def _build_place(weight: _OwnWeight, name: str, whole: Array, starts: Shape) -> Place:
    """Describe the place of a weight, and whether it is the same as the reference's block there."""
    array = weight.array
    block = select_block(whole, starts, array.shape)
    return Place(
        name=name,
        whole=whole.shape,
        starts=starts,
        shape=array.shape,
        is_same=block is not None and is_same_start(array, block),
        is_constant=weight.is_constant,
    )


def list_equal_blocks(whole: Shape, shape: Shape) -> Iterator[Shape]:
    """List where blocks of a shape begin, if they divide a whole along one dimension into equal ones."""
    cut = find_cut_dims(whole, shape)
    if len(cut) != 1:
        return
    (dim,) = cut
    length = shape[dim]
    room = whole[dim]
    if not length or room % length:
        return
    for start in range(0, room, length):
        starts = [0] * len(shape)
        starts[dim] = start
        yield tuple(starts)


def _find_content(weight: _OwnWeight, reference: _Reference) -> Place | None:
    """Find the one parameter of the reference that begins with the same numbers; None for none or several."""
    part = weight.part
    array = weight.array
    shape = part.whole if part.is_placed else array.shape
    starts = get_starts(part, array.shape)
    own_name = reference.get_name(part.name)
    matches = []
    for name, whole in reference.start.items():
        if whole.shape != shape or name == own_name:
            continue
        block = select_block(whole, starts, array.shape)
        if block is not None and np.array_equal(block, array):
            matches.append(_build_place(weight, name, whole, starts))
    if len(matches) != 1:
        return None
    return matches[0]


@dataclass(frozen=True)
class _Shift:
    """How a rank's names differ from the reference's: by modules, and by what is added to the number of a layer."""

    modules: dict[str, str]
    # which part of a name, and what is added to it; None where names do not tell
    number: tuple[int, int] | None

    @staticmethod
    def learn(names: Mapping[str, str]) -> "_Shift":
        """Learn from parameters whose content tells where they belong."""
        modules = {}
        shifts = set()
        for mine, other in names.items():
            own_module, _, _ = mine.rpartition(".")
            other_module, _, _ = other.rpartition(".")
            modules[own_module] = other_module
            shifts.add(_find_shift(mine.split("."), other.split(".")))
        number = None
        if len(shifts) == 1:
            number = shifts.pop()
        return _Shift(modules, number)

    def says(self, name: str) -> bool:
        """Whether anything is known of a name."""
        return self.rename(name) != name

    def rename(self, name: str) -> str:
        """The name in the reference."""
        module, _, last = name.rpartition(".")
        if module in self.modules:
            return f"{self.modules[module]}.{last}"
        if self.number is None:
            return name
        words = name.split(".")
        at, added = self.number
        if at < len(words) and words[at].isdecimal():
            raised = int(words[at]) + added
            words[at] = str(raised)
        return ".".join(words)


def _find_shift(mine: list[str], other: list[str]) -> tuple[int, int] | None:
    """Find the number in a name that was raised, and by how much; None where more differs."""
    if len(mine) != len(other):
        return None
    differing = []
    for at, (one, two) in enumerate(zip(mine, other)):
        if one != two:
            differing.append(at)
    if len(differing) != 1:
        return None
    at = differing[0]
    own_word = mine[at]
    other_word = other[at]
    if not own_word.isdecimal() or not other_word.isdecimal():
        return None
    added = int(other_word) - int(own_word)
    return at, added
