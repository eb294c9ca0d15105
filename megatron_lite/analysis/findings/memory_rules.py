"""Memory that is held, and what would free it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    build_time_finding,
    could_not_look,
    find_lost_memory,
    find_lost_time,
    rule,
    saw,
    saw_nothing,
    told_by,
)
from megatron_lite.analysis.findings.needless_rules import find_recomputed
from megatron_lite.analysis.findings.product_rules import SIXTEEN_BITS
from megatron_lite.analysis.findings.reserved_rules import EXPANDABLE_SEGMENTS, MIN_UNUSED_BYTES
from megatron_lite.analysis.findings.settings import WITHOUT
from megatron_lite.analysis.graph.edits.recomputation import drop_recomputation
from megatron_lite.analysis.memory.memory_results import GROWS_WITH_BATCH, OUTSIDE, OutOfMemory, Snapshot
from megatron_lite.analysis.memory.trace_memory import MIN_RISING_STEPS
from megatron_lite.analysis.rank_facts import MATTERS, RankFacts, in_ms
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import TIGHT, Facts, measure_ordinary, sum_category
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.hardware import match_processor
from megatron_lite.phases import Phase
from megatron_lite.thresholds import MIN_GROWTH_STEPS
from megatron_lite.units import GIB, MIB, counted, size

MIN_BYTES_PER_STEP = MIB  # in a snapshot: less takes thousands of steps to fill a gigabyte
MIN_SNAPSHOT_STEPS = 3
KEEP_NUMBERS = Remedy(
    "keep numbers instead of tensors that hold their graph: .item() at the log interval, or .detach()",
    ("--record-memory-history",),
)


@rule("memory-growth", "memory that grows with every step", "memory", "run", record=Recording.SNAPSHOT)
def find_memory_growth(facts: Facts) -> Finding | Observation:
    """Memory that stays after each step: a leak.

    Meaning: something keeps tensors or objects that the next step does not need: losses with their graph in a list,
        outputs kept by a hook, a validation without no_grad, a cache without a limit.
    Measured: in a snapshot, blocks that outlive their step and where they were made; without one, the process's memory
        or the device's peak in steps.jsonl, which must grow from each quarter of the run to the next; else the memory
        events of a trace (profile_memory): the least that is allocated in a step must rise in each of its steady steps,
        4 at least.
    Cost: memory per step, until it is full. Reserved memory that stays is no leak.
    Do: keep numbers, not tensors (loss.item() at the log interval, or .detach()); look at the growing lines.
    Flags: --record-memory-history over a window of several steps names the lines.
    False alarm: caches that fill up once, such as those of the allocator or of compiled code; they stop.
    """
    found = _find_growth_in_snapshots(facts)
    if found is not None:
        return found
    measured = []
    if facts.run is not None:
        measured += [(one, "the GPU's peak") for one in facts.run.gpu_growths]
        measured += [(one, "the process's memory") for one in facts.run.growths]
    if not measured:
        steady = tuple(_describe_steady_memory(facts))
        # a few steps of a trace say less than a whole run
        return saw(*steady) if steady else _look_at_traces(facts)
    rise, what = max(measured, key=lambda pair: pair[0].bytes_per_step)
    per_step = f"{size(rise.bytes_per_step)} per step"
    in_all = f"{size(rise.num_bytes)} in all, to {size(rise.at_end)}"
    text = f"{what} grew by {per_step}, {in_all}"
    where = STEPS_FILE if rise.rank is None else f"rank {rise.rank}, {STEPS_FILE}"
    return Finding(
        cost_bytes=rise.num_bytes,
        evidence=(Evidence(text, where),),
        advice=KEEP_NUMBERS.advice,
        flags=KEEP_NUMBERS.flags,
        gain_bytes=rise.num_bytes,
        certain=False,
        rank=rise.rank,
    )


def _find_growth_in_snapshots(facts: Facts) -> Finding | None:
    """Find the largest leak among blocks that outlive their step; None where it is too small to fill a memory."""
    grown = [(one.growth, one) for one in facts.snapshots if one.growth is not None]
    grown = [pair for pair in grown if pair[0].steps >= MIN_SNAPSHOT_STEPS]
    if not grown:
        return None
    leak, most = max(grown, key=lambda pair: pair[0].bytes_per_step)
    if leak.bytes_per_step < MIN_BYTES_PER_STEP:
        return None
    total_bytes = int(leak.bytes_per_step * leak.steps)
    text = f"{size(leak.bytes_per_step)} more after each of {leak.steps:,} steps"
    sites = []
    for site in leak.sites[:MAX_SHOWN]:
        phase = site.phase or "an unknown phase"
        made = f"{site.category} made in {phase}"
        sites.append(Evidence(f"{size(site.num_bytes)} per step of {made}", site.site))
    return find_lost_memory(
        most,
        total_bytes,
        total_bytes,
        text,
        KEEP_NUMBERS.advice,
        *sites,
        flags=KEEP_NUMBERS.flags,
    )


def _look_at_traces(facts: Facts) -> Finding | Observation:
    """Find the largest leak by the memory events of traces, if it would fill a memory."""
    seen = [one for one in facts.traced_memory if one.steps >= MIN_RISING_STEPS]
    if not seen:
        return could_not_look()
    most = max(seen, key=lambda one: one.rise_bytes_per_step or 0)
    per_step = most.rise_bytes_per_step or 0
    if per_step < MIN_BYTES_PER_STEP:
        text = f"the least that is allocated in a step does not rise by {size(MIN_BYTES_PER_STEP)} in each of"
        return saw(Evidence(f"{text} {most.steps} steps", most.source))
    total_bytes = per_step * (most.steps - 1)
    whose = f"GPU {most.device}" if most.device >= 0 else "the host"
    text = f"the least that is allocated on {whose} in a step rises by {size(per_step)} per step, in each of"
    evidence = [Evidence(f"{text} {most.steps} steps", most.source)]
    if most.device < 0:
        evidence.append(Evidence("what threads free that the profiler does not follow is not subtracted", most.source))
    return Finding(
        cost_bytes=total_bytes,
        evidence=tuple(evidence),
        advice=KEEP_NUMBERS.advice,
        flags=KEEP_NUMBERS.flags,
        gain_bytes=total_bytes,
        certain=False,
        rank=most.rank,
    )


def _describe_steady_memory(facts: Facts) -> Iterator[Evidence]:
    """Name each memory that was watched for long enough and did not grow."""
    for one in facts.snapshots:
        if len(one.steps) >= MIN_SNAPSHOT_STEPS and one.growth is None:
            yield Evidence(f"no growth over {counted(len(one.steps), 'step')}", one.source)
    run = facts.run
    if run is None:
        return
    memories = {"GPU": run.peak_memory_bytes, "process": run.host_memory_bytes}
    for what, values in memories.items():
        number = (~np.isnan(values[run.ordinary])).sum()
        if number >= MIN_GROWTH_STEPS:
            yield Evidence(f"memory of the {what} does not grow over {number} typical steps", STEPS_FILE)


GROWING_SEGMENTS = Remedy(f"free memory lies in pieces: {EXPANDABLE_SEGMENTS}", (EXPANDABLE_SEGMENTS,))
CONSTANT_SIZES = Remedy("free memory lies in pieces: keep batch and sequence length constant")
REMEDIES = {
    "gathered parameters": "let the library give each layer back after its use (see gathered-parameters)",
    "KV cache": "fewer or shorter sequences at a time, or a smaller share of the memory for the cache",
    "awaiting free": "another stream may still use them (see awaiting-free)",
}


@rule("out-of-memory", "allocation that failed", "memory", needs="snapshot")
def find_out_of_memory(facts: Facts, most: Snapshot) -> Finding | Observation:
    """The run ended because memory was full.

    Meaning: an allocation failed. The line that failed is where memory ran out, not what filled it.
    Measured: the failed request in the snapshot, what was free on the device and in the allocator's segments, and what
        held the memory when the request failed.
    Cost: the run.
    Do: begin with the largest category: activations or logits: a smaller micro-batch or recomputation; moments and
        masters: more ranks or a smaller model; reserved but not allocated: see fragmentation; growing: see
        memory-growth.
    Flags: --micro-batch-size; --recompute-granularity full --recompute-method uniform --recompute-num-layers 1;
        PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    False alarm: a failure that the program caught and got around; the snapshot keeps it.
    """
    failures = [(one, one.oom) for one in facts.snapshots if one.oom is not None]
    if not failures:
        return saw(Evidence("no allocation failed", most.source))
    # one that the program got around comes last
    failed, oom = min(failures, key=lambda pair: pair[1].went_on)
    held_bytes = oom.held_bytes or failed.peak_bytes
    held = oom.held or failed.held
    asked = f"{size(oom.requested_bytes)} were asked for"
    free = f"{size(max(oom.device_free_bytes, 0))} were free on {name_device(failed)}"
    evidence = [Evidence(f"{asked}, {free}", oom.site or failed.source)]
    evidence += [Evidence(text, failed.source) for text in _describe_unusable(oom)]
    for one in held[:MAX_SHOWN]:
        share = one.num_bytes / max(held_bytes, 1)
        of_all = f"{share:.0%} of what tensors held"
        evidence.append(Evidence(f"{one.category}: {size(one.num_bytes)}, {of_all}"))
    remedy = _advise_on_category(held[0].category if held else "")
    if _lies_in_pieces(oom):
        remedy = CONSTANT_SIZES if failed.fragmentation.expandable else GROWING_SEGMENTS
    return Finding(
        cost_bytes=held_bytes,
        evidence=tuple(evidence),
        advice=remedy.advice,
        flags=remedy.flags,
        certain=not oom.went_on,
        rank=failed.rank,
    )


def _lies_in_pieces(oom: OutOfMemory) -> bool:
    """Whether as much as was asked for lay free between tensors, in pieces that were too small."""
    return oom.unused_bytes >= max(oom.requested_bytes, MIN_UNUSED_BYTES)


def _describe_unusable(oom: OutOfMemory) -> Iterator[str]:
    """Name what was free and did not help, and whether the program got around the failure."""
    if oom.went_on:
        yield "the program went on: as many bytes were allocated afterwards"
    if oom.unused_private_bytes >= MIN_UNUSED_BYTES:
        yield f"{size(oom.unused_private_bytes)} lie free in private pools, which this request cannot use"
    if _lies_in_pieces(oom):
        yield f"{size(oom.unused_bytes)} are reserved and lie free between tensors, in pieces that are too small"


def _advise_on_category(most: str) -> Remedy:
    """Choose what to do where memory is full and the category `most` holds most of it."""
    if most in GROWS_WITH_BATCH:
        advice = f"{most} hold most: a smaller --micro-batch-size, or {RECOMPUTE_FLAG}"
        return Remedy(advice, ("--micro-batch-size", RECOMPUTE_FLAG))
    if most in REMEDIES:
        return Remedy(f"{most} hold most: {REMEDIES[most]}")
    return Remedy(f"{most or 'tensors'} hold most, which the micro-batch does not change: fewer parameters per rank")


def name_device(one: Snapshot) -> str:
    """Name the device of a snapshot as in "GPU 1"; "the CPU" for what no GPU allocated."""
    return "the CPU" if one.simulated else f"GPU {one.device}"


MAX_LOGITS_SHARE = 0.25  # of the peak: less than the layers' activations usually take


@rule("logits-peak", "logits and loss at the memory peak", "memory", needs="snapshot")
def find_logits_peak(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Memory peaks at the logits.

    Meaning: the last layer writes a number per token and vocabulary entry, and the loss copies it, in fp32, more
        than once. With 50,000 entries that is more than all layers' activations of a small model.
    Measured: bytes of the category "logits and loss" at the snapshot's peak.
    Cost: those bytes at the moment that decides how large a micro-batch can be.
    Do: compute the loss in chunks of tokens (fused linear cross-entropy), compile logits and loss together, or a
        smaller micro-batch with more of them per step.
    Flags: half the --micro-batch-size at the same --global-batch-size; in Megatron-LM --cross-entropy-loss-fusion and
        tensor parallelism, which splits the vocabulary.
    False alarm: a peak far below the device's memory.
    """
    held_bytes = sum_category(most, "logits and loss")
    peak = f"peak of {size(most.peak_bytes)}"
    if held_bytes < MAX_LOGITS_SHARE * most.peak_bytes or not facts.is_tight(most):
        return saw(Evidence(f"{size(held_bytes)} of a {peak} are logits and loss", most.source))
    share = held_bytes / most.peak_bytes
    phase = most.peak_phase or "an unknown phase"
    text = f"{size(held_bytes)} of the {peak} ({share:.0%}), in {phase}"
    advice = "compute the loss in chunks of tokens"
    flags: tuple[str, ...] = ()
    if facts.smaller_micro_batch:
        now = facts.settings.micro_batch_size
        flag = f"--micro-batch-size {facts.smaller_micro_batch}"
        advice += f", or {flag} (now {now}) with more micro-batches"
        flags = (flag,)
    return find_lost_memory(most, held_bytes, held_bytes, text, advice, flags=flags)


