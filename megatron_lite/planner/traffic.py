"""What ranks exchange in a step, group by group, and how long that takes at least over the links between them.

What every GPU has to send or to receive at least, over the slower of the links on the way: those within a node, and the
network between nodes. Collectives of a few numbers (the norm, the loss, counts) are left out: their time is the host's
and the network's latency.

Letters: M tokens of a micro-batch, H hidden, N parameters of a rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
from megatron_lite.planner.expert_load import count_recomputed_experts, plan_expert_load
from megatron_lite.planner.state_size import FP32, element_bytes, gradient_bytes, group_parameters
from megatron_lite.units import count

# parallel ranks, as in the report
TENSOR = "tensor"
CONTEXT = "context"
DATA = "data"
PIPELINE = "pipeline"
EXPERT = "expert"  # ranks that together have all experts
EXPERT_DATA = "expert data"  # ranks that hold the same part of the experts
GATHER = "all-gather"
SCATTER = "reduce-scatter"
REDUCE = "all-reduce"
SEND = "send"
ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class Exchange:
    """Equal collectives, or sends, of one rank in a step."""

    group: str  # TENSOR | CONTEXT | DATA | PIPELINE | EXPERT | EXPERT_DATA
    kind: str  # GATHER | SCATTER | REDUCE | SEND | ALL_TO_ALL
    what: str
    # of the whole tensor: what a gathering gives, a reduce-scatter takes; all rows that a rank has for all ranks
    num_bytes: int
    times: int  # per step
    hidden_flops: int = 0  # of the product that this rank computes meanwhile
    in_fp8: bool = False  # that product

    @property
    def formula(self) -> str:
        return f"{count(self.times)} {self.kind}s of {self.num_bytes / 1e6:,.1f} MB ({self.what})"


@dataclass(frozen=True)
class Members:
    """How many ranks a group has, and how many of them share a node."""

    ranks: int
    near: int  # on one node

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.near)


@dataclass(frozen=True)
class Route:
    """The slowest part of the way that a collective's bytes take."""

    gb_s: float  # of one GPU in one direction
    share: float  # of the tensor's bytes that each GPU sends or receives
    words: str

    def milliseconds(self, num_bytes: float) -> float:
        return num_bytes * self.share / self.gb_s / 1e6


# --- which ranks are near each other


def find_members(group: str, layout: Layout, sharding: Sharding | None, world: World) -> Members:
    """How many ranks a rank's group has, and how many of them are on one node: the same for all ranks."""
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


def find_route(kind: str, members: Members, processor: Processor) -> Route | None:
    """How a collective's bytes travel; None if a link's speed is unknown, or there is no other rank.

    Without the help of switches each of n GPUs sends at least 2(n-1)/n of the bytes for an all-reduce, half of that for
    a reduce-scatter or an all-gather (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms); to switches
    that add up it sends all of them once. Of GPUs of one node that take part in a group of several nodes, each brings
    its share over the network.
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
    words = f"{parts - 1}/{parts}"
    if rounds > 1:
        words = f"2 x {words}"
    if together > 1:
        words = f"{words}/{together}"
    return rounds * (parts - 1) / parts / together, words


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
    joined = processor.linked_gpus if processor.link_gb_s else 1
    if processor.link_gb_s and ranks <= joined:
        gb_s = processor.link_gb_s / 2
        if processor.mesh:
            gb_s *= (ranks - 1) / (processor.linked_gpus - 1)
        over = f"over the link between GPUs at {gb_s:g} GB/s"
        if kind == SEND:
            return Route(gb_s, 1.0, over)
        if kind == REDUCE and processor.sums_in_switch:
            return Route(gb_s, 1.0, f"once {over}, whose switches add up")
        share, each = _share_collective(kind, ranks, 1)
        return Route(gb_s, share, f"{each} {over}")
    if processor.pcie_gb_s is None:
        return None
    over = f"over PCIe at {processor.pcie_gb_s:g} GB/s"
    if kind == SEND:
        return Route(processor.pcie_gb_s, 1.0, over)
    groups = -(-ranks // joined)  # the GPUs that a bridge joins share the work of what leaves them
    share, each = _share_collective(kind, groups, joined)
    return Route(processor.pcie_gb_s, share, f"{each} {over}")


# --- what travels


def list_exchanges(plan: Plan) -> list[Exchange]:
    """What this plan's rank exchanges in a step of the final global batch, without collectives of a few numbers."""
    layout = plan.layout
    found: list[Exchange] = []
    if layout.tensor > 1:
        found += _split_layers(plan)
    if layout.context > 1:
        found += _gather_sequences(plan)
    if layout.expert_block > 1:
        found += _exchange_tokens(plan)
    if layout.pipeline > 1:
        found += _hand_on(plan)
    if layout.replicas > 1:
        found += _share_gradients(plan)
    if layout.expert_replicas > 1 and plan.shape.experts is not None:
        found += _share_expert_gradients(plan)
    return [one for one in found if one.times and one.num_bytes]


