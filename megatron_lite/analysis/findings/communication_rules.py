"""Gradients on their way between ranks, and ranks that come late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import (
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    build_time_finding,
    could_not_look,
    find_lost_time,
    measure_longest_step,
    rule,
    saw,
    saw_nothing,
)
from megatron_lite.analysis.gpu_clocks import describe_kept_clock, describe_slow_gpu
from megatron_lite.analysis.graph.edits.accumulation import sum_gradients_once
from megatron_lite.analysis.graph.edits.buckets import merge_collectives, resize_buckets
from megatron_lite.analysis.graph.edits.links import change_link
from megatron_lite.analysis.graph.edits.overlap import overlap_collectives
from megatron_lite.analysis.graph.edits.straggler import level_rank
from megatron_lite.analysis.graph.edits.transfers import SUMMED_IN
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers, Numbers, intersection, union
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.ranks.calls import collective_bytes
from megatron_lite.analysis.ranks.exposed import Purpose, find_rows_for, is_of_weights, shows_sharding
from megatron_lite.analysis.ranks.from_run import find_straggler_by_medians
from megatron_lite.analysis.ranks.process_groups import is_fully_sharded
from megatron_lite.analysis.ranks.rank_results import RankComparison, Straggler
from megatron_lite.analysis.run_facts import TIGHT, Facts
from megatron_lite.analysis.time.time_results import NEVER_NS
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.hardware import match_processor
from megatron_lite.phases import Phase
from megatron_lite.units import counted, significant, size
from megatron_lite.variables import MORE_QUEUES, QUEUES, has_needless_order

# --- gradients

NS_PER_MS = 1e6


def _find_reductions(facts: Facts, one: RankFacts) -> Integers:
    """Rows of the collectives that reduce gradients: those of backward, and of what is left of it after.

    Collectives of logging and evaluating are no gradients, nor are exchanges of tokens and gathers of weights. The
    result is empty where ranks split layers or have stages of a pipeline: what they exchange within those is not told
    from gradients.
    """
    if facts.splits_model:
        return np.empty(0, np.int64)
    return one.in_phases(find_rows_for(one, (Purpose.GRADIENTS, Purpose.REST)), *SUMMED_IN)


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced beside backward; means per steady step."""

    collectives: float
    communication_ms: float  # durations added up
    tail_ms: float  # exposed after backward's last computation
    early_share: float  # of the communication: begun before that


def _measure_reduction(facts: Facts, one: RankFacts) -> Reduction | None:
    """Measure how gradients are reduced beside backward.

    The result is None without collectives of gradients, or where the trace does not say what backward is.
    """
    rows = _find_reductions(facts, one)
    backward = one.in_phases(one.compute_rows(), Phase.BACKWARD.value)
    if not len(rows) or not len(backward):
        return None
    step = one.placing.step
    start_ns = one.trace.events.start_ns
    end_ns = one.trace.events.end_ns
    computed_ns = _find_last_ends(one, backward)
    rows = rows[computed_ns[step[rows]] >= 0]
    reduced_ns = _find_last_ends(one, rows)
    duration_ns = end_ns[rows] - start_ns[rows]
    begins_early = start_ns[rows] < computed_ns[step[rows]]
    total_ns = float(duration_ns.sum())
    early_ns = float(duration_ns[begins_early].sum())
    seen = np.unique(step[rows])
    tail_ns = one.find_exposed(rows).within(computed_ns[seen], reduced_ns[seen]).sum()
    return Reduction(
        collectives=len(rows) / one.steady_steps,
        communication_ms=total_ns / NS_PER_MS / one.steady_steps,
        tail_ms=float(tail_ns) / NS_PER_MS / one.steady_steps,
        early_share=early_ns / total_ns if total_ns else 0.0,
    )


def _find_last_ends(one: RankFacts, rows: Integers) -> Integers:
    """Find when the last of these events of each step ends, ns; -1 for a step without one."""
    last_ns = np.full(len(one.time.steps), -1, np.int64)
    np.maximum.at(last_ns, one.placing.step[rows], one.trace.events.end_ns[rows])
    return last_ns


NO_REDUCTION = "no reduction of gradients beside a backward pass"


def _describe_early_share(one: RankFacts, seen: Reduction) -> Evidence:
    """Describe how much of the reduction begins while backward computes."""
    return Evidence(f"{seen.early_share:.0%} of the reduction begins before backward's end", one.where())