MAX_SCORES_SHARE = 0.10  # of the peak: less changes no micro-batch
MIN_BLOCKS = 4  # one per layer; a loss has one or two


@rule("attention-memory", "attention scores kept for backward", "memory", needs="snapshot")
def find_attention_memory(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Attention scores of all layers wait in memory for backward.

    Meaning: softmax's result, batch x heads x T x T, is kept by every layer until its backward. It grows with the
        square of the sequence length; fused attention keeps none of it.
    Measured: activations at the snapshot's peak that were made in a function named softmax, one per layer or more;
        those that the loss makes are counted as logits. What masking and dropout keep beside it comes on top.
    Cost: those bytes at the moment that decides how large a micro-batch can be.
    Do: torch.nn.functional.scaled_dot_product_attention with a causal flag instead of softmax by hand; if it must be by
        hand, recompute it.
    Flags: --attention-backend auto (or flash); --recompute-granularity selective recomputes only this.
    False alarm: a softmax that is no attention, such as a router's, is small.
    """
    activations = [site for site in most.sites if site.category == "activations"]
    of_each_layer = [site for site in activations if site.blocks >= MIN_BLOCKS]
    sites = [site for site in of_each_layer if "softmax" in site.site.lower()]
    held_bytes = sum(site.num_bytes for site in sites)
    if not sites or held_bytes < MAX_SCORES_SHARE * most.peak_bytes:
        text = f"{size(held_bytes)} of a peak of {size(most.peak_bytes)} are scores of attention"
        return saw(Evidence(text, most.source))
    share = held_bytes / most.peak_bytes
    text = f"{size(held_bytes)} of the peak of {size(most.peak_bytes)} ({share:.0%})"
    shown = []
    for site in sites[:MAX_SHOWN]:
        pieces = counted(site.blocks, "piece")
        shown.append(Evidence(f"{size(site.num_bytes)} in {pieces}", site.site))
    flag = "--attention-backend auto"
    advice = f"fused attention, which keeps no scores: {flag}"
    return find_lost_memory(
        most,
        held_bytes,
        held_bytes,
        text,
        advice,
        *shown,
        flags=(flag,),
    )


SELECTIVE = "--recompute-granularity selective"


KEEP_ACTIVATIONS = Edit("keep activations instead of recomputing them", drop_recomputation)
NEEDLESS = f"{WITHOUT}--recompute-granularity full --recompute-method --recompute-num-layers"
MIN_GAIN = 0.40  # of the peak, that it must save to be worth a second forward
MIN_STORED_LAYERS = 4  # with fewer, the one being recomputed is most of it
RECOMPUTE_FLAG = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@rule("recompute-activations", "activations that could be recomputed", "memory", needs="snapshot")
def find_recompute_activations(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Recomputing activations would remove most of the memory peak.

    Meaning: every layer keeps its activations for backward. Recomputing keeps only each layer's input and runs the
        layer's forward once more in backward, one layer at a time.
    Measured: activations by layer at the snapshot's peak; with recomputation the largest one and the inputs of all
        would be left. The gain is what that takes off the peak, as long as nothing else then becomes the peak.
    Cost: memory. Recomputing costs a second forward: a third more of the matrix products.
    Do: recompute if memory is what keeps the micro-batch small; selective recomputation first if attention writes its
        scores.
    Flags: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1; or --recompute-granularity
        selective.
    False alarm: a run that fits and whose micro-batch need not grow: then it only costs time.
    """
    if facts.settings.recompute_granularity:
        return saw(Evidence("activations are recomputed (--recompute-granularity)", RUN_FILE))
    layers = [layer.num_bytes for layer in most.layers if layer.name != OUTSIDE]
    if len(layers) < MIN_STORED_LAYERS:
        return could_not_look(Evidence("the snapshot tells no activations of several layers", most.source))
    held_bytes = sum(layers)
    inputs_bytes = len(layers) * _measure_layer_input(facts)
    gain_bytes = held_bytes - max(layers) - inputs_bytes
    if gain_bytes < MIN_GAIN * most.peak_bytes or not facts.is_tight(most):
        text = f"recomputing would save {size(max(gain_bytes, 0))} of a peak of {size(most.peak_bytes)}"
        return saw(Evidence(text, most.source))
    number = counted(len(layers), "layer")
    inputs = f" of {size(inputs_bytes)}" if inputs_bytes else ""
    text = (
        f"activations of {number} take {size(held_bytes)} of the peak of {size(most.peak_bytes)}; "
        f"with recomputation one layer's {size(held_bytes / len(layers))} and the layers' inputs{inputs}"
    )
    advice = f"if memory keeps the micro-batch small: {RECOMPUTE_FLAG} (costs a second forward)"
    flags = (RECOMPUTE_FLAG,)
    is_certain = inputs_bytes > 0
    return find_lost_memory(
        most,
        held_bytes,
        int(gain_bytes),
        text,
        advice,
        flags=flags,
        certain=is_certain,
    )


def _measure_layer_input(facts: Facts) -> int:
    """Measure a layer's input, micro-batch x sequence x hidden, in bytes; 0 without a plan that tells it."""
    tokens = facts.micro_batch_tokens
    hidden = facts.shape.hidden_size
    if not tokens or not hidden:
        return 0
    element_bytes = 2 if facts.plan.precision in SIXTEEN_BITS else 4
    return tokens * hidden * element_bytes


MIN_SHARED = 0.10  # of the peak, that ranks must save by sharing: it costs no arithmetic


@rule("state-kept-whole", "moments and masters that every rank keeps whole", "memory", needs="snapshot")
def find_state_kept_whole(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Every data parallel rank keeps the whole optimizer state.

    Meaning: fp32 masters and the optimizer's moments are needed in the update only, 12 of 16 bytes per parameter in 16
        bits. Ranks that train the same weights can keep a part each (ZeRO-1): gradients are scattered instead of summed
        everywhere, and weights gathered afterwards, which is as many bytes.
    Measured: masters and moments at the peak of a snapshot that fills most of the device; the ranks that share
        gradients, as recorded in the run's layout.
    Cost: all of that memory but this rank's share.
    Do: shard this state over ranks; also weights and gradients, where that is not enough.
    Flags: --use-distributed-optimizer; --use-torch-fsdp2.
    False alarm: a peak that falls into forward for other reasons stays as high but for this part.
    """
    if not facts.has_plan:
        return could_not_look(record=Recording.RUN_FOLDER)
    layout = facts.plan.layout
    ranks = (layout.data or 1) * (layout.context or 1)
    if ranks < 2 or facts.plan.sharding:
        return saw(Evidence("no ranks that keep the same state", RUN_FILE))
    held_bytes = sum_category(most, "moments") + sum_category(most, "master weights")
    gain_bytes = held_bytes - held_bytes // ranks
    held = f"moments and masters hold {size(held_bytes)} of the peak of {size(most.peak_bytes)}"
    text = f"{held}; {ranks} ranks keep the same"
    if gain_bytes < MIN_SHARED * most.peak_bytes or not facts.is_tight(most):
        return saw(Evidence(text, most.source))
    flag = "--use-distributed-optimizer"
    return find_lost_memory(most, held_bytes, gain_bytes, text, f"shard them: {flag}", flags=(flag,))


@rule("sequence-parallel-off", "activations that tensor parallel ranks keep whole", "memory", needs="snapshot")
def find_sequence_parallel_off(facts: Facts, most: Snapshot) -> Finding | Observation:
    """Every tensor parallel rank keeps all tokens between attention and MLP.

    Meaning: tensor parallelism splits the products. Norms, dropout and the residual between them work on all tokens on
        every rank, 10 of 34 bytes per token and feature in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198).
        Sequence parallelism gives each rank a part of the tokens there, and exchanges as many bytes in forward: a
        gather and a scatter are one sum.
    Measured: a snapshot that fills most of the device, or memory that ran out; what is saved, by the formulas of plan.
    Cost: all of that. Inputs of products are gathered once more in backward.
    Do: switch it on wherever layers are split.
    Flags: --sequence-parallel.
    False alarm: a peak that falls into the optimizer's step.
    """
    if not facts.has_plan:
        return could_not_look(record=Recording.RUN_FOLDER)
    layout = facts.plan.layout
    tensor = layout.tensor or 1
    if tensor < 2 or layout.sequence_parallel or not facts.is_tight(most):
        text = f"{counted(tensor, 'tensor parallel rank')}, a peak of {size(most.peak_bytes)}"
        return saw(Evidence(text, most.source))
    predicted = facts.predicted_categories
    if predicted is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    gain_bytes = predicted.saved_by_sequence_parallelism or 0
    flag = "--sequence-parallel"
    if not gain_bytes or gain_bytes < MIN_SHARED * most.peak_bytes:
        return saw(Evidence(f"{flag} would save {size(gain_bytes)}", RUN_FILE))
    held_bytes = sum_category(most, "activations")
    alike = f"{tensor} ranks keep {size(gain_bytes)} alike"
    text = f"activations hold {size(held_bytes)} of the peak of {size(most.peak_bytes)}; {alike}"
    advice = f"shard the tokens, too: {flag}"
    return find_lost_memory(most, held_bytes, gain_bytes, text, advice, flags=(flag,))


@rule(
    "micro-batch-headroom", "memory left for a larger micro-batch", "memory", "prediction", record=Recording.RUN_FOLDER
)
def find_micro_batch_headroom(facts: Facts) -> Finding | Observation:
    """Memory is left for a larger micro-batch.

    Meaning: the step accumulates several small micro-batches although fewer, larger ones would fit. Larger products use
        the device better, and gradients are accumulated and launched fewer times.
    Measured: the peak (by a real snapshot, or the allocator's counter in steps.jsonl) against the device's memory as
        recorded by the run. The peak of a larger micro-batch is bounded by scaling what depends on it (all of the
        peak, where the parts are not known).
    Cost: the time of adding up gradients in all micro-batches but the first, as far as the trace shows it; larger
        products may gain more; run it to see.
    Do: raise the micro-batch, keep the global batch: the result of training stays the same.
    Flags: --micro-batch-size N at the same --global-batch-size.
    False alarm: memory that evaluation, a checkpoint or a longer batch still needs.
    """
    held = facts.peak
    room = facts.device_bytes
    if held is None or room is None or facts.micro_batches is None:
        return could_not_look()
    number = counted(facts.micro_batches, "micro-batch")
    larger = facts.larger_micro_batch
    if larger is None:
        text = f"{number} per step, and a peak of {size(held.num_bytes)} of {size(room)}"
        return saw(Evidence(text, held.where))
    flag, advice = larger
    one = facts.critical
    if one is not None and one.time.launch_bound:
        return told_by("launch-bound", advice)
    # what is not seen is not known to be 0
    cost_ms = one.accumulation_ms() or None if one is not None else None
    text = f"the peak is {size(held.num_bytes)} of {size(room)}, with {number} per step"
    return build_time_finding(cost_ms, [Evidence(text, held.where)], advice, (flag,), certain=False)


@rule("needless-recompute", "recomputation although memory is plentiful", "memory", "prediction")
def find_needless_recompute(facts: Facts) -> Finding | Observation:
    """Activations are recomputed although memory is plentiful.

    Meaning: full recomputation runs every layer's forward once more in backward, to keep only its input. That is worth
        it where memory decides the micro-batch, and a loss everywhere else.
    Measured: the run's plan; the sum of all that a step would hold without recomputation, by formula, against the
        memory that the run found at its start (of the GPU, or of the machine, shared by its ranks). Of other jobs:
        layers that run forward again inside backward, beside a peak below 30% of the GPU's memory; of watched scripts
        on CPUs, beside processes that together held less than 30% of the machine's memory.
    Cost: up to the time of forward, by its share of recomputed layers.
    Do: leave recomputation out, or a larger micro-batch with it.
    Flags: without --recompute-granularity full, --recompute-method and --recompute-num-layers; --recompute-granularity
        selective in their place costs little.
    False alarm: a rehearsal of a larger job, or memory that evaluation or a longer batch still needs.
    """
    run = facts.run
    if run is None or facts.is_foreign:
        return _find_recomputation_in_trace(facts)
    recomputed = facts.plan.recomputed_layers or 0
    if facts.settings.recompute_granularity != "full" or not recomputed:
        return saw(Evidence("no layer is recomputed as a whole (--recompute-granularity)", RUN_FILE))
    room = _find_room_for_activations(facts, run)
    predicted = facts.predicted_categories
    if not room or predicted is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    needed = predicted.without_recomputation
    layers = sum(end - first for first, end in facts.plan.stage.chunks)
    without = f"without recomputation a step would hold at most {size(needed)}, and there are {size(room)}"
    in_plan = Evidence(f"{recomputed} of {layers} layers are recomputed; {without}", RUN_FILE)
    if needed > TIGHT * room or _has_run_out(facts):
        return saw(in_plan)
    forward = _measure_forward(facts, run)
    cost_ms = forward.ms * recomputed / layers
    seen = (in_plan, Evidence(f"forward takes {in_ms(forward.ms)}, and is run twice", forward.where))
    if cost_ms < MATTERS * forward.step_ms:
        return saw(*seen)
    # the other two without the first would stop the run
    advice = f"run {NEEDLESS}, or with {SELECTIVE} in their place"
    return build_time_finding(cost_ms, seen, advice, (NEEDLESS, SELECTIVE), certain=False, edit=KEEP_ACTIVATIONS)


def _has_run_out(facts: Facts) -> bool:
    """Whether an allocation failed in a snapshot."""
    return any(one.oom is not None for one in facts.snapshots)


def _find_room_for_activations(facts: Facts, run: Run) -> float | None:
    """Find the bytes of a rank's GPU, or its share of what a machine without one had free at the start."""
    if facts.plan.device != "cpu":
        return facts.device_bytes
    predicted = run.record.prediction
    free = predicted.room_bytes if predicted is not None else None
    return free / (facts.local_ranks or 1) if free else None


@dataclass(frozen=True)
class ForwardTime:
    """Time of forward in a step."""

    ms: float
    step_ms: float
    where: str  # a trace, or the run's steps


def _measure_forward(facts: Facts, run: Run) -> ForwardTime:
    """Measure forward by a trace, else by the run's own steps."""
    one = facts.critical
    if one is not None:
        for phase in one.time.phases:
            if phase.name == Phase.FORWARD.value:
                return ForwardTime(phase.device_ms, one.time.step_ms, f"rank {one.time.rank}")
    forward_ms = measure_ordinary(run, run.phases_ms.get(Phase.FORWARD.value, ())) or 0.0
    return ForwardTime(forward_ms, run.steady_step_ms or math.inf, STEPS_FILE)


LITTLE = 0.30  # of the device's memory: what a checkpointed layer would hold is not known


@dataclass(frozen=True)
class MemoryUse:
    """Memory that there is, and the most that was held of it."""

    room_bytes: int  # 0 for unknown
    peak_bytes: int  # 0 for unknown
    where: str  # the source of the peak


def _measure_gpu_use(facts: Facts, one: RankFacts) -> MemoryUse:
    """Measure a GPU's memory and its peak, by the run's record, else by the GPU's name and the trace."""
    processor = match_processor(one.time.device)
    room_bytes = facts.device_bytes or 0
    if not room_bytes and processor is not None and processor.memory_gib:
        room_bytes = int(processor.memory_gib * GIB)
    if facts.peak is not None:
        return MemoryUse(room_bytes, facts.peak.num_bytes, facts.peak.where)
    traced = [seen.peak_bytes for seen in facts.traced_memory if seen.total_is_given]
    return MemoryUse(room_bytes, max(traced, default=0), "")


def _measure_host_use(facts: Facts) -> MemoryUse:
    """Measure a machine's memory, and the most that its ranks held."""
    room_bytes = facts.watched.host_memory_bytes
    peak_bytes = facts.watched.peak_host_bytes
    if not room_bytes or not peak_bytes or not facts.local_ranks:
        return MemoryUse(0, 0, "")
    return MemoryUse(room_bytes, peak_bytes * facts.local_ranks, RUN_FILE)


def _find_recomputation_in_trace(facts: Facts) -> Finding | Observation:
    """Find recomputation that a trace shows, of a job whose flags are unknown.

    It is needless where the peak is far below the device's memory.
    """
    one = facts.critical
    if one is None:
        return could_not_look(record=Recording.TRACE)
    use = _measure_gpu_use(facts, one) if one.time.on_gpu else _measure_host_use(facts)
    if not use.room_bytes or not use.peak_bytes > 0:
        return could_not_look(Evidence("the peak, or the memory that there is, is not known", one.where()))
    held = Evidence(f"the peak is {size(use.peak_bytes)} of {size(use.room_bytes)}", use.where)
    if use.peak_bytes > LITTLE * use.room_bytes or _has_run_out(facts):
        return saw(held)
    rows = find_recomputed(one)
    if not len(rows):
        return saw_nothing(one, "no layer runs forward again inside backward")
    cost = one.covered_ms(one.work_under(rows))
    text = f"layers that run forward again inside backward take {one.of_step(cost)}"
    advice = (
        "checkpoint fewer layers, or none (torch.utils.checkpoint, gradient_checkpointing), while the peak leaves room"
    )
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        held,
        row=int(rows[0]),
        certain=False,
        edit=KEEP_ACTIVATIONS,
    )
