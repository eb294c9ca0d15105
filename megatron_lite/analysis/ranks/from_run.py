"""Ranks beside each other without a trace: from the medians that every rank's own clock gave for steps.jsonl."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np

from megatron_lite.analysis.ranks.imbalance import find_imbalance
from megatron_lite.analysis.ranks.rank_results import Imbalance, RankComparison, RankRow, Straggler
from megatron_lite.analysis.run.cores import find_core_shortage
from megatron_lite.analysis.run.run_results import RankMedians, Run
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.formats.run_record import Layout
from megatron_lite.phases import Phase
from megatron_lite.thresholds import MIN_STEPS, SHARE_OF_STEP, is_by_chance, is_mostly, slowest_rank
from megatron_lite.units import significant

# where a rank's own time is known: it waits for no other, or the waiting can be taken off
OWN = (Phase.DATA.value, Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value)
BUSY = "late ranks are not named: ranks waited for CPU cores (busy-machine), and so waited for each other by chance"
OTHER_STAGES = "late ranks are not named from traces: stages of a pipeline have different work"
NO_WAITS = (
    "ranks are compared by the medians of their own steps.jsonl; "
    "waiting in collectives is visible only in traces of all ranks"
)


def find_only_dimension(run: Run | None) -> str:
    """The one in which the run's ranks divide the work; "" if there are several, or nothing says."""
    layout = run.plan.layout if run else Layout()
    sizes = {"tensor": layout.tensor, "context": layout.context, "data": layout.data, "pipeline": layout.pipeline}
    large = [name for name, number in sizes.items() if number is not None and number > 1]
    return large[0] if len(large) == 1 else ""


def compare_ranks_of_run(run: Run) -> RankComparison | None:
    """Rows and a straggler from the run's own figures; no collectives, no waits.

    None for a run without ranks' figures.
    """
    ranks = run.ranks
    if ranks is None:
        return None
    waits = ranks.phases_ms.get(Phase.DATA.value) or (math.nan,) * len(ranks.step_ms)
    rows = [
        RankRow(rank=rank, host="", step_ms=step_ms, data_wait_ms=None if math.isnan(waits[rank]) else waits[rank])
        for rank, step_ms in enumerate(ranks.step_ms)
    ]
    straggler = find_straggler_by_medians(run)
    slowest = max(rows, key=lambda row: 0.0 if math.isnan(row.step_ms) else row.step_ms).rank
    return RankComparison(
        world_size=run.world_size or len(rows),
        present=tuple(row.rank for row in rows),
        missing=tuple(range(len(rows), run.world_size or 0)),
        rows=tuple(rows),
        groups=(),
        collectives=(),
        straggler=straggler,
        clocks_aligned=None,
        critical_rank=straggler.rank if straggler else slowest,
        notes=(NO_WAITS,) if len(rows) > 1 else (),
    )


def find_straggler_by_medians(run: Run) -> Straggler | None:
    """The rank whose own work takes clearly longer than the median rank's, in the phase where that costs most."""
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2 or not _has_enough_steps(ranks):
        return None
    late = []
    for name in OWN:
        found = slowest_rank(ranks.own_ms(name), ranks.step_ms, run.stages)
        lines = zip(np.asarray(ranks.intervals.own_ms(name)).tolist(), ranks.intervals.step_ms.tolist())
        by_line = [slowest_rank(own_ms, step_ms, run.stages) for own_ms, step_ms in lines]
        if found and is_mostly(found[1], [one and one[1] for one in by_line]):
            late.append((*found, name))
    if not late:
        return None
    lag, rank, name = max(late)
    if is_by_chance(lag, ranks.without_core):
        return None
    cause = "data_wait" if name == Phase.DATA.value else "compute"
    return Straggler(rank, lag, None, cause, lag, name)


def find_imbalance_by_lines(run: Run) -> Imbalance | None:
    """Ranks whose own work is longer in turns, or at times, by console lines of one step each: medians of several steps
    hide it.

    Own work is what no rank waits for another in. None for stages of a pipeline, and where ranks waited for CPU cores.
    """
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2 or len(set(run.stages)) > 1 or find_core_shortage(run) is not None:
        return None
    lines = ranks.intervals.take((ranks.intervals.steps == 1).all(axis=1))
    works = [np.asarray(lines.own_ms(name), float) for name in OWN if len(lines.own_ms(name))]
    # a phase whose own part is unknown (backward, with waiting in it) tells nothing of who is late
    works = [work for work in works if not np.isnan(work).any()]
    if not works or not len(lines.first):
        return None
    own_ms = np.sum(works, axis=0)
    # by [rank, step]: longer than the median of the others
    others = [np.median(np.delete(own_ms, rank, axis=1), axis=1) for rank in range(own_ms.shape[1])]
    net_ms = own_ms.T - np.stack(others)
    return find_imbalance(range(own_ms.shape[1]), net_ms, None, float(np.median(lines.step_ms)), on_gpu=False)


def only_lasting(ranks: RankComparison, run: Run | None, traces: Sequence[Trace] = ()) -> RankComparison:
    """Traces' ranks without a straggler that the run's typical steps do not know: a profile is a moment, and disturbs.

    Args:
        ranks: by their traces.
        run: the run's record; None without one.
        traces: whose headers may tell that a rank had no core.
    """
    late = ranks.straggler
    shortage = find_core_shortage(run, traces=traces)
    has_stages = run is not None and len(set(run.stages)) > 1
    without_core = None if shortage is None else (shortage.rank, shortage.wait_ms)
    moving = ranks.imbalance
    if moving is not None and (has_stages or is_by_chance(moving.lost_ms, without_core)):
        ranks = replace(ranks, imbalance=None, notes=(*ranks.notes, BUSY if without_core else OTHER_STAGES))
    if late is not None and has_stages:
        return replace(ranks, straggler=None, notes=(*ranks.notes, OTHER_STAGES))
    if late is not None and is_by_chance(late.caused_wait_ms, without_core):
        return replace(ranks, straggler=None, notes=(*ranks.notes, BUSY))
    if late is None or run is None or run.ranks is None or slower_in_ordinary_steps(run.ranks, late.rank) is not False:
        return ranks
    note = (
        f"in the profiled steps the others wait {significant(late.caused_wait_ms)} ms per step for rank "
        f"{late.rank}; in the "
        "typical ones its own work takes no longer (steps.jsonl): "
        "caused by profiling or a temporary load, not a straggler"
    )
    return replace(ranks, straggler=None, notes=(*ranks.notes, note))


def slower_in_ordinary_steps(ranks: RankMedians, rank: int) -> bool | None:
    """Is that rank's own work the longest also in the steps that nothing recorded? None if that cannot be known."""
    works = [ranks.own_ms(name) for name in OWN]
    if len(ranks.step_ms) < 2 or rank >= len(ranks.step_ms) or not all(works) or not _has_enough_steps(ranks):
        return None
    own_ms = [sum(of_rank) for of_rank in zip(*works)]
    if any(map(math.isnan, own_ms)):
        return None
    lag = own_ms[rank] - median_low(own_ms[:rank] + own_ms[rank + 1 :])
    return bool(lag > SHARE_OF_STEP * median_low(ranks.step_ms))


def _has_enough_steps(ranks: RankMedians) -> bool:
    return bool((ranks.intervals.steps.sum(axis=0) >= MIN_STEPS).all())  # never with NaN
