"""Work that a step could do without: forward passes that no backward follows, and computing in fp64."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Evidence,
    Finding,
    Observation,
    Recording,
    could_not_look,
    find_lost_time,
    rule,
    saw_nothing,
)
from megatron_lite.analysis.intervals import Flags, Integers, Nesting
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.range_names import is_backward
from megatron_lite.analysis.trace.columns import Kind, Shapes
from megatron_lite.phases import NOT_TRAINING
from megatron_lite.units import counted

# What a model's layers are recognized by. Embeddings and first convolutions tell where a pass begins.
LAYERS = re.compile(
    r"aten::(linear|matmul|mm|bmm|addmm|baddbmm|einsum|embedding|conv\d?d|conv_transpose\d?d"
    r"|scaled_dot_product_attention)$"
)
RECOMPUTED_LAYERS = re.compile(r"aten::(linear|matmul|conv\d?d|layer_norm|scaled_dot_product_attention|embedding)$")
CASTS = ("aten::to", "aten::_to_copy")
UPDATES = re.compile(r"Optimizer\.(step|zero_grad)#")
MIN_PASS_LAYERS = 4  # in a pass: fewer are no model's
ALIKE = 0.8  # of the trained pass: beginnings of two passes that are of one model
WITHOUT_GRADIENTS = "torch.no_grad()"


@dataclass(frozen=True)
class ForwardPass:
    """A pass through layers: their operators follow each other on a thread, with no backward, update or other kind of
    pass between."""

    rows: Integers  # the outermost operators of its layers
    layers: tuple[tuple[str, object], ...]  # name and weights' size of each
    is_followed: bool  # a backward pass goes through it
    is_recorded: bool  # autograd recorded it


@dataclass(frozen=True)
class _LayerCalls:
    """The outermost operators of layers outside of backward, by row of the trace."""

    rows: Integers
    is_followed: Flags  # a backward pass goes through it
    is_recorded: Flags  # autograd recorded it

    def select(self, wanted: Integers | Flags) -> "_LayerCalls":
        """Choose those that an index or a mask picks, in its order."""
        return _LayerCalls(self.rows[wanted], self.is_followed[wanted], self.is_recorded[wanted])


def find_forward_passes(one: RankFacts) -> list[ForwardPass]:
    """List the passes of the steady steps, by start; [] where the trace does not tell which ones have a backward."""
    sequence = one.trace.events.sequence
    backward = is_backward(one.trace)
    followed = np.unique(sequence[backward & (sequence >= 0)])
    if not len(followed):
        return []
    calls = _find_layer_calls(one, backward, followed)
    calls = calls.select(np.argsort(calls.rows))
    calls = calls.select(_is_training(one, calls.rows))
    return _cut_into_passes(one, calls, backward)


def _find_layer_calls(one: RankFacts, backward: Flags, followed: Integers) -> _LayerCalls:
    """Layers' outermost operators in steady steps.

    Args:
        one: The rank.
        backward: [events], whether an event belongs to backward.
        followed: Sequence numbers that operators of backward have: those of the forward operators they belong to.
    """
    trace = one.trace
    events = trace.events
    operators = trace.rows[Kind.OP]
    nest = trace.nest(one.in_steady_steps(operators))
    sequence = events.sequence[nest.rows]
    # autocast keeps the weights' casts of the first pass for later ones, whose backward goes through them
    is_a_cast = trace.passing(CASTS.__contains__, Kind.OP)
    casts = operators[is_a_cast[events.name[operators]]]
    is_cast = np.isin(sequence, events.sequence[casts])
    has_backward = np.isin(sequence, followed) & ~is_cast

    in_backward = _spread_to_children(nest, backward[nest.rows])
    is_named = trace.passing(LAYERS.match, Kind.OP)
    is_layer = is_named[events.name[nest.rows]] & ~in_backward
    has_parent = nest.parent >= 0
    inside_another = _spread_to_children(nest, is_layer)[nest.parent] & has_parent
    outermost = is_layer & ~inside_another

    # the sequence number may stand at an operator around the layer's or inside of it
    is_followed = _spread_to_children(nest, has_backward) | _spread_to_parents(nest, has_backward)
    return _LayerCalls(nest.rows[outermost], is_followed[outermost], (sequence >= 0)[outermost])


def _is_training(one: RankFacts, rows: Integers) -> Flags:
    """Tell for each row whether it lies in a phase that belongs to training: not in evaluation and the like."""
    others = [number for number, name in enumerate(one.placing.phases) if name in NOT_TRAINING]
    return ~np.isin(one.placing.phase[rows], others)


def _cut_into_passes(one: RankFacts, calls: _LayerCalls, backward: Flags) -> list[ForwardPass]:
    """Cut calls into passes: those that follow each other on a thread and are of one kind.

    Backward or an update ends a pass.

    Args:
        one: The rank.
        calls: Operators of layers, by row.
        backward: [events], whether an event belongs to backward.
    """
    if not len(calls.rows):
        return []
    events = one.trace.events
    updates = one.rows_named(UPDATES.match, Kind.ANNOTATION)
    cuts = np.concatenate((np.flatnonzero(backward), updates))
    cuts_ns = np.sort(events.start_ns[cuts])
    between_cuts = np.searchsorted(cuts_ns, events.start_ns[calls.rows])
    thread = events.thread[calls.rows]
    step = one.placing.step[calls.rows]
    keys = np.stack((thread, step, between_cuts, calls.is_followed, calls.is_recorded))
    begins = np.flatnonzero((np.diff(keys, axis=1) != 0).any(axis=0)) + 1
    passes = []
    for part in np.split(np.arange(len(calls.rows)), begins):
        rows = calls.rows[part]
        first = part[0]
        passes.append(
            ForwardPass(
                rows=rows,
                layers=tuple(_describe_layer(one, row) for row in rows),
                is_followed=bool(calls.is_followed[first]),
                is_recorded=bool(calls.is_recorded[first]),
            )
        )
    return passes


def find_recomputed(one: RankFacts) -> Integers:
    """Outermost operators of the layers that run forward again inside backward (activation checkpointing).

    They record how to take gradients and belong to no forward thread. Backward's own operations do so too where a graph
    of them is made, but none is a whole layer's.
    """
    events = one.trace.events
    backward = is_backward(one.trace)
    nest = one.trace.nest(one.in_steady_steps(one.trace.rows[Kind.OP]))
    rows = nest.rows
    is_recorded = events.sequence[rows] >= 0
    is_of_forward = (events.forward_thread[rows] <= 0) & ~backward[rows]
    is_below_engine = (nest.parent >= 0) & backward[rows][nest.parent]
    again = is_recorded & is_of_forward & is_below_engine
    is_named = one.trace.passing(RECOMPUTED_LAYERS.match, Kind.OP)
    is_layer = is_named[events.name[rows]]
    layers = is_layer & _spread_to_children(nest, again)
    if int(layers.sum()) < MIN_PASS_LAYERS * one.steady_steps:
        return rows[:0]
    return np.sort(rows[again])


def _spread_to_children(nest: Nesting, flags: Flags) -> Flags:
    """Tell for each range whether it, or any range around it, has the flag."""
    found = flags.copy()
    for depth in range(1, int(nest.depth.max(initial=0)) + 1):
        here = np.flatnonzero(nest.depth == depth)
        found[here] |= found[nest.parent[here]]
    return found


def _spread_to_parents(nest: Nesting, flags: Flags) -> Flags:
    """Tell for each range whether it, or any range inside of it, has the flag."""
    found = flags.copy()
    for depth in range(int(nest.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero((nest.depth == depth) & found)
        found[nest.parent[here]] = True
    return found


def _describe_layer(one: RankFacts, row: int) -> tuple[str, object]:
    """Name and weights' size of a layer's operator; the size is () where shapes were not recorded."""
    name = one.trace.name_of(row)
    index = int(one.trace.events.shapes[row])
    if index < 0:
        return name, ()
    dims = one.trace.shapes[index].dims
    weights = 0 if name == "aten::embedding" else 1
    return name, dims[weights] if len(dims) > weights else ()


def _repeats(found: ForwardPass, trained: ForwardPass, has_shapes: bool) -> bool:
    """Whether the pass goes through the same layers as the trained one, once or more often.

    Args:
        found: The pass.
        trained: A pass that backward goes through.
        has_shapes: Whether layers are known by the sizes of their weights; else their number must be a multiple.
    """
    number = len(trained.layers)
    own = len(found.layers)
    shorter = min(number, own)
    if shorter < MIN_PASS_LAYERS:
        return False
    if not has_shapes and own % number:
        return False
    alike = 0
    while alike < shorter and found.layers[alike] == trained.layers[alike]:
        alike += 1
    return alike >= max(MIN_PASS_LAYERS, ALIKE * number)


@rule("forward-without-backward", "forward passes that no backward follows", "phases", "operators", needs="trace")
def find_forward_without_backward(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The trained model's layers run forward again, and no backward goes through that pass.

    Meaning: a second call of the model for a metric or a log, an evaluation in the step, a teacher, an average of the
        weights (EMA) or a generator without gradients. Each costs as much as the forward pass of training.
    Measured: products, convolutions and attention of the host's trace that come in the same order (and, with shapes,
        with weights of the same sizes) as in the trained pass, and that no operation of backward belongs to. Ranges
        named as evaluation or saving are left out: they have a finding of their own. Recomputation inside backward does
        not count.
    Cost: device time of what such passes launch; without a GPU the host's time.
    Do: keep the first result instead of calling the model again; evaluate every few hundred steps; compute a teacher's
        results once and store them.
    Flags: --eval-interval for evaluations; none for the others.
    False alarm: a method that needs the pass: distillation, EMA targets, GANs, policy gradients with a reference model.
    """
    passes = find_forward_passes(one)
    trained = [found for found in passes if found.is_followed]
    if not trained:
        return could_not_look(Evidence("no forward pass that a backward follows", one.where()))
    longest = max(trained, key=lambda found: len(found.layers))
    others = [found for found in passes if not found.is_followed]
    repeated = [found for found in others if _repeats(found, longest, one.trace.with_shapes)]
    if not repeated:
        return saw_nothing(one, "a backward follows each forward pass of the model")
    cost = _measure_passes(one, repeated)
    how = f"under {WITHOUT_GRADIENTS}"
    advice = "use the first pass' result, evaluate less often, or compute a teacher's results once"
    if repeated[0].is_recorded:
        how = "with gradients recorded and never used"
        advice = f"use the first pass' result; put what needs no gradients under {WITHOUT_GRADIENTS}"
    passes_per_step = _count_layers(repeated) / len(longest.layers) / one.steady_steps
    again = counted(round(passes_per_step, 1), "more forward pass")
    text = f"{again} per step of the trained layers, {how}: {one.of_step(cost)}"
    layers_per_step = _count_layers(trained) / one.steady_steps
    place = one.where(int(longest.rows[0]))
    more = Evidence(f"{layers_per_step:,.0f} layers' operators per step have a backward", place)
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        more,
        row=int(repeated[0].rows[0]),
        certain=False,
    )


