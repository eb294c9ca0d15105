"""Many small copies between host and device.

Meaning: a batch travels as dozens of little tensors, or values are fetched one by one. Each copy is a driver call of
    microseconds, whatever its size.
Measured: copies to and from the device of at most 64 KiB in steady steps; cost is the host's time inside their calls.
Cost: while the host is inside the calls it launches no kernels. 64 KiB take under 3 us on the bus, less than the
    call.
Do: put the fields of a batch into one tensor and split it on the device; gather values on the device and fetch them
    together, seldom.
Flags: --log-interval 100 for values that are only printed.
False alarm: copies in a process or stream that has nothing else to launch: then the host's time is free.
"""

import re

import numpy as np

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.step_measurements import per_step, per_step_ms, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.units import size

CODE, TITLE = "small-copies", "many small copies"
SMALL_BYTES = 64 * 2**10  # about 2.6 us at 25 GB/s of PCIe 4.0 x16: less than the call takes
MANY = 32  # per step: a batch's few fields and a logged value are far fewer
ACROSS = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost", re.IGNORECASE)


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    rows, num_bytes = rows_named(one, ACROSS.search, Kind.MEMCPY), one.trace.events.num_bytes
    rows = rows[(num_bytes[rows] >= 0) & (num_bytes[rows] <= SMALL_BYTES)]
    if per_step(one, rows) < MANY:
        return None
    calls = one.trace.launch_of[rows]
    cost, median = per_step_ms(one, calls[calls >= 0]), size(float(np.median(num_bytes[rows])))
    text = f"{per_step(one, rows):,.0f} copies per step, the median one of {median}; their calls take the host"
    text += f" {of_step(cost, one)}"
    advice = "copy one tensor per batch and split it on the device; fetch values together and seldom"
    return find_lost_time(
        one, cost, text, advice, row=rows[0], flags=("--log-interval 100",), certain=False, cheap=True
    )
