"""Ranks that come late in turns or at times, and ranks that do not call the same collectives."""

from functools import partial

from megatron_lite.analysis.findings.base import (
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    measure_longest_step,
    rule,
    saw,
    told_by,
)
from megatron_lite.analysis.findings.communication_rules import look_at_ranks
from megatron_lite.analysis.graph.edits.straggler import level_late_steps
from megatron_lite.analysis.rank_facts import MATTERS, in_ms
from megatron_lite.analysis.ranks.from_run import find_imbalance_by_lines, find_straggler_by_medians
from megatron_lite.analysis.ranks.imbalance import MIN_TAIL_STEPS
from megatron_lite.analysis.ranks.rank_results import Imbalance, describe_imbalance
from megatron_lite.analysis.run_facts import Facts

MAX_LATE_RANKS = 4


@rule("late-in-turns", "ranks that take turns being late", "ranks", "collectives")
def find_late_in_turns(facts: Facts) -> Finding | Observation:
    """A rank is late in each step, or in some steps again and again, but not always the same one.

    Meaning: every collective ends for all when the last rank has come. Where the work of a step differs between ranks
        (sequences of unequal length, samples that cost more to load, experts with more tokens), each step takes as long
        as its most loaded rank, though all ranks take equally long on the average. No rank is slow by itself.
    Measured: from the collectives of all ranks' traces, matched in order: in each steady step, how long the others wait
        for the rank that is last, beyond its own waits; several ranks alternate in being last, in most steps or in four
        at least. Beside a straggler: among the other ranks, by what they come later than it. Without such
        traces: every rank's own times in steps.jsonl, where each line is of one step.
    Cost: what they wait, mean over steps.
    Do: give ranks equal work in each step: batches of equal numbers of tokens (sort or pack by length), the same number
        of samples of each kind; expensive work of all ranks (evaluating, logging) in the same step. Prefetch, where
        loading is uneven.
    Flags: --profile-ranks -1 records all ranks.
    False alarm: other jobs on the ranks' cores delay now one rank, now another; see busy-machine, where that was
        recorded. Where it was not, the finding is likely at most.
    """
    found = _find_imbalance(facts)
    if found is None:
        return look_at_ranks(facts)
    if found.rank is not None:
        return told_by("late-at-times", describe_imbalance(found))
    each = ", ".join(f"rank {rank} causes {share:.0%}" for rank, share in found.ranks[:MAX_LATE_RANKS])
    more = f", {len(found.ranks) - MAX_LATE_RANKS} more the rest" if len(found.ranks) > MAX_LATE_RANKS else ""
    every = _describe_period(found)
    seen = [
        Evidence(f"{describe_imbalance(found)}; in {found.late_steps} of {found.steps} steps one is late{every}"),
        Evidence(f"{each}{more} of that waiting{_describe_usual(found) or ': no single rank is slow'}"),
        Evidence(_describe_cause(found)),
        *_describe_doubts(facts, found),
    ]
    advice = (
        "give ranks equal work in each step: batches of equal numbers of tokens, uneven work on all in the same step"
    )
    certain = bool(found.computes) and not seen[3:]
    edit = _level_late_ranks(facts, found, "give ranks equal work in each step")
    return build_time_finding(found.lost_ms, seen, advice, (), certain, edit=edit)


@rule("late-at-times", "rank that comes late in some steps", "ranks", "collectives")
def find_late_at_times(facts: Facts) -> Finding | Observation:
    """A rank comes late in some steps, and is as fast as the others in the rest.

    Meaning: a rank that does something more in every n-th step (saving, evaluating, logging, collecting garbage, a
        batch of another kind) makes all ranks wait for it. Its median step shows nothing.
    Measured: from the collectives of all ranks' traces, matched in order: in which steady steps the others wait for it,
        how long, and whether the steps between are always as many. One odd step is no pattern; in a window of fewer
        than 6 steps two are one if they are equally late, and then the finding is likely at most. Without such traces:
        every rank's own times in steps.jsonl, where each line is of one step.
    Cost: what they wait, mean over all steps.
    Do: look at what the rank does in those steps; do it on all ranks in the same step, overlapped with compute (in a
        thread, or asynchronously), or less often.
    Flags: --manual-gc, --log-interval, --save-interval, by what it does.
    False alarm: other jobs on its cores (likely at most, where its cores were not recorded), or a clock that a hot GPU
    lowers at times.
    """
    found = _find_imbalance(facts)
    if found is None:
        return look_at_ranks(facts)
    if found.rank is None:
        return told_by("late-in-turns", describe_imbalance(found))
    every = _describe_period(found)
    usual = _describe_usual(found)
    seen = [
        Evidence(f"{describe_imbalance(found)}{every}: {in_ms(found.lost_ms)} per step{usual}", f"rank {found.rank}"),
        Evidence(_describe_cause(found)),
        *_describe_doubts(facts, found),
    ]
    advice = (
        f"look at what rank {found.rank} does in these steps; "
        "do it on all ranks at once, overlapped with compute, or less often"
    )
    certain = bool(found.computes) and not seen[2:]
    edit = _level_late_ranks(facts, found, f"keep rank {found.rank} at the others' pace in all steps")
    return build_time_finding(found.lost_ms, seen, advice, (), certain, found.rank, edit)


