"""Lists what ranks exchange in a step, group by group, and how long that takes at least over the links between them.

It is what every GPU has to send or to receive at least, over the slower of the links on the way: those within a node,
and the network between nodes. Collectives of a few numbers (the norm, the loss, counts) are left out: their time is the
host's and the network's latency.

Letters: M tokens of a micro-batch, H hidden, N parameters of a rank.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_lite.config.layout import Layout, Sharding
from megatron_lite.config.model_size import (
    count_expert_layers,
    count_matrix_parameters,
    count_parameter_parts,
    list_attention_matrices,
)
from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import LatentShape, ModelShape
from megatron_lite.config.world import World
from megatron_lite.formats.hardware import Processor
from megatron_lite.mesh_axes import (
    CONTEXT,
    CONTEXT_HEADS,
    CONTEXT_POSITIONS,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    TENSOR,
)
from megatron_lite.planner.expert_load import count_recomputed_experts, plan_expert_load
from megatron_lite.planner.state_size import FP32, ShardedParameters, element_bytes, gradient_bytes, group_parameters
from megatron_lite.units import count

CACHED_ROUTES = 256  # a search asks for the same ones for each layout
# kinds of collectives, as in the report
GATHER = "all-gather"
SCATTER = "reduce-scatter"
REDUCE = "all-reduce"
SEND = "send"
ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class Exchange:
    """Equal collectives, or sends, of one rank in a step."""

    # TENSOR | CONTEXT | CONTEXT_HEADS | CONTEXT_POSITIONS | DATA | PIPELINE | EXPERT | EXPERT_DATA of mesh_axes
    group: str
    kind: str  # GATHER | SCATTER | REDUCE | SEND | ALL_TO_ALL
    what: str
    # of the whole tensor: what a gathering gives, a reduce-scatter takes; all rows that a rank has for all ranks
    num_bytes: int
    times: int  # per step
    hidden_flops: int = 0  # of the product that this rank computes meanwhile
    in_fp8: bool = False  # that product

    @property
    def formula(self) -> str:
        """Number, kind, size and meaning, as "8 all-gathers of 4.2 MB (weights)"."""
        return f"{count(self.times)} {self.kind}s of {self.num_bytes / 1e6:,.1f} MB ({self.what})"


@dataclass(frozen=True)
class Members:
    """How many ranks a group has, and how many of them share a node."""

    ranks: int
    near: int  # on one node

    @property
    def nodes(self) -> int:
        """Nodes on which the group has ranks."""
        return -(-self.ranks // self.near)


@dataclass(frozen=True)
class Route:
    """The slowest part of the way that a collective's bytes take."""

    gb_s: float  # of one GPU in one direction
    share: float  # of the tensor's bytes that each GPU sends or receives
    words: str

    def milliseconds(self, num_bytes: float) -> float:
        """Least time of a collective of a tensor of so many bytes."""
        return num_bytes * self.share / self.gb_s / 1e6


# --- which ranks are near each other


