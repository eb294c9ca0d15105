"""How many assignments of a token to an expert one rank has in a layer of experts, if each expert gets as many."""

from dataclasses import dataclass

from megatron_lite.config.model_size import count_expert_layers
from megatron_lite.config.plan import Plan


def describe_expert_load(plan: Plan) -> tuple[str, ...]:
    """The line that says what is assumed of a model with experts; none of a dense one."""
    if plan.shape.experts is None:
        return ()
    return ("assumed: all experts get as many tokens; an uneven routing takes more time and memory",)


def compute_kept_share(plan: Plan) -> float:
    """Share of assignments that an expert's capacity leaves."""
    e = plan.shape.experts
    if e is None or e.capacity_factor is None:
        return 1.0
    return min(1.0, e.capacity_factor)


def compute_selected_share(plan: Plan) -> float:
    """Share of assignments that a rank selects of those that it sees: where all are gathered, those of its experts."""
    gathers = plan.args.experts.moe_token_dispatcher_type == "allgather" and plan.layout.expert_block > 1
    return compute_kept_share(plan) / (plan.layout.expert if gathers else 1)


@dataclass(frozen=True)
class ExpertLoad:
    """Rows that a rank's experts compute in one layer, and how tokens come to them."""

    rows: float  # that pass this rank's experts, for each token that this rank routes
    gathered: float  # tokens that a rank sees, for each of its own; 0: they are sent, or stay
    sends: bool  # each token goes to its experts' ranks only


def plan_expert_load(plan: Plan) -> ExpertLoad | None:
    """The load of this rank's experts; None of a dense model."""
    e = plan.shape.experts
    layout = plan.layout
    if e is None:
        return None
    # each rank of a block routes its tokens, and those that split an expert pass the same rows
    rows = e.topk * compute_kept_share(plan) * layout.expert_tensor
    spreads = layout.expert_block > 1
    gathers = spreads and plan.args.experts.moe_token_dispatcher_type == "allgather"
    return ExpertLoad(rows, layout.expert_block if gathers else 0, spreads and not gathers)


def compute_expert_share(plan: Plan) -> float:
    """Share of the layers of the rank's stage that have experts."""
    return count_expert_layers(plan.rank_shape, plan.stage) / max(len(plan.stage.layers), 1)


def count_recomputed_experts(plan: Plan) -> int:
    """Layers with experts of this stage whose forward is computed again."""
    e = plan.shape.experts
    if e is None:
        return 0
    number = 0
    for chunk in plan.stage.chunks:
        end = chunk.start + plan.count_recomputed(len(chunk))
        number += e.layers[chunk.start : end].count(True)
    return number
