"""The ledger of a run: what formulas say each category takes, beside what a snapshot measured."""

from typing import Any

import msgspec

from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot
from megatron_lite.config.args import ParallelArgs
from megatron_lite.config.layout import Layout, plan_stage
from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.shape import ModelShape, recomputed_layers
from megatron_lite.formats.run_record import Plan
from megatron_lite.planner.memory import activation_bytes, logits_bytes
from megatron_lite.planner.micro_batch import plan_micro_batch
from megatron_lite.planner.state_size import FP32, element_bytes, state_bytes
from megatron_lite.units import count

NOT_OURS = (KeyError, TypeError, AttributeError, ValueError)  # what a plan that lacks parts raises


def bytes_without_recomputation(plan: Plan) -> int | None:
    """All categories added up, more than any moment holds, if every layer kept its activations; None for foreign plans."""
    return _add_up(plan, {"recompute_granularity": None}, {})


def bytes_of_sequence_parallelism(plan: Plan) -> int | None:
    """What tensor parallel ranks save by sharing out the tokens between attention and MLP; None for foreign plans."""
    apart, shared = (_add_up(plan, {}, {"sequence_parallel": value}) for value in (False, True))
    return None if apart is None or shared is None else apart - shared


def _add_up(plan: Plan, model: dict[str, Any], layout: dict[str, Any]) -> int | None:
    """All categories, with these settings instead of the plan's own."""
    try:
        args = plan.args | {"model": plan.args["model"] | model}
        changed = msgspec.structs.replace(plan, args=args, layout=msgspec.structs.replace(plan.layout, **layout))
        formulas = _compute_formulas(changed, None)
    except NOT_OURS:
        return None
    return sum(num_bytes for _, num_bytes in formulas.values())


def ledger(snapshot: Snapshot, plan: Plan) -> tuple[LedgerRow, ...]:
    """Rows in the order of a report; () where the plan is not this trainer's, so that there is nothing to compare with."""
    try:
        formulas = _compute_formulas(plan, snapshot.rank)
    except NOT_OURS:
        return ()
    measured = {held.category: held.requested_bytes for held in snapshot.highest}
    return tuple(LedgerRow(category, *formula, measured.get(category, 0)) for category, formula in formulas.items())


def _list_known(part: msgspec.Struct | None) -> dict[str, Any]:
    """The fields of a part of the plan that are known."""
    fields = {} if part is None else msgspec.structs.asdict(part)
    return {name: value for name, value in fields.items() if value is not None}


def _describe_state(plan: Plan, parameters: int) -> dict[str, tuple[str, int]]:
    """{category: (the formula in words, bytes)} of weights, gradients and the optimizer's state of so many parameters."""
    optimizer, precision = plan.args["optimizer"], plan.precision or ""
    ranks = (plan.sharding.ranks if plan.sharding is not None else None) or 1
    in_fp32, momentum = plan.fp32_gradients is True, optimizer["sgd_momentum"] > 0
    state = state_bytes(parameters, precision, in_fp32, optimizer["optimizer"], momentum, ranks)
    if precision != "fp32" and not in_fp32 and ranks == 1:
        state["gradients"] += FP32 * parameters  # the optimizer's copies, during its step
    found = {}
    for category, num_bytes in state.items():
        among = f" / {ranks} ranks" if ranks > 1 else ""
        words = f"{num_bytes * ranks // parameters} bytes x {count(parameters)} parameters{among}"
        # as Snapshot.highest counts them
        found[category] = (f"kept ones: {words}" if category == "gradients" else words), num_bytes
    return found


def _compute_formulas(plan: Plan, rank: int | None) -> dict[str, tuple[str, int]]:
    """{category: (the formula in words, bytes)}, of this rank or, if None, of the one that wrote the plan."""
    args, precision = plan.args, plan.precision or ""
    model, batch = args["model"], args["training"]["micro_batch_size"]
    shape = ModelShape(**_list_known(plan.shape))
    layout = Layout(**_list_known(plan.layout))
    layout = layout if rank is None else layout.locate(rank)
    stage = plan_stage(ParallelArgs(**args["parallel"]), layout, shape.num_layers)
    ours = shape.split(layout.tensor, layout.context)
    found = _describe_state(plan, count_parameters(ours, stage))
    granularity, method, number = (model[f"recompute_{name}"] for name in ("granularity", "method", "num_layers"))
    recomputed = recomputed_layers(granularity, method, number, stage.chunk_size)
    attention = model["attention_backend"], args["data"]["reset_attention_mask"], model["recompute_granularity"]
    threads = plan.world.threads or 1
    sizes = plan_micro_batch(shape, batch, precision, plan.device or "", *attention, threads, layout)
    micro_batches = plan.micro_batches or 0
    waiting = stage.count_waiting(micro_batches)
    kept = f"{f'{waiting} micro-batches x ' if waiting > 1 else ''}{stage.chunk_size - recomputed} layers"
    if recomputed:
        kept += f" and the inputs of {recomputed}, of which one is there again"
    element = element_bytes(precision)
    of_micro_batch = f"micro-batch {batch} x {ours.seq_length} tokens, {element} bytes each"
    words = f"{kept}, {sizes.attention} attention, {of_micro_batch}"
    found["activations"] = words, activation_bytes(sizes, stage, micro_batches, recomputed)
    if stage.is_last:
        words = f"{element} bytes x {count(sizes.tokens)} tokens x {count(ours.padded_vocab_size)} entries"
        found["logits and loss"] = f"{words}, and the loss's working memory", logits_bytes(sizes)
    return found