def _count_layers(passes: Sequence[ForwardPass]) -> int:
    """Count the layers' operators of several passes."""
    return sum(len(found.layers) for found in passes)


def _measure_passes(one: RankFacts, passes: list[ForwardPass]) -> float:
    """Measure ms per step of the device that the passes take; without a GPU of the host."""
    events = one.trace.events
    first = np.array([found.rows[0] for found in passes])
    last = np.array([found.rows[-1] for found in passes])
    start_ns = events.start_ns[first]
    end_ns = events.end_ns[last]
    if not one.time.on_gpu:
        return float((end_ns - start_ns).sum()) / 1e6 / one.steady_steps
    work = one.work_rows()
    launcher = one.placing.operator[work]
    is_launched = launcher >= 0
    work = work[is_launched]
    launcher = launcher[is_launched]
    thread = events.thread[first]
    nest = Nesting(np.arange(len(passes)), start_ns, end_ns, thread)
    place = nest.position_at(events.start_ns[launcher], events.thread[launcher])
    return one.covered_ms(work[place >= 0])


FP64 = ("double", "c10::complex<double>")
WHOLE = 0.9  # of the computing: a job that wants fp64 throughout


def holds_fp64(shapes: Shapes) -> bool:
    """Whether any argument is a tensor of fp64 with more than one element."""
    for dtype, dims in zip(shapes.dtypes, shapes.dims):
        if dtype in FP64 and isinstance(dims, tuple) and set(dims) - {1}:
            return True
    return False


