"""Copies between host and device that no computing hides.

Meaning: the device does nothing but copy: batches, offloaded optimizer state or activations, values for the log.
Measured: time of copies and memsets while no kernel runs, per steady step, by name. Copies from pageable memory are
    counted in unpinned-copies instead.
Cost: all of that time: a copy engine works beside the kernels if it is given a stream of its own and pinned memory.
Do: prefetch the next batch on a side stream; overlap offloading with the layers before and after.
Flags: none here: this trainer copies batches on a side stream by itself.
False alarm: copies within the device at a step's end, if they are part of the algorithm.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step, where
from megatron_lite.analysis.findings.step_measurements import exposed_ms, per_step, per_step_ms, rows_named
from megatron_lite.analysis.findings.unpinned_copies import pageable_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "exposed-copies", "copies that nothing hides"
MAX_SHOWN = 3


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    rows = np.setdiff1d(rows_named(one, lambda name: True, Kind.MEMCPY, Kind.MEMSET), pageable_rows(one))
    names = one.trace.events.name[rows]
    groups = [rows[names == name] for name in np.unique(names)]
    groups.sort(key=lambda group: -per_step_ms(one, group))
    shown = (
        Evidence(
            f"{one.trace.name_of(group[0])}: {per_step(one, group):.3g} per step, {in_ms(per_step_ms(one, group))}",
            where(one, group[0]),
        )
        for group in groups[:MAX_SHOWN]
    )
    cost = exposed_ms(one, rows)
    text = f"nothing but copies runs {of_step(cost, one)}"
    advice = "copy from pinned memory on a stream of its own, ahead of the kernels that need it"
    return find_lost_time(one, cost, text, advice, *shown)
