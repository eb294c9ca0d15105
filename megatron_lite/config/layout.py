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

    As in Megatron-LM, tensor parallel ranks are neighbors, and those of a pipeline are farthest apart, unless --use-tp-pp-dp-mapping
    is given (`find_rank`).
    """

    tensor: int = 1  # ranks that split each layer
    context: int = 1  # ranks that share out the positions of each sequence
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
        """This rank's place among those that split the same experts, which are neighbors."""
        return self.stage_rank % self.expert_tensor

    @property
    def expert_rank(self) -> int:
        """This rank's place among those that have other experts each."""
        return self.stage_rank // self.expert_tensor % self.expert

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the experts, and average its gradients."""
        return self.stage_size // self.expert_block

    @property
    def expert_replica(self) -> int:
        """This rank's place among them."""
        return self.stage_rank // self.expert_block

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model, and average their gradients."""
        return self.data * self.context

    @property
    def replica(self) -> int:
        """This rank's place among them."""
        return self.context_rank + self.context * self.data_rank

    @property
    def stage_size(self) -> int:
        """Ranks that have the same layers, or parts of them."""
        return self.tensor * self.context * self.data

    @property
    def stage_rank(self) -> int:
        """This rank's place among them."""
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

    def find_rank(self, tensor_rank: int, context_rank: int, data_rank: int, pipeline_rank: int) -> int:
        """The rank at this place."""
        outer = data_rank + self.data * pipeline_rank
        if self.data_is_outermost:
            outer = pipeline_rank + self.pipeline * data_rank
        return tensor_rank + self.tensor * (context_rank + self.context * outer)

    def describe_place(self, rank: int) -> str:
        """'pp 1, tp 0': where this rank stands in each dimension that has several; "" where all ranks hold the same.

        Experts' ranks are named where they have other experts each (ep), and those that split each expert where they are
        not those that split the layer (etp).
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
        """One rank of each stage of the pipeline."""
        return [self.find_rank(0, 0, 0, number) for number in range(self.pipeline)]

    def find_chunks(self, length: int) -> tuple[range, ...]:
        """Positions of a sequence of this length that this rank has: two of 2 * context equal chunks, one from either end, so that
        attention to all earlier positions is the same work for all ranks."""
        if self.context == 1:
            return (range(length),)
        size = length // (2 * self.context)
        return tuple(
            range(n * size, (n + 1) * size) for n in (self.context_rank, 2 * self.context - 1 - self.context_rank)
        )


def count_keys(length: int, context: int) -> int:
    """Keys per query, on average, in the scores of a context parallel rank with `length` positions."""
    return length if context == 1 else (2 * context + 1) * length // 4


def plan_layout(parallel: ParallelArgs, world: World, has_experts: bool = False) -> Layout:
    """The layout of this rank. The flags' sizes must divide the number of ranks."""
    tensor = parallel.tensor_model_parallel_size
    sizes = Layout(
        tensor,
        parallel.context_parallel_size,
        count_data_ranks(parallel, world),
        parallel.pipeline_model_parallel_size,
        data_is_outermost=parallel.use_tp_pp_dp_mapping,
        sequence_parallel=parallel.sequence_parallel and tensor > 1,
        expert=parallel.expert_model_parallel_size if has_experts else 1,
        expert_tensor=(parallel.expert_tensor_parallel_size or tensor) if has_experts else 1,
    )
    return sizes.locate(world.rank)


