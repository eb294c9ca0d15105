"""Batches are copied to the device from pageable memory.

Meaning: the source of the copy is ordinary memory. The driver first copies it into a page-locked buffer of its own,
    and the host waits: non_blocking=True has no effect on such a copy.
Measured: host-to-device copies whose name says Pageable, in steady steps; cost is their time on the device that no
    kernel hides, and the idle time after the host's wait.
Cost: the copy cannot overlap with computing, and the host cannot launch ahead while it stands there.
Do: DataLoader(pin_memory=True) and .to(device, non_blocking=True); keep batches plain tensors, which can be pinned.
Flags: this trainer pins by itself on a GPU. With --dataloader-type external, yield arrays and let the trainer pin
    them.
False alarm: copies of a few bytes at a step's end, which cost less than pinning them.
"""

import re

import numpy as np

from megatron_lite.analysis.findings.base import Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.step_measurements import exposed_ms, per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.units import size

CODE, TITLE = "unpinned-copies", "copies from pageable memory"
COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda", "")
TO_DEVICE = (Phase.DATA.value, Phase.DATA_TO_DEVICE.value)
PAGEABLE = re.compile(r"(HtoD|HostToDevice|Host2Device).*Pageable|Pageable -> Device", re.IGNORECASE)


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    rows = pageable_rows(one)
    if not len(rows):
        return None
    exposed, stalled = exposed_ms(one, rows), sum(site.idle_ms for site in one.time.syncs if is_batch_copy(site))
    each = float(one.trace.events.num_bytes[rows].clip(min=0).mean())
    text = (
        f"{per_step(one, rows):.3g} unpinned per step, of {size(each)} on average: {in_ms(exposed)} on the device that "
        f"nothing hides, {in_ms(stalled)} idle after the host's wait; {of_step(exposed + stalled, one)}"
    )
    advice = "pin host memory (DataLoader(pin_memory=True)) and copy with .to(device, non_blocking=True)"
    return find_lost_time(one, exposed + stalled, text, advice, row=rows[0], cheap=True)


def pageable_rows(one: RankFacts) -> np.ndarray:
    """Copies from pageable host memory in steady steps."""
    return rows_named(one, PAGEABLE.search, Kind.MEMCPY)


def is_batch_copy(site: SyncSite) -> bool:
    """Does the host wait there for a copy from pageable memory? To be asked only where the trace has such copies."""
    return site.operator in COPIES and ("ageable" in site.call or site.phase in TO_DEVICE)
