"""Chains of waiting: from each rank to those that have not entered its call, down to who waits for nobody."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.postmortem.matched_calls import EnteredCall, MatchedCalls, MatchedGroup, Pair, list_pairs


@dataclass(frozen=True)
class Wait:
    """A rank that waits in a call for ranks that have not entered it."""

    rank: int
    call: EnteredCall
    awaited: tuple[int, ...]
    # None for a message
    group: MatchedGroup | None = None
    # that these ranks belong to the group is a guess
    is_guess: bool = False

    @property
    def title(self) -> str:
        """The call: "all_reduce #12 of all ranks", "recv from rank 2"."""
        if self.group is None:
            return describe_message(self.call)
        return self.group.describe(self.call.name, self.call.number)


def describe_message(call: EnteredCall) -> str:
    """Write what a rank sends or takes: "recv from rank 2"; several in one call are joined."""
    words = []
    for sender, receiver in list_pairs(call):
        said = f"send to rank {receiver}" if sender == call.rank else f"recv from rank {sender}"
        words.append(said)
    return " and ".join(dict.fromkeys(words)) or call.name


def find_waits(matched: MatchedCalls) -> dict[int, Wait]:
    """Find for each rank the first call in which it waits for ranks that have not entered it."""
    found: dict[int, Wait] = {}
    for rank in matched.by_rank:
        waits = [*_find_group_waits(matched, rank), *_find_message_waits(matched, rank)]
        waits = [wait for wait in waits if wait.awaited] or _guess_waits(matched, rank)
        if waits:
            found[rank] = min(waits, key=order_waits)
    return found


def order_waits(wait: Wait) -> tuple[bool, int]:
    """Order waits: calls that have not ended come first, then by the order of calling."""
    return wait.call.has_ended, wait.call.call.record


def _find_group_waits(matched: MatchedCalls, rank: int) -> list[Wait]:
    """Find the call in each group in which a rank waits for absent members."""
    waits = []
    for group in matched.groups:
        call = _find_blocked(group, rank)
        if call is not None:
            waits.append(Wait(rank, call, group.find_absent(call.number), group))
    return waits


def _find_blocked(group: MatchedGroup, rank: int) -> EnteredCall | None:
    """Find the call of a group that holds a rank, of those that some member has not entered.

    That is the first that has not ended, else the first that cannot have completed, else the last.
    """
    calls = []
    for number in group.list_numbers_after(group.entered_by_all):
        call = group.calls[number].get(rank)
        if call is not None:
            calls.append(call)
    for call in calls:
        if not call.has_ended:
            return call
    for call in calls:
        if call.is_synchronizing:
            return call
    return calls[-1] if calls else None


def _find_message_waits(matched: MatchedCalls, rank: int) -> list[Wait]:
    """Find the messages that a rank waits with, whose other end has not called its part."""
    waits = []
    for call in matched.messages.get(rank, ()):
        absent = set()
        for pair in list_pairs(call):
            peer = _find_peer(pair, rank)
            if peer in matched.recordings and not _has_counterpart(matched, peer, rank, pair):
                absent.add(peer)
        waits.append(Wait(rank, call, tuple(sorted(absent))))
    return waits


def _find_peer(pair: Pair, rank: int) -> int:
    sender, receiver = pair
    peer = receiver if sender == rank else sender
    return -1 if peer is None else peer


def _has_counterpart(matched: MatchedCalls, peer: int, rank: int, pair: Pair) -> bool:
    """Tell whether a rank has called its part of another one's message.

    Args:
        matched: All calls.
        peer: The rank that should have.
        rank: The other one.
        pair: Sender and receiver.
    """
    if any(pair in list_pairs(call) for call in matched.messages.get(peer, ())):
        return True
    if matched.is_partial(peer) or matched.is_partial(rank):
        return False
    # a part that has ended already, by order among the two
    counts = matched.message_counts
    return counts[peer][pair] >= counts[rank][pair]


def _guess_waits(matched: MatchedCalls, rank: int) -> list[Wait]:
    """Guess for whom a rank waits in a group whose ranks are not told, where all that recorded in it have entered.

    The first call of such a group may wait for a rank that never called anything in it.
    """
    waits = []
    for group in matched.groups:
        call = group.calls.get(1, {}).get(rank)
        is_first = group.members_are_guessed and group.last.get(rank) == 1
        if not is_first or call is None or call.has_ended:
            continue
        others = tuple(other for other in matched.recordings if other not in group.members)
        if others:
            waits.append(Wait(rank, call, others, group, is_guess=True))
    return waits


@dataclass(frozen=True)
class Roots:
    """The ranks at the end of all waiting."""

    # wait for nobody while others wait for them
    idle: tuple[int, ...] = ()
    # wait for each other in a circle
    circle: tuple[int, ...] = ()


def find_roots(waits: Mapping[int, Wait]) -> Roots:
    """Follow everybody who waits down to who waits for nobody; without such a rank, to who waits in a circle."""
    awaited = _list_awaited(waits, set(waits))
    idle = awaited - set(waits)
    if idle:
        return Roots(idle=tuple(sorted(idle)))
    return Roots(circle=_find_circle(waits))


def _list_awaited(waits: Mapping[int, Wait], ranks: set[int]) -> set[int]:
    awaited: set[int] = set()
    for rank in ranks:
        awaited.update(waits[rank].awaited)
    return awaited


def _find_circle(waits: Mapping[int, Wait]) -> tuple[int, ...]:
    """Find ranks that wait for each other: whom nobody of the rest awaits is taken away, again and again."""
    circle = set(waits)
    while circle:
        awaited = _list_awaited(waits, circle)
        if circle <= awaited:
            break
        circle &= awaited
    return tuple(sorted(circle))
