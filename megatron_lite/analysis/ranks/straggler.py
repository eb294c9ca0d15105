"""The rank that others wait for, and the one quantity that explains it, if one does."""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from megatron_lite.analysis.ranks.figures import RankRow, Straggler
from megatron_lite.analysis.time.figures import RankTime
from megatron_lite.phases import Phase

SHARE_OF_STEP = 0.02  # that others must wait for one rank, or it does not matter; as in the trainer's own line
EXPLAINED = 0.8  # of the lag that a cause must be
BEYOND_CHANCE = 4 / 3  # times the share of all waiting that a rank would cause if all were alike
STANDARD_ERRORS = 2.0  # that the mean over steps must be above nothing

CAUSES: dict[str, Callable[[RankTime], float]] = {
    "data_wait": lambda time: time.rows.get("data_wait", 0.0),
    "compute": lambda time: time.rows.get("compute", 0.0),
    "copy": lambda time: time.rows.get("exposed_copy", 0.0),
    "host": lambda time: sum(
        time.rows.get(name, 0.0) for name in ("host", "sync", "garbage_collector", "allocator", "launch")
    ),
}
# no rank waits for another in these, so that their time is the rank's own
INDEPENDENT = tuple(map(str, (Phase.DATA, Phase.DATA_TO_DEVICE, Phase.FORWARD, Phase.OPTIMIZER_STEP)))


def straggler_of(rows: Sequence[RankRow], times: Sequence[RankTime], net_ms: np.ndarray) -> Straggler | None:
    """Of rows with waits, the same ranks' times, and what others waited for each rank beyond its own waits by step [R, S].

    None where no rank stands out, or where it does by one odd step only.
    """
    if len(rows) < 2 or any(row.caused_wait_ms is None for row in rows):
        return None
    late = max(range(len(rows)), key=lambda at: rows[at].caused_wait_ms)
    lag, whole = rows[late].caused_wait_ms, sum(row.caused_wait_ms for row in rows)
    least = SHARE_OF_STEP * median(row.step_ms for row in rows)
    share = min(max(0.5, BEYOND_CHANCE / len(rows)), 0.9)
    if lag < least or lag < share * whole or not _steadily(net_ms[late], least):
        return None
    cause, by = _excess(times, late, CAUSES, lag)
    phase, _ = _excess(times, late, {name: _of_phase(name) for name in _phases(times)}, lag)
    return Straggler(rows[late].rank, lag, rows[late].last_in, cause, by, phase)


def _steadily(net_ms: np.ndarray, least: float) -> bool:
    """Is the rank late in the usual step, and by more than steps differ among each other?"""
    error = net_ms.std(ddof=1) / np.sqrt(len(net_ms)) if len(net_ms) > 1 else 0.0
    return bool(np.median(net_ms) > least and net_ms.mean() > STANDARD_ERRORS * error)


def _excess(times: Sequence[RankTime], late: int, quantities: dict[str, Callable], lag: float) -> tuple[str, float]:
    """(name, ms): what the late rank has most more of than the median of the others; ("", 0) if it is no explanation."""
    found = {
        name: quantity(times[late]) - median(quantity(time) for at, time in enumerate(times) if at != late)
        for name, quantity in quantities.items()
    }
    name = max(found, key=found.get, default="")
    return (name, found[name]) if name and found[name] >= EXPLAINED * lag else ("", 0.0)


def _phases(times: Sequence[RankTime]) -> list[str]:
    return list(dict.fromkeys(phase.name for time in times for phase in time.phases))


def _of_phase(name: str) -> Callable[[RankTime], float]:
    """Time of a phase that is the rank's own: compute, and where no rank waits for another the host's if that is longer."""

    def of(time: RankTime) -> float:
        phase = next((phase for phase in time.phases if phase.name == name), None)
        if phase is None:
            return 0.0
        return max(phase.compute_ms, phase.host_ms) if name in INDEPENDENT and not time.on_gpu else phase.compute_ms

    return of