def find_members(group: str, layout: Layout, sharding: Sharding | None, world: World) -> Members:
    """How many ranks a rank's group has, and how many of them are on one node: the same for all ranks.

    Args:
        group: A dimension of the layout.
        layout: Sizes of all dimensions.
        sharding: Of the model; None: nobody shards it.
        world: Ranks and nodes.
    """
    model = layout.tensor * layout.context
    # ranks of a stage lie side by side, unless stages lie within data parallel ranks
    from_stage = model * layout.data
    from_replica = model
    from_block = layout.expert_block
    if layout.data_is_outermost:
        from_stage = model
        from_replica = model * layout.pipeline
        from_block = from_replica
    sharing = sharding.ranks if sharding else layout.replicas
    context = math.gcd(layout.context, sharing)
    expert_replicas = layout.expert_replicas * sharing // layout.replicas
    # (ranks, how far they are apart) by dimension
    dimensions = {
        TENSOR: [(layout.tensor, 1)],
        CONTEXT: [(layout.context, layout.tensor)],
        CONTEXT_HEADS: [(layout.inner_context, layout.tensor)],
        CONTEXT_POSITIONS: [(layout.context // layout.inner_context, layout.tensor * layout.inner_context)],
        DATA: [(context, layout.tensor), (sharing // context, from_replica)],
        EXPERT: [(layout.expert_block, 1)],
        EXPERT_DATA: [(expert_replicas, from_block)],
        PIPELINE: [(layout.pipeline, from_stage)],
    }
    ranks = 1
    near = 1
    for size, stride in dimensions[group]:
        ranks *= size
        of_node = max(world.local_size // stride, 1)
        near *= min(size, of_node)
    return Members(ranks, near)


@lru_cache(maxsize=CACHED_ROUTES)
def find_route(kind: str, members: Members, processor: Processor) -> Route | None:
    """How a collective's bytes travel; None if a link's speed is unknown, or there is no other rank.

    Without the help of switches each of n GPUs sends at least 2(n-1)/n of the bytes for an all-reduce, half of that for
    a reduce-scatter or an all-gather (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms); to switches
    that add up it sends all of them once. Of GPUs of one node that take part in a group of several nodes, each brings
    its share over the network.

    Args:
        kind: GATHER, SCATTER, REDUCE, SEND or ALL_TO_ALL.
        members: Of the group.
        processor: The GPU, with the speed of its links.
    """
    if members.ranks < 2:
        return None
    if kind == ALL_TO_ALL:
        return _find_route_to_all(members, processor)
    near = None if members.near < 2 else _find_route_in_node(kind, members.near, processor)
    if members.nodes == 1 or (near is None and members.near > 1):
        return near
    gb_s = processor.network_gb_s
    if gb_s is None:
        return None
    if kind == SEND:
        return Route(gb_s, 1.0, f"over the network at {gb_s:g} GB/s")
    share, each = _share_collective(kind, members.nodes, members.near)
    far = Route(gb_s, share, f"{each} over the network between nodes at {gb_s:g} GB/s")
    if near is None:
        return far
    return max(near, far, key=lambda route: route.milliseconds(1))


def _share_collective(kind: str, parts: int, together: int) -> tuple[float, str]:
    """The share of a tensor's bytes that each GPU sends, and how it is written: (0.375, '2 x 3/4/4').

    Args:
        kind: Of the collective; an all-reduce takes two rounds.
        parts: Nodes, or other units, between which it goes.
        together: GPUs of a unit, which share the work.
    """
    rounds = 2 if kind == REDUCE else 1
    others = parts - 1
    words = f"{others}/{parts}"
    if rounds > 1:
        words = f"2 x {words}"
    if together > 1:
        words = f"{words}/{together}"
    share = rounds * others / parts / together
    return share, words


def _find_route_to_all(members: Members, processor: Processor) -> Route | None:
    """The way of rows that each rank has for every other one: those for its own node, and those for others.

    Each GPU sends its own rows, whatever others send: nothing is added up or repeated on the way.
    """
    ranks = members.ranks
    routes = []
    if members.near > 1:
        # its rate within a node is that of a gathering, whose bytes come from all others as well
        near = _find_route_in_node(GATHER, members.near, processor)
        if near is None:
            return None
        others = members.near - 1
        over = near.words.partition(" over ")[2]
        routes.append(Route(near.gb_s, others / ranks, f"{others}/{ranks} over {over}"))
    if members.nodes > 1:
        gb_s = processor.network_gb_s
        if gb_s is None:
            return None
        others = ranks - members.near
        over = f"the network between nodes at {gb_s:g} GB/s"
        routes.append(Route(gb_s, others / ranks, f"{others}/{ranks} over {over}"))
    return max(routes, key=lambda route: route.milliseconds(1))


def _find_route_in_node(kind: str, ranks: int, processor: Processor) -> Route | None:
    """The way of a collective's bytes among GPUs of one node: over their own link where it joins all of them."""
    if processor.link_gb_s and ranks <= processor.linked_gpus:
        return _find_route_over_link(kind, ranks, processor, processor.link_gb_s)
    gb_s = processor.pcie_gb_s
    if gb_s is None:
        return None
    over = f"over PCIe at {gb_s:g} GB/s"
    if kind == SEND:
        return Route(gb_s, 1.0, over)
    # the GPUs that a bridge joins share the work of what leaves them
    joined = processor.linked_gpus if processor.link_gb_s else 1
    groups = -(-ranks // joined)
    share, each = _share_collective(kind, groups, joined)
    return Route(gb_s, share, f"{each} {over}")


def _find_route_over_link(kind: str, ranks: int, processor: Processor, link_gb_s: float) -> Route:
    """The way of a collective's bytes over the link between GPUs.

    Args:
        kind: Of the collective.
        ranks: GPUs that take part, no more than the link joins.
        processor: The GPU.
        link_gb_s: What its link carries in both directions together.
    """
    gb_s = link_gb_s / 2
    if processor.mesh:
        # each pair of GPUs has its own part of the link
        used = (ranks - 1) / (processor.linked_gpus - 1)
        gb_s *= used
    over = f"over the link between GPUs at {gb_s:g} GB/s"
    if kind == SEND:
        return Route(gb_s, 1.0, over)
    if kind == REDUCE and processor.sums_in_switch:
        return Route(gb_s, 1.0, f"once {over}, whose switches add up")
    share, each = _share_collective(kind, ranks, 1)
    return Route(gb_s, share, f"{each} {over}")


# --- what travels


def list_exchanges(plan: Plan) -> list[Exchange]:
    """List what one rank exchanges in a step of the final global batch, without collectives of a few numbers."""
    layout = plan.layout
    found: list[Exchange] = []
    if layout.tensor > 1:
        found += _split_layers(plan)
    if layout.context > 1:
        found += _exchange_sequences(plan)
    if layout.expert_block > 1:
        found += _exchange_tokens(plan)
    if layout.pipeline > 1:
        found += _hand_on(plan)
    if layout.replicas > 1:
        found += _share_gradients(plan)
    if layout.expert_replicas > 1 and plan.shape.experts is not None:
        found += _share_expert_gradients(plan)
    return [one for one in found if one.times and one.num_bytes]


def compute_hidden_bytes(plan: Plan) -> int:
    """Bytes of the hidden states of a micro-batch, M x H, of one rank."""
    return _count_tokens(plan) * plan.rank_shape.hidden_size * element_bytes(plan.precision)


def _count_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch that one rank has."""
    return plan.args.training.micro_batch_size * plan.rank_shape.seq_length


def _split_layers(plan: Plan) -> Iterator[Exchange]:
    """Sums over tensor parallel ranks behind attention and MLP, and of gradients before them.

    Where ranks share out the tokens, these are gathered and scattered instead.
    """
    layers = _count_split_layers(plan)
    if plan.layout.sequence_parallel:
        yield from _gather_for_layers(plan, layers)
    yield _sum_layer_results(plan, layers)
    latent = plan.rank_shape.latent
    if latent is not None:
        yield from _spread_latent_vectors(plan, latent, layers.passes * layers.number, layers.passes * layers.again)
    yield from _sum_gradients_before_layers(plan, layers)
    if plan.rank_shape.query_group_ranks > 1:
        yield from _gather_query_groups(plan, layers.passes * layers.number, layers.passes * layers.again)


@dataclass(frozen=True)
class _SplitLayers:
    """How many parts of a stage tensor parallel ranks split, for each micro-batch."""

    passes: int  # micro-batches of a step
    number: int  # layers
    again: int  # layers that are recomputed
    with_experts: int  # layers that have experts in the place of an MLP
    unsplit: int  # layers behind whose experts nothing is summed
    unsplit_again: int  # recomputed ones of those
    embeddings: int  # 0 or 1, and one of each further token
    outputs: int  # output layers: 0 or 1, and one of each further token


def _count_split_layers(plan: Plan) -> _SplitLayers:
    """Count what tensor parallel ranks split of the stage of `plan`."""
    shape = plan.rank_shape
    stage = plan.stage
    with_experts = count_expert_layers(shape, stage) + plan.further_expert_layers
    further_again = min(plan.further_expert_layers, plan.recomputed_further_layers)
    # experts take each rank's own tokens; one that all tokens pass is split as an MLP is
    splits_experts = _measure_shared_width(shape) > 0
    return _SplitLayers(
        passes=plan.final_micro_batches,
        number=len(stage.layers) + plan.further_layers,
        again=plan.recomputed_layers + plan.recomputed_further_layers,
        with_experts=with_experts,
        unsplit=0 if splits_experts else with_experts,
        unsplit_again=0 if splits_experts else count_recomputed_experts(plan) + further_again,
        embeddings=plan.further_layers + (1 if stage.is_first else 0),
        outputs=plan.further_layers + (1 if stage.is_last else 0),
    )


def _measure_shared_width(shape: ModelShape) -> int:
    """Width of the expert that all tokens pass; 0 where there is none."""
    if shape.experts is None:
        return 0
    return shape.experts.shared_ffn_hidden_size


def _gather_for_layers(plan: Plan, layers: _SplitLayers) -> Iterator[Exchange]:
    """Gatherings before attention and MLP, forward, and of gradients behind them, backward."""
    num_bytes = compute_hidden_bytes(plan)
    of_mlp = layers.number + layers.again - layers.unsplit - layers.unsplit_again
    # latent attention gathers its vectors instead
    of_attention = 0 if plan.rank_shape.latent is not None else layers.number + layers.again
    forward = layers.passes * (of_attention + of_mlp)
    outputs = layers.passes * layers.outputs
    yield from _gather_hidden(plan, "hidden states, forward", num_bytes, forward, outputs)
    backward = layers.passes * (2 * layers.number - layers.unsplit)
    embeddings = layers.passes * layers.embeddings
    yield from _gather_hidden(plan, "their gradients, backward", num_bytes, backward, embeddings)


def _sum_layer_results(plan: Plan, layers: _SplitLayers) -> Exchange:
    """Sums behind attention, MLP and embedding, forward."""
    sums = 2 * layers.number - layers.unsplit + layers.again + layers.embeddings
    if plan.rank_shape.hidden_dropout > 0:
        # torch.utils.checkpoint stops before the last sum of a layer unless a dropout follows; the sum behind attention
        # is never the last
        sums += layers.again - layers.unsplit_again
    return Exchange(
        group=TENSOR,
        kind=SCATTER if plan.layout.sequence_parallel else REDUCE,
        what="hidden states, forward",
        num_bytes=compute_hidden_bytes(plan),
        times=layers.passes * sums,
    )


def _sum_gradients_before_layers(plan: Plan, layers: _SplitLayers) -> Iterator[Exchange]:
    """Sums of the gradients of what goes into attention, MLP and output layer, backward."""
    shape = plan.rank_shape
    num_bytes = compute_hidden_bytes(plan)
    products = []  # (rows of the weight, how many layers have it)
    if shape.latent is None:
        products.append((shape.qkv_rows, layers.number))
    products.append((shape.fc1_width, layers.number - layers.with_experts))
    shared_width = _measure_shared_width(shape)
    if shared_width:
        products.append((shape.count_fc1_rows(shared_width), layers.with_experts))
    some_in_fp8 = len(plan.fp8_layers) > 0
    for rows, number in products:
        yield from _sum_input_gradients(plan, rows, layers.passes * number, num_bytes, some_in_fp8)
    outputs = layers.passes * layers.outputs
    yield from _sum_input_gradients(plan, shape.padded_vocab_size, outputs, num_bytes, some_in_fp8=False)


def _spread_latent_vectors(plan: Plan, latent: LatentShape, layers: int, again: int) -> Iterator[Exchange]:
    """List what ranks exchange of the vectors from which all heads' queries, keys and values are made.

    Ranks have some of the heads each; the part of keys that heads share is exchanged, too.

    Args:
        plan: Of the rank.
        latent: Widths of the vectors.
        layers: In a step.
        again: Those that are recomputed.
    """
    shape = plan.rank_shape
    hidden_bytes = compute_hidden_bytes(plan)
    keys_bytes = hidden_bytes * latent.qk_pos_emb_head_dim // shape.hidden_size
    # each rank has those up to its heads, and all of those down to the vectors
    *queries, down, up, _ = list_attention_matrices(shape)
    some_in_fp8 = len(plan.fp8_layers) > 0
    shares_tokens = plan.layout.sequence_parallel
    for rows, columns in (queries[-1], up):
        num_bytes = hidden_bytes * columns // shape.hidden_size
        if shares_tokens:
            what = "what queries, keys and values are made from"
            gathered_bytes = _narrow(plan, num_bytes) if some_in_fp8 else num_bytes
            yield Exchange(TENSOR, GATHER, what, gathered_bytes, layers + again)
        yield from _sum_input_gradients(plan, rows, layers, num_bytes, some_in_fp8, columns)
    sums = REDUCE
    if shares_tokens:
        sums = SCATTER
        yield Exchange(TENSOR, GATHER, "keys that heads share", keys_bytes, layers + again)
        yield _sum_latent_projections(plan, [*queries[:-1], down])
    yield Exchange(TENSOR, sums, "gradients of shared keys", keys_bytes, layers)


def _sum_latent_projections(plan: Plan, matrices: list[tuple[int, int]]) -> Exchange:
    """Sums of gradients of weights that all ranks have, where each rank's gradients are of its own tokens.

    Args:
        plan: Of the rank.
        matrices: (rows, columns) of the weights of one layer.
    """
    weights = sum(rows * columns for rows, columns in matrices)
    ranks = plan.sharding.ranks if plan.sharding else 1
    # shares of gradients are fp32
    each = gradient_bytes(plan.precision, plan.fp32_gradients or ranks > 1)
    return Exchange(
        group=TENSOR,
        kind=REDUCE,
        what="gradients of projections to latent vectors",
        num_bytes=weights * len(plan.stage.layers) * each // ranks,
        times=1,
    )


def _gather_hidden(plan: Plan, what: str, num_bytes: int, of_layers: int, of_ends: int) -> Iterator[Exchange]:
    """Gatherings of hidden states or their gradients.

    Args:
        plan: Of the rank.
        what: Which of them.
        num_bytes: Of one.
        of_layers: Times in a step for layers, some of which may take them in fp8.
        of_ends: Times for embedding or output layer.
    """
    if not plan.fp8_layers:
        yield Exchange(TENSOR, GATHER, what, num_bytes, of_layers + of_ends)
        return
    yield Exchange(TENSOR, GATHER, f"{what}, in fp8", _narrow(plan, num_bytes), of_layers)
    yield Exchange(TENSOR, GATHER, what, num_bytes, of_ends)


def _narrow(plan: Plan, num_bytes: int) -> int:
    """Bytes of what ranks gather of 16-bit hidden states for linear layers, some of which take them in fp8.

    These are gathered so (gather_along_first_dim with a quantizer, pytorch/distributed.py of Transformer Engine).
    """
    layers = len(plan.stage.layers)
    # a number in fp8 has half of the bytes
    halves = 2 * layers - len(plan.fp8_layers)
    return num_bytes * halves // (2 * layers)


def _sum_input_gradients(
    plan: Plan, rows: int, times: int, num_bytes: int, some_in_fp8: bool, columns: int | None = None
) -> Iterator[Exchange]:
    """The gradient of the input of linear layers.

    Tensor parallel ranks add it up while they compute that of the weight.

    Args:
        plan: Of the rank.
        rows: Of the layer's weight, on one rank.
        times: Such layers in a step.
        num_bytes: Of the input.
        some_in_fp8: Whether some of these layers multiply in fp8.
        columns: Of the layer's weight; None: the width of hidden states.
    """
    # a mixture's products are taken as if all were slow and hid most: this is a bound
    in_fp8 = some_in_fp8 and len(plan.fp8_layers) == len(plan.stage.layers)
    width = columns or plan.shape.hidden_size
    product_flops = 2 * _count_tokens(plan) * width * rows
    sums = REDUCE
    if plan.layout.sequence_parallel:
        sums = SCATTER
        yield Exchange(
            group=TENSOR,
            kind=GATHER,
            what="hidden states, again",
            num_bytes=_narrow(plan, num_bytes) if some_in_fp8 else num_bytes,
            times=times,
            # while the input's gradient is computed
            hidden_flops=product_flops,
            in_fp8=in_fp8,
        )
    yield Exchange(
        group=TENSOR,
        kind=sums,
        what="their gradients, backward",
        num_bytes=num_bytes,
        times=times,
        # nothing hides it where the weight's gradient is computed later
        hidden_flops=0 if plan.stage.splits_backward else product_flops,
        in_fp8=in_fp8,
    )


def _gather_query_groups(plan: Plan, layers: int, again: int) -> Iterator[Exchange]:
    """Queries, keys and values of a group that several ranks share.

    Args:
        plan: Of the rank.
        layers: In a step, those of all micro-batches.
        again: Those of them that are recomputed.
    """
    shape = plan.rank_shape
    rows_of_group = shape.qkv_rows * shape.query_group_ranks
    num_bytes = _count_tokens(plan) * rows_of_group * element_bytes(plan.precision)
    yield Exchange(TENSOR, GATHER, "queries, keys and values of a group", num_bytes, layers + again)
    yield Exchange(TENSOR, SCATTER, "their gradients", num_bytes, layers)


def _exchange_sequences(plan: Plan) -> Iterator[Exchange]:
    """List exchanges in attention among ranks that have other positions each, for each kind of layers."""
    stage = plan.stage
    passes = plan.final_micro_batches
    layers = Counter(map(plan.count_head_ranks, stage.layers))
    recomputed = [layer for chunk in stage.chunks for layer in chunk[: plan.count_recomputed(len(chunk))]]
    again = Counter(map(plan.count_head_ranks, recomputed))
    for head_ranks, number in sorted(layers.items()):
        if head_ranks > 1:
            yield from _exchange_heads(plan, head_ranks, passes * number, passes * again[head_ranks])
        if head_ranks < plan.layout.context:
            yield from _gather_sequences(plan, head_ranks, passes * number, passes * again[head_ranks])


def _gather_sequences(plan: Plan, head_ranks: int, layers: int, again: int) -> Iterator[Exchange]:
    """Keys and values of whole sequences for attention, and their gradients back.

    Args:
        plan: Of the rank.
        head_ranks: Ranks that share out their heads.
        layers: In a step, those of all micro-batches.
        again: Those of them that are recomputed.
    """
    group = CONTEXT if head_ranks == 1 else CONTEXT_POSITIONS
    shape = plan.rank_shape
    tokens = plan.args.training.micro_batch_size * plan.shape.seq_length
    key_width = shape.num_query_groups // head_ranks * shape.kv_channels
    # keys, and as many values
    num_bytes = 2 * tokens * key_width * element_bytes(plan.precision)
    yield Exchange(group, GATHER, "keys and values", num_bytes, layers + again)
    yield Exchange(group, SCATTER, "their gradients", num_bytes, layers)


def _exchange_heads(plan: Plan, head_ranks: int, layers: int, again: int) -> Iterator[Exchange]:
    """Heads for positions before attention, and back behind it. The arguments are those of _gather_sequences."""
    group = CONTEXT if head_ranks == plan.layout.context else CONTEXT_HEADS
    shape = plan.rank_shape
    each = _count_tokens(plan) * element_bytes(plan.precision)
    keys_and_values = 2 * shape.num_query_groups * shape.kv_channels
    num_bytes = each * (shape.kernel_width + keys_and_values)
    result_bytes = each * shape.kernel_width
    yield Exchange(group, ALL_TO_ALL, "queries, keys and values", num_bytes, layers + again)
    yield Exchange(group, ALL_TO_ALL, "attention's results", result_bytes, layers + again)
    yield Exchange(group, ALL_TO_ALL, "gradients of attention's results", result_bytes, layers)
    yield Exchange(group, ALL_TO_ALL, "gradients of queries, keys and values", num_bytes, layers)


def _exchange_tokens(plan: Plan) -> Iterator[Exchange]:
    """Tokens to the ranks of their experts and back, forward and backward, if each expert gets as many."""
    passes = plan.final_micro_batches
    further_again = min(plan.further_expert_layers, plan.recomputed_further_layers)
    layers = passes * (count_expert_layers(plan.shape, plan.stage) + plan.further_expert_layers)
    again = passes * (count_recomputed_experts(plan) + further_again)
    load = plan_expert_load(plan)
    assert load is not None
    hidden_bytes = compute_hidden_bytes(plan)
    if plan.layout.sequence_parallel:
        hidden_bytes //= plan.layout.tensor
    if load.sends:
        num_bytes = int(hidden_bytes * load.rows)
        yield Exchange(EXPERT, ALL_TO_ALL, "tokens to experts", num_bytes, layers + again)
        yield Exchange(EXPERT, ALL_TO_ALL, "what experts give", num_bytes, layers + again)
        yield Exchange(EXPERT, ALL_TO_ALL, "their gradients", num_bytes, 2 * layers)
        return
    num_bytes = int(hidden_bytes * load.gathered)
    yield Exchange(EXPERT, GATHER, "tokens of all ranks", num_bytes, layers + again)
    # nothing in a layer needs the last sums again but a dropout
    summed = layers + again if plan.shape.hidden_dropout else layers
    yield Exchange(EXPERT, SCATTER, "what experts give", num_bytes, summed)
    yield Exchange(EXPERT, GATHER, "gradients of what experts give", num_bytes, layers)
    yield Exchange(EXPERT, SCATTER, "gradients of tokens", num_bytes, layers)


def _share_expert_gradients(plan: Plan) -> Iterator[Exchange]:
    """Sums of gradients of experts, and gatherings of their weights, among the ranks that hold the same experts."""
    number = count_parameter_parts(plan.rank_shape, plan.stage)["experts"]
    if not number:
        return
    reduced_bytes = number * gradient_bytes(plan.precision, plan.fp32_gradients)
    shared = plan.expert_sharding
    if shared is None:
        yield Exchange(EXPERT_DATA, REDUCE, "gradients of experts", reduced_bytes, 1)
        return
    passes = plan.final_micro_batches if shared.gathers_twice else 1
    if shared.ranks > 1:
        gathers = 2 * passes if shared.gathers_twice else passes
        _, experts = group_parameters(plan)
        weight_bytes = _measure_weights(plan, experts)
        yield Exchange(EXPERT_DATA, GATHER, "weights of experts", weight_bytes, gathers)
        yield Exchange(EXPERT_DATA, SCATTER, "gradients of experts", reduced_bytes, passes)
        if plan.args.optimizer.optimizer == "muon":
            yield Exchange(EXPERT_DATA, GATHER, "experts' momentum of muon", number * FP32, 1)
    if shared.ranks < plan.layout.expert_replicas:
        share_bytes = number * FP32 // shared.ranks
        yield Exchange(EXPERT_DATA, REDUCE, "shares of experts' gradients, over instances", share_bytes, passes)


def _measure_weights(plan: Plan, group: ShardedParameters) -> int:
    """Bytes of a group's weights as ranks gather them: some of them in fp8, where they are kept so."""
    in_fp8 = group.in_fp8 if plan.keeps_fp8_weights else 0
    return element_bytes(plan.precision) * (group.number - in_fp8) + in_fp8


def _hand_on(plan: Plan) -> Iterator[Exchange]:
    """Hidden states to the next stage, and gradients to the one before.

    The gradients of an embedding that both ends of the pipeline have are added up.
    """
    layout = plan.layout
    stage = plan.stage
    passes = plan.final_micro_batches
    chunks = len(stage.chunks)
    num_bytes = compute_hidden_bytes(plan)
    if layout.sequence_parallel:
        num_bytes //= layout.tensor
    # the last chunk has nobody to send to, nor has the first chunk's gradient
    forwards = chunks - 1 if stage.is_last else chunks
    backwards = chunks - 1 if stage.is_first else chunks
    yield Exchange(PIPELINE, SEND, "hidden states", num_bytes, passes * forwards)
    yield Exchange(PIPELINE, SEND, "their gradients", num_bytes, passes * backwards)
    both_embed = plan.shape.tied_embeddings or plan.shape.mtp_num_layers > 0
    if both_embed and (stage.is_first or stage.is_last):
        yield from _sum_embeddings(plan)


def _sum_embeddings(plan: Plan) -> Iterator[Exchange]:
    """Sums of gradients of embeddings that the first and the last stage both have."""
    shape = plan.rank_shape
    ranks = plan.sharding.ranks if plan.sharding else 1
    # shares of gradients are fp32
    in_fp32 = plan.fp32_gradients or ranks > 1
    row_bytes = shape.hidden_size * gradient_bytes(plan.precision, in_fp32)
    words = shape.padded_vocab_size * row_bytes // ranks
    what = "gradients of the tied embedding" if shape.tied_embeddings else "gradients of the embedding"
    yield Exchange(PIPELINE, REDUCE, what, words, 1)
    if shape.mtp_num_layers and shape.position_embedding == "learned_absolute":
        positions = shape.max_position_embeddings * row_bytes // ranks
        yield Exchange(PIPELINE, REDUCE, "gradients of the position embedding", positions, 1)


def _share_gradients(plan: Plan) -> Iterator[Exchange]:
    """Sums of gradients of data and context parallel ranks, and what they gather of weights that they share out."""
    group, *_ = group_parameters(plan)
    shared = plan.sharding
    reduced_bytes = group.number * gradient_bytes(plan.precision, plan.fp32_gradients)
    if shared is None:
        yield Exchange(DATA, REDUCE, "gradients", reduced_bytes, 1)
        return
    passes = plan.final_micro_batches if shared.gathers_twice else 1
    yield Exchange(DATA, GATHER, "weights", _measure_weights(plan, group), passes)
    if shared.gathers_twice:
        of_layers = group.of_layer * len(plan.stage.layers)
        layer_bytes = element_bytes(plan.precision) * of_layers
        yield Exchange(DATA, GATHER, "weights of layers, backward", layer_bytes, passes)
    yield Exchange(DATA, SCATTER, "gradients", reduced_bytes, passes)
    if plan.args.optimizer.optimizer == "muon":
        # its update of a matrix takes all rows of the momentum
        matrices = count_matrix_parameters(plan.rank_shape, plan.stage)
        of_replicas = sum(matrices.values()) - matrices["experts"]
        yield Exchange(DATA, GATHER, "momentum of muon", of_replicas * FP32, 1)
    if shared.ranks < plan.layout.replicas:
        share_bytes = group.number * FP32 // shared.ranks
        yield Exchange(DATA, REDUCE, "shares of gradients, over instances", share_bytes, passes)
