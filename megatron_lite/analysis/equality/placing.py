"""Finds for each rank's parameters what they are of the reference: its name, and the block of the whole."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, RankRun, get_parameter_name
from megatron_lite.analysis.equality.wholes import get_starts, select_block
from megatron_lite.formats.prove_record import TensorPart

SAME_START = 1e-6  # relative: weights that differ by less are the same


@dataclass(frozen=True)
class Place:
    """The name and the block of the reference that a rank's parameter is."""

    # the parameter's name in the reference
    name: str
    # of the whole, and where the rank's block begins
    whole: tuple[int, ...]
    starts: tuple[int, ...]
    # of the rank's block
    shape: tuple[int, ...]
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
    return bool(np.linalg.norm(one - other) <= SAME_START * np.linalg.norm(other))


def is_constant(array: Array) -> bool:
    """Whether all numbers of an array are the same."""
    return array.size == 0 or bool((array == array.flat[0]).all())


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
    for number, rank in sorted(run.ranks.items()):
        _place_rank(number, rank, _Reference(start, aliases, run.world), places)
    _order_guesses(run, places)
    return places


def _order_guesses(run: ProvedRun, places: Places) -> None:
    """Give blocks of which nothing tells the place to ranks in order: the first different one is the first block."""
    for parts in places.group().values():
        if not all(place.is_guessed for _, _, place in parts):
            continue
        contents = {}
        for rank, name, _ in parts:
            own = next(part for part in run.ranks[rank].record.weights if part.name == name)
            contents[rank, name] = run.ranks[rank].tensors[own.key].tobytes()
        different = list(dict.fromkeys(contents.values()))
        starts = list(list_equal_blocks(parts[0][2].whole, parts[0][2].shape))
        if len(different) != len(starts):
            continue
        for rank, name, place in parts:
            places.found[rank, name] = replace(place, starts=starts[different.index(contents[rank, name])])


@dataclass(frozen=True)
class _Reference:
    start: Mapping[str, Array]
    aliases: Mapping[str, str]
    world: int

    def get_name(self, name: str) -> str:
        own = get_parameter_name(name)
        return self.aliases.get(own, own)


def _place_rank(number: int, rank: RankRun, reference: _Reference, places: Places) -> None:
    """Place one rank's parameters: by content where it tells, else by name."""
    arrays = {part.name: (part, rank.read(part)) for part in rank.record.weights}
    direct = {}
    moved = {}
    for name, (part, array) in arrays.items():
        if array is None:
            continue
        place = _place_by_name(number, part, array, reference)
        if place is not None:
            direct[name] = place
        if (place is None or not place.is_same) and not is_constant(array):
            other = _find_content(part, array, reference)
            if other is not None:
                moved[name] = other
    shift = _Shift.learn({name: place.name for name, place in moved.items()})
    for name, (part, array) in arrays.items():
        if array is None:
            continue
        chosen = moved.get(name) or direct.get(name)
        if name not in moved and shift.says(name) and (chosen is None or chosen.is_constant or not chosen.is_same):
            renamed = shift.rename(name)
            chosen = _place_by_name(number, part, array, reference, renamed) or chosen
        if chosen is None:
            places.unknown.append((number, name))
        else:
            places.found[number, name] = chosen


def _place_by_name(number: int, part: TensorPart, array: Array, reference: _Reference, name: str = "") -> Place | None:
    """Place a part in the reference's parameter of that name; None where it does not fit."""
    name = reference.get_name(name or part.name)
    whole = reference.start.get(name)
    if whole is None or whole.ndim != array.ndim:
        return None
    constant = is_constant(array)
    if part.is_placed or array.shape == whole.shape:
        starts = get_starts(part, array.shape)
        block = select_block(whole, starts, array.shape)
        if block is None or (part.is_placed and part.whole != whole.shape):
            return None
        return Place(name, whole.shape, starts, array.shape, is_same_start(array, block), is_constant=constant)
    candidates = list(list_equal_blocks(whole.shape, array.shape))
    if not candidates:
        return None
    for starts in candidates:
        block = select_block(whole, starts, array.shape)
        if not constant and block is not None and is_same_start(array, block):
            return Place(name, whole.shape, starts, array.shape, True)
    starts = candidates[number * len(candidates) // max(reference.world, 1) % len(candidates)]
    if reference.world % len(candidates) == 0:
        starts = candidates[number % len(candidates)]
    block = select_block(whole, starts, array.shape)
    is_same = block is not None and is_same_start(array, block)
    return Place(name, whole.shape, starts, array.shape, is_same, is_guessed=True, is_constant=constant)


def list_equal_blocks(whole: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """List where blocks of a shape begin, if they divide a whole along one dimension into equal ones."""
    cut = [dim for dim, (length, room) in enumerate(zip(shape, whole)) if length != room]
    if len(cut) != 1 or not shape[cut[0]] or whole[cut[0]] % shape[cut[0]]:
        return
    for start in range(0, whole[cut[0]], shape[cut[0]]):
        yield tuple(start if dim == cut[0] else 0 for dim in range(len(shape)))


def _find_content(part: TensorPart, array: Array, reference: _Reference) -> Place | None:
    """Find the one parameter of the reference that begins with the same numbers; None for none or several."""
    matches = []
    shape = part.whole if part.is_placed else array.shape
    for name, whole in reference.start.items():
        if whole.shape != shape or name == reference.get_name(part.name):
            continue
        starts = get_starts(part, array.shape)
        block = select_block(whole, starts, array.shape)
        if block is not None and np.array_equal(block, array):
            matches.append(Place(name, whole.shape, starts, array.shape, True))
    return matches[0] if len(matches) == 1 else None


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
            modules[mine.rpartition(".")[0]] = other.rpartition(".")[0]
            shifts.add(_find_shift(mine.split("."), other.split(".")))
        number = shifts.pop() if len(shifts) == 1 else None
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
            words[at] = str(int(words[at]) + added)
        return ".".join(words)


def _find_shift(mine: list[str], other: list[str]) -> tuple[int, int] | None:
    """Find the number in a name that was raised, and by how much; None where more differs."""
    if len(mine) != len(other):
        return None
    differing = [at for at, (one, two) in enumerate(zip(mine, other)) if one != two]
    if len(differing) != 1:
        return None
    at = differing[0]
    if not mine[at].isdecimal() or not other[at].isdecimal():
        return None
    return at, int(other[at]) - int(mine[at])
