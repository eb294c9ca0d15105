"""Memory of weights, gradients and moments, in closed form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_lite.caching_allocator import MIN_BLOCK_BYTES
from megatron_lite.config.model_size import (
    count_layer_parameters,
    count_linear_weights,
    count_matrices,
    count_matrix_parameters,
    count_parameter_parts,
    count_parameter_tensors,
    count_parameters,
)
from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import RankShape
from megatron_lite.formats.hardware import CUBLAS_THREADS, Processor, cublas_workspace_bytes, cublaslt_workspace_bytes
from megatron_lite.formats.run_record import LedgerRow
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.units import count

FP32 = 4
INT64 = 8
CACHED_STAGES = 64
CACHED_ROWS = 4096  # a search asks for the same rows for each micro-batch and each moment


def element_bytes(precision: str) -> int:
    """Size of one weight or activation in fp32, fp16 or bf16."""
    return FP32 if precision == "fp32" else 2


def gradient_bytes(precision: str, in_fp32: bool) -> int:
    """Bytes of one gradient as ranks reduce it: fp32, or the precision of weights."""
    return FP32 if in_fp32 else element_bytes(precision)


def state_bytes(
    parameters: int,
    precision: str,
    fp32_gradients: bool,
    optimizer: str,
    momentum: bool = True,
    ranks: int = 1,
    is_sharded: bool | None = None,
) -> dict[str, int]:
    """Bytes that live from step to step on every rank, by category.

    Weights, gradients, fp32 masters of 16-bit weights, Adam's two moments or SGD's one. 16 bytes per parameter for fp16
    with Adam: 2 + 2 + 4 + 4 + 4 (Rajbhandari et al. 2020, ZeRO, section 3.1); 18 with gradients in fp32; 16 in fp32:
    4 + 4 + 8.

    Args:
        parameters: Their number.
        precision: fp32, fp16 or bf16.
        fp32_gradients: Whether gradients are added up in fp32.
        optimizer: The value of --optimizer.
        momentum: Whether SGD has one.
        ranks: That shard the model; then only fp32 weights, gradients and moments stay, a share of each.
        is_sharded: Whether torch's fully_shard holds them, be it on one rank; None: on several ranks.
    """
    if is_sharded is None:
        is_sharded = ranks > 1
    moments = 1 if momentum else 0
    if optimizer == "adam":
        moments = 2
    if is_sharded:
        of_one = {"parameters": 0, "gradients": FP32, "master weights": FP32, "moments": FP32 * moments}
        return {kind: parameters * each // ranks for kind, each in of_one.items()}
    of_one = {
        "parameters": element_bytes(precision),
        "gradients": gradient_bytes(precision, fp32_gradients),
        "master weights": 0 if precision == "fp32" else FP32,
        "moments": FP32 * moments,
    }
    return {kind: parameters * each for kind, each in of_one.items()}


def count_moments(plan: Plan) -> int:
    """Numbers of moments that a rank's optimizer keeps for all its parameters: two of Adam, one of momentum."""
    o = plan.args.optimizer
    parameters = count_parameters(plan.rank_shape, plan.stage)
    if o.optimizer == "muon":
        return 2 * parameters - sum(count_matrix_parameters(plan.rank_shape, plan.stage).values())
    if o.optimizer == "adam":
        return 2 * parameters
    return parameters if o.sgd_momentum > 0 else 0


@dataclass(frozen=True)
class ShardedParameters:
    """Parameters of a stage whose state as many ranks share out."""

    number: int  # of this rank's stage, all of which are here when they compute
    of_layer: int  # those of one layer, on average
    ranks: int  # that share out their state; 1: nobody does
    in_fp8: int = 0  # of those, which fp8 multiplies


