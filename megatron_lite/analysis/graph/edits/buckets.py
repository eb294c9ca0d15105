"""Collectives that are merged or split: gradients in buckets of another size, or summed while backward goes on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.graph.edits.change import (
    add_edges,
    drop_edges,
    find_arrivals,
    set_work,
)
from megatron_lite.analysis.graph.edits.transfers import find_gradient_sums, leave_out_transfers, list_by_step
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, EdgeKind, Graph
from megatron_lite.analysis.graph.replay import measure_step
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.phases import Phase

SMALL_BYTES = 4096  # what is not larger takes the latency
MIN_SIZES_RATIO = 2.0  # between the largest and the smallest collective: closer ones do not tell latency from bandwidth
# Of a collective of so many bytes half of the time is latency (Hockney's n 1/2). Links of ranks have more: over 200
# KiB of gloo within a machine (docs/benchmarks.md).
LEAST_HALF_BYTES = 128 * 2**10


@dataclass(frozen=True)
class TransferModel:
    """The time of a collective by its size, once all ranks have come."""

    latency_ns: float
    ns_per_byte: float

    def predict(self, num_bytes: float) -> float:
        """Predict the time of a collective of so many bytes, ns."""
        return self.latency_ns + self.ns_per_byte * num_bytes


def fit_transfers(
    graph: Graph,
    chosen: Flags,
) -> TransferModel | None:
    """Fit latency and bandwidth of collectives to the median time of each size.

    Args:
        graph: the graph.
        chosen: [n], transfers of collectives of one kind and group.

    Returns:
        None where sizes are not recorded, or are too much alike.
    """
    transfers = _find_sized(graph, chosen)
    if not len(transfers):
        return None
    num_bytes = graph.activities.num_bytes[transfers]
    sizes, group = np.unique(num_bytes, return_inverse=True)
    works_ns = graph.activities.work_ns[transfers]
    if sizes[-1] <= SMALL_BYTES:
        return TransferModel(float(np.median(works_ns)), 0.0)
    if sizes[-1] < MIN_SIZES_RATIO * sizes[0]:
        return None
    medians_ns = [float(np.median(works_ns[group == at])) for at in range(len(sizes))]
    weights = np.sqrt(np.bincount(group))
    slope, latency = np.polyfit(sizes, medians_ns, 1, w=weights)
    if slope < 0:
        slope = 0.0
    return TransferModel(max(float(latency), 0.0), float(slope))


def bound_transfers(
    graph: Graph,
    chosen: Flags,
) -> TransferModel | None:
    """Bound the time of larger collectives from above where those of a trace are of one size.

    Of their time at least the share is latency that a link with LEAST_HALF_BYTES gives, so that what merging them saves
    is a lower bound.

    Args:
        graph: the graph.
        chosen: [n], transfers of collectives of one kind and group.

    Returns:
        None where sizes are not recorded.
    """
    transfers = _find_sized(graph, chosen)
    if not len(transfers):
        return None
    num_bytes = graph.activities.num_bytes[transfers]
    # the largest leave the most to bandwidth
    whole_ns = float(np.median(graph.activities.work_ns[transfers]))
    ns_per_byte = whole_ns / (LEAST_HALF_BYTES + float(num_bytes.max()))
    return TransferModel(LEAST_HALF_BYTES * ns_per_byte, ns_per_byte)


def _find_sized(graph: Graph, chosen: Flags) -> Integers:
    """Find those of the chosen transfers that take time, int64; none of them unless the sizes of all are recorded."""
    transfers = np.flatnonzero(chosen & (graph.activities.work_ns > 0))
    num_bytes = graph.activities.num_bytes[transfers]
    return transfers if (num_bytes > 0).all() else transfers[:0]


def resize_buckets(
    graph: Graph,
    bucket_bytes: float,
    first_bytes: float | None = None,
) -> Graph:
    """Sum gradients in buckets of about so many bytes.

    Neighbors are summed together: the last of them, for which all gradients are there, takes what the sum of their
    bytes takes, the others and the calls that hand them over nothing. A bucket that is larger is summed in parts, whose
    gradients are ready at even intervals since the bucket before.

    Buckets of one size do not tell latency from bandwidth. They are merged at the least that this saves, and not split.

    Args:
        graph: the graph; it stays as it is where sizes are not recorded.
        bucket_bytes: a bucket is full with so many.
        first_bytes: the same of the first bucket of a step; None: as the others.
    """
    sums = find_gradient_sums(graph)
    model = fit_transfers(graph, sums)
    if model is None:
        return _merge_at_least(graph, sums, bucket_bytes, first_bytes or bucket_bytes)
    graph = _merge(graph, sums, model, bucket_bytes, first_bytes or bucket_bytes)
    return _split(graph, sums, bucket_bytes, model)


def merge_collectives(
    graph: Graph,
    chosen: Flags,
) -> Graph:
    """Let one collective take the place of all of a step that are chosen, when the last of them is handed over.

    Args:
        graph: the graph; it stays as it is where sizes are not recorded.
        chosen: [n], transfers of collectives of one kind and group. Of one size, the least that this saves is claimed.
    """
    model = fit_transfers(graph, chosen)
    if model is None:
        return _merge_at_least(graph, chosen, math.inf, math.inf)
    return _merge(graph, chosen, model, math.inf, math.inf)


def sum_in_backward(
    graph: Graph,
    chosen: Flags,
    bucket_bytes: float,
) -> Graph:
    """Sum gradients in buckets while backward goes on, instead of one after the other behind it.

    Gradients are ready at even intervals of backward, in the order of their bytes.

    Args:
        graph: the graph; it stays as it is where sizes are not recorded, or do not tell latency from bandwidth.
        chosen: [n], transfers of sums of gradients behind backward.
        bucket_bytes: of a bucket.
    """
    model = fit_transfers(graph, chosen)
    if model is None:
        return graph
    graph = _merge(graph, chosen, model, math.inf, math.inf)
    transfers = np.flatnonzero(chosen)
    arrivals = find_arrivals(graph, transfers)
    calls = graph.find_edges(EdgeKind.CALL, EdgeKind.LAUNCH, EdgeKind.EVENT)
    is_called_late = np.isin(graph.edges.target[calls], arrivals)
    graph = drop_edges(graph, calls[is_called_late])
    for buckets in list_by_step(graph, chosen):
        last = find_arrivals(graph, buckets[-1:])
        backward = _find_last_of_backward(graph, int(buckets[-1]))
        graph = add_edges(graph, backward, last[: len(backward)], EdgeKind.CALL)
    return _split(graph, chosen, bucket_bytes, model)


def _find_last_of_backward(graph: Graph, transfer: int) -> Integers:
    """Find the last activity of backward in the step and on the rank of a transfer: int64 [1]; [0] for none."""
    activities = graph.activities
    kinds = ON_DEVICE if graph.on_device else ON_HOST
    is_same = (activities.step == activities.step[transfer]) & (graph.rank == graph.rank[transfer])
    is_backward = graph.find_phase(Phase.BACKWARD.value) & graph.find_kind(*kinds)
    return np.flatnonzero(is_same & is_backward)[-1:]


@dataclass(frozen=True)
class _Merged:
    """Transfers that also sum the gradients of those before them."""

    kept: Integers  # [g], the last transfer of each
    num_bytes: Integers  # [g], of all of it
    left_out: Integers  # [k], transfers of the others


def _merge(
    graph: Graph,
    chosen: Flags,
    model: TransferModel,
    bucket_bytes: float,
    first_bytes: float,
) -> Graph:
    """Merge neighbors until a bucket is full.

    Args:
        graph: the graph.
        chosen: [n], transfers.
        model: their times.
        bucket_bytes: of a full bucket.
        first_bytes: of the first one of a step.
    """
    merged = _merge_neighbors(graph, chosen, bucket_bytes, first_bytes)
    graph = leave_out_transfers(graph, merged.left_out)
    works_ns = model.latency_ns + model.ns_per_byte * merged.num_bytes
    is_changed = merged.num_bytes != graph.activities.num_bytes[merged.kept]
    graph = set_work(graph, merged.kept[is_changed], np.rint(works_ns[is_changed]))
    return _set_bytes(graph, merged)


def _merge_at_least(
    graph: Graph,
    chosen: Flags,
    bucket_bytes: float,
    first_bytes: float,
) -> Graph:
    """Merge neighbors of one size, as far as that surely saves anything.

    Args:
        graph: the graph; it stays as it is where sizes are not recorded, or the bound says nothing.
        chosen: [n], transfers.
        bucket_bytes: of a full bucket.
        first_bytes: of the first one of a step.
    """
    model = bound_transfers(graph, chosen)
    if model is None:
        return graph
    merged = _merge(graph, chosen, model, bucket_bytes, first_bytes)
    return merged if measure_step(merged) < measure_step(graph) else graph


def _set_bytes(graph: Graph, merged: _Merged) -> Graph:
    """Note how many bytes the merged transfers sum."""
    num_bytes = graph.activities.num_bytes.copy()
    num_bytes[merged.left_out] = 0
    num_bytes[merged.kept] = merged.num_bytes
    return replace(graph, activities=replace(graph.activities, num_bytes=num_bytes))


def _group(
    num_bytes: Integers,
    bucket_bytes: float,
    first_bytes: float,
) -> list[slice]:
    """Group neighbors until a bucket is full.

    Args:
        num_bytes: [k], of each.
        bucket_bytes: of a full bucket.
        first_bytes: of the first one.
    """
    groups = []
    begun = 0
    filled = 0
    limit = first_bytes
    for at, size in enumerate(num_bytes.tolist()):
        filled += size
        if filled >= limit:
            groups.append(slice(begun, at + 1))
            begun = at + 1
            filled = 0
            limit = bucket_bytes
    if begun < len(num_bytes):
        groups.append(slice(begun, len(num_bytes)))
    return groups


def _merge_neighbors(
    graph: Graph,
    chosen: Flags,
    bucket_bytes: float,
    first_bytes: float,
) -> _Merged:
    """Choose the transfers that sum the gradients of their neighbors, too.

    Args:
        graph: the graph.
        chosen: [n], transfers.
        bucket_bytes: of a full bucket.
        first_bytes: of the first one of a step.
    """
    kept = []
    sizes = []
    left_out: list[Integers] = [np.empty(0, np.int64)]
    for buckets in list_by_step(graph, chosen):
        num_bytes = graph.activities.num_bytes[buckets]
        for group in _group(num_bytes, bucket_bytes, first_bytes):
            kept.append(buckets[group][-1])
            sizes.append(num_bytes[group].sum())
            left_out.append(buckets[group][:-1])
    return _Merged(np.array(kept), np.array(sizes), np.sort(np.concatenate(left_out)))


@dataclass(frozen=True)
class _Wait:
    """An edge that is added."""

    source: int
    target: int
    lag_ns: float


@dataclass(frozen=True)
class _Bucket:
    """A transfer that may be split."""

    transfer: int
    arrival: int
    ready: int  # what its last gradients come from; -1: not known
    before: int  # the transfer before it in the step; -1: none
    since: int  # what that one's last gradients come from; -1: none


def _split(
    graph: Graph,
    chosen: Flags,
    bucket_bytes: float,
    model: TransferModel,
) -> Graph:
    """Sum larger buckets in parts, one after the other: what is left of a bucket is its last part.

    Args:
        graph: the graph.
        chosen: [n], transfers.
        bucket_bytes: of a part.
        model: times of transfers.
    """
    works_ns = graph.activities.work_ns.copy()
    waits: list[_Wait] = []
    for bucket in _describe_buckets(graph, chosen):
        num_bytes = graph.activities.num_bytes[bucket.transfer]
        parts = int(num_bytes // bucket_bytes)
        if parts > 1 and bucket.ready >= 0:
            part_ns = model.predict(num_bytes / parts)
            works_ns[bucket.transfer] = round(part_ns)
            waits += _wait_for_parts(graph, bucket, parts, part_ns)
    if not waits:
        return graph
    source = np.array([wait.source for wait in waits])
    target = np.array([wait.target for wait in waits])
    lags_ns = np.array([wait.lag_ns for wait in waits])
    graph = replace(graph, activities=replace(graph.activities, work_ns=works_ns))
    return add_edges(graph, source, target, EdgeKind.CALL, np.rint(lags_ns))


def _describe_buckets(graph: Graph, chosen: Flags) -> Iterator[_Bucket]:
    """Describe the transfers that take any time, step by step."""
    ready_of = _find_ready(graph)
    for buckets in list_by_step(graph, chosen):
        mine = buckets[graph.activities.work_ns[buckets] > 0]
        arrivals = find_arrivals(graph, mine)
        before = -1
        since = -1
        for transfer, arrival in zip(mine.tolist(), arrivals.tolist()):
            ready = int(ready_of[arrival])
            yield _Bucket(transfer, arrival, ready, before, since)
            before = transfer
            since = ready


def _wait_for_parts(
    graph: Graph,
    bucket: _Bucket,
    parts: int,
    part_ns: float,
) -> list[_Wait]:
    """List what the last part of a bucket waits for: a part that could begin then, and those from it to the last.

    Args:
        graph: the graph.
        bucket: that is split.
        parts: how many there are.
        part_ns: what each takes.
    """
    waits = []
    for number, source in enumerate(_find_even(graph, bucket, parts), 1):
        lag_ns = (parts - number) * part_ns
        waits.append(_Wait(source, bucket.arrival, lag_ns))
    if bucket.before >= 0:
        # the first part begins behind the bucket before
        lag_ns = (parts - 1) * part_ns
        waits.append(_Wait(bucket.before, bucket.arrival, lag_ns))
    return waits


def _find_ready(graph: Graph) -> Integers:
    """Find what each activity waits for that computes what it needs: int64 [n]; -1 for nothing known."""
    edges = graph.edges
    found = np.full(len(graph.activities), -1, np.int64)
    # an event tells more than the launch
    for kind in (EdgeKind.LAUNCH, EdgeKind.CALL, EdgeKind.EVENT):
        numbers = graph.find_edges(kind)
        found[edges.target[numbers]] = edges.source[numbers]
    return found


def _find_even(
    graph: Graph,
    bucket: _Bucket,
    parts: int,
) -> list[int]:
    """Find the activities that end when another part of the time has passed in which a bucket's gradients are computed.

    Args:
        graph: the graph.
        bucket: whose gradients come from the lane of `ready`, since those of the bucket before or the phase's begin.
        parts: how many there are; the last one ends with `ready`.
    """
    activities = graph.activities
    last = bucket.ready
    is_meant = activities.lane == activities.lane[last]
    for column in (activities.phase, activities.step):
        is_meant &= column == column[last]
    numbers = np.flatnonzero(is_meant)
    numbers = numbers[(numbers > bucket.since) & (numbers <= last)]
    if not len(numbers):
        return []
    done_ns = np.cumsum(activities.work_ns[numbers])
    wanted_ns = done_ns[-1] * np.arange(1, parts) / parts
    at = np.searchsorted(done_ns, wanted_ns)
    found: list[int] = numbers[at].tolist()
    return found
