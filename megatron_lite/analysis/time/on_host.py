"""Where the steps of a rank without a GPU go: the main thread's time, since the host is the device.

Each moment of a step is, in this order: saving or evaluating; in the loader; an operator at work on the main thread or on
autograd's; waiting for communication (a backend's span such as gloo:all_reduce runs on a thread of its own, and no operator
does); the garbage collector; else Python between operators. autograd's wrappers count as operators only while nothing is
communicated: DistributedDataParallel waits for gloo inside them.
"""

import re

import numpy as np

from megatron_lite.analysis.intervals import Cover, difference, intersection, joined, union
from megatron_lite.analysis.time.device_covers import communication_names
from megatron_lite.analysis.time.figures import RankTime
from megatron_lite.analysis.time.host_activity import HostActivity, host_activity
from megatron_lite.analysis.time.phase_table import host_phases, host_timeline
from megatron_lite.analysis.time.phases_of import AUTOGRAD
from megatron_lite.analysis.time.placing import Placing
from megatron_lite.analysis.time.sites import CallSites, long_stretches, python_sites
from megatron_lite.analysis.time.steady import SteadySteps
from megatron_lite.analysis.trace.columns import Kind, Trace

COMPILED = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction")
MAY_WAIT = re.compile(
    r"c10d::|record_param_comms|gloo|torch[.:]+distributed|Torch-Compiled Region|_c10d_functional|c10d_functional"
)


def on_host(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """The time of a rank whose trace has no device work. `steady`: at least one step."""
    activity = host_activity(trace, placing)
    communication = intersection(_communication(trace), steady.cover)
    rows, compute = _breakdown(trace, steady, activity, communication)
    sites = CallSites(trace, placing)

    def ms(cover: Cover) -> float:
        return cover.length / 1e6 / steady.count

    talking = ms(communication)
    exposed = ms(rows["exposed_communication"])
    return RankTime(
        rank=trace.rank,
        device=None,
        on_gpu=False,
        steps=placing.steps,
        step_ms=steady.step_ms,
        rows={row: ms(cover) for row, cover in rows.items()},
        busy_ms=ms(joined(compute, communication)),
        communication_ms=talking,
        copy_ms=0.0,
        overlap=1 - exposed / talking if talking else None,
        phases=host_phases(trace, placing, compute, communication, steady.flags),
        syncs=(),
        hosts=python_sites(trace, placing, rows["host"], sites, steady.count),
        loader_host_ms=ms(intersection(activity.data, steady.cover)),
        launches=0.0,
        median_kernel_us=0.0,
        median_launch_interval_us=0.0,
        median_queue_us=0.0,
        launch_bound=False,
        spilled_ms=0.0,
        timeline=host_timeline(trace, placing, communication, steady.typical),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes),
        stretches=long_stretches(trace, placing, rows["host"], sites, steady.flags),
    )


def _communication(trace: Trace) -> Cover:
    """Backends' spans (gloo:all_reduce), on whatever thread."""
    events = trace.events
    rows = np.flatnonzero(communication_names(trace)[events.name] & (events.kind == Kind.ANNOTATION))
    return union(events.start_ns[rows], events.end_ns[rows])


def _breakdown(
    trace: Trace, steady: SteadySteps, activity: HostActivity, communication: Cover
) -> tuple[dict[str, Cover], Cover]:
    """({row: when}, operators at work): rows are disjoint and cover the steady steps."""
    working = _operators_at_work(trace, activity, communication)
    order = {
        "save": activity.save,
        "data_wait": activity.data,
        "compute": working,
        "exposed_communication": communication,
        "garbage_collector": activity.garbage,
    }
    rows, left = {}, steady.cover
    for row, cover in order.items():
        rows[row] = intersection(left, cover)
        left = difference(left, cover)
    return rows | {"host": left}, intersection(working, steady.cover)


def _operators_at_work(trace: Trace, activity: HostActivity, communication: Cover) -> Cover:
    events = trace.events
    compiled = trace.matching(COMPILED.match) & (events.kind == Kind.ANNOTATION)
    mine = ((events.kind == Kind.OP) | compiled) & np.isin(events.thread, activity.threads)
    may_wait = trace.matching(lambda name: bool(AUTOGRAD.match(name) or MAY_WAIT.match(name)))
    sure, others = (union(events.start_ns[rows], events.end_ns[rows]) for rows in (mine & ~may_wait, mine & may_wait))
    return joined(sure, difference(others, communication))
