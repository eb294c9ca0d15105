"""How fast the host launches, and whether that is what holds the GPU back."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.trace.columns import Kind, Trace

# Thresholds: an A100 under DDP with 76% idle time must be found, a CUDA graph with 64% (queued for 162 ms) must not
IDLE_SHARE, KERNEL_TO_INTERVAL, QUEUE_US = 0.15, 1.5, 50.0


@dataclass(frozen=True)
class Launches:
    """Medians in us over the steady steps; 0 where there is none."""

    per_step: float  # kernels
    kernel_us: float
    interval_us: float  # between launch calls of the same thread
    queue_us: (
        float  # from the end of a launch call to the kernel's start; below 0 where it starts before the call returns
    )

    def bound(self, host_share: float) -> bool:
        """Is the host too slow to launch? `host_share`: of the step, in which the GPU waited for the host itself."""
        return (
            host_share >= IDLE_SHARE
            and 0 < self.kernel_us < KERNEL_TO_INTERVAL * self.interval_us
            and self.queue_us < QUEUE_US
        )


def launches(trace: Trace, kernels: np.ndarray, steps: int) -> Launches:
    """Of the rows `kernels` (device work of the steady steps, other kinds are left out)."""
    events = trace.events
    kernels = kernels[events.kind[kernels] == Kind.KERNEL]
    if not len(kernels):
        return Launches(0.0, 0.0, 0.0, 0.0)
    launch = trace.launch_of[kernels]
    known, calls = launch >= 0, np.unique(launch[launch >= 0])
    calls = calls[np.lexsort((events.start_ns[calls], events.thread[calls]))]
    between = np.diff(events.start_ns[calls])[np.diff(events.thread[calls]) == 0]
    queue = events.start_ns[kernels[known]] - events.end_ns[launch[known]]
    return Launches(
        len(kernels) / steps,
        _median_us(events.end_ns[kernels] - events.start_ns[kernels]),
        _median_us(between),
        _median_us(queue),
    )


def _median_us(lengths: np.ndarray) -> float:
    return float(np.median(lengths)) / 1e3 if len(lengths) else 0.0
