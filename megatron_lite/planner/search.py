"""All layouts of a run on so many GPUs: which fit into one kind of GPU, and how fast each can be at best."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_lite.config.args import ModelArgs
from megatron_lite.config.plan import Plan, list_stage_kinds
from megatron_lite.formats.hardware import Processor
from megatron_lite.formats.run_record import TimePrediction
from megatron_lite.planner.memory import measure_peak
from megatron_lite.planner.step_time import predict_time
from megatron_lite.planner.traffic import find_members
from megatron_lite.planner.what_if import (
    NO_RECOMPUTE,
    SHARE_STATE,
    SHARE_WEIGHTS,
    ChangedPlan,
    Changes,
    change_plan,
    find_fewest_recomputed,
    full_recompute,
)
from megatron_lite.units import GIB

MAX_CHUNKS = 4  # of each stage
# positions, of which a context parallel rank has two chunks: with less, attention's kernels have too little to do
MIN_CHUNK = 1024
KEPT_WHOLE: Changes = {"use_distributed_optimizer": False, "use_torch_fsdp2": False, "use_megatron_fsdp": False}
# ranks that share the work of one sequence
MODEL_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
EQUAL_STAGES: Changes = {
    "num_layers_per_virtual_pipeline_stage": None, "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None, "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "microbatch_group_size_per_virtual_pipeline_stage": None,
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A layout of the run with one micro-batch and one way of recomputation."""

    changed: ChangedPlan
    changes: Changes
    peak_bytes: int  # of one GPU's tensors, on the stage that holds most
    time: TimePrediction | None = None  # None where it does not fit: nobody asks then

    @property
    def plan(self) -> Plan:
        """The run in this layout."""
        return self.changed.plan

    @property
    def step_ms(self) -> float:
        """Least time of a step, in milliseconds; infinite where it is not known."""
        return self.time.step_ms if self.time else math.inf

    def sum_rows(self, *names: str) -> float:
        """Milliseconds of the rows of these names."""
        return sum(row.ms for row in self.time.rows if row.name in names) if self.time else 0.0

    def count_nodes(self, group: str) -> int:
        """Nodes among which the ranks of a dimension of the layout are spread."""
        return find_members(group, self.plan.layout, self.plan.sharding, self.plan.world).nodes


@dataclass(frozen=True)
class Search:
    """The result of a search for layouts on one kind of GPU."""

    processor: Processor
    budget_bytes: int  # the GPU's memory without the margin
    margin: float
    tried: int
    fitting: tuple[Candidate, ...]  # fastest first
    least: Candidate | None  # of all that were tried, by memory

    @property
    def best_of_layouts(self) -> list[Candidate]:
        """The fastest candidate of each layout."""
        found: dict[tuple[int, ...], Candidate] = {}
        for one in self.fitting:
            found.setdefault(one.plan.layout.sizes, one)
        return list(found.values())

    @property
    def front(self) -> list[Candidate]:
        """The Pareto front of time and memory: no other candidate is as fast with less memory. Fastest first."""
        found: list[Candidate] = []
        for one in self.fitting:
            if not found or one.peak_bytes < found[-1].peak_bytes:
                found.append(one)
        return found


def search(
    plan: Plan, processor: Processor, margin: float, tell: Callable[[int, int], None] = lambda done, of: None
) -> Search:
    """Try all layouts that the flags allow, with the global batch of the plan.

    Args:
        plan: The run, whose layout does not matter.
        processor: The GPU, as many of which as the plan has ranks.
        margin: Share of its memory that stays free.
        tell: Called with (layouts done, layouts).
    """
    plan = replace(plan, world=replace(plan.world, rank=0))
    budget = int((processor.memory_gib or 0) * GIB * (1 - margin))
    tried = 0
    fitting: list[Candidate] = []
    least = None
    layouts = list(_list_layouts(plan, plan.world.size))
    for number, layout in enumerate(layouts):
        tell(number, len(layouts))
        for micro_batch in _list_micro_batches(plan.batch.final, plan.world.size, layout):
            candidates = list(_try(plan, processor, layout | {"micro_batch_size": micro_batch}, budget))
            tried += len(candidates)
            least = min(filter(None, [least, *candidates]), key=lambda one: one.peak_bytes, default=None)
            if not candidates or candidates[-1].peak_bytes > budget:
                break  # nor does a larger micro-batch
            fitting.append(candidates[-1])
            if len(candidates) > 1:
                refined = _refine(plan, processor, candidates[0], candidates[1], budget)
                fitting += [refined] if refined else []
    timed = [replace(one, time=predict_time(one.plan, processor)) for one in fitting]
    timed.sort(key=lambda one: (one.step_ms, one.peak_bytes))
    return Search(processor, budget, margin, tried, tuple(timed), least)


def _list_layouts(plan: Plan, ranks: int) -> Iterator[Changes]:
    """Layouts of a model, each with all ways in which its ranks can have experts."""
    for layout in _list_dense_layouts(plan.args.model, ranks):
        for of_experts in _list_expert_sizes(plan, layout, ranks):
            yield layout | of_experts


