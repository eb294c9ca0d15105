"""Communication that no compute runs beside, whatever it is for, where no rule knows its cause better."""

from collections.abc import Sequence

from megatron_lite.analysis.findings import communication_rules as known
from megatron_lite.analysis.findings import pipeline_rules
from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Rule,
    find_lost_time,
    rule,
    saw_nothing,
    saw_wrong,
)
from megatron_lite.analysis.rank_facts import MATTERS, RankFacts, in_ms
from megatron_lite.analysis.ranks.exposed import Exposed, Purpose
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.thresholds import is_by_chance
from megatron_lite.units import counted

# rules that name a cause of some of it, and what they speak of: their cost is not told again
CAUSES: tuple[tuple[Rule, str], ...] = (
    (known.find_all_reduce_tail, Purpose.GRADIENTS),
    (known.find_no_overlap, Purpose.GRADIENTS),
    (known.find_small_buckets, Purpose.GRADIENTS),
    (known.find_reduce_every_micro_batch, Purpose.GRADIENTS),
    (known.find_parameter_gather, Purpose.WEIGHTS),
    (known.find_needless_sharding, Purpose.WEIGHTS),
    (known.find_tensor_across_nodes, Purpose.TENSOR),
    (pipeline_rules.find_pipeline_bubble, Purpose.STAGES),
    (pipeline_rules.find_unbalanced_stages, Purpose.STAGES),
)
TITLES = {
    Purpose.EXPERTS: "expert exchange",
    Purpose.ALL_TO_ALL: "all-to-all",
    Purpose.TENSOR: "tensor parallel reductions",
    Purpose.CONTEXT: "context parallel exchange",
    Purpose.FORWARD: "reductions in forward",
    Purpose.STAGES: "sends and receives",
    Purpose.OPTIMIZER: "communication in the optimizer's step",
    Purpose.OBJECTS: "gathers of objects",
    Purpose.VALUES: "gathers of features, statistics or metrics",
    Purpose.WEIGHTS: "gathers of weights",
    Purpose.GRADIENTS: "reduction of gradients",
    Purpose.REST: "communication",
}
REMEDIES = {
    Purpose.EXPERTS: "compute one micro-batch while another one's tokens are exchanged; run shared experts meanwhile",
    Purpose.ALL_TO_ALL: (
        "overlap it with other computation: another micro-batch, shared experts, layers that need no exchange"
    ),
    Purpose.TENSOR: (
        "use fewer tensor parallel ranks if memory allows; else overlap matrix products with their reductions"
    ),
    Purpose.OPTIMIZER: (
        "reduce gradients during backward, compute norms in one collective, gather weights during the next forward"
    ),
    Purpose.CONTEXT: (
        "exchange the next block of keys and values while one is computed; "
        "fewer context parallel ranks, or longer sequences"
    ),
    Purpose.FORWARD: "reduce fewer, larger tensors, and overlap that with compute (async_op=True)",
    Purpose.STAGES: (
        "overlap sends and receives with compute (batch_isend_irecv); "
        "between stages of a pipeline also more micro-batches per step"
    ),
    Purpose.VALUES: (
        "gather fewer bytes (16 bits, one tensor for many), beside compute (async_op=True), or in fewer steps"
    ),
    Purpose.OBJECTS: "gather tensors instead of pickled objects, once per many steps",
    Purpose.WEIGHTS: (
        "gather the next layer's weights while one computes (prefetch), or keep them between forward and backward"
    ),
    Purpose.GRADIENTS: (
        "reduce during backward, on a separate stream; send fewer bytes: 16 bits, more micro-batches per step"
    ),
    Purpose.REST: "overlap it with compute on a separate stream (async_op=True), or do it less often",
}
MAX_WORDS = 3


