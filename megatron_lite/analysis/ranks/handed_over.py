"""Pairs of operators and the collectives that they hand over to a backend's own threads (gloo).

Nothing but order and shapes tells which operator has handed over which collective.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import Trace


def pair_with_operators(trace: Trace, spans: Integers, operators: Integers) -> tuple[Integers | None, bool]:
    """Find the operator that handed over each span.

    Threads of a backend take calls from one queue, but those that take two at once may begin them in either order. Then
    only the shapes tell which span is of which call.

    Args:
        trace: the trace.
        spans: rows of the spans, by their starts.
        operators: rows of the operators that may have handed them over, by their starts.

    Returns:
        The operator of each span, None where their numbers differ; and whether they are known to be in the order of the
        program.
    """
    if len(spans) != len(operators):
        return None, False
    by_shape = _pair_by_shapes(trace, spans, operators)
    if by_shape is not None:
        return by_shape, True
    # a call that comes when the span before it has begun is not that span's
    events = trace.events
    called_ns = events.start_ns[operators[1:]]
    span_before_ns = events.start_ns[spans[:-1]]
    alternate = called_ns >= span_before_ns
    threads = np.unique(events.thread[spans])
    is_in_order = len(threads) <= 1 or bool(alternate.all())
    return operators, is_in_order


def _pair_by_shapes(trace: Trace, spans: Integers, operators: Integers) -> Integers | None:
    """Pair the k-th span of a shape with the k-th operator of that shape.

    None where shapes are not known or do not agree.
    """
    of_spans = _group(trace, spans, has_list=False)
    of_operators = _group(trace, operators, has_list=True)
    if None in of_spans or _count(of_spans) != _count(of_operators):
        return None
    paired = np.empty(len(spans), np.int64)
    for key, places in of_spans.items():
        same_shape = of_operators[key]
        paired[places] = operators[same_shape]
    return paired


def _count(places: dict[Hashable, list[int]]) -> dict[Hashable, int]:
    """Count the events of each shape."""
    return {key: len(rows) for key, rows in places.items()}


def _group(trace: Trace, rows: Integers, has_list: bool) -> dict[Hashable, list[int]]:
    """Group events by the shapes of their tensors.

    Args:
        trace: the trace.
        rows: the events.
        has_list: their first argument lists the tensors.

    Returns:
        By shapes, places in `rows`; under None those whose shapes are not known.
    """
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, index in enumerate(trace.events.shapes[rows].tolist()):
        dims: Any = None
        if index >= 0:
            dims = trace.shapes[index].dims
        if has_list and dims:
            dims = dims[0]
        found[dims or None].append(place)
    return found
