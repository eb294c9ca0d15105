"""How ranks divide the work, and which of them holds what of the model's state. Pure numbers."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_lite.config.args import ParallelArgs
from megatron_lite.config.world import World
from megatron_lite.pipeline_schedule import ZERO_BUBBLE, Stage

# of parameters that are split over tensor parallel ranks, the dimension
SPLIT = {
    "linear_qkv.weight": 0,  # whole groups: [queries, key, value] of one after the other
    "linear_qkv.bias": 0,
    # of latent attention: whole heads
    "linear_q_proj.weight": 0,
    "linear_q_up_proj.weight": 0,
    "linear_kv_up_proj.weight": 0,
    "core_attention.softmax_offset": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the dimensions in which ranks divide the work, and this rank's place in each.

    As in Megatron-LM, tensor parallel ranks are neighbors, and those of a pipeline are farthest apart, unless
    --use-tp-pp-dp-mapping is given (`find_rank`).
    """

    tensor: int = 1  # ranks that split each layer
    context: int = 1  # ranks that share out the positions of each sequence
    inner_context: int = 1  # of them, those that exchange heads with --cp-comm-type a2a+p2p: neighbors
    data: int = 1  # ranks that share out each batch
    pipeline: int = 1  # ranks that have some of the layers each, and hand hidden states on
    tensor_rank: int = 0
    context_rank: int = 0
    data_rank: int = 0
    pipeline_rank: int = 0
    data_is_outermost: bool = False  # --use-tp-pp-dp-mapping
    sequence_parallel: bool = False  # between attention and MLP, tensor parallel ranks share out the tokens
    expert: int = 1  # ranks that have some of the experts each, among those of a stage
    expert_tensor: int = 1  # ranks that split each expert

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each dimension: tensor, context, pipeline, data, expert, and those that split each expert."""
        return self.tensor, self.context, self.pipeline, self.data, self.expert, self.expert_tensor

    @property
    def expert_block(self) -> int:
        """Ranks that together have all experts once."""
        return self.expert * self.expert_tensor

    @property
    def expert_tensor_rank(self) -> int:
        """Place of this rank among those that split the same experts, which are neighbors."""
        return self.stage_rank % self.expert_tensor

    @property
    def expert_rank(self) -> int:
        """Place of this rank among those that have other experts each."""
        return self.stage_rank // self.expert_tensor % self.expert

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the experts, and average its gradients."""
        return self.stage_size // self.expert_block

    @property
    def expert_replica(self) -> int:
        """Place of this rank among those that hold the same part of the experts."""
        return self.stage_rank // self.expert_block

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model, and average their gradients."""
        return self.data * self.context

    @property
    def replica(self) -> int:
        """Place of this rank among those that hold the same part of the model."""
        return self.context_rank + self.context * self.data_rank

    @property
    def stage_size(self) -> int:
        """Ranks that have the same layers, or parts of them."""
        return self.tensor * self.context * self.data

    @property
    def stage_rank(self) -> int:
        """Place of this rank among those of its stage."""
        return self.tensor_rank + self.tensor * self.replica

    def locate(self, rank: int) -> "Layout":
        """The layout as this rank has it."""
        above, tensor_rank = divmod(rank, self.tensor)
        above, context_rank = divmod(above, self.context)
        pipeline_rank, data_rank = divmod(above, self.data)
        if self.data_is_outermost:
            data_rank, pipeline_rank = divmod(above, self.pipeline)
        return replace(
            self,
            tensor_rank=tensor_rank,
            context_rank=context_rank,
            data_rank=data_rank,
            pipeline_rank=pipeline_rank,
        )

    def find_rank(
        self,
        tensor_rank: int,
        context_rank: int,
        data_rank: int,
        pipeline_rank: int,
    ) -> int:
        """The rank at a place.

        Args:
            tensor_rank: Place among ranks that split each layer.
            context_rank: Place among ranks that share out positions.
            data_rank: Place among ranks that share out the batch.
            pipeline_rank: Number of the stage.
        """
        outer = data_rank + self.data * pipeline_rank
        if self.data_is_outermost:
            outer = pipeline_rank + self.pipeline * data_rank
        return tensor_rank + self.tensor * (context_rank + self.context * outer)

    def describe_place(self, rank: int) -> str:
        """Name the place of a rank in each dimension that has several ranks, as in "pp 1, tp 0".

        Experts' ranks are named where they have other experts each (ep), and those that split each expert where they
        are not those that split the layer (etp).

        Returns:
            An empty text where all ranks hold the same.
        """
        if self.tensor * self.context * self.pipeline * self.expert_block == 1:
            return ""
        one = self.locate(rank)
        splits_experts_alike = self.expert_tensor == self.tensor
        places = (
            ("pp", self.pipeline, one.pipeline_rank),
            ("dp", self.data, one.data_rank),
            ("cp", self.context, one.context_rank),
            ("tp", self.tensor, one.tensor_rank),
            ("ep", self.expert, one.expert_rank),
            ("etp", 1 if splits_experts_alike else self.expert_tensor, one.expert_tensor_rank),
        )
        return ", ".join(f"{name} {place}" for name, size, place in places if size > 1)

    def list_stages(self) -> list[int]:
        """List the first rank of each stage of the pipeline."""
        return [self.find_rank(0, 0, 0, number) for number in range(self.pipeline)]

    def count_head_ranks(self, kind: str) -> int:
        """Count the context parallel ranks that have other heads each, of the same positions, while attention computes.

        Args:
            kind: A value of --cp-comm-type.

        Returns:
            1 where each rank has all heads of its own positions.
        """
        if kind == "a2a":
            return self.context
        return self.inner_context if kind == "a2a+p2p" else 1

    def join_context(self, ranks: int) -> "Layout":
        """The layout in which so many neighboring context parallel ranks are one, which has the positions of all."""
        return replace(self, context=self.context // ranks, context_rank=self.context_rank // ranks)

    def find_chunks(self, length: int) -> tuple[range, ...]:
        """Positions of a sequence of this length that this rank has.

        They are two of 2 * context equal chunks, one from either end, so that attention to all earlier positions is the
        same work for all ranks.
        """
        if self.context == 1:
            return (range(length),)
        chunks = 2 * self.context
        size = length // chunks
        from_start = self.context_rank
        from_end = chunks - 1 - self.context_rank
        return (
            range(from_start * size, (from_start + 1) * size),
            range(from_end * size, (from_end + 1) * size),
        )


def count_keys(length: int, context: int) -> int:
    """Keys per query, on average, in the scores of a context parallel rank with `length` positions."""
    if context == 1:
        return length
    return (2 * context + 1) * length // 4


def plan_layout(parallel: ParallelArgs, world: World, has_experts: bool = False) -> Layout:
    """Plan the layout, as one rank has it.

    Args:
        parallel: The flags, whose sizes must divide the number of ranks.
        world: The rank, and how many there are.
        has_experts: Whether the model has experts.
    """
    tensor = parallel.tensor_model_parallel_size
    sizes = Layout(
        tensor=tensor,
        context=parallel.context_parallel_size,
        inner_context=count_inner_ranks(parallel),
        data=count_data_ranks(parallel, world),
        pipeline=parallel.pipeline_model_parallel_size,
        data_is_outermost=parallel.use_tp_pp_dp_mapping,
        sequence_parallel=parallel.sequence_parallel and tensor > 1,
        expert=parallel.expert_model_parallel_size if has_experts else 1,
        expert_tensor=(parallel.expert_tensor_parallel_size or tensor) if has_experts else 1,
    )
    return sizes.locate(world.rank)


def count_inner_ranks(parallel: ParallelArgs) -> int:
    """Number of context parallel ranks that exchange heads with --cp-comm-type a2a+p2p; 1 without it."""
    sizes = parallel.hierarchical_context_parallel_sizes
    if parallel.context_parallel_size == 1 or "a2a+p2p" not in parallel.cp_comm_type or not sizes:
        return 1
    return sizes[0]


def count_data_ranks(parallel: ParallelArgs, world: World) -> int:
    """Number of data parallel ranks; at least 1 even where sizes do not fit."""
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    others = math.prod(max(size, 1) for size in sizes)
    return max(world.size // others, 1)


# --- a pipeline: which layers a rank has (pipeline_schedule.py: in which order it computes)


LAYER_LETTERS = "EtmL"  # of --pipeline-model-parallel-layout: embedding, layer, layer of multi-token prediction, loss
REPEATED = (
    re.compile(r"\(([^)]+)\)\*(\d+)"),
    re.compile(r"(.)\*(\d+)"),
)  # first pieces in parentheses, then single letters
MAX_LAYOUT = 1_000_000  # letters


def expand_layout(layout: str) -> list[str]:
    """Spell out the letters of each chunk, in the order of layers: "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"].

    Args:
        layout: The value of --pipeline-model-parallel-layout.

    Raises:
        ValueError: It would be longer than any model's.
    """
    expanded = layout.replace(",", "").replace(" ", "")
    for pattern in REPEATED:
        repeated = pattern.findall(expanded)
        length = sum(int(number) * len(piece) for piece, number in repeated)
        if length > MAX_LAYOUT:
            raise ValueError("too long")
        expanded = pattern.sub(lambda match: match[1] * int(match[2]), expanded)
    return expanded.split("|")


def count_accounted(parallel: ParallelArgs) -> tuple[int, int]:
    """Count the layers as which embedding and loss count where stages share out layers: (embedding, loss)."""
    embedding = int(parallel.account_for_embedding_in_pipeline_split)
    loss = int(parallel.account_for_loss_in_pipeline_split)
    return embedding, loss


def count_chunk_layers(parallel: ParallelArgs, num_layers: int) -> list[list[int]]:
    """Count the layers of each chunk of each stage. This is the one place that divides layers among stages.

    Returns:
        Rows for the chunks: how many layers the first chunk of every stage has, then every second one, and so on. They
        add up to num_layers only if the flags fit together.
    """
    stages = max(parallel.pipeline_model_parallel_size, 1)
    if stages == 1:
        return [[num_layers]]
    if parallel.pipeline_model_parallel_layout is not None:
        pieces = expand_layout(parallel.pipeline_model_parallel_layout)
        counts = [piece.count("t") for piece in pieces]
        return [counts[first : first + stages] for first in range(0, len(counts), stages)]
    chunks = count_chunks(parallel, num_layers)
    embedding, loss = count_accounted(parallel)
    of_stages = count_whole_stages(parallel, num_layers)
    of_chunks = [[number // chunks for number in of_stages] for _ in range(chunks)]
    of_chunks[0][0] -= embedding
    of_chunks[-1][-1] -= loss
    return of_chunks


def count_whole_stages(parallel: ParallelArgs, num_layers: int) -> list[int]:
    """Numbers of layers of two or more stages, before they are cut into chunks.

    Stages have as many each, but for a first or last one whose number a flag gives. The embedding and the loss are
    among them where flags count them as layers.
    """
    stages = parallel.pipeline_model_parallel_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    given = [number for number in (first, last) if number is not None]
    left = num_layers + sum(count_accounted(parallel)) - sum(given)
    each = left // max(stages - len(given), 1)
    numbers = [each] * stages
    if first is not None:
        numbers[0] = first
    if last is not None:
        numbers[-1] = last
    return numbers


def count_stage_layers(parallel: ParallelArgs, num_layers: int) -> list[int]:
    """Numbers of layers of each stage, in order."""
    of_chunks = count_chunk_layers(parallel, num_layers)
    return [sum(of_stage) for of_stage in zip(*of_chunks)]


def count_chunks(parallel: ParallelArgs, num_layers: int) -> int:
    """Number of chunks of each stage, at least 1."""
    stages = parallel.pipeline_model_parallel_size
    if stages <= 1:
        return 1
    if parallel.pipeline_model_parallel_layout is not None:
        pieces = expand_layout(parallel.pipeline_model_parallel_layout)
        return max(len(pieces) // stages, 1)
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return parallel.num_virtual_stages_per_pipeline_rank or 1
    accounted = num_layers + sum(count_accounted(parallel))
    of_stage = accounted // stages
    return max(of_stage // parallel.num_layers_per_virtual_pipeline_stage, 1)


def plan_stage(parallel: ParallelArgs, layout: Layout, num_layers: int) -> Stage:
    """Plan the stage of a rank.

    Args:
        parallel: The flags. Stages have as many layers each, unless they say otherwise.
        layout: The layout, as the rank has it.
        num_layers: Layers of the whole model.
    """
    number = layout.pipeline_rank
    before = 0  # layers before the chunks of this row
    own: list[range] = []
    for counts in count_chunk_layers(parallel, num_layers):
        start = before + sum(counts[:number])
        own.append(range(start, start + counts[number]))
        before += sum(counts)
    group = 0
    if len(own) > 1:
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage or 0
    is_zero_bubble = parallel.pipeline_schedule == ZERO_BUBBLE
    return Stage(
        number,
        layout.pipeline,
        tuple(own),
        is_zero_bubble and layout.pipeline > 1,
        group,
    )


# --- which part of a tensor a rank holds


@dataclass(frozen=True)
class Block:
    """A contiguous part of a tensor: `sizes` elements along each dimension, from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def cut(self, start: int, end: int) -> "Block":
        """The block that consists of rows `start` to `end` of this one."""
        offsets = (self.offsets[0] + start, *self.offsets[1:])
        return Block(offsets, (end - start, *self.sizes[1:]))


