"""The phase of every event: by the range around it (or around its launch), across threads."""

import re
from collections.abc import Callable, Iterator

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, union
from megatron_lite.analysis.time.host_steps import NUMBERED, PROFILER_STEP, HostSteps
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import PYTHON_GC, Phase

# what other people call the trainer's phases
OTHER_NAMES = {
    Phase.DATA: "dataloader data_loader data_loading load_data load_batch get_batch next_batch batch_generator "
    "wait_for_batch fetch_batch dataload",
    Phase.DATA_TO_DEVICE: "to_device h2d copy_batch_to_gpu batch_to_device data_to_gpu copy_to_device",
    Phase.FORWARD: "fwd forward_pass forward_compute forward_step",
    Phase.BACKWARD: "bwd backward_pass backward_compute backward_step",
    Phase.GRAD_SYNC: "all_reduce_gradients allreduce_gradients sync_gradients grads_all_reduce",
    Phase.CLIP_GRAD: "clip_grad_norm grad_clip clip_gradients",
    Phase.OPTIMIZER_STEP: "optimizer optim opt opt_step optim_step optimizer_update",
    Phase.EVAL: "evaluate evaluation validation validate",
    Phase.SAVE: "checkpoint save_checkpoint checkpointing",
}
PHASE_OF_NAME = {str(phase): phase for phase in Phase} | {
    name: phase for phase, names in OTHER_NAMES.items() for name in names.split()
}
PHASE_OF_PATTERN = (  # what PyTorch itself emits
    (re.compile(r"enumerate\(DataLoader\)"), Phase.DATA),
    (re.compile(r"Optimizer\.step#"), Phase.OPTIMIZER_STEP),
    (re.compile(r"(Distributed|FullySharded)DataParallel\.forward"), Phase.FORWARD),
)
ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")  # PyTorch's too: a phase of its own, whatever range it is called in
DECORATION = " \t#=-*<>[]"
AUTOGRAD = re.compile(r"autograd::engine::evaluate_function|\w+Backward\d*$|torch::autograd::AccumulateGrad")
SENDS = re.compile(r"aten::(to|_to_copy|copy_|cuda)$")
TO_DEVICE = re.compile(r"HtoD|HostToDevice|Host ?-> ?Device", re.IGNORECASE)
NO_PHASE = re.compile(rf"nccl|gloo:|c10d::|ucc:|mpi:|{PYTHON_GC}$", re.IGNORECASE)  # it comes inside any
MAX_NAMES = 100  # of ranges that are phases
WRAPPER_SHARE = 0.9  # a range over so much of its step says nothing: what lies inside it is the phase


def known_phase(name: str) -> Phase | None:
    """The phase that a range with this name is; None if the name means none."""
    for pattern, phase in PHASE_OF_PATTERN:
        if pattern.match(name):
            return phase
    plain = name.strip(DECORATION).lower().replace("-", "_").replace(" ", "_")
    return PHASE_OF_NAME.get(plain)


def label_phase(name: str) -> str:
    """What a report calls the range: the trainer's name for it where there is one, else its own without decoration."""
    phase = known_phase(name)
    return str(phase) if phase else name.strip(DECORATION).partition("#")[0].strip() or name


def is_backward(trace: Trace) -> Flags:
    """bool [n]: operators of autograd's engine, by their names or by the forward thread that they name."""
    events = trace.events
    found: Flags = (trace.matching(AUTOGRAD.match) | (events.forward_thread > 0)) & (events.kind == Kind.OP)
    return found


def find_phases(trace: Trace, steps: HostSteps, thread: Integers, moment: Integers) -> tuple[tuple[str, ...], Integers]:
    """(names, index into names per event; -1: none). thread, moment [n]: where the host was for each event, -1: unknown.

    The innermost phase around the moment on its own thread; else on the thread that drives the steps, which stands in
    backward() while autograd's thread works; else what operators tell: autograd's, or that gradients will be taken.
    """
    events, rows = trace.events, _find_phase_ranges(trace, steps)
    labels = {name: label_phase(trace.names[name]) for name in np.unique(events.name[rows])}
    names = list(dict.fromkeys(labels[events.name[row]] for row in rows))
    number_of = np.full(len(trace.names) + 1, -1, np.int16)
    for name, label in labels.items():
        number_of[name] = names.index(label)
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


def _find_phase_ranges(trace: Trace, steps: HostSteps) -> Integers:
    """Rows of the ranges that are phases: known ones on any thread, wherever they are, and the outermost under a step on
    its thread. A range that merely wraps a whole step gives way to what it holds."""
    events, rows = trace.events, trace.rows[Kind.ANNOTATION]
    marks = trace.matching(PROFILER_STEP.match) | trace.matching(NUMBERED.match) | trace.matching(NO_PHASE.match)
    rows = rows[~marks[rows]]
    known = trace.matching(known_phase)
    of_step, inside = trace.matching(set(steps.names).__contains__), union(steps.start_ns, steps.end_ns)
    own = rows[(events.thread[rows] == steps.thread) & ~of_step[rows] & inside.holds(events.start_ns[rows])]
    nest = trace.nest(own)
    top = nest.rows[nest.depth == 0]
    for level in range(3):
        outer = nest.rows[nest.depth == level]
        share = (events.end_ns[outer] - events.start_ns[outer]).sum() > WRAPPER_SHARE * inside.length
        if known[outer].any() or not share or not (nest.depth > level).any():
            top = outer
            break
    rows = np.union1d(rows[(known | trace.matching(ZERO_GRAD.match))[rows]], top)
    names, inverse = np.unique(events.name[rows], return_inverse=True)
    if len(names) <= MAX_NAMES:
        return rows
    # too many names (a name per batch, say): those that add up to least are left out
    lengths = np.bincount(inverse, events.end_ns[rows] - events.start_ns[rows])
    return rows[np.isin(inverse, np.argsort(-lengths, kind="stable")[:MAX_NAMES])]


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