def _level_late_ranks(facts: Facts, found: Imbalance, change: str) -> Edit | None:
    """Build the edit of late ranks at the others' pace; None where traces of several ranks do not show them.

    Args:
        facts: the run.
        found: who is late.
        change: what is done to the program.
    """
    places = [facts.find_graph_place(rank) for rank, _ in found.ranks]
    if found.rank is not None:
        places = [facts.find_graph_place(found.rank)]
    known = [place for place in places if place is not None]
    if len(facts.graph_ranks) < 2 or not known:
        return None
    return Edit(change, partial(level_late_steps, ranks=known), is_of_late_ranks=True)


@rule("collective-order", "ranks that do not call the same collectives", "collectives", "ranks")
def find_collective_order(facts: Facts) -> Finding | Observation:
    """Ranks of one process group call their collectives in another order, or other ones.

    Meaning: the k-th collective of a process group is one exchange of all its ranks. Where one rank calls them in
        another order, data of one tensor is taken for another's, or ranks wait for each other for ever.
    Measured: the collectives of each process group in each steady step, by kind, numbers and size, in the order in
        which the hosts call them. Groups are compared each by itself: between groups any order is allowed.
    Cost: none in time; results are wrong, or the run hangs.
    Do: call collectives in one order on all ranks: no branch by rank, no iteration over sets, no hooks whose order
        depends on timing, around a collective.
    Flags: TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare collectives of all ranks.
    False alarm: traces that do not name groups are not compared; those of windows that begin apart are compared by step
    numbers.
    """
    if facts.ranks is None or len(facts.ranks.present) < 2:
        return could_not_look(record=Recording.EVERY_RANK)
    found = facts.ranks.disorder
    if found is None:
        return saw(Evidence(f"{len(facts.ranks.present)} ranks, and no collective in another order"))
    where = f"{found.group}, {found.step}, collective {found.place}"
    first = f"rank {found.rank} calls {found.what}, rank {found.other_rank} {found.other_what}"
    what = "the same collectives in another order" if found.reordered else "other collectives"
    seen = [
        Evidence(f"first difference: {first}", where),
        Evidence(f"{what} in {found.steps} of {found.of_steps} steps"),
    ]
    advice = "call collectives in one order on all ranks; TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch compare them"
    return build_time_finding(None, seen, advice, ("TORCH_DISTRIBUTED_DEBUG=DETAIL",))


def _find_imbalance(facts: Facts) -> Imbalance | None:
    """Find ranks that come late now and then, by the traces of several ranks; else by every rank's own times.

    None where it is little, or without traces a rank is a straggler.
    """
    ranks = facts.ranks
    run = facts.run
    found = ranks.imbalance if ranks else None
    step_ms = measure_longest_step(facts)
    if found is None and run is not None and (ranks is None or ranks.straggler is None):
        found = None if find_straggler_by_medians(run) else find_imbalance_by_lines(run)
        step_ms = run.steady_step_ms or step_ms
    is_notable = found is not None and step_ms > 0 and found.lost_ms >= MATTERS * step_ms
    return found if is_notable else None


def _describe_period(found: Imbalance) -> str:
    """Describe it as in ", every 5 steps"; "" where late steps do not come at equal distances, or every step is one."""
    return f", every {found.every} steps" if found.every and found.every > 1 else ""


def _describe_usual(found: Imbalance) -> str:
    """Name a rank that is late in the usual step, too; "" where none is."""
    if found.usual is None:
        return ""
    rank, late_ms = found.usual
    return f"; rank {rank} is late in the usual step, too, by {in_ms(late_ms)}"


def _describe_cause(found: Imbalance) -> str:
    """Describe what makes the late rank late, and how that is known."""
    if found.computes is None:
        return "by each rank's own times in steps.jsonl, in phases where none waits for another"
    if found.computes:
        return "the late rank computes longer in these steps: its work is more, or its device slower"
    return "the late rank computes no longer in these steps: its host, its data or its copies are late"


def _describe_doubts(facts: Facts, found: Imbalance) -> list[Evidence]:
    """Name ranks that were not read, and hosts of late ranks whose cores other jobs may have taken."""
    doubts = []
    absent = facts.ranks.describe_missing() if facts.ranks else ""
    if absent:
        doubts.append(Evidence(f"{absent}: they may be late, too"))
    doubt = facts.doubt_imbalance(found)
    if doubt:
        doubts.append(Evidence(doubt))
    if found.rank is not None and found.steps < MIN_TAIL_STEPS:
        doubts.append(Evidence(f"{found.steps} steps are few: a longer window shows whether it comes again"))
    return doubts