@dataclass(frozen=True)
class Part:
    """Blocks of a tensor that a rank holds, one below the other along the first dimension."""

    whole: tuple[int, ...]  # the tensor's shape
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the blocks together, as the rank holds them."""
        rows = sum(block.sizes[0] for block in self.blocks)
        return (rows, *self.blocks[0].sizes[1:])

    def cut(self, start: int, end: int) -> "Part":
        """The part that consists of rows `start` to `end` of this one."""
        blocks = []
        first = 0  # row of this part in which a block begins
        for block in self.blocks:
            low = max(start - first, 0)
            high = min(end - first, block.sizes[0])
            if low < high:
                blocks.append(block.cut(low, high))
            first += block.sizes[0]
        if not blocks:
            blocks = [self.blocks[0].cut(0, 0)]
        return Part(self.whole, tuple(blocks))


def whole_part(shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(shape, (Block((0,) * len(shape), shape),))


def take_part(tensor: Any, whole: Any, part: Part) -> None:
    """Copy this rank's part of a whole tensor.

    Args:
        tensor: A torch tensor of the part's shape, to be filled.
        whole: The whole tensor.
        part: Where the part lies in it.
    """
    for rows, region in _pair(tensor, whole, part):
        rows.copy_(region)


def put_part(whole: Any, tensor: Any, part: Part) -> None:
    """Copy a rank's part into its place in the whole tensor.

    Args:
        whole: The whole tensor, to be filled in part.
        tensor: A torch tensor of the part's shape.
        part: Where the part lies in the whole.
    """
    for rows, region in _pair(tensor, whole, part):
        region.copy_(rows)


def _pair(tensor: Any, whole: Any, part: Part) -> Iterator[tuple[Any, Any]]:
    """Views of each block's rows in `tensor`, and of its place in `whole`."""
    if not part.whole:
        yield tensor, whole
        return
    start = 0
    for block in part.blocks:
        end = start + block.sizes[0]
        region = [slice(at, at + size) for at, size in zip(block.offsets, block.sizes)]
        yield tensor[start:end], whole[tuple(region)]
        start = end