@rule("all-reduce-tail", "gradient reduction after backward's end", "phases", "collectives", needs="trace")
def find_all_reduce_tail(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Gradients are still being reduced when backward is over.

    Meaning: buckets are reduced while backward goes on, but the last ones are complete only at its end (with tied
        embeddings the largest one is the very last), and nothing is left to overlap them with.
    Measured: communication not overlapped with any kernel, after backward's last computation, per steady step.
    Cost: all of it, on every rank. A part may be waiting for a slower rank: see straggler.
    Do: smaller buckets (more of them are through before the end); reduce in 16 bits; more micro-batches per step, which
        reduce less often; a faster network.
    Flags: --ddp-bucket-size N (parameters); --grad-reduce-in-bf16 with --bf16; a larger --global-batch-size.
    False alarm: a trace of one rank only: whether it waits for others or for the network cannot be told from it.
    """
    seen = _measure_reduction(facts, one)
    if seen is None:
        return could_not_look(Evidence(NO_REDUCTION, one.where()))
    if seen.early_share < NEVER_EARLY:
        return saw(_describe_early_share(one, seen))
    collectives = counted(seen.collectives, "collective")
    text = (
        f"the tail takes {one.of_step(seen.tail_ms)}; {collectives} of together {in_ms(seen.communication_ms)} "
        f"per step, {seen.early_share:.0%} of it begun before backward's end"
    )
    doubts = []
    if facts.ranks is None or len(facts.ranks.present) < 2:
        doubts.append(Evidence(ONE_RANK_ONLY))
    doubt = facts.doubt_exchange()
    if doubt:
        doubts.append(Evidence(doubt))
    remedy = _advise_on_tail(facts)
    return find_lost_time(
        one,
        seen.tail_ms,
        text,
        remedy.advice,
        *doubts,
        flags=remedy.flags,
        certain=not doubts,
        edit=remedy.edit,
    )


ONE_RANK_ONLY = "with one rank's trace alone, waiting for a slower rank cannot be distinguished from the transfer"
DEFAULT_BUCKET = 6_553_600  # parameters: 25 MiB of fp32, as torch has it
BF16_REDUCTION = "--grad-reduce-in-bf16"
LESS_OFTEN = "--global-batch-size"


def _advise_on_tail(facts: Facts) -> Remedy:
    """Choose what shortens the reduction that is left after backward, of what this run would take."""
    ways: list[str] = []
    flags: list[str] = []
    edit = None
    if not _has_no_buckets(facts):
        bucket = facts.settings.ddp_bucket_size or DEFAULT_BUCKET
        smaller = max(1, bucket // 4)
        flag = f"--ddp-bucket-size {smaller}"
        edit = Edit("sum gradients in smaller buckets", partial(resize_buckets, bucket_bytes=FP32_BYTES * smaller))
        flags.append(flag)
        ways.append(f"smaller buckets ({flag})")
    takes_it = not facts.has_plan or facts.plan.precision == "bf16"
    if takes_it and not facts.settings.grad_reduce_in_bf16:
        flags.append(BF16_REDUCTION)
        ways.append(f"16-bit reduction ({BF16_REDUCTION})")
    last_way = "more micro-batches per step"
    if not flags:
        flags.append(LESS_OFTEN)
        last_way += f" (a larger {LESS_OFTEN})"
    advice = f"{', '.join(ways)} or {last_way}" if ways else last_way
    return Remedy(advice, tuple(flags), edit)


LARGER_UNITS = Remedy("shard larger units: one fully_shard (FSDP's wrapping policy) around several layers")


def _has_no_buckets(facts: Facts) -> bool:
    """Whether replicas shard state, by the run's plan, or by the names in the trace of another job.

    Replicas that shard state have no buckets of gradients, but reduce layer by layer.
    """
    if facts.has_plan or facts.critical is None:
        return facts.plan.sharding is not None
    return is_fully_sharded(facts.critical.trace) is True


def _advise_shards(facts: Facts) -> Remedy:
    """Choose what replicas that shard state can do where buckets would help others."""
    if not facts.has_plan:
        return LARGER_UNITS
    if facts.sharding.gathers_twice:
        flag = "--use-distributed-optimizer"
        return Remedy(f"reduce once per step, if memory allows: {flag} instead of --use-torch-fsdp2", (flag,))
    return Remedy(f"more micro-batches per step, which reduce less often: a larger {LESS_OFTEN}", (LESS_OFTEN,))


NEVER_EARLY = 0.05  # of the communication: that little begins early by rounding, or is no gradient
BUCKETS = 8  # enough that the last one is a small part


@rule("no-overlap", "gradient reduction not overlapped with compute", "step", "collectives", needs="trace")
def find_no_overlap(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Gradients are reduced only after backward is over.

    Meaning: no collective begins before backward's last computation: overlap is off, or there are so few buckets that
        the first is complete only at the end. Nothing overlaps.
    Measured: when collectives of steady steps begin, against the end of backward's last kernel (without a GPU:
        operator), and their time that is not overlapped with compute.
    Cost: all of the reduction, where a part could run beside backward.
    Do: several buckets; gradient hooks that reduce as backward goes on (DistributedDataParallel does).
    Flags: --ddp-bucket-size N (parameters, 25 MiB of them when left out); in Megatron-LM --overlap-grad-reduce.
    False alarm: models so small that one bucket is all there is.
    """
    seen = _measure_reduction(facts, one)
    if seen is None:
        return could_not_look(Evidence(NO_REDUCTION, one.where()))
    if seen.early_share >= NEVER_EARLY:
        return saw(_describe_early_share(one, seen))
    text = (
        f"{counted(seen.collectives, 'collective')} per step, none before backward's end; not overlapped with compute: "
        f"{one.of_step(seen.tail_ms)}"
    )
    remedy = _advise_shards(facts) if _has_no_buckets(facts) else _advise_buckets(facts)
    doubt = facts.doubt_exchange()
    more = [Evidence(doubt)] if doubt else []
    return find_lost_time(
        one,
        seen.tail_ms,
        text,
        remedy.advice,
        *more,
        flags=remedy.flags,
        certain=not more,
        edit=Edit("reduce gradients beside backward", _overlap_reduction),
    )


def _overlap_reduction(graph: Graph) -> Graph:
    """Let gradients be reduced beside backward, and only the update wait for them."""
    return overlap_collectives(graph, graph.find_phase(*SUMMED_IN))


def _advise_buckets(facts: Facts) -> Remedy:
    """Advise several buckets, as large as the model's number of parameters asks for."""
    number = facts.parameters
    flag = f"--ddp-bucket-size {number // BUCKETS}" if number else "--ddp-bucket-size"
    advice = f"several buckets, reduced while backward goes on: {flag}; in Megatron-LM --overlap-grad-reduce"
    return Remedy(advice, (flag,))


SMALL_MESSAGE_BYTES = 2**20  # latency is about that of moving a megabyte, on NVLink as on a network
MAX_SMALL_REDUCTIONS = 16  # per step: the loss, the norm and a few flags are fewer
FP32_BYTES = 4
BUCKET_FLAG = f"--ddp-bucket-size {DEFAULT_BUCKET}"
IN_LARGER_BUCKETS = Edit(
    "sum gradients in larger buckets",
    partial(resize_buckets, bucket_bytes=FP32_BYTES * DEFAULT_BUCKET),
)
LARGER_BUCKETS = Remedy(f"larger buckets: {BUCKET_FLAG}", (BUCKET_FLAG,), IN_LARGER_BUCKETS)


@rule("small-buckets", "many small collectives", "collectives", needs="trace")
def find_small_buckets(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Gradients, or other values, are exchanged in many small collectives.

    Meaning: each collective pays a latency that does not depend on its size. Below about a megabyte the latency, not
        the network's bandwidth, decides.
    Measured: collectives per steady step, their bytes as recorded in the trace, and the communication among the small
        ones that is not overlapped with compute. A trace without shapes: the run's parameters in fp32, spread over the
        collectives of backward.
    Cost: that exposed time; larger buckets pay fewer latencies.
    Do: larger buckets; where weights are sharded, larger units of the sharding. Collectives of your own outside of
        backward: one of all values (torch.cat, torch.stack), DistributedDataParallel for gradients.
    Flags: --ddp-bucket-size N (parameters): several millions.
    False alarm: small collectives of tensor or expert parallelism in other trainers' traces, which are not gradients.
    """
    if facts.splits_model:  # hidden states are as large as a micro-batch makes them
        text = "ranks split the model, so that small collectives need not be gradients"
        return could_not_look(Evidence(text, one.where()))
    seen = _measure_collectives(facts, one)
    if seen is None:
        return could_not_look(record=Recording.SHAPES)
    is_small = seen.num_bytes <= SMALL_MESSAGE_BYTES
    small = seen.rows[is_small]
    if one.per_step(small) < MAX_SMALL_REDUCTIONS:
        number = significant(one.per_step(small))
        text = f"{number} of {counted(one.per_step(seen.rows), 'collective')} per step are small"
        return saw(Evidence(text, one.where()))
    cost_ms = one.exposed_ms(small)
    number = counted(round(one.per_step(small)), "collective")
    median_bytes = float(np.median(seen.num_bytes[is_small]))
    text = f"{number} per step of {size(median_bytes)} (median); not overlapped with compute: {one.of_step(cost_ms)}"
    remedy = _advise_on_small(facts, one, small)
    return find_lost_time(
        one,
        cost_ms,
        text,
        remedy.advice,
        row=small[0],
        flags=remedy.flags,
        certain=False,
        cheap=True,
        edit=remedy.edit,
    )


def _advise_on_small(facts: Facts, one: RankFacts, small: Integers) -> Remedy:
    """Choose the remedy of small collectives by where most of their exposed time is: in backward, or elsewhere.

    Args:
        facts: the run.
        one: the rank.
        small: rows of its small collectives.
    """
    if _has_no_buckets(facts):
        return _advise_shards(facts)
    of_backward = one.in_phases(small, *SUMMED_IN)
    others = np.setdiff1d(small, of_backward)
    if one.exposed_ms(of_backward) >= one.exposed_ms(others):
        return LARGER_BUCKETS
    if _computes_between(one, others):
        return FEWER_MESSAGES
    numbers = np.unique(one.placing.phase[others]).tolist()
    names = (*one.placing.phases, "")  # -1 is no phase
    phases = tuple(names[number] for number in numbers)
    where = " and ".join(name for name in phases if name)
    at_once = f"what is exchanged in {where} at once" if where else "what is exchanged between phases at once"
    advice = f"send {at_once}, as one tensor (torch.cat); gradients: DistributedDataParallel"
    return Remedy(advice, (), Edit(f"send {at_once}", partial(_merge_small, phases=phases)))


FEWER_MESSAGES = Remedy(
    "send tensors of which none is computed from another at once (torch.cat); layers that exchange in forward: "
    "larger micro-batches, or fewer ranks that split them"
)
MOSTLY_COMPUTING = 0.5  # of the time from the first to the last collective of a step


def _computes_between(one: RankFacts, rows: Integers) -> bool:
    """Tell whether a step computes from its first of some collectives to its last: results of some may be needed for
    others, so that they cannot be sent at once.

    Args:
        one: the rank.
        rows: the collectives.
    """
    events = one.trace.events
    _, step = np.unique(one.placing.step[rows], return_inverse=True)
    first_ns = np.full(step.max() + 1, NEVER_NS)
    last_ns = np.zeros(step.max() + 1, np.int64)
    np.minimum.at(first_ns, step, events.end_ns[rows])
    np.maximum.at(last_ns, step, events.start_ns[rows])
    between = union(first_ns, np.maximum(first_ns, last_ns))
    computing = intersection(between, one.trace.cover(one.compute_rows()))
    return computing.length > MOSTLY_COMPUTING * between.length


def _merge_small(graph: Graph, phases: Sequence[str]) -> Graph:
    """Let one collective of each kind take the place of a step's small ones.

    Args:
        graph: the graph.
        phases: in which they are; "" is what is in none.
    """
    sizes = graph.activities.num_bytes
    is_small = (sizes >= 0) & (sizes <= SMALL_MESSAGE_BYTES)
    chosen = graph.find_phase(*phases) & graph.find_kind(ActivityKind.TRANSFER) & is_small
    for number in np.unique(graph.activities.name[chosen]).tolist():
        graph = merge_collectives(graph, chosen & (graph.activities.name == number))
    return graph


@dataclass(frozen=True)
class CollectiveSizes:
    """Collectives of a rank's steady steps, by row of the trace."""

    rows: Integers
    num_bytes: Integers | Numbers  # of each; NaN for unknown


def _measure_collectives(facts: Facts, one: RankFacts) -> CollectiveSizes | None:
    """Measure what collectives move, by the trace's shapes or by the number of parameters.

    The result is None where there are collectives and neither is known.
    """
    rows = one.communication_rows()
    num_bytes = collective_bytes(one.trace, rows, facts.plan.world.size)
    if not np.isnan(num_bytes).all():
        return CollectiveSizes(rows, num_bytes)
    if facts.parameters:
        rows = _find_reductions(facts, one)
        gradients_bytes = FP32_BYTES * facts.parameters * one.steady_steps
        return CollectiveSizes(rows, np.full(len(rows), gradients_bytes / max(1, len(rows))))
    return None if len(rows) else CollectiveSizes(rows, num_bytes)


AS_MANY = 0.5  # of the last micro-batch's collectives, in each of the others: a stray one is something else


@rule("reduce-every-micro-batch", "gradient reduction in every micro-batch", "collectives", needs="trace")
def find_reduce_every_micro_batch(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Gradients are reduced in every micro-batch instead of once per step.

    Meaning: while gradients are accumulated, only the sum after the last micro-batch is needed on all ranks. Reducing
        each micro-batch's gradients sends the same bytes once per micro-batch.
    Measured: collectives that begin in the backward of micro-batches other than the last (or before the next one
        begins); the cost is their time that is not overlapped with compute.
    Cost: that exposed time, and a network that is busy for nothing.
    Do: DistributedDataParallel.no_sync() around all micro-batches but the last.
    Flags: none here: this trainer reduces after the last micro-batch. Fewer, larger micro-batches reduce less in any
        trainer.
    False alarm: collectives in backward that are no gradients (tensor, context or expert parallelism).
    """
    ranges = one.backward_ranges()
    rows = _find_reductions(facts, one)
    if not len(rows):
        return saw_nothing(one, "no reduction of gradients")
    if len(ranges) < 2:
        return could_not_look(Evidence("no range around each backward pass", one.where()))
    is_last = _is_last_of_step(one, ranges)
    followed = _find_followed_ranges(one, ranges, rows)
    counts = np.bincount(followed[followed >= 0], minlength=len(ranges))
    if not _reduces_before_last(counts, is_last):
        return saw_nothing(one, "no reduction in micro-batches before the last one")
    early = rows[(followed >= 0) & ~is_last[np.maximum(followed, 0)]]
    early_ms = one.per_step_ms(early)
    if one.share(early_ms) < MIN_SHARE_SHOWN:
        text = f"micro-batches before the last one reduce for {one.of_step(early_ms)}"
        return saw(Evidence(text, one.where()))
    cost_ms = one.exposed_ms(early)
    micro_batches = significant(len(ranges) / is_last.sum())
    text = (
        f"{micro_batches} micro-batches per step, and all reduce: those before the last one communicate "
        f"{in_ms(early_ms)} per step; not overlapped with compute: {one.of_step(cost_ms)}"
    )
    advice = "reduce after the last micro-batch only: model.no_sync() around the others"
    summing = partial(sum_gradients_once, micro_batches=round(len(ranges) / is_last.sum()))
    edit = Edit("reduce gradients once per step", summing)
    return find_lost_time(one, cost_ms, text, advice, row=early[0], at_least=0.0, edit=edit)


def _is_last_of_step(one: RankFacts, ranges: Integers) -> Flags:
    """Tell for each range around backward whether it is the last one of its step."""
    step = one.placing.step[ranges]
    return np.append(step[1:] != step[:-1], True)


def _find_followed_ranges(one: RankFacts, ranges: Integers, rows: Integers) -> Integers:
    """Find the place in `ranges` of the backward that each collective follows; -1 where it follows none of its step.

    A collective follows the last backward that began before the host launched it.

    Args:
        one: The rank.
        ranges: Rows of the ranges around backward, by start.
        rows: Rows of the collectives.
    """
    start_ns = one.trace.events.start_ns
    step = one.placing.step
    launches = one.trace.launch_of[rows]
    launched_ns = start_ns[np.where(launches >= 0, launches, rows)]
    place = np.searchsorted(start_ns[ranges], launched_ns, side="right") - 1
    in_same_step = step[ranges[np.maximum(place, 0)]] == step[rows]
    return np.where((place >= 0) & in_same_step, place, -1)


def _reduces_before_last(counts: Integers, is_last: Flags) -> bool:
    """Whether micro-batches before a step's last one reduce about as often as it does.

    Args:
        counts: Collectives of each micro-batch.
        is_last: Whether each is the last of its step.
    """
    if is_last.all() or not counts[~is_last].any():
        return False
    return bool(counts[~is_last].mean() >= AS_MANY * counts[is_last].mean())


THROTTLED = "its GPU runs below the others' clock: check its cooling, power and clock settings"
NOT_THROTTLED = (
    "it computes longer at the others' clock: look for another process on its GPU, or more work on this rank"
)
CAUSES = {
    "compute": "it computes longer: look for a throttled or shared GPU (or cores), or more work on this rank",
    "data_wait": "it waits for its data: its loader, disk or --num-workers",
    "host": "its host is late: other jobs on its cores, garbage collection (--manual-gc), other Python work",
    "copy": "it copies longer: its bus, or batches from pageable memory",
}


@rule("straggler", "rank that the others wait for", "ranks", "collectives")
def find_straggler(facts: Facts) -> Finding | Observation:
    """A rank makes the others wait.

    Meaning: every collective ends for all when the last rank has come. A rank that is slower, or that waits for its
        data or its host, costs the time of all, and shows up on the others as communication.
    Measured: from the collectives of all ranks' traces, matched in order: who starts last, and how much later than the
        median, as far as the others have nothing to compute meanwhile; the cause is the part of its time (computing,
        data, host, copies) that covers at least 80% of the lag. Where traces of several ranks show none, or there are
        none: every rank's median time over the whole run, in phases where none waits for another; and whether the
        profiled steps agree. Where clocks were sampled, whether its GPU ran below the others' clock, and why.
    Cost: the others' wait per step.
    Do: look at the cause. Computing: a hot or throttled GPU, another process on it, an unequal share of work; data: its
        loader or disk; host: another job on its cores, garbage collection. Swap the node and see whether the number
        moves.
    Flags: --profile-ranks -1 records all ranks; --timing-log-level 1 --timing-log-option all prints every rank's
        phases.
    False alarm: clocks of several nodes that are not aligned; the report says whether they are. Other jobs on the
        rank's cores: without a record of what each rank got of them the finding is likely at most, unless the GPU
        itself computes longer.
    """
    found, step_ms = find_latest_rank(facts)
    if found is None or found.caused_wait_ms < MATTERS * step_ms:
        return look_at_ranks(facts)
    flags = _choose_recording(facts)
    evidence = [
        Evidence(_describe_lateness(found, facts.ranks), f"rank {found.rank}"),
        Evidence(_describe_cause(found)),
    ]
    if found.alike:
        evidence.append(Evidence(_describe_alike(found.alike)))
    slow_gpu = ""
    kept_clock = ""
    if found.cause == "compute":
        slow_gpu = describe_slow_gpu(facts.ranks_hardware, found.rank)
        kept_clock = describe_kept_clock(facts.ranks_hardware, found.rank)
    if slow_gpu:
        evidence.insert(1, Evidence(slow_gpu, STEPS_FILE))
    if kept_clock:
        evidence.append(Evidence(kept_clock, STEPS_FILE))
    doubt = facts.doubt_straggler(found)
    if doubt:
        evidence.append(Evidence(doubt))
    to_do = _advise_on_cause(found, flags)
    if slow_gpu:
        to_do = THROTTLED
    elif kept_clock:
        to_do = NOT_THROTTLED
    advice = f"rank {found.rank}: {to_do}"
    is_certain = bool(found.cause) and found.share_last is not None and not doubt
    return build_time_finding(
        found.caused_wait_ms,
        evidence,
        advice,
        flags,
        is_certain,
        found.rank,
        edit=_level_late_rank(facts, found),
    )


def _level_late_rank(facts: Facts, found: Straggler) -> Edit | None:
    """Build the edit of a late rank at the others' pace; None where no traces of it and of others show it late."""
    place = facts.find_graph_place(found.rank)
    is_traced = place is not None and len(facts.graph_ranks) > 1
    if place is None or not is_traced or found.share_last is None:
        return None
    change = f"bring rank {found.rank} to the others' pace"
    return Edit(change, partial(level_rank, late=place), is_of_late_ranks=True)


def find_latest_rank(facts: Facts) -> tuple[Straggler | None, float]:
    """Find the rank that the others wait for, by the traces, else by every rank's own times.

    Returns:
        The rank, and the length of a step of the same source, ms.
    """
    ranks = facts.ranks
    run = facts.run
    if ranks is not None and ranks.straggler is not None:
        return ranks.straggler, measure_longest_step(facts)
    if run is not None and run.ranks is not None:
        return find_straggler_by_medians(run), run.steady_step_ms or 0.0
    return None, 0.0


def _choose_recording(facts: Facts) -> tuple[str, ...]:
    """Choose the flags that record what the traces of a run lack."""
    if facts.ranks is None or facts.ranks.missing:
        return ("--profile-ranks -1",)
    if not all(one.trace.with_stack for one in facts.ranks_seen):
        return ("--pytorch-profiler-collect-callstack",)
    return ()


def _advise_on_cause(found: Straggler, flags: tuple[str, ...]) -> str:
    """Advise what to do about a late rank. flags: what would record more of it."""
    if found.cause in CAUSES:
        return CAUSES[found.cause]
    if flags:
        return f"record it with {flags[0]}, and compare it with another one"
    return "swap its node or GPU with another's and see whether the rank or the place is slow"


def _describe_cause(found: Straggler) -> str:
    """Describe what takes a late rank longer than the others."""
    if not found.cause:
        return "no single cause covers 80% of its lag"
    what = "waiting for data" if found.cause == "data_wait" else found.cause
    phase = f", most of it in {found.phase}" if found.phase else ""
    return f"{what} takes {in_ms(found.cause_ms)} longer than on the median of the others{phase}"


def _describe_alike(ranks: Sequence[int]) -> str:
    """Name the ranks that come nearly as late as the latest."""
    names = ", ".join(map(str, ranks))
    if len(ranks) > 1:
        return f"ranks {names} come nearly as late, and hardly wait"
    return f"rank {names} comes nearly as late, and hardly waits"


def look_at_ranks(facts: Facts) -> Observation:
    """Say between how many ranks no lasting lag was found; one rank's times tell of none."""
    traced = len(facts.ranks.rows) if facts.ranks else 0
    recorded = len(facts.run.ranks.step_ms) if facts.run and facts.run.ranks else 0
    number = max(traced, recorded)
    if number < 2:
        return could_not_look(record=Recording.EVERY_RANK)
    return saw(Evidence(f"none of {number} ranks makes the others wait for {MATTERS:.0%} of a step"))


def _describe_lateness(found: Straggler, ranks: RankComparison | None) -> str:
    """Describe how late a rank comes, by the collectives or by every rank's own clock."""
    caused = in_ms(found.caused_wait_ms)
    if found.share_last is not None:
        last = f"rank {found.rank} is last in {found.share_last:.0%} of the collectives"
        return f"{last}; others wait {caused} per step"
    # No collectives were seen, only every rank's own clock; traces may show waits all the same.
    text = (
        f"over the whole run rank {found.rank} takes {caused} longer per step than the median rank "
        "(medians in steps.jsonl)"
    )
    rows = ranks.rows if ranks else ()
    awaited = [(row.caused_wait_ms, row.rank) for row in rows if row.caused_wait_ms is not None]
    if len(awaited) < 2:
        return text
    most_ms, rank = max(awaited, key=lambda one: one[0])
    if rank == found.rank:
        return f"{text}; in the profiled steps, too, the others wait most for it, {in_ms(most_ms)} per step"
    return f"{text}; but in the profiled steps the others wait most for rank {rank}, {in_ms(most_ms)} per step"


@rule("tensor-across-nodes", "tensor parallel ranks on several nodes", "ranks", "collectives")
def find_tensor_across_nodes(facts: Facts) -> Finding | Observation:
    """Tensor parallel ranks exchange hidden states over the network.

    Meaning: ranks that split each layer exchange whole hidden states several times per layer, and wait for them. Links
        within a node carry that nine times as fast as the network between nodes, on an H100; stages of a pipeline and
        data parallel ranks exchange far less, and bear the network well.
    Measured: the run's layout against the ranks of a node; in the traces, tensor parallel communication not overlapped
    with compute.
    Cost: all of that; within a node a part of it remains.
    Do: as many tensor parallel ranks as a node has at most, and stages of a pipeline for the rest.
    Flags: --tensor-model-parallel-size; --pipeline-model-parallel-size; --context-parallel-size for long sequences.
    False alarm: nodes joined by links as fast as those within (NVL72); ranks of one machine that say they are several.
    """
    ranks = facts.ranks
    tensor = facts.plan.layout.tensor or 1
    per_node = facts.local_ranks
    if ranks is None or not per_node:
        return could_not_look(record=Recording.RUN_FOLDER)
    layout = f"{counted(tensor, 'tensor parallel rank')}, {per_node} on a node"
    if tensor < 2 or per_node % tensor == 0:
        return saw(Evidence(layout, RUN_FILE))
    exposed_ms = sum(row.exposed_ms for row in ranks.groups if row.group == "tensor")
    step_ms = measure_longest_step(facts)
    if exposed_ms < MATTERS * step_ms or not step_ms:
        return saw(Evidence(f"{in_ms(exposed_ms)} of their communication per step is not overlapped with compute"))
    exposed = f"{in_ms(exposed_ms)} of their communication is not overlapped with compute"
    fewer = math.gcd(tensor, per_node)
    flags = (f"--tensor-model-parallel-size {fewer}", f"--pipeline-model-parallel-size {tensor // fewer}")
    advice = f"use tensor parallelism within a node only: {flags[0]}, and {flags[1]} for the rest"
    evidence = [Evidence(f"{layout}; {exposed}")]
    return build_time_finding(exposed_ms, evidence, advice, flags, edit=_keep_within_node(facts))


def _keep_within_node(facts: Facts) -> Edit | None:
    """Build the edit of tensor parallel ranks that exchange over the link within a node; None without its bandwidth."""
    one = facts.critical
    processor = match_processor(one.time.device if one else None)
    if processor is None or not processor.link_gb_s or not processor.network_gb_s:
        return None
    # a link's bandwidth is that of both directions
    factor = processor.link_gb_s / 2 / processor.network_gb_s
    return Edit("split layers within a node", partial(_change_tensor_link, facts=facts, factor=factor))


def _change_tensor_link(
    graph: Graph,
    facts: Facts,
    factor: float,
) -> Graph:
    """Let collectives of tensor parallel ranks be transferred so many times as fast.

    Args:
        graph: the graph of the ranks of `facts`.
        facts: the run.
        factor: 2 for twice the bandwidth.
    """
    chosen = np.zeros(len(graph.activities), bool)
    for place, one in enumerate(facts.graph_ranks):
        rows = find_rows_for(one, (Purpose.TENSOR, Purpose.FORWARD))
        chosen |= (graph.rank == place) & np.isin(graph.activities.row, rows)
    return change_link(graph, factor, chosen)


@dataclass(frozen=True)
class ShardTraffic:
    """Communication of sharded weights not overlapped with compute, ms per step."""

    gathers_ms: float
    gathers: float  # calls per step
    reductions_ms: float
    step_ms: float


def _measure_shard_traffic(facts: Facts) -> ShardTraffic | None:
    """Measure the exchange of weights and gradients among replicas that shard them.

    The result is None where no trace shows that replicas gather weights.
    """
    ranks = facts.ranks
    step_ms = measure_longest_step(facts)
    if ranks is None or not step_ms:
        return None
    rows = [row for row in ranks.collectives if _is_among_replicas(facts, row.group)]
    is_sharded = shows_sharding(facts.critical) if facts.critical else None
    gathers = [row for row in rows if row.name == "all_gather" and is_of_weights(row.dtype, is_sharded)]
    if not gathers:
        return None
    # calls of two kinds at once are exposed both, and cost only once
    groups = {row.group for row in rows}
    most_ms = sum(row.exposed_ms for row in ranks.groups if row.group in groups)
    gathers_ms = min(sum(row.exposed_ms for row in gathers), most_ms)
    reductions_ms = sum(row.exposed_ms for row in rows if row.name == "reduce_scatter")
    return ShardTraffic(
        gathers_ms=gathers_ms,
        gathers=sum(row.per_step for row in gathers),
        reductions_ms=min(reductions_ms, most_ms - gathers_ms),
        step_ms=step_ms,
    )


def _is_among_replicas(facts: Facts, group: str) -> bool:
    """Whether a group of ranks are replicas. Ranks that do not split the model are all replicas of each other."""
    if "data" in group:
        return True
    return not facts.splits_model and group in ("", "all ranks")


@rule("parameter-gather", "weight gathering not overlapped with compute", "step", "collectives")
def find_parameter_gather(facts: Facts) -> Finding | Observation:
    """Ranks that shard weights wait until they have gathered those of the next layer.

    Meaning: with sharded weights (ZeRO, FSDP, Megatron's distributed optimizer) every layer's weights are gathered
        before they are used. The next layer's can come while one computes; if a layer computes too briefly, the step
        waits.
    Measured: all-gathers among data parallel ranks in the traces' steady steps, and their time that is not overlapped
        with compute; the mean over ranks. Waiting for a rank that comes late is in it: see straggler.
    Cost: all of that.
    Do: keep weights between forward and backward, if memory allows; more tokens per micro-batch, so that layers compute
        longer; shard within a node only; in other trainers, prefetch the next layer.
    Flags: --use-distributed-optimizer, or --torch-fsdp2-no-reshard-after-forward;
        --num-distributed-optimizer-instances; in Megatron-LM --overlap-param-gather with --overlap-grad-reduce.
    False alarm: the first layer's gather, which cannot overlap; a window whose first step warms up. Gathers of whole
        numbers and of pickled objects (all_gather_object), and all gathers of a model whose gradients are summed as a
        whole (DistributedDataParallel), are no weights.
    """
    seen = _measure_shard_traffic(facts)
    if seen is None:
        return could_not_look(Evidence("no gather of weights is seen"), record=Recording.TRACE)
    if seen.gathers_ms < MATTERS * seen.step_ms:
        text = f"gathers of weights not overlapped with compute: {in_ms(seen.gathers_ms)} of {in_ms(seen.step_ms)}"
        return saw(Evidence(text))
    number = counted(round(seen.gathers), "all-gather")
    text = (
        f"{number} of weights per step; not overlapped with compute: {in_ms(seen.gathers_ms)} of a step of "
        f"{in_ms(seen.step_ms)}"
    )
    remedy = _advise_gathers(facts)
    return build_time_finding(seen.gathers_ms, [Evidence(text)], remedy.advice, remedy.flags, certain=False)


def _advise_gathers(facts: Facts) -> Remedy:
    """Choose what makes gathers of weights fewer or faster, or layers long enough to overlap them."""
    if facts.sharding.gathers_twice:
        flag = "--torch-fsdp2-no-reshard-after-forward"
        return Remedy(f"gather once per micro-batch, if memory allows: {flag}", (flag,))
    # ranks of a node that train the same part of the model, among those that shard it
    per_node = (facts.local_ranks or 0) // (facts.plan.layout.tensor or 1)
    sharding = facts.sharding.ranks or 1
    if 1 < per_node < sharding and sharding % per_node == 0:
        instances = facts.settings.num_distributed_optimizer_instances or 1
        flag = f"--num-distributed-optimizer-instances {instances * sharding // per_node}"
        return Remedy(f"shard within a node: {flag}", (flag,))
    advice = "more tokens per micro-batch, so that layers compute longer: a larger --micro-batch-size"
    if facts.has_plan:
        return Remedy(advice, ("--micro-batch-size",))
    return Remedy(f"{advice}; in Megatron-LM --overlap-param-gather")


@rule("needless-sharding", "weights sharded although memory is plentiful", "memory", "prediction", "collectives")
def find_needless_sharding(facts: Facts) -> Finding | Observation:
    """Weights are gathered and gradients scattered in every micro-batch although all of them would fit.

    Meaning: ZeRO-3 gathers each layer's weights twice and scatters its gradients once per micro-batch. ZeRO-1 shards
        masters and moments, which are most of the state, and exchanges each weight and gradient once per step.
    Measured: communication among replicas not overlapped with compute; the peak, and what whole weights and gradients
    would add to it.
    Cost: of the exposed exchange what once per step would not be.
    Do: shard the optimizer's state only.
    Flags: --use-distributed-optimizer instead of --use-torch-fsdp2.
    False alarm: a rehearsal of a larger model, or memory that a longer sequence still needs.
    """
    if facts.has_plan and not facts.sharding.gathers_twice:
        return saw(Evidence("weights are not gathered twice per micro-batch", RUN_FILE))
    seen = _measure_shard_traffic(facts)
    peak = facts.peak
    room = facts.device_bytes
    batches = facts.micro_batches
    more_bytes = _measure_whole_weights(facts)
    if seen is None or peak is None or not room or not batches or more_bytes is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    if not facts.sharding.gathers_twice:
        return could_not_look(record=Recording.RUN_FOLDER)
    peak_then = peak.num_bytes + more_bytes
    # once per step what ZeRO-3 exchanges per micro-batch: gathers twice, sums of gradients once
    gathers_ms = seen.gathers_ms * (1 - 0.5 / batches)
    reductions_ms = seen.reductions_ms * (1 - 1 / batches)
    cost_ms = gathers_ms + reductions_ms
    then = f"{size(peak_then)} of {size(room)}"
    if peak_then > TIGHT * room or cost_ms < MATTERS * seen.step_ms:
        text = f"whole weights would save at most {in_ms(cost_ms)} per step, and take {then}"
        return saw(Evidence(text, peak.where))
    exposed = (
        "communication among replicas, not overlapped with compute: "
        f"{in_ms(seen.gathers_ms + seen.reductions_ms)} per step"
    )
    fits = f"the peak of {size(peak.num_bytes)} would be {then} with whole weights and gradients"
    advice = "shard the optimizer's state only: --use-distributed-optimizer instead of --use-torch-fsdp2"
    evidence = [Evidence(f"{exposed}, in {counted(batches, 'micro-batch')}"), Evidence(fits, peak.where)]
    return build_time_finding(cost_ms, evidence, advice, ("--use-distributed-optimizer",), certain=False)


def _measure_whole_weights(facts: Facts) -> int | None:
    """Measure the bytes that whole weights and gradients take on a rank beyond its shard; None for unknown."""
    ranks = facts.sharding.ranks
    if not facts.parameters or not ranks:
        return None
    weight_bytes = 4 if facts.plan.precision == "fp32" else 2
    gradient_bytes = 4 if facts.plan.fp32_gradients else 2
    return (weight_bytes + gradient_bytes) * facts.parameters * (ranks - 1) // ranks


@rule("max-connections", "one hardware queue for all streams", "collectives", needs="gpu")
def find_max_connections(facts: Facts, one: RankFacts) -> Finding | Observation:
    """CUDA_DEVICE_MAX_CONNECTIONS=1 without tensor parallelism.

    Meaning: the variable gives the device one queue for all streams, so that work starts in the order of its launches.
        Megatron-LM's tensor and sequence parallelism want that order. With data parallelism alone it can make
        collectives wait behind kernels that were launched before them, and the other way round: overlap is lost.
    Measured: the variable as recorded by the run, the plan's parallel sizes, and the communication not
        overlapped with compute.
    Cost: at most that exposed communication; run without the variable to see whether it is the cause.
    Do: unset it, or set 8 to 32, for pure data parallelism; compare the exposed communication.
    Flags: CUDA_DEVICE_MAX_CONNECTIONS (many launch scripts export it); --tensor-model-parallel-size.
    False alarm: GPUs from Blackwell on order launches otherwise; a single GPU has nothing to overlap.
    """
    if facts.run is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    ranks = facts.plan.world.size
    layout = facts.plan.layout
    if not has_needless_order(facts.variables.get(QUEUES), ranks or 1, layout.tensor or 1, layout.context or 1):
        return saw(Evidence(f"{QUEUES} is not 1, or the layout wants its order", RUN_FILE))
    cost_ms = one.time.rows.get("exposed_communication", 0.0)
    text = (
        f"the variable is 1, tensor parallel size 1, {ranks} ranks; communication not overlapped with compute: "
        f"{one.of_step(cost_ms)}"
    )
    advice = f"unset {QUEUES} (or set 32) for pure data parallelism, and compare"
    return find_lost_time(
        one,
        cost_ms,
        text,
        advice,
        flags=(MORE_QUEUES,),
        certain=False,
        cheap=True,
    )
