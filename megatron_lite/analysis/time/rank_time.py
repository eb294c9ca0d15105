"""Where the steps of one rank go."""

from megatron_lite.analysis.time.figures import RankTime
from megatron_lite.analysis.time.on_device import on_device
from megatron_lite.analysis.time.on_host import on_host
from megatron_lite.analysis.time.placing import Placing
from megatron_lite.analysis.time.steady import SteadySteps
from megatron_lite.analysis.trace.columns import Trace


def rank_time(trace: Trace, placing: Placing) -> RankTime:
    """The figures of a trace whose events are placed; empty ones, with a note, where no step has any work."""
    if not any(step.steady for step in placing.steps):
        return _nothing(trace, placing)
    steady = SteadySteps(placing.steps)
    return on_device(trace, placing, steady) if len(trace.device_rows) else on_host(trace, placing, steady)


def _nothing(trace: Trace, placing: Placing) -> RankTime:
    return RankTime(
        rank=trace.rank,
        device=trace.devices[0] if trace.devices else None,
        on_gpu=len(trace.device_rows) > 0,
        steps=placing.steps,
        step_ms=0.0,
        rows={},
        busy_ms=0.0,
        communication_ms=0.0,
        copy_ms=0.0,
        overlap=None,
        phases=(),
        syncs=(),
        hosts=(),
        loader_host_ms=0.0,
        launches=0.0,
        median_kernel_us=0.0,
        median_launch_interval_us=0.0,
        median_queue_us=0.0,
        launch_bound=False,
        spilled_ms=0.0,
        timeline=(),
        timeline_step=None,
        notes=placing.notes,
    )
