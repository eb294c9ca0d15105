"""Checks of what a run's own record, snapshots and shapes say, for which no single rule answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import (
    CheckResult,
    Evidence,
    Observation,
    Recording,
    could_not_look,
    saw,
    saw_wrong,
)
from megatron_lite.analysis.findings.check_case import CheckCase, fail_by_findings
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.units import count, counted, significant, size

BATCH_REMEDY = "micro-batch size x ranks x micro-batches must give --global-batch-size, with one update for all of it"
OPTIMIZER_STEP = "optimizer step"
UPDATE_RANGE = "Optimizer.step#"  # PyTorch's own, around step()
MIN_STEPS_WITH_SHAPES = 2  # whose shapes can be compared
MAX_CATEGORIES = 4  # shown
MAX_ITERATIONS = 6  # shown
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
PACKED = Evidence(
    "every position holds a token: the data set cuts a stream of tokens, without padding (--dataloader-type)",
    RUN_FILE,
)


# --- the hardware

RULES_OF_GPUS = ("gpu-slowed", "gpu-errors")
RULES_OF_HOSTS = ("cpu-quota", "stolen-time")


def look_at_hardware(case: CheckCase) -> Observation:
    """Tell at which clocks GPUs ran and what hosts took from their ranks, as far as it was sampled.

    Without clocks of the GPUs of a run on GPUs nothing passes.
    """
    of_gpus = _list_seen(case, RULES_OF_GPUS)
    of_hosts = _list_seen(case, RULES_OF_HOSTS)
    if case.facts.on_gpu is False:
        return saw(*of_hosts) if of_hosts else could_not_look(record=Recording.RUN_FOLDER)
    knows_clocks = case.facts.ranks_hardware.has_gpu
    return saw(*of_gpus, *of_hosts) if knows_clocks and of_gpus else could_not_look(*of_hosts)


def _list_seen(case: CheckCase, codes: Sequence[str]) -> list[Evidence]:
    """List what these rules saw that found nothing."""
    seen: list[Evidence] = []
    for code in codes:
        look = case.get_look(code)
        if look is not None and look.outcome is CheckResult.PASSED:
            seen += look.evidence[:1]
    return seen


# --- memory


def look_at_peak(case: CheckCase) -> Observation:
    """Tell what holds the peak, which a snapshot shows, and that nothing stays from step to step."""
    held = _describe_peak(case.facts.highest_snapshot)
    growth = case.get_look("memory-growth")
    steady = growth.evidence if growth and growth.outcome is CheckResult.PASSED else ()
    if held and steady:
        return saw(*held, *steady)
    return could_not_look(*held, *steady)


def _describe_peak(most: Snapshot | None) -> list[Evidence]:
    """Describe the largest categories at a snapshot's peak; [] where it does not know all of it."""
    if most is None or not most.complete or most.peak_bytes <= 0:
        return []
    largest = most.held[:MAX_CATEGORIES]
    parts = [f"{part.category} {size(part.num_bytes)}" for part in largest]
    phase = most.peak_phase or "an unknown phase"
    text = f"peak of {size(most.peak_bytes)} in {phase}: {', '.join(parts)}"
    if most.simulated:
        text = f"simulated {text}"
    return [Evidence(text, most.source)]


# --- updates


def look_at_batches(case: CheckCase) -> Observation:
    """Tell whether global batch = micro-batch x ranks x micro-batches, and samples and learning rate follow updates."""
    facts = case.facts
    run = facts.run
    nothing = measure_learning(run).nothing if run else ""
    if nothing:
        causes = [found.code for found in case.find("overflow-storm", "no-learning")]
        seen = Evidence(f"no update at all: {nothing}", STEPS_FILE)
        return saw_wrong("see why no step improves the weights", seen, code=causes[0] if causes else "")
    passes = _count_passes(facts.critical)
    shown = _describe_passes(facts.critical, passes)
    micro_batch = facts.settings.micro_batch_size
    sizes = run.batch_sizes[run.batch_sizes > 0] if run else np.empty(0)
    if run is None or not micro_batch or not run.world_size or not len(sizes):
        return could_not_look(*shown)
    samples = micro_batch * run.world_size
    wrong = _check_sizes(run, sizes, samples, passes.backward)
    wrong += _check_progress(run)
    wrong += _check_planned_batch(facts, sizes)
    if passes.updates > 1:
        wrong.append(f"{significant(passes.updates)} {OPTIMIZER_STEP}s per iteration in the trace")
    if wrong:
        seen_wrong = [Evidence(text, STEPS_FILE) for text in wrong]
        return saw_wrong(BATCH_REMEDY, *seen_wrong, *shown)
    ranks = counted(run.world_size, "rank")
    parts = f"{micro_batch} x {ranks} x {sizes[-1] / samples:,.0f} of them"
    batch = counted(sizes[-1], "sample")
    text = f"{batch} per step = micro-batches of {parts}, in {counted(len(sizes), 'step')}"
    return saw(Evidence(text, STEPS_FILE), *_describe_rates(run), *shown)