def compute_hidden_bytes(shape: ModelShape, sequences: int, precision: str) -> int:
    """Bytes of the hidden states of a micro-batch, M x H. shape: of one rank."""
    return sequences * shape.seq_length * shape.hidden_size * element_bytes(precision)


def _split_layers(plan: Plan) -> Iterator[Exchange]:
    """Sums over tensor parallel ranks behind attention and MLP, and of gradients before them.

    Where ranks share out the tokens, these are gathered and scattered instead.
    """
    shape = plan.rank_shape
    stage = plan.stage
    passes = plan.batch.final // plan.samples_per_pass
    layers = len(stage.layers)
    again = plan.recomputed_layers
    with_experts = count_expert_layers(shape, stage)
    shared_width = shape.experts.shared_ffn_hidden_size if shape.experts else 0
    unsplit = with_experts
    unsplit_again = count_recomputed_experts(plan)
    if shared_width:
        # experts take each rank's own tokens; one that all tokens pass is split as an MLP is
        unsplit = 0
        unsplit_again = 0
    num_bytes = compute_hidden_bytes(shape, plan.args.training.micro_batch_size, plan.precision)
    embeddings = 1 if stage.is_first else 0
    outputs = 1 if stage.is_last else 0
    # torch.utils.checkpoint stops before the last sum of a layer unless a dropout follows
    sums_again = 2 if shape.hidden_dropout > 0 else 1
    sums = REDUCE
    if plan.layout.sequence_parallel:
        sums = SCATTER
        of_attention = layers + again if shape.latent is None else 0
        gathers = of_attention + layers + again - unsplit - unsplit_again
        backward = 2 * layers - unsplit
        yield from _gather_hidden(plan, "hidden states, forward", num_bytes, passes * gathers, passes * outputs)
        yield from _gather_hidden(plan, "their gradients, backward", num_bytes, passes * backward, passes * embeddings)
    forward = 2 * layers - unsplit + sums_again * again + embeddings
    # the sum behind attention is never the last
    forward -= unsplit_again * (sums_again - 1)
    yield Exchange(TENSOR, sums, "hidden states, forward", num_bytes, passes * forward)
    products = [(shape.fc1_width, layers - with_experts)]
    if shape.latent is None:
        products.insert(0, (shape.qkv_rows, layers))
    else:
        yield from _spread_latent_vectors(plan, shape.latent, passes * layers, passes * again)
    if shared_width:
        products.append((shape.count_fc1_rows(shared_width), with_experts))
    some_in_fp8 = len(plan.fp8_layers) > 0
    for rows, times in products:
        yield from _sum_input_gradients(plan, rows, passes * times, num_bytes, some_in_fp8)
    yield from _sum_input_gradients(plan, shape.padded_vocab_size, passes * outputs, num_bytes, False)
    if shape.query_group_ranks > 1:
        yield from _gather_query_groups(plan, passes * layers, passes * again)


def _spread_latent_vectors(plan: Plan, latent: LatentShape, layers: int, again: int) -> Iterator[Exchange]:
    """What ranks, which have some of the heads each, exchange of the vectors from which all heads' queries, keys and
    values are made, and of the part of keys that heads share.

    Args:
        latent: Widths of the vectors.
        layers: In a step.
        again: Those that are recomputed.
    """
    shape = plan.rank_shape
    hidden_bytes = compute_hidden_bytes(shape, plan.args.training.micro_batch_size, plan.precision)
    keys_bytes = hidden_bytes * latent.qk_pos_emb_head_dim // shape.hidden_size
    # each rank has those up to its heads, and all of those down to the vectors
    *queries, down, up, _ = list_attention_matrices(shape)
    ups = [queries[-1], up]
    downs = [*queries[:-1], down]
    shares_tokens = plan.layout.sequence_parallel
    for rows, columns in ups:
        num_bytes = hidden_bytes * columns // shape.hidden_size
        if shares_tokens:
            what = "what queries, keys and values are made from"
            gathered = _narrow(plan, num_bytes) if plan.fp8_layers else num_bytes
            yield Exchange(TENSOR, GATHER, what, gathered, layers + again)
        yield from _sum_input_gradients(plan, rows, layers, num_bytes, len(plan.fp8_layers) > 0, columns)
    if shares_tokens:
        yield Exchange(TENSOR, GATHER, "keys that heads share", keys_bytes, layers + again)
        # each rank's gradients are of its own tokens
        weights = sum(rows * columns for rows, columns in downs)
        ranks = plan.sharding.ranks if plan.sharding else 1
        each = gradient_bytes(plan.precision, plan.fp32_gradients or ranks > 1)
        num_bytes = weights * len(plan.stage.layers) * each // ranks
        yield Exchange(TENSOR, REDUCE, "gradients of projections to latent vectors", num_bytes, 1)
    yield Exchange(TENSOR, SCATTER if shares_tokens else REDUCE, "gradients of shared keys", keys_bytes, layers)


