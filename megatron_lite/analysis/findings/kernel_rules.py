"""Operators that compute or move more than they need."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_nothing,
    saw_wrong,
    tell_more,
)
from megatron_lite.analysis.findings.kernel_edits import ShortenedKernels, shorten_kernels
from megatron_lite.analysis.findings.update_rules import OPTIMIZER_PHASE, find_unfused_optimizer
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.kernels.kernel_results import KernelRow, Role
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.units import counted, significant

MIN_TOKENS = 128  # below, the scores are no larger than the activations around them
MIN_TOKENS_ON_CPU = 512  # at 256 explicit attention was measured to be the faster one


@rule("attention-scores", "attention that writes its scores", "kernels", "operators", "roofline", needs="trace")
def find_attention_scores(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Attention writes its scores to memory.

    Meaning: queries times keys, the mask, softmax and dropout each read and write a tensor of batch x heads x T x T.
        Fused attention (flash, memory-efficient, cuDNN) keeps the scores inside the kernel.
    Measured: device time (without a GPU: operators' time) of all operators that read a tensor whose last two dimensions
        are the T x T of a softmax; needs --pytorch-profiler-collect-shapes. The product that writes the scores is not
        in it.
    Cost: up to that time, and memory: the scores of every layer wait for backward.
    Do: torch.nn.functional.scaled_dot_product_attention with a causal flag instead of a mask tensor.
    Flags: --attention-backend auto (or flash); not unfused or local; --explain-attention says why a kernel was
        rejected.
    False alarm: on a CPU at short sequences explicit attention can be the faster one: try both.
    """
    if not one.trace.with_shapes:
        return could_not_look(record=Recording.SHAPES)
    lengths = _find_score_lengths(one)
    rows = _find_work_on_scores(one, lengths)
    if not len(rows):
        return saw_nothing(one, "no operator reads the scores of attention")
    cost = one.covered_ms(rows)
    sizes = " and ".join(f"{length} x {length}" for length in sorted(lengths))
    text = f"operators on {sizes} scores take {one.of_step(cost)}"
    flag = "--attention-backend auto"
    advice = f"fused attention: {flag}"
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        row=int(rows[0]),
        flags=(flag,),
        certain=one.time.on_gpu,
    )


def _find_score_lengths(one: RankFacts) -> set[int]:
    """Find the T of tensors [..., T, T] that a softmax reads, where T is long enough to matter."""
    shapes = one.trace.shapes
    softmax = one.rows_named(lambda name: "softmax" in name and "log_softmax" not in name, Kind.OP)
    lengths = set()
    for index in np.unique(one.trace.events.shapes[softmax]):
        if index >= 0:
            lengths |= find_score_tensors(shapes[index].dims)
    least = MIN_TOKENS if one.time.on_gpu else MIN_TOKENS_ON_CPU
    return {length for length in lengths if length >= least}


def _find_work_on_scores(one: RankFacts, lengths: set[int]) -> Integers:
    """Find device work (without a GPU: operators) whose operator reads a tensor [..., T, T], T one of `lengths`."""
    is_on_scores = [bool(find_score_tensors(shape.dims) & lengths) for shape in one.trace.shapes]
    of_unknown_shape = [False]
    on_scores = np.array(is_on_scores + of_unknown_shape)
    rows = one.work_rows()
    operators = one.placing.operator[rows] if one.time.on_gpu else rows
    shapes = one.trace.events.shapes[np.maximum(operators, 0)]
    shapes = np.where(operators >= 0, shapes, -1)
    found: Integers = rows[on_scores[shapes]]
    return found


def find_score_tensors(dims: tuple[Any, ...]) -> set[int]:
    """Find T of every argument [..., T, T] with batch or heads in front."""
    lengths = set()
    for arg in dims:
        is_tensor = all(isinstance(size, int) for size in arg)
        if is_tensor and len(arg) >= 3 and arg[-1] == arg[-2]:
            lengths.add(arg[-1])
    return lengths


MATH = "aten::_scaled_dot_product_attention_math"


