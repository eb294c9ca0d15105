"""Says whether random numbers that must agree between ranks do, and those that must differ do."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_lite.analysis.equality.call_order import CallOrder
from megatron_lite.analysis.equality.check_gradients import MAX_OTHERS_SHOWING, describe_ranks
from megatron_lite.analysis.equality.placing import Place, Places, is_constant, is_same_start
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun
from megatron_lite.analysis.equality.same_data import Roles, find_part
from megatron_lite.analysis.equality.wholes import select_block
from megatron_lite.formats.prove_report import Difference, ErrorKind

# a rank, and what it has of a parameter
Holding = tuple[int, Place, Array]
Held = list[Holding]


def check_start(run: ProvedRun, places: Places, start: Mapping[str, Array], order: CallOrder) -> list[Difference]:
    """Name errors that the weights show with which ranks begin.

    Args:
        run: The records of what is proved.
        places: What its parameters are of the reference.
        start: The reference's whole weights at the start, by name, as it made them itself.
        order: The order of the reference's parameters.
    """
    held = _read_start(run, places)
    names = sorted(held, key=lambda name: order.parameters.get(name, 0))
    found = list(_check_names(places, start))
    disagreeing: list[str] = []
    # where some are lacking, local layers of other ranks may go by the names of the first rank's
    if all(name in held for name in start):
        disagreeing = [name for name in names if _find_disagreement(held[name])]
    copied = [name for name in names if _find_copies(held[name], start[name])]
    moved = [name for name in names if _find_moved(held[name], start[name])]
    lacking: list[str] = []
    # a rank without a record may hold what the others do not
    if not run.missing:
        lacking = [name for name in names if _is_lacking(held[name], start[name])]
    if disagreeing:
        difference = _describe_disagreement(disagreeing, held)
        found.append(difference)
    if copied:
        difference = _describe_copies(copied, held, start)
        found.append(difference)
    if found:
        return found
    shards = {*moved, *lacking}
    if shards:
        in_order = [name for name in names if name in shards]
        difference = _describe_shards(in_order, held, start)
        found.append(difference)
    return found


def _check_names(places: Places, start: Mapping[str, Array]) -> Iterator[Difference]:
    """Find parameters with the weights of one that comes earlier in the model.

    A stage that counts its layers from zero has weights of later ones. Nothing but a mistake makes them earlier ones.
    """
    moved = []
    is_any_earlier = False
    for (rank, own_name), place in places.found.items():
        if own_name not in start or not place.is_same or place.name == own_name:
            continue
        own_number = places.order[own_name]
        number = places.order[place.name]
        moved.append((own_number, number, own_name, place.name, rank))
        is_any_earlier = is_any_earlier or number < own_number
    if not is_any_earlier:
        return
    moved.sort()
    _, _, own_name, name, rank = moved[0]
    own_names = [own for _, _, own, _, _ in moved]
    names = list(dict.fromkeys(own_names))
    yield Difference(
        kind=ErrorKind.WRONG_SHARD,
        where=names[0],
        step=1,
        evidence=f"{own_name} on rank {rank} begins with the weights that {name} has in the reference",
        remedy="look at which layers each rank takes: those that it computes by their names",
        others=_list_others(names),
    )


def _list_others(names: Sequence[str]) -> tuple[str, ...]:
    """List the names behind the first that a difference shows."""
    return tuple(names[1 : MAX_OTHERS_SHOWING + 1])


def _read_start(run: ProvedRun, places: Places) -> dict[str, Held]:
    held: dict[str, Held] = defaultdict(list)
    for (rank, own_name), place in places.found.items():
        records = run.ranks[rank]
        part = find_part(records.record.weights, own_name)
        if part is None:
            continue
        array = records.read(part)
        if array is not None:
            held[place.name].append((rank, place, array))
    return dict(held)


def _list_pairs(held: Held) -> Iterator[tuple[Holding, Holding]]:
    """List the holdings by two, the one of the lower rank first."""
    return itertools.combinations(held, 2)


def _find_disagreement(held: Held) -> tuple[int, int] | None:
    """Two ranks that hold the same block with different weights."""
    for (rank, place, array), (other, other_place, other_array) in _list_pairs(held):
        is_one_block = place.starts == other_place.starts and place.shape == other_place.shape
        if not is_one_block or place.is_guessed:
            continue
        if not is_same_start(array, other_array):
            return rank, other
    return None


def _find_copies(held: Held, whole: Array) -> tuple[int, int] | None:
    """Two ranks that hold different blocks with the same random weights, where the reference's blocks differ."""
    is_any_guessed = any(place.is_guessed for _, place, _ in held)
    if is_any_guessed and _has_every_block(held, whole):
        return None
    for (rank, place, array), (other, other_place, other_array) in _list_pairs(held):
        if place.starts == other_place.starts or is_constant(array):
            continue
        if not np.array_equal(array, other_array):
            continue
        one = select_block(whole, place.starts, place.shape)
        two = select_block(whole, other_place.starts, other_place.shape)
        if one is None or two is None or place.is_guessed:
            return rank, other
        if not np.array_equal(one, two):
            return rank, other
    return None


