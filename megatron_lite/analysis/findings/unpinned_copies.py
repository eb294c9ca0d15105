"""Batches are copied to the device from pageable memory.

Meaning: the source of the copy is ordinary memory. The driver first copies it into a page-locked
    buffer of its own, and the host waits: non_blocking=True has no effect on such a copy.
Measured: host-to-device copies whose name says Pageable, in steady steps; cost is their time on
    the device that no kernel hides, and the idle time after the host's wait.
Cost: the copy cannot overlap with computing, and the host cannot launch ahead while it stands
    there.
Do: DataLoader(pin_memory=True) and .to(device, non_blocking=True); keep batches plain tensors,
    which can be pinned.
Flags: this trainer pins by itself on a GPU. With --dataloader-type external, yield arrays and let
    the trainer pin them.
False alarm: copies of a few bytes at a step's end, which cost less than pinning them.
"""

import re

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    exposed_ms,
    in_ms,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.units import size

CODE = "unpinned-copies"
TITLE = "copies from pageable memory"
COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda", "")
TO_DEVICE = (Phase.DATA.value, Phase.DATA_TO_DEVICE.value)
PAGEABLE = re.compile(r"(HtoD|HostToDevice|Host2Device).*Pageable|Pageable -> Device", re.IGNORECASE)


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    rows = pageable_rows(one) if one is not None and one.time.on_gpu else np.empty(0, np.int64)
    if not len(rows):
        return None
    exposed, stalled = exposed_ms(one, rows), _stalled_ms(one)
    cost = exposed + stalled
    if share(cost, one) < MIN_SHARE_SHOWN:
        return None
    number, each = len(rows) / steady_steps(one), float(one.trace.events.num_bytes[rows].clip(min=0).mean())
    text = (
        f"{number:.3g} unpinned per step, of {size(each)} on average: {in_ms(exposed)} on the device that nothing "
        "hides, "
        f"{in_ms(stalled)} idle after the host's wait; {of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, rows[0])),),
        advice="pin host memory (DataLoader(pin_memory=True)) and copy with .to(device, non_blocking=True)",
        gain_ms=cost,
        rank=one.time.rank,
    )


def pageable_rows(one: RankFacts) -> np.ndarray:
    """Copies from pageable host memory in steady steps."""
    return rows_named(one, PAGEABLE.search, Kind.MEMCPY)


def is_batch_copy(site: SyncSite) -> bool:
    """Does the host wait there for a copy from pageable memory? To be asked only where the trace has such copies."""
    return site.operator in COPIES and ("ageable" in site.call or site.phase in TO_DEVICE)


def _stalled_ms(one: RankFacts) -> float:
    return sum(site.idle_ms for site in one.time.syncs if is_batch_copy(site))
