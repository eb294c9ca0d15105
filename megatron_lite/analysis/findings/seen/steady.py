"""What rules share: events of the steady steps, milliseconds per step, and how they are written."""

from collections.abc import Callable

import numpy as np

from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.trace.columns import Kind

MATTERS = 0.05  # of a step: less is hard to tell from the noise between steps, and not where to begin
MIN_SHARE_SHOWN = 0.01  # of a step, for causes that are cheap to remove


def steady_steps(one: RankFacts) -> int:
    """How many steps the figures are means of; at least 1."""
    return max(1, sum(step.steady for step in one.time.steps))


def rows_named(one: RankFacts, test: Callable[[str], object], *kinds: Kind) -> np.ndarray:
    """Rows of the steady steps of these kinds whose name passes `test`, in order; each distinct name is asked once."""
    trace = one.trace
    rows = trace.rows[kinds[0]] if len(kinds) == 1 else np.sort(np.concatenate([trace.rows[kind] for kind in kinds]))
    return _in_steady_steps(one, rows[trace.passing(test, *kinds)[trace.events.name[rows]]])


def work_rows(one: RankFacts) -> np.ndarray:
    """Kernels, copies and memsets of the steady steps; without a GPU their operators."""
    return _in_steady_steps(one, one.trace.device_rows if one.time.on_gpu else one.trace.rows[Kind.OP])


def _in_steady_steps(one: RankFacts, rows: np.ndarray) -> np.ndarray:
    flags = np.array([step.steady for step in one.time.steps] + [False])  # the last one is for -1: outside all steps
    return rows[flags[one.placing.step[rows]]]


def per_step_ms(one: RankFacts, rows: np.ndarray) -> float:
    """Durations added up, per steady step."""
    events = one.trace.events
    return float((events.end_ns[rows] - events.start_ns[rows]).sum()) / 1e6 / steady_steps(one)


def in_phases(one: RankFacts, rows: np.ndarray, *phases: str) -> np.ndarray:
    """Those of `rows` that belong to one of the phases."""
    wanted = np.array([name in phases for name in one.placing.phases] + [False])
    return rows[wanted[one.placing.phase[rows]]]


def share(ms: float, one: RankFacts) -> float:
    """Of the mean steady step."""
    return ms / one.time.step_ms if one.time.step_ms > 0 else 0.0


def where(one: RankFacts, row: int | None = None) -> str:
    """ "rank 0, ProfilerStep#12 at 1,204.3 ms"."""
    words = [f"rank {one.time.rank}" if one.time.rank is not None else one.trace.source]
    if row is not None:
        index = int(one.placing.step[row])
        words += [one.time.steps[index].name] if 0 <= index < len(one.time.steps) else []
        words[-1] += f" at {one.trace.events.start_ns[row] / 1e6:,.1f} ms"
    return ", ".join(words)


def counted(number: float, what: str) -> str:
    """'1 wait', '12 waits', '0.5 waits'."""
    return f"{number:,.3g} {what}" + ("" if number == 1 else "s")


def in_ms(ms: float) -> str:
    """12.345 -> '12.3 ms', 0.0123 -> '0.012 ms'."""
    return f"{ms:,.1f} ms" if abs(ms) >= 1 else f"{ms:.2g} ms"


def of_step(ms: float, one: RankFacts) -> str:
    """'12.3 ms of each step of 100.0 ms (12%)'."""
    return f"{in_ms(ms)} of each step of {in_ms(one.time.step_ms)} ({share(ms, one):.1%})"
