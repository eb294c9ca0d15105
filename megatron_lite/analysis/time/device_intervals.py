"""What a GPU is busy with, as unions: compute, communication, copies."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, difference, joined, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.trace.columns import Kind, Trace


@dataclass(frozen=True)
class DeviceCovers:
    """Unions over all streams of one device."""

    compute: Cover  # kernels that are not communication
    communication: Cover
    copy: Cover  # memcpy and memset

    @cached_property
    def busy(self) -> Cover:
        return joined(self.compute, self.communication, self.copy)

    @cached_property
    def exposed_communication(self) -> Cover:
        return difference(self.communication, self.compute)

    @cached_property
    def exposed_copy(self) -> Cover:
        return difference(self.copy, joined(self.compute, self.communication))


def device_covers(trace: Trace, rows: np.ndarray) -> DeviceCovers:
    """Of these rows of device work."""
    events = trace.events
    kernel, talks = events.kind[rows] == Kind.KERNEL, communication_names(trace)[events.name[rows]]
    classes = (kernel & ~talks, kernel & talks, ~kernel)
    return DeviceCovers(*(union(events.start_ns[rows[one]], events.end_ns[rows[one]]) for one in classes))


def communication_names(trace: Trace) -> np.ndarray:
    """bool per name of the trace: of a kernel or a host span that communicates?"""
    return trace.passing(is_communication, Kind.KERNEL, Kind.ANNOTATION)
