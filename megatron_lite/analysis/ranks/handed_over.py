"""Which operator has handed which collective over to a backend's own threads (gloo),
where nothing but order and shapes tells."""

from collections import defaultdict
from collections.abc import Hashable

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import Trace


def pair_with_operators(trace: Trace, spans: Integers, operators: Integers) -> tuple[Integers | None, bool]:
    """(the operator of each span, None where their numbers differ; is the order of the program known by them?).

    Threads of a backend take calls from one queue, but those that take two at once may begin them in either order. Then
    only the shapes tell which span is of which call.

    Args:
        spans, operators: Rows, by their starts.
    """
    if len(spans) != len(operators):
        return None, False
    by_shape = _pair_by_shapes(trace, spans, operators)
    if by_shape is not None:
        return by_shape, True
    starts, threads = trace.events.start_ns, trace.events.thread
    # a call that comes when the span before it has begun is not that span's
    alternate = bool((starts[operators[1:]] >= starts[spans[:-1]]).all())
    return operators, alternate or len(np.unique(threads[spans])) <= 1


def _pair_by_shapes(trace: Trace, spans: Integers, operators: Integers) -> Integers | None:
    """The k-th span of a shape is of the k-th operator of that shape;
    None where shapes are not known or do not agree."""
    of_spans, of_operators = _group(trace, spans, 0), _group(trace, operators, 1)
    if None in of_spans or {key: len(rows) for key, rows in of_spans.items()} != {
        key: len(rows) for key, rows in of_operators.items()
    }:
        return None
    paired = np.empty(len(spans), np.int64)
    for key, places in of_spans.items():
        paired[places] = operators[of_operators[key]]
    return paired


def _group(trace: Trace, rows: Integers, depth: int) -> dict[Hashable, list[int]]:
    """{shapes of its tensors: places in `rows`}; None: shapes that are not known.

    depth: 1 where the first argument lists them.
    """
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, index in enumerate(trace.events.shapes[rows].tolist()):
        dims = trace.shapes[index].dims if index >= 0 else None
        if depth and dims:
            dims = dims[0]
        found[dims or None].append(place)
    return found