def _list_expert_sizes(plan: Plan, layout: Changes, ranks: int) -> Iterator[Changes]:
    """Numbers of ranks that have some of the experts each, and of those that split each expert.

    The latter are as many as split a layer, or none.
    """
    e = plan.shape.experts
    if e is None:
        yield {}
        return
    of_stage = ranks // layout["pipeline_model_parallel_size"]
    for split in sorted({1, layout["tensor_model_parallel_size"]}):
        for expert in _list_divisors(math.gcd(e.number, of_stage // split)):
            yield {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": split}


def _list_dense_layouts(model: ModelArgs, ranks: int) -> Iterator[Changes]:
    """Sizes whose product divides the number of ranks; the trainer's rules sort out the others."""
    for tensor in _list_divisors(math.gcd(ranks, model.num_attention_heads)):
        for context in _list_divisors(ranks // tensor):
            if context > 1 and (model.seq_length % (2 * context) or model.seq_length // (2 * context) < MIN_CHUNK):
                continue
            for pipeline in _list_divisors(ranks // tensor // context):
                if model.num_layers % pipeline:
                    continue
                sizes: Changes = {
                    "tensor_model_parallel_size": tensor,
                    "sequence_parallel": tensor > 1,
                    "context_parallel_size": context,
                    "pipeline_model_parallel_size": pipeline,
                }
                replicas = ranks // tensor // pipeline
                shared = [SHARE_STATE, SHARE_WEIGHTS] if replicas > 1 else [KEPT_WHOLE]
                for sharing in shared:
                    for chunks in _list_chunk_numbers(model.num_layers, pipeline):
                        several = chunks if chunks > 1 else None
                        yield EQUAL_STAGES | sizes | sharing | {"num_virtual_stages_per_pipeline_rank": several}


def _list_chunk_numbers(num_layers: int, stages: int) -> list[int]:
    """Numbers of chunks into which each stage can be cut."""
    highest = MAX_CHUNKS if stages > 1 else 1
    return [chunks for chunks in range(1, highest + 1) if num_layers % (stages * chunks) == 0]


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _list_micro_batches(global_batch: int, ranks: int, layout: Changes) -> Iterator[int]:
    """Powers of two that divide a data parallel rank's share of the global batch."""
    model = math.prod(layout[name] for name in MODEL_SIZES)
    share = global_batch // (ranks // model)
    size = 1
    while share and share % size == 0:
        yield size
        size *= 2


def _try(plan: Plan, processor: Processor, changes: Changes, budget: int) -> Iterator[Candidate]:
    """Candidates without recomputation and, if that does not fit, with full recomputation.

    There are none if the trainer refuses the layout.
    """
    for mode in (NO_RECOMPUTE, full_recompute(1, "uniform")):
        found = _predict(plan, processor, changes | mode)
        if found is None:
            return
        yield found
        if found.peak_bytes <= budget:
            return


def _predict(plan: Plan, processor: Processor, changes: Changes) -> Candidate | None:
    """The candidate with its memory and without its time; None if the trainer refuses it."""
    changed = change_plan(plan, changes)
    if changed is None:
        return None
    return Candidate(changed, changes, measure_heaviest_stage(changed.plan, processor))


def measure_heaviest_stage(plan: Plan, processor: Processor | None) -> int:
    """Peak memory, in bytes, of one GPU of the stage that holds most."""
    return max(measure_peak(one, processor) for one in _list_heavy_stages(plan))


def _list_heavy_stages(plan: Plan) -> list[Plan]:
    """The plans of one rank of each stage that may hold most.

    Where stages have equal layers, one in the middle holds less than the first, which has the embedding and more
    micro-batches in flight.
    """
    if plan.layout.pipeline == 1:
        return [plan]
    kinds = [one for one, _ in list_stage_kinds(plan)]
    experts = plan.shape.experts
    has_equal_layers = experts is None or all(experts.layers)
    exchange_alike = len(plan.args.parallel.cp_comm_type) == 1
    if plan.fp8 is None and has_equal_layers and exchange_alike and _are_of_one_size(kinds):
        return [kinds[0], kinds[-1]]
    return kinds


def _are_of_one_size(stages: list[Plan]) -> bool:
    """Whether stages have as many layers in each chunk."""
    return len({tuple(map(len, one.stage.chunks)) for one in stages}) == 1


def _refine(plan: Plan, processor: Processor, none: Candidate, all_layers: Candidate, budget: int) -> Candidate | None:
    """The candidate with as few recomputed layers of each chunk as fit; None if that takes all of them.

    Args:
        none: The candidate without recomputation, which does not fit.
        all_layers: The candidate that recomputes all layers, which fits.
        budget: Bytes.
    """
    layers = max(len(chunk) for chunk in all_layers.plan.stage.chunks)
    peaks = {0: none.peak_bytes, layers: all_layers.peak_bytes}
    stages = _list_heavy_stages(all_layers.plan)
    args = all_layers.plan.args

    def measure(number: int) -> int:
        if number in peaks:
            return peaks[number]
        model = replace(args.model, **full_recompute(number, "block"))
        recomputing = replace(args, model=model)
        peak_bytes = 0
        for stage in stages:
            one = replace(stage, args=recomputing)
            peak_bytes = max(peak_bytes, measure_peak(one, processor))
            if peak_bytes > budget:
                # how far it is from fitting matters little
                return peak_bytes
        peaks[number] = peak_bytes
        return peak_bytes

    number = find_fewest_recomputed(layers, measure, budget)
    if number == layers:
        return None
    changes = all_layers.changes | full_recompute(number, "block")
    changed = change_plan(plan, changes)
    # the trainer takes any number of layers where it takes all
    assert changed is not None
    return Candidate(changed, changes, peaks[number])
