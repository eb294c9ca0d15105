"""Copies between host and device that no computing hides.

Meaning: the device does nothing but copy: batches, offloaded optimizer state or activations,
    values for the log.
Measured: time of copies and memsets while no kernel runs, per steady step, by name. Copies from
    pageable memory are counted in unpinned-copies instead.
Cost: all of that time: a copy engine works beside the kernels if it is given a stream of its own
    and pinned memory.
Do: prefetch the next batch on a side stream; overlap offloading with the layers before and after.
Flags: none here: this trainer copies batches on a side stream by itself.
False alarm: copies within the device at a step's end, if they are part of the algorithm.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MATTERS,
    exposed_ms,
    in_ms,
    of_step,
    per_step_ms,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.findings.unpinned_copies import pageable_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE = "exposed-copies"
TITLE = "copies that nothing hides"
MAX_SHOWN = 3


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    rows = np.setdiff1d(rows_named(one, lambda name: True, Kind.MEMCPY, Kind.MEMSET), pageable_rows(one))
    cost = exposed_ms(one, rows)
    if share(cost, one) < MATTERS:
        return None
    first = Evidence(f"nothing but copies runs {of_step(cost, one)}", where(one))
    return Finding(
        cost_ms=cost,
        evidence=(first, *_by_name(one, rows)),
        advice="copy from pinned memory on a stream of its own, ahead of the kernels that need it",
        gain_ms=cost,
        rank=one.time.rank,
    )


def _by_name(one: RankFacts, rows: np.ndarray) -> list[Evidence]:
    groups = [rows[one.trace.events.name[rows] == name] for name in np.unique(one.trace.events.name[rows])]
    groups.sort(key=lambda group: -per_step_ms(one, group))
    return [
        Evidence(
            f"{one.trace.name_of(group[0])}: {len(group) / steady_steps(one):.3g} per step, "
            f"{in_ms(per_step_ms(one, group))}",
            where(one, group[0]),
        )
        for group in groups[:MAX_SHOWN]
    ]
