"""Samples of a device's counters in a Chrome trace: entries "C" of a process "GPU 0 Counters", with one unnamed value.

Kineto writes what CUPTI's PM sampling reads under the metrics' own names (libkineto/src/output_json.cpp,
handleCounterEvent; CuptiPMSamplingProfiler.cpp: each sample at its start). torch's CUPTI monitor, 2.14 and later, gives
the usual ones names for people: "SM Active (%)", "DRAM BW (%)" (torch/profiler/_cupti/monitor_trace.py, _pm_label).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_lite.analysis.trace.columns import CounterSamples, Numbered
from megatron_lite.analysis.trace.kineto_json import NO_ARGS, Event

_PROCESS = re.compile(r"GPU (\d{1,4}) Counters\Z")
_MAX_SAMPLES = 2_000_000  # 40 counters of 8 GPUs, sampled each ms for 6 s
_MAX_VALUE = 1e18  # bytes or cycles of a sample have fewer; what is more is damage
_MAX_US = 2**53  # in ns it fits 64 bits


@dataclass
class CollectedCounters:
    """Samples of the chunks so far."""

    names: Numbered[str] = field(default_factory=Numbered)
    rows: list[tuple[int, int, float, float]] = field(default_factory=list)  # name, device, time in us, value

    def add(self, events: Sequence[Event]) -> None:
        """Append the samples among the entries of a chunk."""
        for event in events:
            if event.ph != "C" or not isinstance(event.pid, str) or event.ts is None:
                continue
            process = _PROCESS.match(event.pid)
            value = (event.args or NO_ARGS).counter
            if process is None or value is None or len(self.rows) >= _MAX_SAMPLES:
                continue
            time_us = float(event.ts)
            if abs(value) <= _MAX_VALUE and abs(time_us) <= _MAX_US:
                self.rows.append((self.names[event.name], int(process[1]), time_us, value))

    def build(self, first_ns: int) -> CounterSamples:
        """Build the columns. first_ns: start of the first event by the file's clock."""
        if not self.rows:
            return CounterSamples()
        table = np.array(self.rows, np.float64)
        return CounterSamples(
            names=tuple(self.names),
            name=table[:, 0].astype(np.int64),
            device=table[:, 1].astype(np.int64),
            time_ns=np.rint(table[:, 2] * 1000).astype(np.int64) - first_ns,
            value=table[:, 3],
        )
