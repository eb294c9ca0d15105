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
from megatron_lite.formats.run_record import LayoutRecord
from megatron_lite.phases import Phase
from megatron_lite.thresholds import MIN_RANK_STEPS, SHARE_OF_STEP, is_by_chance, is_mostly, slowest_rank
from megatron_lite.units import significant

# where a rank's own time is known: it waits for no other, or the waiting can be taken off
OWN = (
    Phase.DATA.value,
    Phase.FORWARD.value,
    Phase.BACKWARD.value,
    Phase.OPTIMIZER_STEP.value,
)
BUSY = "late ranks are not named: ranks waited for CPU cores (busy-machine), and so waited for each other by chance"
OTHER_STAGES = "late ranks are not named from traces: stages of a pipeline have different work"
NO_WAITS = (
    "ranks are compared by the medians of their own steps.jsonl; "
    "waiting in collectives is visible only in traces of all ranks"
)


def find_only_dimension(run: Run | None) -> str:
    """Find the dimension in which the run's ranks divide the work; "" if there are several, or nothing says."""
    layout = run.plan.layout if run else LayoutRecord()
    sizes = {
        "tensor": layout.tensor,
        "context": layout.context,
        "data": layout.data,
        "pipeline": layout.pipeline,
    }
    large = [name for name, number in sizes.items() if (number or 0) > 1]
    return large[0] if len(large) == 1 else ""


def compare_ranks_of_run(run: Run) -> RankComparison | None:
    """Compare ranks by the run's own figures: rows and a straggler, no collectives and no waits.

    None for a run without ranks' figures.
    """
    ranks = run.ranks
    if ranks is None:
        return None
    unknown_ms = (math.nan,) * len(ranks.step_ms)
    waits_ms = ranks.phases_ms.get(Phase.DATA.value) or unknown_ms
    rows = []
    for rank, step_ms in enumerate(ranks.step_ms):
        wait_ms = waits_ms[rank]
        row = RankRow(
            rank=rank,
            host="",
            step_ms=step_ms,
            data_wait_ms=None if math.isnan(wait_ms) else wait_ms,
        )
        rows.append(row)
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
    """Find the rank whose own work takes clearly longer than the median rank's, in the phase where that costs most."""
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2 or not _has_enough_steps(ranks):
        return None
    late = []
    for name in OWN:
        found = slowest_rank(ranks.own_ms(name), ranks.step_ms, run.stages)
        if found is None:
            continue
        lag_ms, rank = found
        if is_mostly(rank, _list_slowest(ranks, name, run.stages)):
            late.append((lag_ms, rank, name))
    if not late:
        return None
    lag_ms, rank, name = max(late)
    if is_by_chance(lag_ms, ranks.without_core):
        return None
    cause = "data_wait" if name == Phase.DATA.value else "compute"
    return Straggler(
        rank=rank,
        caused_wait_ms=lag_ms,
        share_last=None,
        cause=cause,
        cause_ms=lag_ms,
        phase=name,
    )


def _list_slowest(ranks: RankMedians, name: str, stages: Sequence[int]) -> list[int | None]:
    """List the slowest rank of each console line.

    Args:
        ranks: the ranks' figures.
        name: the phase by whose own time they are compared.
        stages: each rank's stage of the pipeline; () without one.

    Returns:
        By line, the rank; None where none is clearly slower.
    """
    own_ms_by_line = np.asarray(ranks.intervals.own_ms(name)).tolist()
    step_ms_by_line = ranks.intervals.step_ms.tolist()
    slowest = []
    for own_ms, step_ms in zip(own_ms_by_line, step_ms_by_line):
        found = slowest_rank(own_ms, step_ms, stages)
        slowest.append(None if found is None else found[1])
    return slowest


