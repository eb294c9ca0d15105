"""Order of collectives: whether all ranks of a process group call the same ones in the same order.

Each group stands by itself: between groups any order is allowed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT, Calls, What
from megatron_lite.analysis.ranks.process_groups import drop_name
from megatron_lite.analysis.ranks.rank_results import OTHER_KIND, Disorder
from megatron_lite.analysis.trace.columns import ProcessGroup
from megatron_lite.units import size

Key = tuple[str, int | None, str]  # kind, bytes, numbers
Rows = dict[int, list[int]]  # by index of the rank, its calls in the order of the program


def find_disorder(
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    step_names: Sequence[str],
    labels: Mapping[ProcessGroup, str],
    world_size: int | None,
) -> Disorder | None:
    """Find the first difference, of the group with most of them.

    Args:
        ranks: the collectives of each rank.
        slots: by rank, the shared step of each call; -1 for none.
        step_names: of the shared steps.
        labels: the dimension of each process group.
        world_size: the number of all ranks; None if unknown.

    Returns:
        The difference; None where orders agree, or where traces do not tell groups apart.
    """
    groups: dict[ProcessGroup, Rows] = {}
    for at, calls in enumerate(ranks):
        if not calls.is_in_order or calls.rank is None:
            return None
        for row in np.argsort(calls.called_ns, kind="stable").tolist():
            what = calls.whats[row]
            counts = slots[at][row] >= 0 and what.kind not in POINT_TO_POINT
            if not counts or not _is_known(what, world_size):
                continue
            rows = groups.setdefault(drop_name(what.group), defaultdict(list))
            rows[at].append(row)
    names = {drop_name(group): label for group, label in labels.items()}
    found = []
    for group, rows in groups.items():
        name = names.get(group) or f"process group {group.name!r}"
        disorder = _compare(ranks, slots, rows, step_names, name)
        if disorder:
            found.append(disorder)
    return max(found, key=lambda disorder: disorder.steps, default=None)


def _is_known(what: What, world_size: int | None) -> bool:
    """Whether it is certain which ranks the group has.

    A name alone stands for several groups, except where all ranks are in it.
    """
    if what.group.ranks:
        return True
    return bool(what.group.name) and what.group_size == world_size


def _compare(
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    rows: Rows,
    names: Sequence[str],
    label: str,
) -> Disorder | None:
    """Compare the calls of one group step by step.

    Args:
        ranks: the collectives of each rank.
        slots: by rank, the shared step of each call.
        rows: by rank, its calls of the group in the order of the program.
        names: of the shared steps.
        label: the group's name.

    Returns:
        The first difference; None where its ranks agree.
    """
    by_step: dict[int, list[list[int]]] = {}
    for at, of_rank in rows.items():
        steps: list[list[int]] = [[] for _ in names]
        for row in of_rank:
            slot = slots[at][row]
            steps[slot].append(row)
        by_step[at] = steps
    members = sorted(rows)
    differing = []
    for step in range(len(names)):
        difference = _find_in_step(ranks, by_step, members, step)
        if difference:
            differing.append(difference)
    if not differing:
        return None
    step, at, place, reordered = differing[0]
    first = members[0]
    row = by_step[first][step][place]
    other_row = by_step[at][step][place]
    return Disorder(
        group=label,
        step=names[step],
        place=place + 1,
        rank=ranks[first].rank or 0,
        what=_describe(ranks[first].whats[row]),
        other_rank=ranks[at].rank or 0,
        other_what=_describe(ranks[at].whats[other_row]),
        steps=len(differing),
        of_steps=len(names),
        reordered=reordered,
    )


def _find_in_step(
    ranks: Sequence[Calls],
    by_step: Mapping[int, list[list[int]]],
    members: Sequence[int],
    step: int,
) -> tuple[int, int, int, bool] | None:
    """Find the first member whose calls of a step are not the first one's.

    Args:
        ranks: the collectives of each rank.
        by_step: by rank and step, rows of calls.
        members: the ranks of the group.
        step: the step.

    Returns:
        The step, the member, the first place where they differ, and whether they are the same in another order; None
        where all agree.
    """
    keys = {}
    for at in members:
        whats = ranks[at].whats
        keys[at] = [_key(whats[row]) for row in by_step[at][step]]
    first = keys[members[0]]
    for at in members[1:]:
        place = _find_difference(first, keys[at])
        if place is not None:
            reordered = Counter(first) == Counter(keys[at])
            return step, at, place, reordered
    return None


def _find_difference(first: list[Key], other: list[Key]) -> int | None:
    """Find the first place in which two ranks' calls of a step are not the same.

    None where they are the same, or where a difference tells nothing: other numbers of calls are a window's edge, other
    sizes of one kind are an uneven exchange.
    """
    if len(first) != len(other) or first == other:
        return None
    reordered = Counter(first) == Counter(other)
    for place, (key, other_key) in enumerate(zip(first, other)):
        if reordered and key != other_key:
            return place
        kind = key[0]
        other_kind = other_key[0]
        if kind != other_kind and OTHER_KIND not in (kind, other_kind):
            return place
    return None


def _key(what: What) -> Key:
    """Traits that a call must have on all ranks."""
    return what.kind, what.num_bytes, what.dtype


def _describe(what: What) -> str:
    """Name a call as reports do: "all_reduce of 4.0 MiB"."""
    if what.num_bytes is None:
        return what.kind
    return f"{what.kind} of {size(what.num_bytes)}"