def count_data_ranks(parallel: ParallelArgs, world: World) -> int:
    """Number of data parallel ranks; at least 1 even where sizes do not fit."""
    p = parallel
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    return max(world.size // math.prod(max(size, 1) for size in sizes), 1)


# --- a pipeline: which layers a rank has (pipeline_schedule.py: in which order it computes)


LAYER_LETTERS = "EtmL"  # of --pipeline-model-parallel-layout
REPEATED = (
    re.compile(r"\(([^)]+)\)\*(\d+)"),
    re.compile(r"(.)\*(\d+)"),
)  # first pieces in parentheses, then single letters
MAX_LAYOUT = 1_000_000  # letters


def expand_layout(layout: str) -> list[str]:
    """What each stage has by --pipeline-model-parallel-layout, in the order of layers: "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"].

    Raises ValueError for one that would be longer than any model's.
    """
    expanded = layout.replace(",", "").replace(" ", "")
    for pattern in REPEATED:
        if sum(int(number) * len(piece) for piece, number in pattern.findall(expanded)) > MAX_LAYOUT:
            raise ValueError("too long")
        expanded = pattern.sub(lambda match: match[1] * int(match[2]), expanded)
    return expanded.split("|")


def count_accounted(parallel: ParallelArgs) -> tuple[int, int]:
    """(layers that the embedding counts as, those that the loss counts as) where stages share out layers."""
    embedding = 1 if parallel.account_for_embedding_in_pipeline_split else 0
    loss = 1 if parallel.account_for_loss_in_pipeline_split else 0
    return embedding, loss


def count_chunk_layers(parallel: ParallelArgs, num_layers: int) -> list[list[int]]:
    """Numbers of layers of each chunk of each stage: first those of every stage's first chunk, then of every second, and so on.

    They add up to num_layers only if the flags fit together. This is the one place that divides layers among stages.
    """
    p, stages = parallel, max(parallel.pipeline_model_parallel_size, 1)
    if stages == 1:
        return [[num_layers]]
    if p.pipeline_model_parallel_layout is not None:
        counts = [piece.count("t") for piece in expand_layout(p.pipeline_model_parallel_layout)]
        return [counts[first : first + stages] for first in range(0, len(counts), stages)]
    chunks = count_chunks(p, num_layers)
    embedding, loss = count_accounted(p)
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    given = 2 - [first, last].count(None)
    each = (num_layers + embedding + loss - (first or 0) - (last or 0)) // max(stages - given, 1)
    of_stages = [each if first is None else first, *[each] * (stages - 2), each if last is None else last]
    shared = [[count // chunks for count in of_stages] for _ in range(chunks)]
    shared[0][0] -= embedding
    shared[-1][-1] -= loss
    return shared


def count_stage_layers(parallel: ParallelArgs, num_layers: int) -> list[int]:
    """Numbers of layers of each stage, in order."""
    return [sum(of_stage) for of_stage in zip(*count_chunk_layers(parallel, num_layers))]


def count_chunks(parallel: ParallelArgs, num_layers: int) -> int:
    """Number of chunks of each stage, at least 1."""
    p, stages = parallel, parallel.pipeline_model_parallel_size
    if stages <= 1:
        return 1
    if p.pipeline_model_parallel_layout is not None:
        return max(len(expand_layout(p.pipeline_model_parallel_layout)) // stages, 1)
    if p.num_layers_per_virtual_pipeline_stage is None:
        return p.num_virtual_stages_per_pipeline_rank or 1
    accounted = num_layers + sum(count_accounted(p))
    return max(accounted // stages // p.num_layers_per_virtual_pipeline_stage, 1)


def plan_stage(parallel: ParallelArgs, layout: Layout, num_layers: int) -> Stage:
    """The stage of this rank. Stages have as many layers each, unless flags say otherwise."""
    number, first = layout.pipeline_rank, 0
    own: list[range] = []
    for counts in count_chunk_layers(parallel, num_layers):
        start = first + sum(counts[:number])
        own.append(range(start, start + counts[number]))
        first += sum(counts)
    splits_backward = parallel.pipeline_schedule == ZERO_BUBBLE and layout.pipeline > 1
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or 0
    return Stage(number, layout.pipeline, tuple(own), splits_backward, group if len(own) > 1 else 0)


# --- which part of a tensor a rank holds


@dataclass(frozen=True)
class Block:
    """A contiguous part of a tensor: `sizes` elements along each dimension, from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: blocks of it, one below the other along the first dimension."""

    whole: tuple[int, ...]  # the tensor's shape
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(block.sizes[0] for block in self.blocks), *self.blocks[0].sizes[1:])

    def cut(self, start: int, end: int) -> "Part":
        """The part that consists of rows `start` to `end` of this one."""
        blocks, first = [], 0
        for block in self.blocks:
            low, high = max(start - first, 0), min(end - first, block.sizes[0])
            if low < high:
                offsets = (block.offsets[0] + low, *block.offsets[1:])
                blocks.append(Block(offsets, (high - low, *block.sizes[1:])))
            first += block.sizes[0]
        nothing = Block(self.blocks[0].offsets, (0, *self.blocks[0].sizes[1:]))
        return Part(self.whole, tuple(blocks) or (nothing,))


def whole_part(shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(shape, (Block((0,) * len(shape), shape),))


def take_part(tensor: Any, whole: Any, part: Part) -> None:
    """Copy a part of `whole` into `tensor`, which holds it."""
    for rows, region in _pair(tensor, whole, part):
        rows.copy_(region)


def put_part(whole: Any, tensor: Any, part: Part) -> None:
    """Copy `tensor`, which holds a part, into its place in `whole`."""
    for rows, region in _pair(tensor, whole, part):
        region.copy_(rows)


def _pair(tensor: Any, whole: Any, part: Part) -> Iterator[tuple[Any, Any]]:
    """For each block, views of its rows in `tensor` and of its place in `whole`."""
    if not part.whole:
        yield tensor, whole
        return
    start = 0
    for block in part.blocks:
        end = start + block.sizes[0]
        yield tensor[start:end], whole[tuple(slice(at, at + size) for at, size in zip(block.offsets, block.sizes))]
        start = end


def is_split(name: str) -> bool:
    """Whether ranks that split a layer have a part each of the model's parameter of this name, or all of it."""
    return ".".join(name.split(".")[-2:]) in SPLIT


def is_of_experts(name: str) -> bool:
    """Whether the parameter of this name is of experts, of which ranks have some each."""
    return ".mlp.experts." in name


def find_part(name: str, shape: tuple[int, ...], layout: Layout, gated: bool, experts: int = 0) -> Part:
    """What a rank holds of the parameter of this name, whose shape on the rank is `shape`.

    Args:
        name: Megatron-Core's.
        shape: On this rank.
        layout: The rank's place.
        gated: fc1's rows are all gates, then all values; a rank has the same ones of both.
        experts: That this rank has, in each layer.
    """
    if is_of_experts(name):
        return _find_expert_part(name, shape, layout, gated, experts)
    whole, kind = list(shape), ".".join(name.split(".")[-2:])
    if layout.tensor == 1 or kind not in SPLIT:
        return whole_part(shape)
    dimension = SPLIT[kind]
    whole[dimension] *= layout.tensor
    halves = 2 if gated and kind.startswith("linear_fc1") else 1
    sizes, blocks = list(shape), []
    sizes[dimension] //= halves
    for half in range(halves):
        offsets = [0] * len(shape)
        offsets[dimension] = sizes[dimension] * (half * layout.tensor + layout.tensor_rank)
        blocks.append(Block(tuple(offsets), tuple(sizes)))
    return Part(tuple(whole), tuple(blocks))


def _find_expert_part(name: str, shape: tuple[int, ...], layout: Layout, gated: bool, experts: int) -> Part:
    """The same of a matrix of experts, which lie one below the other: those of this rank, and of each its part."""
    dimension = SPLIT[".".join(name.split(".")[-2:])]
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
        blocks.append(Block((first, *[0] * (len(shape) - 1)), (rows, *shape[1:])))
    return Part(tuple(whole), tuple(blocks))


# --- ranks that shard the model's state by rows


@dataclass(frozen=True)
class Sharding:
    """How replicas share out fp32 weights, gradients and moments: each parameter by rows, in equal parts but for the last ones."""

    ranks: int  # that together hold the whole
    index: int  # this rank's among them
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