def find_imbalance_by_lines(run: Run) -> Imbalance | None:
    """Find ranks whose own work is longer in turns, or at times, by console lines of one step each.

    Medians of several steps hide it. Own work is what no rank waits for another in. None for stages of a pipeline, and
    where ranks waited for CPU cores.
    """
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2 or _has_stages(run):
        return None
    if find_core_shortage(run) is not None:
        return None
    is_of_one_step = (ranks.intervals.steps == 1).all(axis=1)
    lines = ranks.intervals.take(is_of_one_step)
    works_ms = []
    for name in OWN:
        work_ms = np.asarray(lines.own_ms(name), float)
        # a phase whose own part is unknown (backward, with waiting in it) tells nothing of who is late
        if len(work_ms) and not np.isnan(work_ms).any():
            works_ms.append(work_ms)
    if not works_ms or not len(lines.first):
        return None
    own_ms = np.sum(works_ms, axis=0)
    number = own_ms.shape[1]
    # by [rank, step]: longer than the median of the others
    of_others_ms = [np.median(np.delete(own_ms, rank, axis=1), axis=1) for rank in range(number)]
    net_ms = own_ms.T - np.stack(of_others_ms)
    step_ms = float(np.median(lines.step_ms))
    return find_imbalance(range(number), net_ms, None, step_ms, on_gpu=False)


def _has_stages(run: Run) -> bool:
    """Whether the run's ranks are stages of a pipeline, which have different work."""
    return len(set(run.stages)) > 1


def only_lasting(ranks: RankComparison, run: Run | None, traces: Sequence[Trace] = ()) -> RankComparison:
    """Remove from the traces' ranks what the run's typical steps do not know: a profile is a moment, and disturbs.

    Args:
        ranks: the comparison by their traces.
        run: the run's record; None without one.
        traces: whose headers may tell that a rank had no core.

    Returns:
        The comparison, with a note on each straggler or imbalance that was removed.
    """
    shortage = find_core_shortage(run, traces=traces)
    without_core = None if shortage is None else (shortage.rank, shortage.wait_ms)
    has_stages = run is not None and _has_stages(run)
    moving = ranks.imbalance
    if moving is not None and (has_stages or is_by_chance(moving.lost_ms, without_core)):
        note = BUSY if without_core else OTHER_STAGES
        ranks = replace(ranks, imbalance=None, notes=(*ranks.notes, note))
    late = ranks.straggler
    if late is None:
        return ranks
    note = _object_to_straggler(late, run, without_core)
    if not note:
        return ranks
    return replace(ranks, straggler=None, notes=(*ranks.notes, note))


def _object_to_straggler(late: Straggler, run: Run | None, without_core: tuple[int, float | None] | None) -> str:
    """Write why the straggler of a trace is none; '' where nothing speaks against it.

    Args:
        late: the straggler.
        run: the run's record; None without one.
        without_core: the rank that lacked a core, and for how long, ms per step; None where none did.
    """
    if run is not None and _has_stages(run):
        return OTHER_STAGES
    if is_by_chance(late.caused_wait_ms, without_core):
        return BUSY
    if run is None or run.ranks is None or slower_in_ordinary_steps(run.ranks, late.rank) is not False:
        return ""
    wait = f"{significant(late.caused_wait_ms)} ms per step"
    return (
        f"in the profiled steps the others wait {wait} for rank {late.rank}; "
        "in the typical ones its own work takes no longer (steps.jsonl): "
        "caused by profiling or a temporary load, not a straggler"
    )


def slower_in_ordinary_steps(ranks: RankMedians, rank: int) -> bool | None:
    """Tell whether a rank's own work is the longest also in the steps that nothing recorded; None if unknown."""
    number = len(ranks.step_ms)
    if number < 2 or rank >= number or not _has_enough_steps(ranks):
        return None
    works_ms = [ranks.own_ms(name) for name in OWN]
    if not all(works_ms):
        return None
    own_ms = [sum(of_rank_ms) for of_rank_ms in zip(*works_ms)]
    if any(map(math.isnan, own_ms)):
        return None
    of_others_ms = own_ms[:rank] + own_ms[rank + 1 :]
    lag_ms = own_ms[rank] - median_low(of_others_ms)
    return bool(lag_ms > SHARE_OF_STEP * median_low(ranks.step_ms))


def _has_enough_steps(ranks: RankMedians) -> bool:
    """Whether medians are over enough steps of every rank."""
    steps = ranks.intervals.steps.sum(axis=0)
    # NaN is not enough
    return bool((steps >= MIN_RANK_STEPS).all())
