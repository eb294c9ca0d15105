"""The phase of every event: by the range around it (or around its launch), across threads."""

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, union
from megatron_lite.analysis.time.host_steps import NUMBERED, PROFILER_STEP, HostSteps
from megatron_lite.analysis.time.range_names import (
    COMES_INSIDE_ANY,
    NO_PHASE_OF_ITS_OWN,
    drop_numbers,
    find_meaning,
    is_backward,
    is_phase,
    label_phase,
)
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase

SENDS = re.compile(r"aten::(to|_to_copy|copy_|cuda)$")
TO_DEVICE = re.compile(r"HtoD|HostToDevice|Host ?-> ?Device", re.IGNORECASE)
MAX_NAMES = 100  # of ranges that are phases
WRAPPER_SHARE = 0.9  # a range over so much of its step says nothing: what lies inside it is the phase


def find_phases(trace: Trace, steps: HostSteps, thread: Integers, moment: Integers) -> tuple[tuple[str, ...], Integers]:
    """(names, index into names per event; -1: none). thread, moment [n]: where the host was for each event, -1: unknown.

    The innermost phase around the moment on its own thread; else on the thread that drives the steps, which stands in
    backward() while autograd's thread works; else what operators tell: autograd's, or that gradients will be taken.
    """
    events, rows = trace.events, _find_phase_ranges(trace, steps)
    labels = _label_phases(trace, np.unique(events.name[rows]))
    names = list(dict.fromkeys(labels[events.name[row]] for row in rows))
    number_of = np.full(len(trace.names) + 1, -1, np.int16)
    for number, label in labels.items():
        number_of[number] = names.index(label)
    nest = trace.nest(rows)
    position = np.where(thread >= 0, nest.position_at(moment, np.maximum(thread, 0)), -1)
    # a range that begins in the same nanosecond as a phase but lasts longer holds the phase, not the other way round
    wider, ends = trace.rows[Kind.ANNOTATION], events.end_ns[nest.rows]
    while len(wider := wider[position[wider] >= 0]):
        inner = position[wider]
        wider = wider[(events.start_ns[nest.rows[inner]] == moment[wider]) & (ends[inner] < events.end_ns[wider])]
        position[wider] = nest.parent[position[wider]]
    found = nest.row_of(position)
    elsewhere = np.flatnonzero((found < 0) & (thread >= 0) & (thread != steps.thread))
    if steps.thread >= 0:
        main = trace.nest(rows[events.thread[rows] == steps.thread])
        found[elsewhere] = main.row_at(moment[elsewhere], np.full(len(elsewhere), steps.thread))
    phase = np.where(found >= 0, number_of[events.name[found]], -1).astype(np.int16)
    for name, is_inside in _told_by_operators(trace, steps.thread):
        unknown = np.flatnonzero((phase < 0) & (thread >= 0))
        hit = unknown[is_inside(thread[unknown], moment[unknown])]
        if len(hit):
            names = names if name in names else [*names, name]
            phase[hit] = names.index(name)
    return tuple(names), phase


def _label_phases(trace: Trace, names: Integers) -> dict[int, str]:
    """{name: what a report calls its ranges}. Names that differ in numbers alone are one phase."""
    labels = {name: label_phase(trace.names[name]) for name in names.tolist()}
    common = {name: label if is_phase(trace.names[name]) else drop_numbers(label) for name, label in labels.items()}
    variants = Counter(common.values())
    return {name: common[name] if variants[common[name]] > 1 else label for name, label in labels.items()}


def _find_phase_ranges(trace: Trace, steps: HostSteps) -> Integers:
    """Rows of the ranges that are phases: known ones on any thread, wherever they are, and the outermost under a step on
    its thread. A range that merely wraps a whole step gives way to what it holds."""
    events, rows = trace.events, trace.rows[Kind.ANNOTATION]
    of_step = set(steps.names)
    names = trace.passing(lambda name: name not in of_step and _may_be_phase(name), Kind.ANNOTATION)
    rows = rows[names[events.name[rows]]]
    known = trace.passing(is_phase, Kind.ANNOTATION)[events.name]
    inside = union(steps.start_ns, steps.end_ns)
    own = rows[(events.thread[rows] == steps.thread) & inside.holds(events.start_ns[rows])]
    nest = trace.nest(own)
    top = nest.rows[nest.depth == 0]
    for level in range(3):
        outer = nest.rows[nest.depth == level]
        share = (events.end_ns[outer] - events.start_ns[outer]).sum() > WRAPPER_SHARE * inside.length
        if known[outer].any() or not share or not (nest.depth > level).any():
            top = outer
            break
    rows = np.union1d(_drop_recomputed_forward(trace, rows[known[rows]]), top)
    names, inverse = np.unique(events.name[rows], return_inverse=True)
    if len(names) <= MAX_NAMES:
        return rows
    # too many names (a name per batch, say): those that add up to least are left out
    lengths = np.bincount(inverse, events.end_ns[rows] - events.start_ns[rows])
    return rows[np.isin(inverse, np.argsort(-lengths, kind="stable")[:MAX_NAMES])]


def _may_be_phase(name: str) -> bool:
    """No mark of a step, no bookkeeping, no collective, which come inside any phase."""
    if PROFILER_STEP.match(name) or NUMBERED.match(name) or COMES_INSIDE_ANY.match(name):
        return False
    return find_meaning(name) != NO_PHASE_OF_ITS_OWN


def _drop_recomputed_forward(trace: Trace, rows: Integers) -> Integers:
    """`rows` without the forward ranges inside autograd's engine: activations are recomputed there, for backward."""
    events = trace.events
    engine = trace.nest(np.flatnonzero(is_backward(trace)))
    forward = trace.passing(lambda name: find_meaning(name) == Phase.FORWARD.value, Kind.ANNOTATION)[events.name[rows]]
    return rows[~forward | (engine.position_at(events.start_ns[rows], events.thread[rows]) < 0)]


def _told_by_operators(trace: Trace, main_thread: int) -> Iterator[tuple[str, Callable[[Integers, Integers], Flags]]]:
    """(phase, test of threads and moments): what lies inside operators of autograd, or on a thread of its own; then what
    sends tensors to the device; then what gradients will be taken of. Nothing where there is no backward pass."""
    events, operators, backward = trace.events, trace.rows[Kind.OP], is_backward(trace)
    if not backward.any():
        return
    threads, engine = np.setdiff1d(events.thread[backward], [main_thread]), trace.nest(np.flatnonzero(backward))
    yield (
        str(Phase.BACKWARD),
        lambda thread, moment: (engine.position_at(moment, thread) >= 0) | np.isin(thread, threads),
    )
    # the outermost operators that launch a copy to the device
    nest = trace.nest(operators[trace.matching(SENDS.match)[operators]])
    copies = trace.rows[Kind.MEMCPY]
    calls = trace.launch_of[copies[trace.matching(TO_DEVICE.search)[copies]]]
    calls = calls[calls >= 0]
    found = trace.nest(nest.rows[nest.depth == 0]).row_at(events.start_ns[calls], events.thread[calls])
    sending = trace.nest(np.unique(found[found >= 0]))
    yield str(Phase.DATA_TO_DEVICE), lambda thread, moment: sending.position_at(moment, thread) >= 0
    forward = trace.nest(operators[~backward[operators] & (events.sequence[operators] >= 0)])
    yield str(Phase.FORWARD), lambda thread, moment: forward.position_at(moment, thread) >= 0
