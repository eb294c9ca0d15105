"""Predicts by formula what each category of a memory snapshot takes.

run.json holds it, and a report sets it beside what was measured.
"""

from collections import Counter
from dataclasses import replace

from megatron_lite.config.plan import Plan, plan_stages
from megatron_lite.formats.run_record import CategoryBytes, CategoryPrediction
from megatron_lite.planner.memory import activation_bytes, logits_bytes, plan_batch
from megatron_lite.planner.micro_batch import MicroBatch
from megatron_lite.planner.state_size import FP32, count_moments, element_bytes, group_parameters, state_bytes
from megatron_lite.units import count


def predict_categories(plan: Plan) -> CategoryPrediction:
    """The categories of every stage's ranks, and what two flags change on the rank of `plan`."""
    # No moment of a step holds as much as all categories at their own highest.
    without_recomputation = _add_up(_set_recomputation(plan, None))
    apart = _add_up(_share_tokens(plan, False))
    shared = _add_up(_share_tokens(plan, True))
    return CategoryPrediction(
        of_stages=tuple(list_categories(of_stage) for of_stage in plan_stages(plan)),
        without_recomputation=without_recomputation,
        saved_by_sequence_parallelism=apart - shared,
    )


def _set_recomputation(plan: Plan, granularity: str | None) -> Plan:
    model = replace(plan.args.model, recompute_granularity=granularity)
    return replace(plan, args=replace(plan.args, model=model))


def _share_tokens(plan: Plan, shares: bool) -> Plan:
    """The plan with tokens between attention and MLP shared among tensor parallel ranks, or kept by each of them."""
    return replace(plan, layout=replace(plan.layout, sequence_parallel=shares))


def _add_up(plan: Plan) -> int:
    """Bytes of all categories together."""
    return sum(category.num_bytes for category in list_categories(plan))


def list_categories(plan: Plan) -> tuple[CategoryBytes, ...]:
    """The categories of the plan's rank, each where it is highest, in the order of a report."""
    batch = plan_batch(plan)
    found = [*_list_states(plan), _measure_activations(plan, batch)]
    if plan.stage.is_last:
        found.append(_measure_logits(plan, batch))
    return tuple(found)


def _list_states(plan: Plan) -> list[CategoryBytes]:
    """Weights, gradients and the optimizer's state."""
    optimizer = plan.args.optimizer
    groups = group_parameters(plan)
    parameters = sum(group.number for group in groups)
    is_sharded = plan.sharding is not None
    state: Counter[str] = Counter()
    for group in groups:
        of_group = state_bytes(
            parameters=group.number,
            precision=plan.precision,
            fp32_gradients=plan.fp32_gradients,
            optimizer=optimizer.optimizer,
            momentum=optimizer.sgd_momentum > 0,
            ranks=group.ranks,
            is_sharded=is_sharded,
        )
        state.update(of_group)
    if not is_sharded:
        state["moments"] = FP32 * count_moments(plan)
        if plan.precision != "fp32" and not plan.fp32_gradients:
            # the optimizer's copies, during its step
            state["gradients"] += FP32 * parameters
    ranks = groups[0].ranks
    among = f" / {ranks} ranks" if ranks > 1 else ""
    if len({group.ranks for group in groups}) > 1:
        among += f", of experts / {groups[1].ranks}"
    found = []
    held = sum(group.number / group.ranks for group in groups)
    for category, num_bytes in state.items():
        # all groups have as many bytes of each parameter
        formula = f"{round(num_bytes / held)} bytes x {count(parameters)} parameters{among}"
        if category == "gradients":
            # as a snapshot's highest counts them
            formula = f"kept ones: {formula}"
        found.append(CategoryBytes(category, formula, num_bytes))
    return found


def _count_waiting_layers(plan: Plan, micro_batches: int) -> tuple[int, int]:
    """Count the layers of all micro-batches that wait for their backward, when these are most.

    Returns:
        (layers, those of them that keep their input only).
    """
    stage = plan.stage
    found = []
    for number, others in stage.list_fullest(micro_batches):
        layers = 0
        recomputed = 0
        for place, chunk in enumerate(stage.chunks):
            waiting = others[place]
            if place == number:
                # and the running one
                waiting += 1
            layers += waiting * len(chunk)
            recomputed += waiting * plan.count_recomputed(len(chunk))
        found.append((layers, recomputed))
    return max(found)


def _measure_activations(plan: Plan, batch: MicroBatch) -> CategoryBytes:
    """Measure what all micro-batches that wait for their backward keep."""
    stage = plan.stage
    micro_batches = plan.micro_batches(plan.train_samples)
    if stage.has_equal_chunks:
        waiting = stage.count_waiting(micro_batches)
        layers = len(stage.chunks[0])
        recomputed = plan.count_recomputed(layers)
    else:
        # of all micro-batches that wait together
        waiting = 1
        layers, recomputed = _count_waiting_layers(plan, micro_batches)
    kept = f"{layers - recomputed} layers"
    if waiting > 1:
        kept = f"{waiting} micro-batches x {kept}"
    elif not stage.has_equal_chunks:
        kept += " of all micro-batches"
    if recomputed:
        kept += f" and the inputs of {recomputed}, of which one is there again"
    tokens = plan.rank_shape.seq_length
    of_micro_batch = f"micro-batch {batch.size} x {tokens} tokens, {element_bytes(plan.precision)} bytes each"
    formula = f"{kept}, {batch.attention} attention, {of_micro_batch}"
    return CategoryBytes("activations", formula, activation_bytes(batch, stage, micro_batches, plan.count_recomputed))


def _measure_logits(plan: Plan, batch: MicroBatch) -> CategoryBytes:
    """The last stage's logits, and what the loss works in."""
    entries = count(plan.rank_shape.padded_vocab_size)
    formula = f"{element_bytes(plan.precision)} bytes x {count(batch.tokens)} tokens x {entries} entries"
    return CategoryBytes("logits and loss", f"{formula}, and the loss's working memory", logits_bytes(batch))
