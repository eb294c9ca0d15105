"""Do all ranks of a process group call the same collectives in the same order? Each group by itself:
between groups any order is allowed."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT, Calls, What
from megatron_lite.analysis.ranks.rank_results import OTHER, Disorder
from megatron_lite.analysis.trace.columns import ProcessGroup
from megatron_lite.units import size

Key = tuple[str, int | None, str]  # kind, bytes, numbers


def find_disorder(
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    step_names: Sequence[str],
    labels: Mapping[ProcessGroup, str],
    world_size: int | None,
) -> Disorder | None:
    """The first difference, of the group with most of them; None where orders agree, or where traces do not tell groups
    apart.

    slots: by rank, the shared step of each call, -1 for none; step_names: of the shared steps.
    """
    groups: dict[ProcessGroup, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, calls in enumerate(ranks):
        if not calls.is_in_order or calls.rank is None:
            return None
        for i in np.argsort(calls.called_ns, kind="stable").tolist():
            what = calls.whats[i]
            if slots[at][i] >= 0 and what.kind not in POINT_TO_POINT and _is_known(what, world_size):
                # ranks number their groups differently: known members tell which is which
                group = replace(what.group, name="") if what.group.ranks else what.group
                groups[group][at].append(i)
    names = {(replace(one, name="") if one.ranks else one): label for one, label in labels.items()}
    found = [
        one
        for group, rows in groups.items()
        if (one := _compare(ranks, slots, rows, step_names, names.get(group) or f"process group {group.name!r}"))
    ]
    return max(found, key=lambda one: one.steps, default=None)


def _is_known(what: What, world_size: int | None) -> bool:
    """Is it certain which ranks the group has? A name alone stands for several groups,
    except where all ranks are in it."""
    return bool(what.group.ranks) or (bool(what.group.name) and what.group_size == world_size)


def _compare(
    ranks: Sequence[Calls], slots: Sequence[Integers], rows: Mapping[int, list[int]], names: Sequence[str], label: str
) -> Disorder | None:
    by_step: dict[int, list[list[int]]] = {at: [[] for _ in names] for at in rows}
    for at, of_rank in rows.items():
        for i in of_rank:
            by_step[at][slots[at][i]].append(i)
    members = sorted(rows)
    differing = [one for step in range(len(names)) if (one := _find_in_step(ranks, by_step, members, step))]
    if not differing:
        return None
    step, at, place, reordered = differing[0]
    mine, theirs = (ranks[one].whats[by_step[one][step][place]] for one in (members[0], at))
    return Disorder(
        group=label,
        step=names[step],
        place=place + 1,
        rank=ranks[members[0]].rank or 0,
        what=_describe(mine),
        other_rank=ranks[at].rank or 0,
        other_what=_describe(theirs),
        steps=len(differing),
        of_steps=len(names),
        reordered=reordered,
    )


def _find_in_step(
    ranks: Sequence[Calls], by_step: Mapping[int, list[list[int]]], members: Sequence[int], step: int
) -> tuple[int, int, int, bool] | None:
    """(step, the member whose calls are not the first one's, the first place where, are they reordered);
    None where all agree."""
    keys = {at: [_key(ranks[at].whats[i]) for i in by_step[at][step]] for at in members}
    first = keys[members[0]]
    for at in members[1:]:
        place = _find_difference(first, keys[at])
        if place is not None:
            return step, at, place, Counter(first) == Counter(keys[at])
    return None


def _find_difference(first: list[Key], other: list[Key]) -> int | None:
    """The first place in which two ranks' calls of a step are not the same; None where they are, or where that tells
    nothing: other numbers of calls are a window's edge, other sizes of one kind are an uneven exchange."""
    if len(first) != len(other) or first == other:
        return None
    if Counter(first) == Counter(other):
        return next(place for place, (one, another) in enumerate(zip(first, other)) if one != another)
    kinds = [(one[0], another[0]) for one, another in zip(first, other)]
    return next(
        (place for place, (one, another) in enumerate(kinds) if one != another and OTHER not in (one, another)), None
    )


def _key(what: What) -> Key:
    return what.kind, what.num_bytes, what.dtype


def _describe(what: What) -> str:
    return what.kind + (f" of {size(what.num_bytes)}" if what.num_bytes is not None else "")
