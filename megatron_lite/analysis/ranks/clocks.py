"""Are the ranks' clocks one? Ends of collectives coincide, so that they show by how much each clock is off."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.ranks.kinds import END_TOGETHER
from megatron_lite.analysis.ranks.matching import Group

OFF_NS = 1_000_000  # a clock that is off by less is left as it is: collectives do not end closer than that everywhere
NOISE = 3.0  # times the spread of its ends that a correction must be


@dataclass(frozen=True)
class Clocks:
    """What to add to a rank's own time to have one clock."""

    start_ns: tuple[int, ...]  # by rank in the given order
    aligned: bool | None  # None: nothing to see it by
    notes: tuple[str, ...]


def clocks_of(
    ranks: Sequence[Calls], groups: list[Group], base_ns: Sequence[int | None], hosts: Sequence[str]
) -> Clocks:
    """`base_ns`: each trace's own first moment on the clock that its file names; `hosts`: "" where unknown."""
    named = all(base is not None for base in base_ns)
    start = [base - min(base_ns) if named else 0 for base in base_ns]
    if len(ranks) < 2 or not any(len(group.call) for group in groups):
        return Clocks(tuple(start), None, ())
    if named and hosts[0] and len(set(hosts)) == 1:
        return Clocks(tuple(start), True, ())
    offsets, spreads = _offsets(ranks, groups, start)
    if np.isnan(offsets).all():
        return Clocks(tuple(start), None if not named else True, ())
    off = np.nan_to_num(_by_host(offsets, hosts))
    wrong = (
        (np.abs(off) > OFF_NS) & (np.abs(off) > NOISE * np.nan_to_num(spreads)) if named else np.ones(len(off), bool)
    )
    if not wrong.any():
        aligned = bool(np.abs(off).max() <= OFF_NS)
        return Clocks(
            tuple(start),
            aligned,
            ()
            if aligned
            else ("the ranks' collectives do not end together, so that their clocks may differ: waits are uncertain",),
        )
    corrected = tuple(int(at - by) if bad else at for at, by, bad in zip(start, off, wrong))
    return Clocks(
        corrected,
        True,
        (
            _said(off, wrong, hosts)
            if named
            else "the traces name no common clock: they are laid over each other by the ends of collectives",
        ),
    )


def _offsets(ranks: Sequence[Calls], groups: list[Group], start: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """[R] each: median of a rank's ends against the median rank's, and how far they scatter around it; NaN: none seen."""
    seen: list[list[np.ndarray]] = [[] for _ in ranks]
    for group in groups:
        columns = list(zip(group.members.tolist(), group.call.T))
        reference = ranks[columns[0][0]]
        together = np.array([reference.whats[i].kind in END_TOGETHER for i in columns[0][1]], bool)
        ends = np.stack([ranks[at].end_ns[calls] + start[at] for at, calls in columns], axis=1)[together]
        if len(ends):
            apart = ends - np.median(ends, axis=1, keepdims=True)
            for column, (at, _) in enumerate(columns):
                seen[at].append(apart[:, column])
    joined = [np.concatenate(parts) if parts else np.array([np.nan]) for parts in seen]
    offsets = np.array([np.median(values) for values in joined])
    return offsets, np.array([np.median(np.abs(values - middle)) for values, middle in zip(joined, offsets)])


def _by_host(offsets: np.ndarray, hosts: Sequence[str]) -> np.ndarray:
    """Ranks of one host share a clock; a rank whose host is unknown stands for itself."""
    shared = offsets.copy()
    for host in set(hosts) - {""}:
        here = np.array([name == host for name in hosts])
        if not np.isnan(offsets[here]).all():
            shared[here] = np.nanmedian(offsets[here])
    return shared


def _said(off: np.ndarray, wrong: np.ndarray, hosts: Sequence[str]) -> str:
    names = {hosts[at] or f"rank {at}": off[at] for at in np.flatnonzero(wrong)}
    told = ", ".join(f"{name} by {by / 1e6:+.3g} ms" for name, by in list(names.items())[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"clocks differ, and were set right by the ends of collectives: {told}{more}"
