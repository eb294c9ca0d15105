"""Order and mend what profilers are known to write wrongly."""

import numpy as np

from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Events


def repaired(columns: dict[str, np.ndarray]) -> tuple[Events, list[str]]:
    """Events of their columns: ordered by start, device work clipped where it overlaps the next on its stream; and notes
    of what was changed. Empties `columns`, so that nothing is held twice for long."""
    order = _order(columns["start_ns"], columns["end_ns"])
    events = Events(**{name: columns.pop(name)[order] for name in list(columns)})
    clipped = _clip_overlaps(events)
    if not clipped:
        return events, []
    return events, [f"GPU operations that ran into the next one of their stream: {clipped:,}, counted up to its start"]


def _order(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Rows by start, the longer one first where starts are equal; in the file's order where ends are equal too."""
    order = np.argsort(start, kind="stable")
    equal = np.flatnonzero(np.diff(start[order]) == 0)
    if len(equal):
        tied = np.unique(np.concatenate([equal, equal + 1]))
        rows = order[tied]
        order[tied] = rows[np.lexsort((-end[rows], start[rows]))]
    return order


def _clip_overlaps(events: Events) -> int:
    """End device work where the next on its stream starts; a writer that does not measure its end gives it a length that
    is too long (AMD-AGI/TraceLens#669). Returns how many were changed."""
    rows = np.flatnonzero(np.isin(events.kind, DEVICE_KINDS))
    if len(rows) < 2:
        return 0
    rows = rows[np.lexsort((rows, events.stream[rows], events.device[rows]))]
    same = (np.diff(events.stream[rows]) == 0) & (np.diff(events.device[rows]) == 0)
    too_long = same & (events.end_ns[rows[:-1]] > events.start_ns[rows[1:]])
    events.end_ns[rows[:-1][too_long]] = events.start_ns[rows[1:][too_long]]
    return int(too_long.sum())