def group_parameters(plan: Plan) -> tuple[ShardedParameters, ...]:
    """Parameters that all replicas hold, and those of experts, of which fewer ranks hold the same."""
    ranks = plan.sharding.ranks if plan.sharding else 1
    if plan.shape.experts is None:
        return _group_parameters(plan.rank_shape, plan.stage, plan.fp8_layers, ranks)
    of_experts = plan.expert_sharding
    expert_ranks = of_experts.ranks if of_experts else 1
    return _group_parameters(plan.rank_shape, plan.stage, plan.fp8_layers, ranks, expert_ranks)


# a search asks again for the same stages with other micro-batches and other recomputation
@lru_cache(maxsize=CACHED_STAGES)
def _group_parameters(
    shape: RankShape, stage: Stage, fp8_layers: tuple[int, ...], ranks: int, expert_ranks: int = 1
) -> tuple[ShardedParameters, ...]:
    """The groups of group_parameters.

    Args:
        shape: What the rank has of the model.
        stage: Its stage.
        fp8_layers: Layers whose linear layers multiply in fp8.
        ranks: That share out the state of what all replicas hold.
        expert_ranks: That share out the state of experts.
    """
    number = count_parameters(shape, stage)
    in_fp8 = 0
    of_experts_in_fp8 = 0
    for layer in fp8_layers:
        of_all, of_expert = count_linear_weights(shape, layer)
        in_fp8 += of_all
        of_experts_in_fp8 += of_expert
    if shape.experts is None:
        return (ShardedParameters(number, count_layer_parameters(shape), ranks, in_fp8),)
    layers = max(len(stage.layers), 1)
    parts = count_parameter_parts(shape, stage)
    of_experts = parts["experts"]
    of_layers = sum(parts[name] for name in ("attention", "MLP", "router", "shared expert", "norms"))
    others = ShardedParameters(
        number=number - of_experts,
        of_layer=of_layers // layers,
        ranks=ranks,
        in_fp8=in_fp8,
    )
    if not of_experts:
        return (others,)
    experts = ShardedParameters(
        number=of_experts,
        of_layer=of_experts // layers,
        ranks=expert_ranks,
        in_fp8=of_experts_in_fp8,
    )
    return others, experts


def list_groups(category: str, name: str, each: int, groups: Sequence[ShardedParameters]) -> Iterator[LedgerRow]:
    """Rows of so many bytes per parameter, of which each rank has a share.

    Args:
        category: One of formats.memory_categories.
        name: Of the rows.
        each: Bytes per parameter.
        groups: Parameters, by how many ranks share them out.
    """
    for group in groups:
        yield per_parameter(category, name, each, group.number, group.ranks)


def list_fp8_weights(plan: Plan, processor: Processor | None) -> Iterator[LedgerRow]:
    """Rows of the weights in fp8 that live from step to step.

    They are there beside those in 16 bits or, with --fp8-param-gather, in their place.

    Transformer Engine's modules keep them in a workspace (quantize_weight in module/base.py, called by
    module/linear.py), but where torch's FSDP gathers weights for forward and for backward (is_fsdp2 in the same files).
    """
    number = sum(group.in_fp8 for group in group_parameters(plan))
    if plan.fp8 is None or not number or (plan.sharding and plan.sharding.gathers_twice):
        return
    name = "weights in fp8" if plan.keeps_fp8_weights else "copies of weights in fp8"
    yield measure_fp8_copies(plan, processor, "parameters", name, number)


def _leave_out_fp8(plan: Plan, groups: Sequence[ShardedParameters]) -> Sequence[ShardedParameters]:
    """The parameters that are kept in 16 bits: without those that are kept in fp8 in their place."""
    if not plan.keeps_fp8_weights:
        return groups
    return [replace(group, number=group.number - group.in_fp8) for group in groups]


def measure_fp8_copies(plan: Plan, processor: Processor | None, category: str, name: str, number: int) -> LedgerRow:
    """A row of so many weights in fp8, each as often as Transformer Engine keeps it.

    Args:
        plan: Of a training in fp8.
        processor: The GPU; None: one that multiplies one layout of fp8 only.
        category: Of the row; one of formats.memory_categories.
        name: Of the row.
        number: Of the weights.
    """
    assert plan.fp8 is not None
    copies = plan.fp8.count_weight_copies(processor is not None and processor.multiplies_any_fp8_layout)
    each = copies * plan.fp8.number_bytes
    return LedgerRow(
        category=category,
        name=name,
        num_bytes=int(each * number),
        formula=f"{each:g} bytes x {count(number)} weights of linear layers",
    )