@rule("exposed-experts", "expert exchange not overlapped with compute", "step", "collectives", needs="trace")
def find_exposed_experts(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Tokens are exchanged between experts (all-to-all, dispatch and combine) without overlapping compute.

    Meaning: every layer of experts sends each token to the ranks of its experts and the results back. A micro-batch can
        compute only when its tokens have come; another micro-batch, or the shared experts, could compute meanwhile.
    Measured: all-to-alls, dispatches and combines (NCCL, DeepEP and its kin) in steady steps, and their time that is
        not overlapped with compute; which stream they run on.
    Cost: all of that. Waiting for a rank with more tokens is in it.
    Do: two alternating micro-batches, so that one computes while the other's tokens are exchanged (DeepEP:
        async_finish=True and previous_event, on its own communication stream); shared experts beside the exchange;
        fewer nodes per token; 8-bit dispatch.
    Flags: in Megatron-LM --overlap-moe-expert-parallel-comm and --moe-shared-expert-overlap; in Megatron-LM
        --moe-router-num-groups.
    False alarm: a trace of one rank: whether it waits for others or for the network cannot be told from it. Inference
        of a few tokens has nothing to compute meanwhile. All-to-alls of embedding tables are of the same kind; the
        finding says "all-to-all" where the purpose is unknown. Those around attention are of sequences, and told by
        exposed-communication.
    """
    return _find_exposed(facts, one, (Purpose.EXPERTS, Purpose.ALL_TO_ALL))


@rule(
    "exposed-tensor-parallel",
    "tensor parallel communication not overlapped with compute",
    "step",
    "collectives",
    needs="trace",
)
def find_exposed_tensor_parallel(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Tensor parallel ranks exchange hidden states without overlapping compute.

    Meaning: with tensor parallelism every layer ends with a sum over ranks, which the next layer needs. Products can be
        cut into pieces, so that one piece is summed while the next is computed.
    Measured: collectives of tensor parallel groups, and all-reduces in forward of groups without a name, in steady
        steps; what of them no compute runs beside.
    Cost: all of that.
    Do: fewer tensor parallel ranks, if memory allows; products that overlap with their sums (sequence parallelism with
        overlapped user buffers, asynchronous tensor parallelism of torch); larger micro-batches.
    Flags: --sequence-parallel; in Megatron-LM --tp-comm-overlap.
    False alarm: sums in forward that belong to SyncBatchNorm or to a loss over all ranks.
    """
    return _find_exposed(facts, one, (Purpose.TENSOR, Purpose.FORWARD))