@dataclass(frozen=True)
class TracedPasses:
    """Passes of a trace, per steady step; 0.0 where it does not name them."""

    backward: float = 0.0
    updates: float = 0.0


def _count_passes(one: RankFacts | None) -> TracedPasses:
    """Count backward passes and the optimizer's steps of a trace."""
    if one is None:
        return TracedPasses()
    updates = one.rows_named(lambda name: name.startswith(UPDATE_RANGE), Kind.ANNOTATION)
    return TracedPasses(one.per_step(one.backward_ranges()), one.per_step(updates))


def _describe_passes(one: RankFacts | None, passes: TracedPasses) -> list[Evidence]:
    """Tell backward ranges and optimizer steps per iteration of a trace; [] without a backward range."""
    if one is None or not passes.backward:
        return []
    told = counted(passes.backward, "backward range")
    if passes.updates:
        told += f", {counted(passes.updates, OPTIMIZER_STEP)}"
    return [Evidence(f"per step {told} in the trace", one.where())]


def _describe_rates(run: Run) -> list[Evidence]:
    """Tell from where to where the learning rate went; [] where no step has one."""
    rates = run.next_lrs[~np.isnan(run.next_lrs)]
    if not len(rates):
        return []
    went = f"{significant(rates[0])} to {significant(rates[-1])}"
    text = f"the learning rate is set once per step, {went}"
    if run.skipped.any():
        text += ", and unchanged in skipped ones"
    return [Evidence(text, STEPS_FILE)]


def _check_planned_batch(facts: Facts, sizes: Numbers) -> list[str]:
    """Say what is wrong with the steps' numbers of samples against the plan, where nothing ramps up."""
    batch = facts.plan.batch
    if not batch.final or batch.start or (sizes == batch.final).all():
        return []
    steps = f"{sizes.min():,.0f} to {sizes.max():,.0f}"
    return [f"the plan has {batch.final} samples per step, the steps have {steps}"]


def _check_sizes(run: Run, sizes: Numbers, samples: int, traced: float) -> list[str]:
    """Say what is wrong with the numbers of samples and of backward passes.

    Args:
        run: the steps.
        sizes: samples of each step that has a number of them.
        samples: samples of one micro-batch of every rank.
        traced: micro-batches per step in the trace; 0 for unknown.
    """
    numbers = run.batch_sizes
    wrong = []
    is_odd = (numbers > 0) & (numbers % samples > 0)
    for at in np.flatnonzero(is_odd)[:1]:
        iteration = f"iteration {run.iterations[at]}"
        of = f"no multiple of {samples} (micro-batch x ranks)"
        wrong.append(f"{iteration} has {numbers[at]:,.0f} samples, {of}")
    planned = sizes[0] / samples
    is_constant = (sizes == sizes[0]).all()
    if traced and is_constant and traced != planned:
        passes = f"{counted(traced, 'backward pass')} per step in the trace"
        wrong.append(f"{passes}, {planned:g} micro-batches planned")
    return wrong


def _check_progress(run: Run) -> list[str]:
    """Say what is wrong with the counts of samples and the schedule, for the first iteration of each kind."""
    wrong = []
    # a step's own entry is the one after the difference's; nothing unknown is wrong
    own_samples = run.batch_sizes[1:]
    counted_samples = np.diff(run.consumed_samples)
    is_known = ~np.isnan(counted_samples + own_samples)
    miscounted = is_known & (counted_samples != own_samples)
    for at in np.flatnonzero(miscounted)[:1]:
        told = f"{own_samples[at]:,.0f} samples and counts {counted_samples[at]:,.0f}"
        wrong.append(f"iteration {run.iterations[at + 1]} has {told}")
    rates = np.diff(run.next_lrs)
    is_moved = ~np.isnan(rates) & (rates != 0)
    for at in np.flatnonzero(run.skipped[1:] & is_moved)[:1]:
        before = significant(run.next_lrs[at], 6)
        after = significant(run.next_lrs[at + 1], 6)
        told = f"from {before} to {after} in iteration {run.iterations[at + 1]:,}"
        wrong.append(f"the learning rate goes on {told}, which was skipped")
    return wrong


# --- compilation and shapes


def look_at_compilation(case: CheckCase) -> Observation:
    """Tell the first step's compiling apart from steady steps, and how many later ones compiled."""
    run = case.facts.run
    one = case.facts.critical
    compiles = case.facts.compiles
    slow_first = case.find("first-step")
    if compiles and slow_first:
        return fail_by_findings(slow_first)
    regions = one.kernels.compiled_regions if one is not None else 0.0
    if compiles is False and not regions:
        text = "nothing is compiled (--torch-compile none)"
        return could_not_look(Evidence(text, RUN_FILE), record="a run with --torch-compile")
    seen = []
    if one is not None and regions:
        seen.append(Evidence(f"{counted(regions, 'compiled region')} per step", one.where()))
    if run is None:
        return could_not_look(*seen)
    first_ms = run.first_step_ms
    typical_ms = run.steady_step_ms
    may_compile = compiles or regions
    if not may_compile or not first_ms or not typical_ms:
        return could_not_look(*seen, record="all steps of the run: start it with an empty --run-dir")
    return saw(Evidence(_describe_compiling(run, first_ms, typical_ms), STEPS_FILE), *seen)