def _gather_hidden(plan: Plan, what: str, num_bytes: int, of_layers: int, of_ends: int) -> Iterator[Exchange]:
    """Gatherings of hidden states or their gradients.

    Args:
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
    return num_bytes * (2 * layers - len(plan.fp8_layers)) // (2 * layers)


def _sum_input_gradients(
    plan: Plan, rows: int, times: int, num_bytes: int, some_in_fp8: bool, columns: int | None = None
) -> Iterator[Exchange]:
    """The gradient of the input of linear layers.

    Tensor parallel ranks add it up while they compute that of the weight.

    Args:
        rows: Of the layer's weight, on one rank.
        times: Such layers in a step.
        num_bytes: Of the input.
        some_in_fp8: Whether some of these layers multiply in fp8.
        columns: Of the layer's weight; None: the width of hidden states.
    """
    # a mixture's products are taken as if all were slow and hid most: this is a bound
    in_fp8 = some_in_fp8 and len(plan.fp8_layers) == len(plan.stage.layers)
    tokens = plan.args.training.micro_batch_size * plan.rank_shape.seq_length
    product = 2 * tokens * (columns or plan.shape.hidden_size) * rows
    sums = REDUCE
    if plan.layout.sequence_parallel:
        sums = SCATTER
        # while the input's gradient is computed
        gathered = _narrow(plan, num_bytes) if some_in_fp8 else num_bytes
        yield Exchange(TENSOR, GATHER, "hidden states, again", gathered, times, product, in_fp8)
    # nothing hides it where the weight's gradient is computed later
    hidden = 0 if plan.stage.splits_backward else product
    yield Exchange(TENSOR, sums, "their gradients, backward", num_bytes, times, hidden, in_fp8)


def _gather_query_groups(plan: Plan, layers: int, again: int) -> Iterator[Exchange]:
    """Queries, keys and values of a group that several ranks share.

    Args:
        plan: Of the rank.
        layers: In a step, those of all micro-batches.
        again: Those of them that are recomputed.
    """
    shape = plan.rank_shape
    tokens = plan.args.training.micro_batch_size * shape.seq_length
    rows_of_group = shape.qkv_rows * shape.query_group_ranks
    num_bytes = tokens * rows_of_group * element_bytes(plan.precision)
    yield Exchange(TENSOR, GATHER, "queries, keys and values of a group", num_bytes, layers + again)
    yield Exchange(TENSOR, SCATTER, "their gradients", num_bytes, layers)


def _gather_sequences(plan: Plan) -> Iterator[Exchange]:
    """Keys and values of whole sequences for attention, and their gradients back."""
    shape = plan.rank_shape
    layers = len(plan.stage.layers)
    passes = plan.batch.final // plan.samples_per_pass
    again = plan.recomputed_layers
    tokens = plan.args.training.micro_batch_size * plan.shape.seq_length
    key_width = shape.num_query_groups * shape.kv_channels
    num_bytes = 2 * tokens * key_width * element_bytes(plan.precision)
    yield Exchange(CONTEXT, GATHER, "keys and values", num_bytes, passes * (layers + again))
    yield Exchange(CONTEXT, SCATTER, "their gradients", num_bytes, passes * layers)


def _exchange_tokens(plan: Plan) -> Iterator[Exchange]:
    """Tokens to the ranks of their experts and back, forward and backward, if each expert gets as many."""
    passes = plan.batch.final // plan.samples_per_pass
    layers = passes * count_expert_layers(plan.shape, plan.stage)
    again = passes * count_recomputed_experts(plan)
    load = plan_expert_load(plan)
    assert load is not None
    hidden_bytes = compute_hidden_bytes(plan.rank_shape, plan.args.training.micro_batch_size, plan.precision)
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
    """As _share_gradients, of experts, which fewer ranks hold the same of."""
    number = count_parameter_parts(plan.rank_shape, plan.stage)["experts"]
    reduced = gradient_bytes(plan.precision, plan.fp32_gradients)
    shared = plan.expert_sharding
    if shared is None:
        yield Exchange(EXPERT_DATA, REDUCE, "gradients of experts", number * reduced, 1)
        return
    passes = plan.batch.final // plan.samples_per_pass if shared.gathers_twice else 1
    if shared.ranks > 1:
        gathers = 2 * passes if shared.gathers_twice else passes
        in_fp8 = group_parameters(plan)[1].in_fp8 if plan.keeps_fp8_weights else 0
        num_bytes = element_bytes(plan.precision) * (number - in_fp8) + in_fp8
        yield Exchange(EXPERT_DATA, GATHER, "weights of experts", num_bytes, gathers)
        yield Exchange(EXPERT_DATA, SCATTER, "gradients of experts", number * reduced, passes)
        if plan.args.optimizer.optimizer == "muon":
            yield Exchange(EXPERT_DATA, GATHER, "experts' momentum of muon", number * FP32, 1)
    if shared.ranks < plan.layout.expert_replicas:
        num_bytes = number * FP32 // shared.ranks
        yield Exchange(EXPERT_DATA, REDUCE, "shares of experts' gradients, over instances", num_bytes, passes)


def _hand_on(plan: Plan) -> Iterator[Exchange]:
    """Hidden states to the next stage, and gradients to the one before.

    The gradients of an embedding that both ends of the pipeline have are added up.
    """
    layout = plan.layout
    stage = plan.stage
    passes = plan.batch.final // plan.samples_per_pass
    chunks = len(stage.chunks)
    sequences = plan.args.training.micro_batch_size
    num_bytes = compute_hidden_bytes(plan.rank_shape, sequences, plan.precision)
    if layout.sequence_parallel:
        num_bytes //= layout.tensor
    # the last chunk has nobody to send to, nor has the first chunk's gradient
    forwards = chunks - 1 if stage.is_last else chunks
    backwards = chunks - 1 if stage.is_first else chunks
    yield Exchange(PIPELINE, SEND, "hidden states", num_bytes, passes * forwards)
    yield Exchange(PIPELINE, SEND, "their gradients", num_bytes, passes * backwards)
    if plan.shape.tied_embeddings and (stage.is_first or stage.is_last):
        matrix = plan.rank_shape.padded_vocab_size * plan.shape.hidden_size
        ranks = plan.sharding.ranks if plan.sharding else 1
        # shares of gradients are fp32
        in_fp32 = plan.fp32_gradients or ranks > 1
        num_bytes = matrix * gradient_bytes(plan.precision, in_fp32) // ranks
        yield Exchange(PIPELINE, REDUCE, "gradients of the tied embedding", num_bytes, 1)


def _share_gradients(plan: Plan) -> Iterator[Exchange]:
    """Of data and context parallel ranks: sums of gradients, and what they gather of weights that they share out."""
    group, *_ = group_parameters(plan)
    number = group.number
    shared = plan.sharding
    in_fp8 = group.in_fp8 if plan.keeps_fp8_weights else 0
    num_bytes = number * gradient_bytes(plan.precision, plan.fp32_gradients)
    if shared is None:
        yield Exchange(DATA, REDUCE, "gradients", num_bytes, 1)
        return
    passes = plan.batch.final // plan.samples_per_pass if shared.gathers_twice else 1
    each = element_bytes(plan.precision)
    of_layers = group.of_layer * len(plan.stage.layers)
    yield Exchange(DATA, GATHER, "weights", each * (number - in_fp8) + in_fp8, passes)
    if shared.gathers_twice:
        yield Exchange(DATA, GATHER, "weights of layers, backward", each * of_layers, passes)
    yield Exchange(DATA, SCATTER, "gradients", num_bytes, passes)
    if plan.args.optimizer.optimizer == "muon":
        # its update of a matrix takes all rows of the momentum
        matrices = count_matrix_parameters(plan.rank_shape, plan.stage)
        of_replicas = sum(matrices.values()) - matrices["experts"]
        yield Exchange(DATA, GATHER, "momentum of muon", of_replicas * FP32, 1)
    if shared.ranks < plan.layout.replicas:
        yield Exchange(DATA, REDUCE, "shares of gradients, over instances", number * FP32 // shared.ranks, passes)
