"""The ledger of a run: what formulas say each category takes, beside what a snapshot measured."""

from dataclasses import fields

from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot
from megatron_lite.config.shape import ModelShape, recomputed_layers
from megatron_lite.estimate.layer_memory import FP32, element_bytes, plan_micro_batch
from megatron_lite.estimate.memory import activation_bytes, logits_bytes, state_bytes
from megatron_lite.estimate.params import parameter_count
from megatron_lite.units import count


def bytes_without_recomputation(plan: dict) -> int | None:
    """All categories added up, more than any moment holds, if every layer kept its activations; None for foreign plans."""
    try:
        model = plan["args"]["model"] | {"recompute_granularity": None}
        formulas = _formulas(plan | {"args": plan["args"] | {"model": model}})
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return sum(num_bytes for _, num_bytes in formulas.values())


def ledger(snapshot: Snapshot, plan: dict) -> tuple[LedgerRow, ...]:
    """Rows in the order of a report; () where the plan is not this trainer's, so that there is nothing to compare with."""
    try:
        formulas = _formulas(plan)
    except (KeyError, TypeError, AttributeError, ValueError):
        return ()
    measured = {held.category: held.requested_bytes for held in snapshot.highest}
    return tuple(
        LedgerRow(category, formula, num_bytes, measured.get(category, 0))
        for category, (formula, num_bytes) in formulas.items()
    )


def _formulas(plan: dict) -> dict[str, tuple[str, int]]:
    """{category: (the formula in words, bytes)}."""
    args, precision = plan["args"], plan["precision"]
    shape = ModelShape(**{field.name: plan["shape"][field.name] for field in fields(ModelShape)})
    batch, parameters = args["training"]["micro_batch_size"], parameter_count(shape)
    optimizer = args["optimizer"]
    state = state_bytes(
        parameters, precision, plan["fp32_gradients"], optimizer["optimizer"], optimizer["sgd_momentum"] > 0
    )
    if precision != "fp32" and not plan["fp32_gradients"]:
        state["gradients"] += FP32 * parameters  # the optimizer's copies, during its step
    found = {
        category: (f"{num_bytes // parameters} bytes x {count(parameters)} parameters", num_bytes)
        for category, num_bytes in state.items()
    }
    words, num_bytes = found["gradients"]
    found["gradients"] = f"kept ones: {words}", num_bytes  # as Snapshot.highest counts them
    recomputed = recomputed_layers(
        *(args["model"][f"recompute_{name}"] for name in ("granularity", "method", "num_layers")), shape.num_layers
    )
    sizes = plan_micro_batch(
        shape,
        batch,
        precision,
        plan["device"],
        args["model"]["attention_backend"],
        args["data"]["reset_attention_mask"],
        args["model"]["recompute_granularity"],
        plan["world"].get("threads", 1),
    )
    whole = shape.num_layers - recomputed
    kept = f"{whole} layers" + (f" and the inputs of {recomputed}, of which one is there again" if recomputed else "")
    words = (
        f"{kept}, {sizes.attention} attention, micro-batch {batch} x {shape.seq_length} tokens, "
        f"{element_bytes(precision)} bytes each"
    )
    logits = (
        f"{element_bytes(precision)} bytes x {count(sizes.tokens)} tokens x {count(shape.padded_vocab_size)} words, "
        "and what the loss works with"
    )
    return found | {
        "activations": (words, activation_bytes(sizes, recomputed)),
        "logits and loss": (logits, logits_bytes(sizes)),
    }
