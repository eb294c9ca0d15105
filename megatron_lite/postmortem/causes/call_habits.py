"""Habits of ranks: of two that disagree, the one is to blame whose call is new."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping

from megatron_lite.postmortem.matched_calls import EnteredCall, MatchedGroup


def sign_place(call: EnteredCall) -> Hashable:
    """Sign a call by its operation and the line that called it."""
    return call.names, call.call_site


def sign_arguments(call: EnteredCall) -> Hashable:
    """Sign a call by its operation, line, shapes and types."""
    return sign_place(call), call.call.input_shapes, call.call.output_shapes, call.call.input_types


def find_departing(group: MatchedGroup, number: int, *, by_place: bool) -> tuple[int, ...]:
    """Find the ranks whose call departs from former ones, where not all do.

    Args:
        group: The group of the call.
        number: The number of the call.
        by_place: Compare operations and lines only.

    Returns:
        The ranks whose call was never made before or, where all were, does not follow the one before it as it used to.
    """
    sign = sign_place if by_place else sign_arguments
    habits = _learn_habits(group, number, sign)
    departing = []
    unusual = []
    for rank, call in group.calls[number].items():
        signed = sign(call)
        if signed not in habits:
            departing.append(rank)
        before = group.calls.get(number - 1, {}).get(rank)
        usual = habits.get(sign(before), set()) if before else set()
        if usual and signed not in usual:
            unusual.append(rank)
    everybody = len(group.calls[number])
    for ranks in (departing, unusual):
        if 0 < len(ranks) < everybody:
            return tuple(sorted(ranks))
    return ()


def _learn_habits(
    group: MatchedGroup, number: int, sign: Callable[[EnteredCall], Hashable]
) -> dict[Hashable, set[Hashable]]:
    """Learn which calls were made before a number, and which ones followed each.

    Args:
        group: The group of the calls.
        number: The number of the first call that is not learned from.
        sign: What a call is known by.
    """
    habits: dict[Hashable, set[Hashable]] = defaultdict(set)
    for before in group.numbers:
        if before >= number:
            break
        followers = group.calls.get(before + 1, {}) if before + 1 < number else {}
        for rank, call in group.calls[before].items():
            follower = followers.get(rank)
            seen = {sign(follower)} if follower else set()
            habits[sign(call)].update(seen)
    return dict(habits)


def make_each_others_calls(by_rank: Mapping[int, Iterable[EnteredCall]], calls: Mapping[int, EnteredCall]) -> bool:
    """Tell whether some rank makes, before or after, the call that another one makes here.

    Args:
        by_rank: All calls of each rank.
        calls: The call of each rank that is compared.
    """
    for rank, mine in calls.items():
        signs = {sign_place(call) for call in by_rank[rank]}
        for theirs in calls.values():
            if sign_place(theirs) != sign_place(mine) and sign_place(theirs) in signs:
                return True
    return False