@rule("attention-dropout", "attention dropout without a fused kernel", "kernels", "operators", needs="trace")
def find_attention_dropout(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Dropout inside attention keeps a CPU from using its fused kernel.

    Meaning: PyTorch's fused attention for CPUs knows no dropout. With --attention-dropout above 0 it falls back to the
        formula, with all scores in memory. Megatron-LM's default is 0.1.
    Measured: aten::_scaled_dot_product_attention_math in the trace of a run on a CPU whose plan has attention dropout;
        cost is the time of those calls (forward only: backward's share is not marked in the trace).
    Cost: at long sequences several times the fused kernel's time, and memory for the scores.
    Do: train without attention dropout, as most large models are; try it at your sequence length.
    Flags: --attention-dropout 0.
    False alarm: short sequences, where the formula may be the faster one.
    """
    dropout = facts.settings.attention_dropout
    if dropout is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    rows = one.rows_named(MATH.__eq__, Kind.OP)
    if one.time.on_gpu or not dropout or not len(rows):
        return saw_nothing(one, "no attention that dropout keeps from its fused kernel")
    cost = one.covered_ms(rows)
    number = counted(round(one.per_step(rows)), "unfused call")
    text = f"--attention-dropout {dropout:g}: {number}, forward alone {one.of_step(cost)}"
    flag = "--attention-dropout 0"
    advice = f"train without dropout inside attention: {flag}"
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        row=rows[0],
        flags=(flag,),
        certain=False,
    )


ORDERED = ("aten::contiguous", "aten::reshape", "aten::_reshape_copy")


@rule("layout-copies", "copies into another layout", "operators", "kernels", needs="trace")
def find_layout_copies(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Tensors are copied because their layout does not suit the next operator.

    Meaning: .contiguous() on a transposed or sliced view, and reshape() where a view cannot have the new shape, read
        and write the whole tensor and compute nothing.
    Measured: device time (without a GPU: operators' time) of what aten::contiguous and aten::reshape launch, where they
        copy.
    Cost: up to that time, and the memory of the copies.
    Do: keep one layout from the start; use view, unflatten or einsum on what is contiguous; hand strided tensors to
        operators that take them (matmul, scaled_dot_product_attention); choose channels_last for the whole model, or
        for nothing.
    Flags: --pytorch-profiler-collect-shapes names the sizes, --pytorch-profiler-collect-callstack the lines.
    False alarm: a kernel that takes contiguous tensors only.
    """
    rows = _find_layout_operators(one)
    if not len(rows):
        return saw_nothing(one, "no copy into another layout")
    groups = _group_by_size(one, rows)
    times_ms = {}
    for name, group in groups.items():
        times_ms[name] = one.covered_ms(one.work_under(group))
    shown = []
    for name in sorted(times_ms, key=lambda name: -times_ms[name])[:MAX_SHOWN]:
        group = groups[name]
        number = counted(one.per_step(group), "time")
        told = f"{name}: {in_ms(times_ms[name])}, {number} per step"
        shown.append(Evidence(told, one.where(int(group[0]))))
    cost = one.covered_ms(one.work_under(rows))
    text = f"{counted(one.per_step(rows), 'copy')} into another layout per step: {one.of_step(cost)}"
    advice = "leave .contiguous() out where the next operator takes strides, and keep one layout from the start"
    return find_lost_time(one, cost, text, advice, *shown, certain=False)


def _find_layout_operators(one: RankFacts) -> Integers:
    """Find the operators that change a layout and copy for it."""
    events = one.trace.events
    copies = one.rows_named("aten::copy_".__eq__, Kind.OP)
    nest = one.trace.nest(one.rows_named(ORDERED.__contains__, Kind.OP))
    around = nest.position_at(events.start_ns[copies], events.thread[copies])
    return nest.row_of(np.unique(around[around >= 0]))


def _group_by_size(one: RankFacts, rows: Integers) -> dict[str, Integers]:
    """Group operators by name and size of their first argument, as in "aten::contiguous [64, 128]"."""
    groups: dict[str, list[int]] = {}
    for row in rows.tolist():
        name = one.trace.name_of(row)
        index = int(one.trace.events.shapes[row])
        if index >= 0:
            first_argument = one.trace.shapes[index].dims[:1]
            sizes = [str(list(dims)) for dims in first_argument]
            name = " ".join([name, *sizes])
        groups.setdefault(name, []).append(row)
    return {name: np.array(group) for name, group in groups.items()}


MAX_COPY_SHARE = 0.10  # of the step: a transformer with fused kernels and 16-bit weights stays at a few percent
MAX_COPY_SHARE_ON_CPU = 0.25  # there the copy of a small tensor costs as much as any small operator
BY_DESIGN = {Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value}  # 16-bit gradients and weights become fp32 and back
MOST = 0.5


@rule("copy-share", "copying, casting and reordering tensors", "kernels", "operators", needs="trace")
def find_copy_share(facts: Facts, one: RankFacts) -> Finding | Observation:
    """A large part of the work is copying, casting and reordering tensors.

    Meaning: .contiguous(), .to(dtype), cat, clone and their kin read and write memory and compute nothing. Autocast
        casts weights in every forward; a transposed view that the next operator cannot read is copied first.
    Measured: device time (without a GPU: operators' own time) of kernels whose role is copying or casting, by the
        operator that launched them.
    Cost: up to that time; what a layout truly needs stays.
    Do: keep weights in the precision they compute in instead of autocast; fix the layout once, before the hot path;
        write into the result (out=) instead of cat; compile, which folds casts into their neighbors.
    Flags: --bf16 or --fp16 of this trainer hold 16-bit weights and no autocast; --torch-compile.
    False alarm: fp32 gradients of 16-bit weights, which are cast by design; without a GPU, copies in backward and in
        the optimizer's step are not counted for that reason.
    """
    copies = _list_copies(one)
    cost = sum(copy.ms for copy in copies)
    if one.time.on_gpu:
        cost = one.kernels.roles.get(Role.CAST_COPY, 0.0)
    limit = MAX_COPY_SHARE if one.time.on_gpu else MAX_COPY_SHARE_ON_CPU
    look = could_not_look()
    if _has_work(one):
        what = "copying, casting and reordering tensors"
        if not one.time.on_gpu:
            what += " outside backward and the optimizer's step"
        told = f"{what}: {one.of_step(cost)}; {limit:.0%} would be much"
        look = saw(Evidence(told, one.where()))
    layout = find_layout_copies(facts)
    if layout is not None and (layout.cost_ms or 0.0) > MOST * cost:
        return look  # layout-copies says which ones
    shown = []
    for copy in copies[:MAX_SHOWN]:
        text = f"{copy.name}: {in_ms(copy.ms)}, {significant(copy.per_step)} per step"
        shown.append(Evidence(text, copy.phase))
    text = f"copies and casts take {one.of_step(cost)}"
    advice = "16-bit weights instead of autocast, one layout from the start, torch.compile to fold casts away"
    flags = ("--torch-compile",)
    found = find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        flags=flags,
        certain=False,
        at_least=limit,
    )
    return tell_more(found, look)


@dataclass(frozen=True, order=True)
class Copies:
    """Copies and casts of one name in one phase."""

    ms: float  # per step
    name: str
    phase: str
    per_step: float


def _list_copies(one: RankFacts) -> list[Copies]:
    """List copies and casts, longest first: kernels by their operators, or without a GPU operators."""
    copies = []
    for kernel in one.kernels.rows:
        if kernel.role is Role.CAST_COPY:
            name = f"{kernel.short} under {kernel.operator or 'no operator'}"
            copies.append(Copies(kernel.ms, name, kernel.phase, kernel.per_step))
    if not copies:
        for row in one.kernels.operators:
            if row.role is Role.CAST_COPY and row.phase not in BY_DESIGN:
                copies.append(Copies(row.self_ms, row.name, row.phase, row.per_step))
    return sorted(copies, reverse=True)


def _has_work(one: RankFacts) -> bool:
    """Whether a trace has a step and work in it whose role is known."""
    return one.time.step_ms > 0 and any(one.kernels.roles.values())


# Of the step: below, compiling saves less than a run's noise against what it costs at the start.
MAX_ELEMENTWISE_SHARE = 0.15


@rule("unfused-elementwise", "elementwise kernels one by one", "kernels", needs="trace")
def find_unfused_elementwise(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Elementwise kernels that a compiler would join.

    Meaning: bias, activation, dropout, residual and scaling each read a tensor from memory and write one back, at one
        or two operations per number: memory is the limit, not arithmetic, so that half precision alone does not halve
        them.
    Measured: device time of elementwise kernels outside of compiled regions, per steady step; without those of an
        update that unfused-optimizer counts.
    Cost: up to that time. Joined, a chain of them costs one read and one write.
    Do: compile the layers; use fused operators (fused bias + activation, fused dropout + residual).
    Flags: --torch-compile here; in Megatron-LM its fusions are on unless a --no-...-fusion flag turns them off.
    False alarm: a model whose own work is elementwise.
    """
    look = _look_at_elementwise(one)
    if facts.compiles or not one.time.on_gpu:
        return look
    rows = [row for row in one.kernels.rows if row.role is Role.ELEMENTWISE]
    cost = one.kernels.roles.get(Role.ELEMENTWISE, 0.0)
    if find_unfused_optimizer(facts) is not None:
        # a fused update has none of them, and that finding has counted them
        of_update = [row for row in rows if OPTIMIZER_PHASE.match(row.phase)]
        cost -= sum(row.ms for row in of_update)
        rows = [row for row in rows if row not in of_update]
    kernels = counted(round(sum(row.per_step for row in rows)), "elementwise kernel")
    text = f"{kernels} per step: {one.of_step(cost)}"
    shown = []
    for row in rows[:MAX_SHOWN]:
        times = f"{in_ms(row.ms)}, {significant(row.per_step)} per step"
        shown.append(Evidence(f"{row.short}: {times}", row.phase))
    found = find_lost_time(
        one,
        cost,
        text,
        "compile the layers, so that chains of elementwise operators become one kernel",
        *shown,
        flags=("--torch-compile",),
        certain=False,
        at_least=MAX_ELEMENTWISE_SHARE,
        edit=_join_chains(facts, rows),
    )
    return tell_more(found, look)


def _join_chains(facts: Facts, kernels: Sequence[KernelRow]) -> Edit:
    """Build the edit of elementwise kernels that become one where they follow each other on a stream.

    The longest of a chain is left: it reads and writes memory at the rate at which it did.

    Args:
        facts: the run.
        kernels: those that a compiler joins.
    """
    names = frozenset(kernel.name for kernel in kernels)
    return shorten_kernels(facts, "compile chains of elementwise kernels", partial(_choose_chained, names=names))


def _choose_chained(rank: RankFacts, names: Collection[str]) -> ShortenedKernels:
    """Choose the kernels of chains: all time of the longest of each is left, of the others nothing.

    Those of the update, which no compiler of layers joins, stay as they are.

    Args:
        rank: the rank.
        names: of the kernels.
    """
    events = rank.trace.events
    rows = rank.in_steady_steps(rank.trace.device_rows)
    rows = rows[np.lexsort((events.start_ns[rows], events.stream[rows], events.device[rows]))]
    phase = rank.placing.phase[rows]
    of_update = [number for number, name in enumerate(rank.placing.phases) if OPTIMIZER_PHASE.match(name)]
    is_named = rank.trace.passing(names.__contains__, Kind.KERNEL)[events.name[rows]]
    is_link = is_named & ~np.isin(phase, of_update)
    lane = np.stack([events.device[rows], events.stream[rows], phase])
    is_next = (lane[:, 1:] == lane[:, :-1]).all(axis=0)
    goes_on = is_link[1:] & is_link[:-1] & is_next
    chain = np.cumsum(np.concatenate(([True], ~goes_on)))[is_link]
    links = rows[is_link]
    longest_first = np.lexsort((-rank.trace.lengths_ns(links), chain))
    _, firsts = np.unique(chain[longest_first], return_index=True)
    kept = np.zeros(len(links))
    kept[longest_first[firsts]] = 1.0
    return ShortenedKernels(links, kept)


def _look_at_elementwise(one: RankFacts) -> Observation:
    """Tell the time of elementwise operators, compiled or not, on a GPU or a CPU."""
    if not _has_work(one):
        return could_not_look()
    ms = one.kernels.roles.get(Role.ELEMENTWISE, 0.0)
    text = f"elementwise operators take {one.of_step(ms)}; {MAX_ELEMENTWISE_SHARE:.0%} would be much"
    if one.time.on_gpu:
        kernels = counted(round(one.time.launches), "kernel")
        text += f"; {kernels} per step, the median one of {one.time.median_kernel_us:.1f} us"
    seen = Evidence(text, one.where())
    if one.share(ms) >= MAX_ELEMENTWISE_SHARE:
        return saw_wrong("compile the layers: --torch-compile", seen, code="unfused-elementwise")
    return saw(seen)