@lru_cache(maxsize=CACHED_ROWS)
def per_parameter(category: str, name: str, each: int, number: int, ranks: int = 1) -> LedgerRow:
    """A row of so many bytes per parameter.

    Args:
        category: One of formats.memory_categories.
        name: Of the row.
        each: Bytes per parameter.
        number: Of the parameters.
        ranks: That share them out.
    """
    among = f" / {ranks} ranks" if ranks > 1 else ""
    return LedgerRow(
        category=category,
        name=name,
        num_bytes=each * number // ranks,
        formula=f"{each} bytes x {count(number)} parameters{among}",
    )


def list_states(plan: Plan, processor: Processor | None) -> Iterator[LedgerRow]:
    """Rows of what lives from step to step: states, buffers of gradients, the batch and cuBLAS workspaces."""
    optimizer = plan.args.optimizer
    groups = group_parameters(plan)
    has_momentum = optimizer.sgd_momentum > 0
    is_sharded = plan.sharding is not None
    of_one = state_bytes(
        1, plan.precision, plan.fp32_gradients, optimizer.optimizer, has_momentum, is_sharded=is_sharded
    )
    yield from list_fp8_weights(plan, processor)
    yield from list_groups("parameters", "weights", of_one["parameters"], _leave_out_fp8(plan, groups))
    yield from list_groups("master weights", "fp32 masters", of_one["master weights"], groups)
    if optimizer.optimizer == "muon":
        yield from _list_moments_of_muon(plan, groups)
    else:
        yield from list_groups("moments", f"moments of {optimizer.optimizer}", of_one["moments"], groups)
    if optimizer.optimizer != "sgd":
        yield _measure_step_counters(plan)
    if plan.fp32_gradients and not is_sharded:
        yield from list_groups("gradients", "fp32 sums of gradients", FP32, groups)
    if plan.layout.replicas > 1 and not is_sharded:
        # gradients of experts are averaged where they lie
        bucketed = groups[0].number
        each = element_bytes(plan.precision)
        yield per_parameter("gradients", "DistributedDataParallel's buckets", each, bucketed)
    yield _measure_tokens(plan)
    if plan.device == "cuda":
        each = cublas_workspace_bytes(processor, plan.args.training.deterministic_mode)
        formula = f"{CUBLAS_THREADS} x {count(each)} bytes"
        yield LedgerRow(
            category="workspace",
            name="cuBLAS workspaces",
            num_bytes=CUBLAS_THREADS * each,
            formula=formula,
        )
        if own := cublaslt_workspace_bytes(plan.rank_shape.adds_biases):
            yield LedgerRow(
                category="workspace",
                name="cuBLASLt workspace",
                num_bytes=own,
                formula=f"{count(own)} bytes",
            )


def _list_moments_of_muon(plan: Plan, groups: Sequence[ShardedParameters]) -> Iterator[LedgerRow]:
    """Rows of Muon's moments: one momentum of matrices, Adam's two of all else. groups: of group_parameters."""
    matrices = count_matrix_parameters(plan.rank_shape, plan.stage)
    of_experts = matrices["experts"]
    others = sum(matrices.values()) - of_experts
    for number, group in zip((others, of_experts), groups):
        yield per_parameter("moments", "momentum of muon", FP32, number, group.ranks)
    yield per_parameter("moments", "moments of adam", 2 * FP32, groups[0].number - others, groups[0].ranks)