def is_split(name: str) -> bool:
    """Whether ranks that split a layer have a part each of the model's parameter of this name, or all of it."""
    return _find_kind(name) in SPLIT


def _find_kind(name: str) -> str:
    """The last two words of a parameter's name: those of its module and its own."""
    words = name.split(".")
    return ".".join(words[-2:])


def is_of_experts(name: str) -> bool:
    """Whether the parameter of this name is of experts, of which ranks have some each."""
    return ".mlp.experts." in name


def find_part(
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    gated: bool,
    experts: int = 0,
) -> Part:
    """Find the part of a parameter that a rank holds.

    Args:
        name: The parameter's name, Megatron-Core's.
        shape: Shape of the parameter on the rank.
        layout: The layout, as the rank has it.
        gated: Whether fc1's rows are all gates, then all values. A rank has the same ones of both.
        experts: How many experts the rank has in each layer.
    """
    if is_of_experts(name):
        return _find_expert_part(name, shape, layout, gated, experts)
    kind = _find_kind(name)
    if layout.tensor == 1 or kind not in SPLIT:
        return whole_part(shape)
    dimension = SPLIT[kind]
    whole = list(shape)
    whole[dimension] *= layout.tensor
    halves = 2 if gated and kind.startswith("linear_fc1") else 1
    sizes = list(shape)
    sizes[dimension] //= halves
    blocks = []
    for half in range(halves):
        number = half * layout.tensor + layout.tensor_rank
        offsets = [0] * len(shape)
        offsets[dimension] = sizes[dimension] * number
        blocks.append(Block(tuple(offsets), tuple(sizes)))
    return Part(tuple(whole), tuple(blocks))


