"""Where the steps of a rank with a GPU go."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, intersection, union
from megatron_lite.analysis.time.device_covers import DeviceCovers, device_covers
from megatron_lite.analysis.time.figures import RankTime
from megatron_lite.analysis.time.gaps import Gaps, gaps_of
from megatron_lite.analysis.time.host_activity import HostActivity, host_activity
from megatron_lite.analysis.time.launches import Launches, launches
from megatron_lite.analysis.time.phase_table import device_phases, device_timeline
from megatron_lite.analysis.time.placing import Placing
from megatron_lite.analysis.time.sites import CallSites, host_sites, sync_sites
from megatron_lite.analysis.time.steady import SteadySteps
from megatron_lite.analysis.time.step_windows import computing_stream
from megatron_lite.analysis.trace.columns import Trace


@dataclass(frozen=True)
class OnDevice:
    """One device's work, and the steps that count."""

    trace: Trace
    placing: Placing
    steady: SteadySteps
    device: int
    rows: np.ndarray  # work of this device, by start

    @cached_property
    def covers(self) -> DeviceCovers:
        return device_covers(self.trace, self.rows)

    @cached_property
    def activity(self) -> HostActivity:
        return host_activity(self.trace, self.placing)

    @cached_property
    def gaps(self) -> Gaps:
        return gaps_of(self.trace, self.rows, self.covers.busy, self.steady.cover, self.activity)

    @cached_property
    def launches(self) -> Launches:
        return launches(self.trace, self.rows[self.steady.flags[self.placing.step[self.rows]]], self.steady.count)

    def ms(self, cover: Cover) -> float:
        """Of the cover inside the steady steps, per step."""
        return intersection(cover, self.steady.cover).length / 1e6 / self.steady.count

    def breakdown(self) -> dict[str, float]:
        """Rows that sum to the step, in ms."""
        covers = self.covers
        rows = {
            "compute": self.ms(covers.compute),
            "exposed_communication": self.ms(covers.exposed_communication),
            "exposed_copy": self.ms(covers.exposed_copy),
        }
        return rows | {row: self.gaps.total(row) / 1e6 / self.steady.count for row in self.gaps.amounts}


def on_device(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """The time of a rank whose trace has device work. `steady`: at least one step."""
    device, _ = computing_stream(trace)
    rows = trace.device_rows[trace.events.device[trace.device_rows] == device]
    one = OnDevice(trace, placing, steady, device, rows)
    breakdown, covers, activity, sites = one.breakdown(), one.covers, one.activity, CallSites(trace, placing)
    talking, pace = one.ms(covers.communication), one.launches
    return RankTime(
        rank=trace.rank,
        device=trace.devices[device] if 0 <= device < len(trace.devices) else None,
        on_gpu=True,
        steps=placing.steps,
        step_ms=steady.step_ms,
        rows=breakdown,
        busy_ms=one.ms(covers.busy),
        communication_ms=talking,
        copy_ms=one.ms(covers.copy),
        overlap=1 - breakdown["exposed_communication"] / talking if talking else None,
        phases=device_phases(trace, placing, rows, steady.flags),
        syncs=sync_sites(trace, placing, activity, one.gaps, sites, steady.flags),
        hosts=host_sites(trace, placing, one.gaps, sites, steady.count),
        loader_host_ms=intersection(activity.data, steady.host_cover).length / 1e6 / steady.count,
        launches=pace.per_step,
        median_kernel_us=pace.kernel_us,
        median_launch_interval_us=pace.interval_us,
        median_queue_us=pace.queue_us,
        launch_bound=pace.bound(breakdown["host"] / steady.step_ms),
        spilled_ms=_spilled_ms(one),
        timeline=device_timeline(trace, placing, rows, steady.typical),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes, *_notes(one)),
    )


def _spilled_ms(one: OnDevice) -> float:
    """Work in the trace whose launch call lies outside of it; of the whole trace."""
    rows = one.rows[one.trace.launch_of[one.rows] < 0]
    return union(one.trace.events.start_ns[rows], one.trace.events.end_ns[rows]).length / 1e6


def _notes(one: OnDevice):
    events, trace = one.trace.events, one.trace
    lost = int((trace.launch_of[one.rows] < 0).sum())
    if lost == len(one.rows):
        yield "no device work can be joined with the call that launched it: its phase and why the GPU idled are unknown"
    elif lost:
        yield (
            f"{lost} of {len(one.rows)} kernels and copies were launched outside of the trace ({_spilled_ms(one):.1f} ms): "
            "they keep the device busy, but belong to no step or phase"
        )
    others = set(events.device[trace.device_rows].tolist()) - {one.device}
    if others:
        yield f"the process drives {len(others) + 1} GPUs; the figures are of GPU {one.device}, which computes most"
