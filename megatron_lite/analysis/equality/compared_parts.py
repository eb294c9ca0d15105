"""Lays the ranks' parts of parameters, gradients and weights beside the reference's blocks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron_lite.analysis.equality.measure import Measured, Rounding
from megatron_lite.analysis.equality.placing import Place, Places
from megatron_lite.analysis.equality.proved_run import Array, Parts, ProvedRun, RankRun, get_parameter_name
from megatron_lite.analysis.equality.wholes import get_starts, select_block
from megatron_lite.formats.prove_record import TensorPart


@dataclass(frozen=True)
class ComparedPart:
    """A rank's part beside the reference's block."""

    rank: int
    # that the rank gave
    own_name: str
    place: Place
    array: Array
    # the reference's block, and its whole
    reference: Array
    whole: Array
    measured: Measured


@dataclass
class ComparedParts:
    """All parts of a kind."""

    # by the reference's name
    compared: dict[str, list[ComparedPart]] = field(default_factory=dict)
    # by the reference's name: ranks that have none where the reference has one, and ranks that have one where it has
    # none
    lacking: dict[str, list[int]] = field(default_factory=dict)
    surplus: dict[str, list[int]] = field(default_factory=dict)
    # names of which a part does not fit into the reference's whole
    unfit: list[str] = field(default_factory=list)
    # ranks with parts that are to be added to those of others
    adding_ranks: set[int] = field(default_factory=set)

    @property
    def differing(self) -> list[str]:
        """Names of which a part differs by more than rounding, or is lacking."""
        return [
            name
            for name in dict.fromkeys((*self.compared, *self.lacking))
            if name in self.lacking or any(entry.measured.differs for entry in self.compared[name])
        ]

    @property
    def worst(self) -> Measured | None:
        """The largest error beside its tolerance."""
        return max(
            (entry.measured for entries in self.compared.values() for entry in entries),
            key=lambda measured: measured.error / measured.tolerance,
            default=None,
        )


def collect_entries(
    run: ProvedRun,
    places: Places,
    list_parts: Callable[[RankRun], Parts],
    wholes: Mapping[str, Array],
    rounding: Rounding,
) -> ComparedParts:
    """Lay every part of a kind beside the reference's block.

    Args:
        run: The records of what is proved.
        places: What its parameters are of the reference.
        list_parts: Says which parts of a rank to take, such as its gradients in the first step.
        wholes: The reference's tensors of that kind, by name.
        rounding: What rounding allows.
    """
    entries = ComparedParts()
    given = {}
    for rank, record in run.ranks.items():
        for part in list_parts(record):
            given[rank, part.name] = part
    arrays = _read_arrays(run, given, places)
    for key, place in places.found.items():
        whole = wholes.get(place.name)
        is_empty = 0 in place.shape
        if key not in arrays and whole is not None and not is_empty and whole.any():
            entries.lacking.setdefault(place.name, []).append(key[0])
    for (rank, own_name), (part, array) in arrays.items():
        # a rank may have parts of the gradient of a parameter that it has as a whole
        own_place = places.found.get((rank, own_name)) or places.found.get((rank, get_parameter_name(own_name)))
        if own_place is None:
            continue
        if part.is_partial:
            entries.adding_ranks.add(rank)
        whole = wholes.get(own_place.name)
        if whole is not None:
            _add_part(entries, rank, part, array, own_place, whole, rounding)
        elif array.any():
            entries.surplus.setdefault(own_place.name, []).append(rank)
    return entries


def _add_part(
    entries: ComparedParts,
    rank: int,
    part: TensorPart,
    array: Array,
    place: Place,
    whole: Array,
    rounding: Rounding,
) -> None:
    """Lay a part beside the reference's block; one that does not lie within the whole is noted."""
    located = _locate(part, array, place, whole)
    block = None if located is None else select_block(whole, located.starts, array.shape)
    if located is None or block is None:
        entries.unfit.append(place.name)
        return
    measured = rounding.measure(array, block, place.name)
    entry = ComparedPart(rank, part.name, located, array, block, whole, measured)
    entries.compared.setdefault(place.name, []).append(entry)


def _read_arrays(
    run: ProvedRun, given: Mapping[tuple[int, str], TensorPart], places: Places
) -> dict[tuple[int, str], tuple[TensorPart, Array]]:
    """Read all parts; those that are to be added up are, over the ranks that have them at one place."""
    arrays = {}
    sums: dict[tuple[str, tuple[int, ...]], Array] = {}
    for key, part in given.items():
        array = run.ranks[key[0]].read(part)
        if array is None:
            continue
        arrays[key] = (part, array)
        if part.is_partial:
            at = (_get_name(key, places), get_starts(part, array.shape))
            sums[at] = sums[at] + array if at in sums else array
    for key, (part, array) in arrays.items():
        if part.is_partial:
            arrays[key] = (part, sums[_get_name(key, places), get_starts(part, array.shape)])
    return arrays


def _get_name(key: tuple[int, str], places: Places) -> str:
    place = places.found.get(key)
    return key[1] if place is None else place.name


def _locate(part: TensorPart, array: Array, place: Place, whole: Array) -> Place | None:
    """Where a part lies: where it says itself, else where the parameter lies; None where that cannot be."""
    if part.is_placed and part.whole == whole.shape:
        return replace(place, whole=part.whole, starts=get_starts(part, array.shape), shape=array.shape)
    if array.shape == whole.shape:
        return replace(place, whole=whole.shape, starts=(0,) * whole.ndim, shape=array.shape)
    if array.shape == place.shape and whole.shape == place.whole:
        return place
    return None


def group_replicas(entries: Iterable[ComparedPart]) -> list[list[ComparedPart]]:
    """Group the parts that should be the same block."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ComparedPart]] = defaultdict(list)
    for entry in entries:
        groups[entry.place.starts, entry.place.shape].append(entry)
    return list(groups.values())