@rule("fp64-compute", "computing in fp64", "kernels", "operators", needs="trace")
def find_fp64_compute(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Part of the model computes in fp64.

    Meaning: a tensor of numpy's default type, .double() or a Python float64 scale turned a block's activations or
        weights into fp64. It moves twice the bytes of fp32; GPUs for graphics and many newer ones for training compute
        fp64 32 to 64 times slower than fp32.
    Measured: time of operators with an fp64 tensor among their arguments (needs shapes), or of kernels whose name says
        fp64.
    Cost: up to that time; in fp32 a part of it remains.
    Do: convert inputs and buffers to the model's type: .float(), torch.from_numpy(x).to(torch.float32),
        torch.set_default_dtype(torch.float32).
    Flags: --pytorch-profiler-collect-shapes (record_shapes=True) names the operators.
    False alarm: sums or a solver that need the digits.
    """
    rows = _find_fp64_rows(one)
    if not len(rows) and not one.trace.with_shapes:
        return could_not_look(record=Recording.SHAPES)
    if not len(rows):
        return saw_nothing(one, "nothing computes in fp64")
    cost = one.covered_ms(rows)
    operators = one.placing.operator[rows] if one.time.on_gpu else rows
    names = one.trace.events.name[np.where(operators >= 0, operators, rows)]
    groups = {one.trace.names[int(index)]: rows[names == index] for index in np.unique(names)}
    times_ms = {name: one.covered_ms(group) for name, group in groups.items()}
    shown = []
    for name in sorted(groups, key=lambda name: -times_ms[name])[:MAX_SHOWN]:
        group = groups[name]
        times = counted(one.per_step(group), "time")
        told = f"{name} in fp64: {times} per step, {in_ms(times_ms[name])}"
        shown.append(Evidence(told, one.where(int(group[0]))))
    text = f"operators in fp64 take {one.of_step(cost)}"
    advice = "convert the inputs and weights of these operators to fp32 or the model's type (.float())"
    in_part = cost < WHOLE * one.time.rows.get("compute", 0.0)
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        row=int(rows[0]),
        certain=in_part,
        cheap=True,
    )


def _find_fp64_rows(one: RankFacts) -> Integers:
    """Find device work (without a GPU: operators) in fp64."""
    events = one.trace.events
    are_fp64 = [holds_fp64(shapes) for shapes in one.trace.shapes]
    of_unknown_shape = [False]
    is_fp64 = np.array(are_fp64 + of_unknown_shape, bool)
    operators = one.rows_named(lambda name: name.startswith("aten::"), Kind.OP)
    computing = np.asarray(operators[is_fp64[events.shapes[operators]]], np.int64)
    if not one.time.on_gpu:
        return computing
    work = one.work_rows()
    kernels = {row.name for row in one.kernels.rows if row.precision == "fp64"}
    says_fp64 = one.trace.passing(kernels.__contains__, Kind.KERNEL)
    is_named = says_fp64[events.name[work]]
    is_launched = np.isin(one.placing.operator[work], computing)
    found: Integers = work[is_named | is_launched]
    return found