def _has_every_block(held: Held, whole: Array) -> bool:
    """Whether there are as many different parts as blocks in the whole."""
    different = {array.tobytes() for _, _, array in held}
    _, _, first = held[0]
    return first.size * len(different) >= whole.size


def _find_moved(held: Held, whole: Array) -> tuple[int, tuple[int, ...]] | None:
    """A rank whose part has the weights of another block of the reference, and where that begins."""
    for rank, place, array in held:
        if place.is_same or place.is_guessed:
            continue
        shape = array.shape
        if shape == whole.shape or is_constant(array):
            continue
        counts = [room // max(length, 1) for room, length in zip(whole.shape, shape)]
        for number in np.ndindex(*counts):
            begin = tuple(int(at * length) for at, length in zip(number, shape))
            block = select_block(whole, begin, shape)
            if block is None:
                continue
            if is_same_start(array, block):
                return rank, begin
    return None


def _is_lacking(held: Held, whole: Array) -> bool:
    """Whether a part of the reference's weights is on no rank, while all parts were found in it."""
    is_held = np.zeros(whole.shape, dtype=bool)
    for _, place, array in held:
        # only contents tell surely where a part belongs
        if not place.is_same or place.is_constant:
            return False
        block = select_block(is_held, place.starts, array.shape)
        if block is not None:
            block[...] = True
    return not is_held.all()


def _describe_disagreement(names: Sequence[str], held: dict[str, Held]) -> Difference:
    name = names[0]
    one, other = _find_disagreement(held[name]) or (0, 1)
    return Difference(
        kind=ErrorKind.RANDOM_MUST_AGREE,
        where=name,
        step=1,
        evidence=f"ranks {one} and {other} begin with different weights of {name}, at the same place of it",
        remedy="seed all ranks alike before the model is made, or broadcast the weights of rank 0",
        others=_list_others(names),
    )


def _describe_copies(names: Sequence[str], held: dict[str, Held], start: Mapping[str, Array]) -> Difference:
    name = names[0]
    one, other = _find_copies(held[name], start[name]) or (0, 1)
    return Difference(
        kind=ErrorKind.RANDOM_MUST_DIFFER,
        where=name,
        step=1,
        evidence=f"ranks {one} and {other} hold different blocks of {name}, with the same random weights",
        remedy="make the whole weight on each rank and keep a block of it, or seed each rank of the group differently",
        others=_list_others(names),
    )


def _describe_shards(names: Sequence[str], held: dict[str, Held], start: Mapping[str, Array]) -> Difference:
    name = names[0]
    moved = _find_moved(held[name], start[name])
    if moved is not None:
        rank, begin = moved
        evidence = f"rank {rank} holds the reference's block at {list(begin)} of {name} at another place"
    else:
        ranks = describe_ranks([rank for rank, _, _ in held[name]])
        evidence = f"{ranks} hold blocks of {name} that are not all of it: a part of the reference's is on no rank"
    return Difference(
        kind=ErrorKind.WRONG_SHARD,
        where=name,
        step=1,
        evidence=evidence,
        remedy="look at which block each rank takes: its offset must be its rank within the group times the length",
        others=_list_others(names),
    )


def check_dropout(run: ProvedRun, roles: Roles) -> Iterator[Difference]:
    """Name errors of the masks that dropout would draw.

    Args:
        run: The records of what is proved.
        roles: What its ranks do alike.
    """
    dropouts = _list_dropouts(run)
    if not run.steps or not dropouts:
        return
    states = {}
    for rank in itertools.chain.from_iterable(roles.peers):
        states[rank] = _read_state(run, rank)
    # an empty one is unknown
    if not all(states.values()):
        return
    where = dropouts[0]
    others = _list_others(dropouts)
    data_ranks = roles.data_ranks
    same = [rank for rank in data_ranks if states[rank] == states[data_ranks[0]]]
    if len(same) > 1 and not roles.is_context:
        yield Difference(
            kind=ErrorKind.RANDOM_MUST_DIFFER,
            where=where,
            step=1,
            evidence=f"{describe_ranks(same)} draw the same dropout masks for different samples, from one state",
            remedy="add the data-parallel rank to the seed once the model is made",
            others=others,
        )
    if not roles.is_cut:
        return
    for peers in roles.peers:
        different = {states[rank] for rank in peers}
        if len(different) > 1:
            yield Difference(
                kind=ErrorKind.RANDOM_MUST_AGREE,
                where=where,
                step=1,
                evidence=f"{describe_ranks(peers)} split layers and take the same samples, and draw different dropout "
                "masks: right only where each has a part of what is dropped",
                remedy="give ranks that split layers one seed for what all of them hold",
                others=others,
                confidence="medium",
            )
            return


def _list_dropouts(run: ProvedRun) -> list[str]:
    """List the modules with dropout of the first rank that has any."""
    for rank in run.ranks.values():
        if rank.record.dropouts:
            return list(rank.record.dropouts)
    return []


def _read_state(run: ProvedRun, rank: int) -> str:
    first = run.ranks[rank].record.steps[0]
    if not first.micro_batches:
        return ""
    return first.micro_batches[0].random_state