def _find_expert_part(
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    gated: bool,
    experts: int,
) -> Part:
    """Find the part of a matrix of experts, which lie one below the other: those of this rank, and of each its part.

    The arguments are those of find_part.
    """
    dimension = SPLIT[_find_kind(name)]
    splits_rows = dimension == 0
    whole = list(shape)
    whole[0] *= layout.expert
    whole[dimension] *= layout.expert_tensor
    if layout.expert_tensor == 1 or not splits_rows:
        offsets = [0] * len(shape)
        offsets[0] = shape[0] * layout.expert_rank
        if not splits_rows:
            offsets[dimension] = shape[dimension] * layout.expert_tensor_rank
        return Part(tuple(whole), (Block(tuple(offsets), shape),))
    halves = 2 if gated else 1
    rows = shape[0] // (experts * halves)
    blocks = []
    for number in range(experts * halves):
        # halves of all experts before this one, of which each rank has `rows` rows
        before = experts * halves * layout.expert_rank + number
        first = rows * (before * layout.expert_tensor + layout.expert_tensor_rank)
        others = [0] * (len(shape) - 1)
        blocks.append(Block((first, *others), (rows, *shape[1:])))
    return Part(tuple(whole), tuple(blocks))


# --- ranks that shard the model's state by rows


@dataclass(frozen=True)
class Sharding:
    """How replicas share out fp32 weights, gradients and moments.

    Each parameter is shared out by rows, in equal parts but for the last ones.
    """

    ranks: int  # that together hold the whole
    index: int  # place of this rank among them
    # layers give back after forward what they gathered (ZeRO-3), or keep it until backward (ZeRO-1)
    gathers_twice: bool

    def find_rows(self, part: Part) -> Part:
        """The rows that this rank keeps of a part."""
        each = -(-part.shape[0] // self.ranks)
        return part.cut(each * self.index, each * (self.index + 1))


def plan_sharding(parallel: ParallelArgs, layout: Layout) -> Sharding | None:
    """How replicas share out state; None where every rank keeps everything."""
    ranks = layout.replicas // parallel.num_distributed_optimizer_instances
    if ranks == 1 or not parallel.shards_state:
        return None
    twice = parallel.shards_weights and parallel.torch_fsdp2_reshard_after_forward
    return Sharding(ranks, layout.replica % ranks, twice)


def plan_expert_sharding(parallel: ParallelArgs, layout: Layout) -> Sharding | None:
    """How replicas of experts share out their state; None where the model's is not shared out."""
    of_all = plan_sharding(parallel, layout)
    if of_all is None:
        return None
    ranks = layout.expert_replicas // parallel.num_distributed_optimizer_instances
    return replace(of_all, ranks=ranks, index=layout.expert_replica % ranks)