def _describe_compiling(run: Run, first_ms: float, typical_ms: float) -> str:
    """Describe the first step against typical ones, and name the later ones that compiled something.

    Args:
        run: The run.
        first_ms: First step of the run, ms.
        typical_ms: Typical step of the run, ms.
    """
    first = f"first step {in_ms(first_ms)}"
    if run.compile_ms[0] > 0:
        first += f" ({in_ms(run.compile_ms[0])} of it compiling)"
    late = run.iterations[1:][run.compiling[1:]]
    left_out = f"left out, since they compiled something: {counted(len(late), 'later step')}"
    text = f"{first}, typical ones {in_ms(typical_ms)}; {left_out}"
    if len(late):
        iterations = ", ".join(map(str, late[:MAX_ITERATIONS]))
        text += f" (iterations {iterations})"
    return text


def look_at_shapes(case: CheckCase) -> Observation:
    """Tell whether shapes are the same in every step, so that nothing compiles anew, and no position lacks a token."""
    facts = case.facts
    one = facts.critical
    shapes = _list_shapes(one) if one is not None else []
    seen = []
    if one is not None and len(shapes) >= MIN_STEPS_WITH_SHAPES:
        is_constant = len(set(shapes)) == 1
        seen.append(Evidence(_describe_shapes(shapes, is_constant), one.where()))
        if not is_constant:
            record = f"how much of it is padding and what it compiles: {Recording.RUN_FOLDER}"
            return could_not_look(*seen, record=record)
    seen += _describe_length(facts)
    if not seen:
        has_shapes = one is not None and one.trace.with_shapes
        return could_not_look(record="a window with two steady steps or more: --profile-step-end" if has_shapes else "")
    if not _is_packed(facts):
        record = f"how many positions are padding: {Recording.RUN_FOLDER}, with its own data set"
        return could_not_look(*seen, record=record)
    return saw(*seen, PACKED)


def _describe_shapes(shapes: Sequence[frozenset[int]], is_constant: bool) -> str:
    """Describe how many shapes products have, and whether they are the same in each steady step.

    Args:
        shapes: Numbers of the shapes, a set for each steady step.
        is_constant: Whether all of these sets are the same.
    """
    number = counted(len(frozenset().union(*shapes)), "shape")
    same = "the same" if is_constant else "not the same"
    return f"{number} of products, {same} in each of {counted(len(shapes), 'steady step')}"


def _describe_length(facts: Facts) -> list[Evidence]:
    """Tell the length of all sequences, and how many steps compiled after the first; [] without a run's plan."""
    run = facts.run
    length = facts.shape.seq_length
    if not length or run is None or not run.steps:
        return []
    compiling = run.compiling & ~run.evaluating
    late = f"{compiling[1:].sum()} of {run.steps:,} steps compiled after the first"
    return [Evidence(f"every sequence has {length:,} positions; {late}", RUN_FILE)]


def _list_shapes(one: RankFacts) -> list[frozenset[int]]:
    """List the numbers of the products' shapes, a set for each steady step; [] without shapes."""
    if not one.trace.with_shapes:
        return []
    rows = one.rows_named(PRODUCTS.__contains__, Kind.OP)
    rows = rows[one.trace.events.shapes[rows] >= 0]
    shapes = one.trace.events.shapes[rows]
    step = one.placing.step[rows]
    numbers = np.unique(step)
    return [frozenset(shapes[step == number].tolist()) for number in numbers]


def _is_packed(facts: Facts) -> bool:
    """Whether the data sets are this trainer's own, which cut one stream of tokens. Other loaders are not known."""
    return facts.settings.dataloader_type in ("single", "cyclic")


def look_at_tokens(case: CheckCase) -> Observation:
    """Tell tokens per second, and whether each position of a batch is one that trains."""
    run = case.facts.run
    if run is None or run.tokens_per_second is None:
        return could_not_look()
    no_learning = case.find("no-learning")
    if run.not_finite.any() and no_learning:
        return fail_by_findings(no_learning)
    typical = counted(int(run.ordinary.sum()), "typical step")
    speed = f"{count(run.tokens_per_second)} tokens/s over {typical}, all ranks"
    skipped = f"{run.skipped.sum():,} of {run.steps:,} steps skipped"
    seen = Evidence(f"{speed}; {skipped}", STEPS_FILE)
    if case.facts.settings.eod_mask_loss:
        record = "how many positions have a loss is not recorded: without --eod-mask-loss all have one"
        return could_not_look(seen, record=record)
    if not _is_packed(case.facts):
        record = "how many positions are padding is not recorded: a .bin/.idx data set has none"
        return could_not_look(seen, record=record)
    return saw(seen, PACKED)
