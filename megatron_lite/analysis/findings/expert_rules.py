"""Experts that have more tokens than others, and tokens that are dropped."""

import numpy as np

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    rule,
    saw,
)
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import ExpertsRecord, Shape
from megatron_lite.phases import Phase

MIN_STEPS_ROUTED = 5
MIN_IMBALANCE = 1.2  # tokens of the busiest rank over an even share
MIN_EXPERT_IMBALANCE = 2.0  # the same of one expert, where no rank waits for it
MIN_DROPPED = 0.01  # of the assignments
NO_EXPERTS = Evidence("the model has no experts", RUN_FILE)
BALANCE = "raise --moe-aux-loss-coeff, or balance by --moe-router-enable-expert-bias"
BALANCE_FLAGS = ("--moe-aux-loss-coeff",)


@rule("expert-imbalance", "experts with more tokens than others", "run", "ranks", needs="run")
def find_expert_imbalance(facts: Facts, run: Run) -> Finding | Observation:
    """A few experts have many more tokens than others.

    Meaning: a layer of experts ends when the rank with most tokens is through: the others wait for it in the exchange
        of the results, in forward and in backward, in each layer. Memory follows the busiest rank, too. Experts with
        few tokens learn little.
    Measured: assignments of tokens to experts in steps.jsonl, of all ranks, median over the steps: those of the ranks
        with most over an even share, mean over layers.
    Cost: forward and backward of the busiest rank in which the others have no tokens left, by the share of FLOPs that
        experts have: an estimate, which does not know how fast small products are.
    Do: a larger balancing loss, biases that balance, or a capacity factor that drops what is beyond; more experts on
        each rank even their sums out.
    Flags: --moe-aux-loss-coeff, --moe-router-load-balancing-type, --moe-router-enable-expert-bias,
        --moe-expert-capacity-factor, --expert-model-parallel-size.
    False alarm: the first steps of training, before the balancing loss has done its work.
    """
    shape = run.plan.shape
    if shape is None or shape.experts is None:
        return could_not_look(NO_EXPERTS)
    ranks = _take_known(run.busiest_expert_ranks)
    experts = _take_known(run.busiest_experts)
    if len(ranks) < MIN_STEPS_ROUTED:
        return could_not_look(record=Recording.LONGER_RUN)
    of_rank = float(np.median(ranks))
    of_expert = float(np.median(experts))
    steps = f"median of {len(ranks):,} steps"
    text = f"the busiest expert of a layer has {of_expert:.2f} times its even share of tokens ({steps})"
    number = run.plan.layout.expert or 1
    if number > 1:
        text = f"of {number} ranks with experts, the busiest has {of_rank:.2f} times its even share of tokens; {text}"
    seen = Evidence(text, STEPS_FILE)
    if number > 1 and of_rank >= MIN_IMBALANCE:
        cost_ms, how = _estimate_waiting(run, shape, shape.experts, of_rank)
        estimate = Evidence(how, STEPS_FILE)
        return build_time_finding(cost_ms, [seen, estimate], BALANCE, BALANCE_FLAGS, certain=False)
    if of_expert >= MIN_EXPERT_IMBALANCE:
        return Finding(evidence=(seen,), advice=BALANCE, flags=BALANCE_FLAGS, certain=False)
    return saw(seen)


@rule("dropped-tokens", "tokens that are dropped beyond the capacity of experts", "run", needs="run")
def find_dropped_tokens(facts: Facts, run: Run) -> Finding | Observation:
    """Tokens pass fewer experts than they were routed to.

    Meaning: beyond --moe-expert-capacity-factor times its even share an expert takes no tokens. What is dropped passes
        the layer by its residual connection only, and the model learns from it less than its FLOPs suggest.
    Measured: dropped assignments in steps.jsonl, of all ranks, median over the steps.
    Cost: not time: what is learned per token.
    Do: balance the experts, or raise the capacity factor; without one nothing is dropped, and the busiest expert
        decides time and memory.
    Flags: --moe-expert-capacity-factor, --moe-aux-loss-coeff.
    False alarm: a recipe that means to drop tokens.
    """
    shape = run.plan.shape
    if shape is None or shape.experts is None:
        return could_not_look(NO_EXPERTS)
    shares = _take_known(run.dropped_shares)
    if len(shares) < MIN_STEPS_ROUTED:
        return could_not_look(record=Recording.LONGER_RUN)
    share = float(np.median(shares))
    factor = shape.experts.capacity_factor
    beyond = "" if factor is None else f" beyond --moe-expert-capacity-factor {factor:g}"
    seen = Evidence(f"{share:.1%} of the assignments of tokens to experts are dropped{beyond}", STEPS_FILE)
    if share < MIN_DROPPED:
        return saw(seen)
    advice = BALANCE
    if factor is not None:
        advice = f"raise --moe-expert-capacity-factor (now {factor:g}), or balance experts: {BALANCE}"
    return Finding(evidence=(seen,), advice=advice, flags=("--moe-expert-capacity-factor",), certain=True)


def _take_known(values: Numbers) -> Numbers:
    """Leave out what is unknown (NaN)."""
    return values[~np.isnan(values)]


def _estimate_waiting(run: Run, shape: Shape, experts: ExpertsRecord, imbalance: float) -> tuple[float, str]:
    """Estimate how long the busiest rank computes experts beyond an even share.

    Its forward and backward are D + E * imbalance, where experts take E when balanced, and E / (D + E) is their share
    of the model's FLOPs.

    Args:
        run: The run.
        shape: The model's shape.
        experts: The shape of its experts.
        imbalance: Tokens of the busiest rank over an even share.

    Returns:
        ms per step, and how that is estimated.
    """
    share = _share_of_experts(shape, experts)
    computing_ms = 0.0
    for phase in (Phase.FORWARD.value, Phase.BACKWARD.value):
        if phase in run.phases_ms and run.ordinary.any():
            computing_ms += float(np.median(run.phases_ms[phase][run.ordinary]))
    experts_ms = computing_ms / ((1 - share) / max(share, 1e-9) + imbalance)
    how = f"experts have {share:.0%} of the FLOPs; forward and backward take {computing_ms:,.1f} ms"
    return experts_ms * (imbalance - 1), how


def _share_of_experts(shape: Shape, experts: ExpertsRecord) -> float:
    """Compute the share of a token's FLOPs that routed experts have, by products of weights."""
    gates = 3 if shape.activation == "swiglu" else 2
    hidden = shape.hidden_size or 0
    routed = gates * (experts.topk or 1) * (experts.ffn_hidden_size or 0) * hidden
    shared = gates * (experts.shared_ffn_hidden_size or 0) * hidden
    queries = shape.num_attention_heads or 0
    keys = shape.num_query_groups or 0
    attention = (2 * queries + 2 * keys) * (shape.kv_channels or 0) * hidden
    dense = gates * (shape.ffn_hidden_size or 0) * hidden
    output = (shape.padded_vocab_size or 0) * hidden
    layers = len(experts.layers)
    with_experts = sum(experts.layers)
    all_layers = layers * attention + with_experts * (routed + shared) + (layers - with_experts) * dense
    return with_experts * routed / max(all_layers + output, 1)
