"""Every rank's usual step, from what the ranks said at each console line."""

import math
from collections.abc import Iterable
from statistics import median

from megatron_lite.analysis.run.figures import Interval, RankMedians
from megatron_lite.analysis.run.step_lines import CORES


def rank_medians(intervals: list[Interval], ordinary: set[int]) -> RankMedians | None:
    """Medians over the lines that have an ordinary iteration among theirs; over all lines if none has. None without lines."""
    if not intervals:
        return None
    ranks = len(intervals[-1].step_ms)
    alike = [interval for interval in intervals if len(interval.step_ms) == ranks]
    good = [one for one in alike if any(at in ordinary for at in range(one.first, one.last + 1))] or alike
    return RankMedians(
        step_ms=_median([one.step_ms for one in good]),
        gpu_ms=_some(_median([one.gpu_ms for one in good])),
        phases_ms=_by_phase(one.phases_ms for one in good),
        gpu_phases_ms=_by_phase(one.gpu_phases_ms for one in good),
        own_backward_ms=_some(_median([one.own_backward_ms for one in good])),
        host_memory_bytes=tuple(one.host_memory_bytes for one in alike),
        peak_memory_bytes=tuple(one.peak_memory_bytes for one in alike),
        intervals=tuple(good),
        **{name: _some(_median([getattr(one, name) for one in good])) for name in CORES},
    )


def _by_phase(parts: Iterable[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    parts = list(parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _median([part[name] for part in parts if name in part]) for name in names}


def _median(lists: list[tuple[float, ...]]) -> tuple[float, ...]:
    """By rank; NaN for a rank that has no number in any."""
    known = [[value for value in values if not math.isnan(value)] for values in zip(*lists)]
    return tuple(median(values) if values else math.nan for values in known)


def _some(values: tuple[float, ...]) -> tuple[float, ...]:
    return () if all(map(math.isnan, values)) else values