@rule(
    "optimizer-communication", "communication in the optimizer's step", "step", "phases", "collectives", needs="trace"
)
def find_optimizer_communication(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Ranks exchange data inside the optimizer's step without overlapping compute.

    Meaning: a reduction that the optimizer starts cannot overlap with anything: backward is over, and the update needs
        its result. Gradients reduced there, norms of many tensors one by one, or weights gathered after the update are
        the usual cases.
    Measured: collectives launched inside the optimizer's step of steady steps, and what of them no compute runs beside.
    Cost: all of that.
    Do: reduce gradients as backward goes on; sum all norms in one collective; gather updated weights beside the next
    forward.
    Flags: in Megatron-LM --overlap-grad-reduce and --overlap-param-gather.
    False alarm: the one sum of the gradients' norm, which clipping needs: then it waits for the slowest rank.
    """
    return _find_exposed(facts, one, (Purpose.OPTIMIZER,))


@rule("exposed-communication", "communication not overlapped with compute", "step", "collectives", needs="trace")
def find_exposed_communication(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Ranks exchange data without overlapping compute, and no other rule knows why.

    Meaning: communication costs time where no compute runs beside it: because what follows needs its result, because it
        is waited for at once, or because it runs on the stream that computes and so cannot overlap.
    Measured: what of all collectives, sends and receives in steady steps no compute runs beside, less what other
        findings tell; by what they are for, as far as groups, names and phases say.
    Cost: all of that. Waiting for ranks that come late is in it.
    Do: launch it earlier and wait for it later, on a stream of its own; fewer bytes; less often.
    Flags: none.
    False alarm: a trace of one rank: whether it waits for others or for the network cannot be told from it.
    """
    return _find_exposed(
        facts,
        one,
        (
            Purpose.CONTEXT,
            Purpose.STAGES,
            Purpose.WEIGHTS,
            Purpose.GRADIENTS,
            Purpose.OBJECTS,
            Purpose.VALUES,
            Purpose.REST,
        ),
    )


def _find_exposed(facts: Facts, one: RankFacts, purposes: Sequence[str]) -> Finding | Observation:
    """Find exposed communication of these purposes that no other finding tells.

    Title and advice are those of the purpose with most of it.

    Args:
        facts: The run.
        one: The rank whose steps lose the time.
        purposes: What the communication is for.
    """
    left = [(part, _find_rest_ms(facts, part)) for part in facts.exposed if part.purpose in purposes]
    left = [(part, ms) for part, ms in left if ms > 0]
    left.sort(key=lambda one: -one[1])
    share = _find_share_of_row(facts, one) * (1 - _find_waiting_share(facts, one))
    cost = sum(ms for _, ms in left) * share
    if not left or one.share(cost) < MATTERS:
        return saw_nothing(one, f"{in_ms(cost)} of each step in exposed communication of this kind")
    shortage = facts.core_shortage
    if shortage is not None and is_by_chance(cost, (shortage.rank, shortage.wait_ms)):
        late = Evidence("ranks that wait for CPU cores come late by chance, so that others wait for them")
        return saw_wrong("see busy-machine", late, code="busy-machine")
    most, _ = left[0]
    advice = REMEDIES[most.purpose]
    seen = [_describe(part) for part, ms in left if one.share(ms * share) >= MATTERS or part is most]
    evidence = [Evidence(text) for text in seen[1:]]
    if most.on_compute_stream_ms > most.ms / 2:
        evidence.append(Evidence("it cannot overlap: its kernels run on the stream that computes, one after the other"))
        advice = f"launch it on a stream of its own; {advice}"
    evidence += _describe_absent_ranks(facts)
    text = f"{one.of_step(cost)} not overlapped with compute: {seen[0]}"
    title = f"exposed {TITLES[most.purpose]}"
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        *evidence,
        row=most.row,
        certain=False,
        title=title,
    )


def _describe(part: Exposed) -> str:
    """Describe it as in "49.0 ms of 20 calls of dispatch and combine per step are exposed (deep_ep::dispatch)"."""
    kinds = " and ".join(part.kinds[:MAX_WORDS]) or "an unknown kind"
    where = [phase for phase in part.phases[:MAX_WORDS] if phase]
    within = f" in {' and '.join(where)}" if where else ""
    return f"{in_ms(part.ms)} of {counted(part.calls, 'call')} of {kinds} per step{within} are exposed ({part.kernel})"


def _find_rest_ms(facts: Facts, part: Exposed) -> float:
    """Find ms per step of it that no other finding tells.

    Findings of one purpose overlap, so that the most costly one counts.
    """
    told = [found.cost_ms or 0.0 for cause, purpose in CAUSES if purpose == part.purpose and (found := cause(facts))]
    return part.ms - max(told, default=0.0)


def _find_share_of_row(facts: Facts, one: RankFacts) -> float:
    """Find how much of the exposed communication lies in the step's row.

    Work that was launched in steady steps may run beyond their windows: no more counts than the row has.
    """
    total = sum(part.ms for part in facts.exposed)
    row = one.time.rows.get("exposed_communication", 0.0)
    return min(1.0, row / total) if total else 0.0


def _find_waiting_share(facts: Facts, one: RankFacts) -> float:
    """Find how much of this rank's exposed communication is waiting for ranks that another finding names."""
    ranks = facts.ranks
    if ranks is None or (ranks.straggler is None and ranks.imbalance is None):
        return 0.0
    row = next((row for row in ranks.rows if row.rank == one.time.rank), None)
    if row is None or not row.exposed_wait_ms or not row.exposed_communication_ms:
        return 0.0
    return min(1.0, row.exposed_wait_ms / row.exposed_communication_ms)


def _describe_absent_ranks(facts: Facts) -> list[Evidence]:
    """Name the ranks that were not read; [] where all were."""
    absent = facts.ranks.describe_missing() if facts.ranks else ""
    return [Evidence(f"{absent}: waiting for them cannot be distinguished from the transfer")] if absent else []
