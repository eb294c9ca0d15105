"""Who waits for whom inside collectives: of each, when every rank came and what the transfer itself takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.ranks.clocks import Clocks
from megatron_lite.analysis.ranks.matching import Group


@dataclass(frozen=True)
class Waits:
    """[R ranks, S shared steps], over the collectives that were matched; ms and counts."""

    wait_ms: np.ndarray  # inside collectives for a rank that came later
    exposed_wait_ms: np.ndarray  # of it, what no compute hides
    caused_ms: np.ndarray  # its start - the median start of the others, where it came last
    last: np.ndarray  # how often it came last
    matched: np.ndarray  # collectives that it took part in
    transfer_ns: tuple[np.ndarray, ...]  # by rank: int64 [c] of all its calls, shortest over ranks; -1: not matched

    @property
    def net_ms(self) -> np.ndarray:
        """[R, S]: how much more others waited for the rank than it for them."""
        return self.caused_ms - self.wait_ms


def waits_of(
    ranks: Sequence[Calls], groups: list[Group], clocks: Clocks, slots: Sequence[np.ndarray], steps: int
) -> Waits:
    """slots: by rank, int [c], the shared step of each call, -1 for what does not count."""
    found = Waits(
        *(np.zeros((len(ranks), steps)) for _ in range(5)), tuple(np.full(len(calls), -1, np.int64) for calls in ranks)
    )
    for group in groups:
        columns = list(zip(group.members.tolist(), group.call.T))
        start = np.stack([ranks[at].start_ns[calls] + clocks.start_ns[at] for at, calls in columns], axis=1)
        length = np.stack([ranks[at].end_ns[calls] - ranks[at].start_ns[calls] for at, calls in columns], axis=1)
        transfer = length.min(axis=1)
        for at, calls in columns:
            found.transfer_ns[at][calls] = transfer
        if clocks.aligned is not None:
            counts = np.stack([slots[at][calls] >= 0 for at, calls in columns], axis=1).all(axis=1)
            kept = [(at, calls[counts], slots[at][calls[counts]]) for at, calls in columns]
            _add(found, ranks, kept, start[counts], length[counts])
    return found


def _add(found: Waits, ranks: Sequence[Calls], columns: list, start: np.ndarray, length: np.ndarray):
    """The group's collectives [K, G] to the sums of its members."""
    wait = np.clip(start.max(axis=1, keepdims=True) - start, 0, length)
    last = start.argmax(axis=1)
    lag = start.max(axis=1) - np.median(np.sort(start, axis=1)[:, :-1], axis=1)
    for column, (at, calls, slot) in enumerate(columns):
        own, is_last = ranks[at].start_ns[calls], last == column
        hidden = ranks[at].compute.within(own, own + wait[:, column])
        for table, values in (
            (found.wait_ms, wait[:, column] / 1e6),
            (found.caused_ms, np.where(is_last, lag, 0) / 1e6),
            (found.exposed_wait_ms, (wait[:, column] - hidden) / 1e6),
            (found.last, is_last),
            (found.matched, np.ones(len(slot))),
        ):
            np.add.at(table[at], slot, values)
