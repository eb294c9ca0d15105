"""Activities and edges as they are collected, before they are put in order."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_lite.analysis.graph.graph import Activities, EdgeKind, Edges, Lane
from megatron_lite.analysis.intervals import Flags, Integers

ALL_NS = np.iinfo(np.int64).max  # an edge whose lag is all that lies between its ends
_COLUMNS = (
    "kind",
    "lane",
    "step",
    "phase",
    "name",
    "row",
    "cause",
    "start_ns",
    "end_ns",
    "again_ns",
    "bucket_ns",
    "num_bytes",
)
_EDGE_COLUMNS = ("source", "target", "kind", "base_ns")


@dataclass
class Parts:
    """Activities and edges of all ranks, which grow."""

    lanes: list[Lane] = field(default_factory=list)
    count: int = 0
    columns: dict[str, list[Integers]] = field(default_factory=dict)
    edge_columns: dict[str, list[Integers]] = field(default_factory=dict)
    missing: Counter[EdgeKind] = field(default_factory=Counter)  # edges whose source measured times contradict

    def add_lane(
        self,
        rank: int,
        name: str,
    ) -> int:
        """Add a lane, and return its number."""
        self.lanes.append(Lane(rank, name))
        return len(self.lanes) - 1

    def add(
        self,
        lane: int,
        start_ns: Integers,
        end_ns: Integers,
        kind: ArrayLike,
        *,
        step: ArrayLike = -1,
        phase: ArrayLike = -1,
        name: ArrayLike = -1,
        row: ArrayLike = -1,
        cause: ArrayLike = -1,
        again_ns: ArrayLike = 0,
        bucket_ns: ArrayLike = 0,
        num_bytes: ArrayLike = -1,
    ) -> Integers:
        """Add activities of a lane, in its order.

        Args:
            lane: their lane.
            start_ns: [k], measured, on the clock of all ranks.
            end_ns: [k].
            kind: the ActivityKind of each, or one for all, as are the following.
            step: number of the step; -1 for none.
            phase: index into Graph.phases; -1 for none.
            name: index into Graph.names; -1 for none.
            row: row of the rank's trace; -1 for none.
            cause: of what is NAMED, index into CAUSES; -1 for none.
            again_ns: the part that computes forward once more.
            bucket_ns: the part that moves gradients into buckets or back.
            num_bytes: size of a collective; -1 for none.

        Returns:
            Their numbers: int64 [k].
        """
        given = {"kind": kind, "lane": lane, "step": step, "phase": phase, "name": name, "row": row}
        given |= {"cause": cause, "start_ns": start_ns, "end_ns": end_ns}
        given |= {"again_ns": again_ns, "bucket_ns": bucket_ns, "num_bytes": num_bytes}
        count = len(start_ns)
        for column in _COLUMNS:
            whole = np.asarray(given[column], np.int64)
            values = np.broadcast_to(whole, count)
            self.columns.setdefault(column, []).append(values)
        first = self.count
        self.count += count
        return np.arange(first, self.count)

    def connect(
        self,
        source: Integers,
        target: Integers,
        kind: EdgeKind,
        base_ns: ArrayLike = 0,
    ) -> None:
        """Add edges.

        Args:
            source: [k], numbers of activities; -1: none, which adds no edge.
            target: [k].
            kind: why the targets wait.
            base_ns: [k] or one for all, what lies at least between the end of the source and the start of the target.
        """
        is_there = (source >= 0) & (target >= 0)
        bases = np.broadcast_to(np.asarray(base_ns, np.int64), len(source))
        given = {"source": source, "target": target, "base_ns": bases}
        given["kind"] = np.full(len(source), int(kind))
        for column in _EDGE_COLUMNS:
            kept = given[column][is_there]
            self.edge_columns.setdefault(column, []).append(kept)

    def chain(
        self,
        numbers: Integers,
        kind: EdgeKind,
        base_ns: ArrayLike = 0,
    ) -> None:
        """Let each activity of a lane wait for the one before it.

        Args:
            numbers: [k], the activities in order.
            kind: why they wait.
            base_ns: [k - 1] or one for all, as for `connect`.
        """
        self.connect(numbers[:-1], numbers[1:], kind, base_ns)

    def read(self, column: str) -> Integers:
        """A column of all activities so far."""
        if not self.count:
            return np.empty(0, np.int64)
        return np.concatenate(self.columns[column])


@dataclass(frozen=True)
class Ordered:
    """Activities and edges in order."""

    activities: Activities
    edges: Edges
    contradicted: dict[EdgeKind, int]
    seen: dict[EdgeKind, int]


def put_in_order(parts: Parts) -> Ordered:
    """Order activities by measured start, drop edges that measured times contradict, and find what no edge explains.

    An edge's lag is at most what was measured, and at most its base; what then still lies between an activity's start
    and the end of all that it waits for is its own delay.
    """
    columns = {name: parts.read(name) for name in _COLUMNS}
    order = np.lexsort((columns["end_ns"], columns["start_ns"]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = {name: values[order] for name, values in columns.items()}
    candidates = _place_edges(parts, place, columns)
    contradicted = _count_kinds(candidates.kind[~candidates.is_possible])
    seen = _count_kinds(candidates.kind)
    for kind, number in parts.missing.items():
        if number:
            contradicted[kind] = contradicted.get(kind, 0) + number
            seen[kind] = seen.get(kind, 0) + number
    edges = _keep_possible(candidates)
    activities = _build_activities(columns, edges)
    return Ordered(activities, edges, contradicted, seen)


@dataclass(frozen=True)
class _Candidates:
    """Edges before those are dropped that measured times contradict, m of them; int64 [m] each."""

    source: Integers
    target: Integers
    kind: Integers
    lag_ns: Integers
    is_possible: Flags


def _place_edges(
    parts: Parts,
    place: Integers,
    columns: dict[str, Integers],
) -> _Candidates:
    """Give edges the places of their activities, and the lags that measured times allow.

    Args:
        parts: all edges.
        place: by number of an activity, its place.
        columns: the activities in order.
    """
    edges = _join_edges(parts)
    source = place[edges["source"]]
    target = place[edges["target"]]
    measured_ns = columns["start_ns"][target] - columns["end_ns"][source]
    return _Candidates(
        source=source,
        target=target,
        kind=edges["kind"],
        lag_ns=np.minimum(measured_ns, edges["base_ns"]),
        is_possible=(measured_ns >= 0) & (source < target),
    )


def _keep_possible(candidates: _Candidates) -> Edges:
    """Keep the edges that measured times allow, by target."""
    kept = np.flatnonzero(candidates.is_possible)
    kept = kept[np.argsort(candidates.target[kept], kind="stable")]
    return Edges(
        source=candidates.source[kept].astype(np.int32),
        target=candidates.target[kept].astype(np.int32),
        kind=candidates.kind[kept].astype(np.uint8),
        lag_ns=candidates.lag_ns[kept],
    )


def _build_activities(columns: dict[str, Integers], edges: Edges) -> Activities:
    """Build activities of columns in order; what no edge explains of a start is the activity's own delay."""
    start_ns = columns["start_ns"]
    end_ns = columns["end_ns"]
    ready_ns = np.full(len(start_ns), -1, np.int64)
    let_go_ns = end_ns[edges.source] + edges.lag_ns
    np.maximum.at(ready_ns, edges.target, let_go_ns)
    has_reason = np.zeros(len(start_ns), bool)
    has_reason[edges.target] = True
    return Activities(
        kind=columns["kind"].astype(np.uint8),
        lane=columns["lane"].astype(np.int32),
        step=columns["step"].astype(np.int32),
        phase=columns["phase"].astype(np.int32),
        name=columns["name"].astype(np.int32),
        row=columns["row"],
        cause=columns["cause"].astype(np.int8),
        start_ns=start_ns,
        end_ns=end_ns,
        work_ns=end_ns - start_ns,
        delay_ns=np.where(has_reason, start_ns - ready_ns, 0),
        again_ns=columns["again_ns"],
        bucket_ns=columns["bucket_ns"],
        num_bytes=columns["num_bytes"],
    )


def _join_edges(parts: Parts) -> dict[str, NDArray[np.int64]]:
    """All edges, as columns."""
    joined = {}
    for name in _EDGE_COLUMNS:
        pieces = parts.edge_columns.get(name, [])
        nothing = np.empty(0, np.int64)
        joined[name] = np.concatenate([nothing, *pieces])
    return joined


def _count_kinds(kinds: Integers) -> dict[EdgeKind, int]:
    """Count the edges of each kind that there is."""
    numbers = np.bincount(kinds, minlength=len(EdgeKind))
    return {kind: int(numbers[kind]) for kind in EdgeKind if numbers[kind]}