def _measure_tokens(plan: Plan) -> LedgerRow:
    """Size the batch: tokens and labels, and for documents that are told apart positions and masks."""
    data = plan.args.data
    tensors = 2 + [data.restarts_positions, data.separates_documents].count(True)
    tokens = plan.args.training.micro_batch_size * plan.rank_shape.seq_length
    formula = f"{tensors} x {INT64} bytes x {count(tokens)} tokens"
    return LedgerRow(
        category="other",
        name="tokens, labels and their positions",
        num_bytes=tensors * INT64 * tokens,
        formula=formula,
    )


def _measure_step_counters(plan: Plan) -> LedgerRow:
    """Size the step counters that fused Adam keeps on the device: one number for each parameter tensor.

    Each takes the allocator's smallest block. A record of a CPU's memory counts in the same blocks.
    """
    number = count_parameter_tensors(plan.rank_shape, plan.stage)
    if plan.args.optimizer.optimizer == "muon":
        # of the others
        number -= count_matrices(plan.rank_shape, plan.stage)
    formula = f"{count(number)} parameter tensors x {MIN_BLOCK_BYTES} bytes"
    return LedgerRow(
        category="moments",
        name="step counters of adam",
        num_bytes=number * MIN_BLOCK_BYTES,
        formula=formula,
    )


# --- where ranks shard the model (torch's fully_shard): each layer is gathered by itself, and the rest together


def list_gathered(
    plan: Plan, groups: Sequence[ShardedParameters], layer: int, accumulates: bool
) -> Iterator[LedgerRow]:
    """Rows of what is gathered while backward computes one layer.

    Args:
        plan: Of a rank that shards.
        groups: Its parameters, of group_parameters.
        layer: Counted from 1; layers + 1: output and loss, where forward ends; 0: the embedding.
        accumulates: Whether this is not the step's first micro-batch.
    """
    shared = plan.sharding
    assert shared is not None
    layers = len(plan.stage.layers)
    each = element_bytes(plan.precision)
    reduced = gradient_bytes(plan.precision, plan.fp32_gradients)
    below = min(layer, layers)
    # where weights are gathered for backward again, one layer's are whole at a time
    whole_layers = below
    if shared.gathers_twice:
        whole_layers = 1 if 0 < layer <= layers else 0
    in_fp8 = sum(group.in_fp8 for group in groups)
    if in_fp8 and shared.gathers_twice and 0 < layer <= layers:
        name = "copies of a layer's weights in fp8"
        yield measure_fp8_copies(plan, None, "gathered parameters", name, in_fp8 // len(plan.fp8_layers))
    sums_are_shared = accumulates and shared.gathers_twice
    for group in groups:
        ends = group.number - layers * group.of_layer
        whole = ends + group.of_layer * whole_layers
        if plan.keeps_fp8_weights:
            whole -= group.in_fp8 // max(layers, 1) * whole_layers
        yield per_parameter("gathered parameters", "gathered weights", each, whole)
        if sums_are_shared:
            yield per_parameter("gradients", "sums of gradients", FP32, group.number, group.ranks)
        elif accumulates:
            yield per_parameter("gradients", "sums of gradients", reduced, ends + group.of_layer * below)
        if layer < layers:
            yield per_parameter("communication", "gradients to be reduced", reduced, group.of_layer)
        if layer < layers and not sums_are_shared:
            done = layers - max(layer, 1)
            yield per_parameter("gradients", "reduced gradients", FP32, done * group.of_layer, group.ranks)
        if layer > layers or (shared.gathers_twice and layer > 1):
            yield per_parameter("gathered parameters", "gathered weights of a layer", each, group.of_layer)


def list_reduced(groups: Sequence[ShardedParameters], ends: int, gradient_bytes: int) -> Iterator[LedgerRow]:
    """Rows of what is held when the last gradients, those outside of layers, are reduced.

    Args:
        groups: Parameters of the stage.
        ends: Number of those outside of layers.
        gradient_bytes: Of one gradient as it is reduced.
    """
    yield per_parameter("communication", "gradients to be reduced", gradient_bytes, ends)
    yield from list_groups("gradients", "reduced gradients", FP32, groups)
