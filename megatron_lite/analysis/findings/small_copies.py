"""Many small copies between host and device.

Meaning: a batch travels as dozens of little tensors, or values are fetched one by one. Each copy
    is a driver call of microseconds, whatever its size.
Measured: copies to and from the device of at most 64 KiB in steady steps; cost is the host's time
    inside their calls.
Cost: while the host is inside the calls it launches no kernels. 64 KiB take under 3 us on the
    bus, less than the call.
Do: put the fields of a batch into one tensor and split it on the device; gather values on the
    device and fetch them together, seldom.
Flags: --log-interval 100 for values that are only printed.
False alarm: copies in a process or stream that has nothing else to launch: then the host's time
    is free.
"""

import re

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    of_step,
    per_step_ms,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.units import size

CODE = "small-copies"
TITLE = "many small copies"
SMALL_BYTES = 64 * 2**10  # about 2.6 us at 25 GB/s of PCIe 4.0 x16: less than the call takes
MANY = 32  # per step: a batch's few fields and a logged value are far fewer
ACROSS = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost", re.IGNORECASE)


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.time.on_gpu:
        return None
    rows = _small(one)
    number = len(rows) / steady_steps(one)
    calls = one.trace.launch_of[rows]
    cost = per_step_ms(one, calls[calls >= 0])
    if number < MANY or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    median = float(np.median(one.trace.events.num_bytes[rows]))
    text = (
        f"{number:,.0f} copies per step, the median one of {size(median)}; their calls take the host "
        f"{of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, rows[0])),),
        advice="copy one tensor per batch and split it on the device; fetch values together and seldom",
        flags=("--log-interval 100",),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _small(one: RankFacts) -> np.ndarray:
    rows = rows_named(one, ACROSS.search, Kind.MEMCPY)
    num_bytes = one.trace.events.num_bytes[rows]
    return rows[(num_bytes >= 0) & (num_bytes <= SMALL_BYTES)]
