"""Which operator has handed which collective over to a backend's own threads (gloo),
where nothing but order and shapes tells."""

from collections import defaultdict
from collections.abc import Hashable

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import Trace


def pair_with_operators(trace: Trace, spans: Integers, operators: Integers) -> tuple[Integers | None, bool]:
    """Find the operator that handed over each span.

    Threads of a backend take calls from one queue, but those that take two at once may begin them in either order. Then
    only the shapes tell which span is of which call.

    Args:
        trace: the trace.
        spans, operators: rows, by their starts.

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
    called_ns = trace.events.start_ns[operators[1:]]
    span_before_ns = trace.events.start_ns[spans[:-1]]
    alternate = bool((called_ns >= span_before_ns).all())
    threads = np.unique(trace.events.thread[spans])
    return operators, alternate or len(threads) <= 1


def _pair_by_shapes(trace: Trace, spans: Integers, operators: Integers) -> Integers | None:
    """Pair the k-th span of a shape with the k-th operator of that shape; None where shapes are not known or do not
    agree."""
    of_spans = _group(trace, spans, 0)
    of_operators = _group(trace, operators, 1)
    if None in of_spans or _count(of_spans) != _count(of_operators):
        return None
    paired = np.empty(len(spans), np.int64)
    for key, places in of_spans.items():
        paired[places] = operators[of_operators[key]]
    return paired


def _count(places: dict[Hashable, list[int]]) -> dict[Hashable, int]:
    """How many have each shape."""
    return {key: len(rows) for key, rows in places.items()}


def _group(
    trace: Trace,
    rows: Integers,
    depth: int,  # 1 where the first argument lists the tensors
) -> dict[Hashable, list[int]]:
    """Group events by the shapes of their tensors: places in `rows`, under None those whose shapes are not known."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, index in enumerate(trace.events.shapes[rows].tolist()):
        dims = trace.shapes[index].dims if index >= 0 else None
        if depth and dims:
            dims = dims[0]
        found[dims or None].append(place)
    return found
