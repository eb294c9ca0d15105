"""A run with other flags: its memory and speed, and the flags with which it fits into a GPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_lite.config.args import Args
from megatron_lite.config.check import RULES_WITHOUT_FILES, find_numbers_outside, range_rules
from megatron_lite.config.flags import Flag, list_flags, replace_fields
from megatron_lite.config.fp8 import list_fp8_mistakes
from megatron_lite.config.plan import Plan, plan_stages, resolve
from megatron_lite.config.rules.run import data_rules
from megatron_lite.formats.hardware import Processor
from megatron_lite.formats.run_record import MemoryPrediction, TimePrediction
from megatron_lite.planner.memory import measure_peak, predict_memory
from megatron_lite.planner.step_time import predict_time
from megatron_lite.units import GIB

# a plan may be made without its data; ranges are checked of what is changed only
RULES = [rule for rule in RULES_WITHOUT_FILES if rule not in (data_rules, range_rules)]
FLAGS = {flag.field: flag for flag in list_flags(Args)}
MARGIN = 0.08  # of a GPU's memory: CUDA's context, libraries' buffers, NCCL, what the caching allocator cannot reuse
HALVED_EVERY = 3  # tries along a line, in case memory is far from linear
SHORTEST = 128  # sequence that anybody would want
Changes = dict[str, Any]  # fields of Args
NO_RECOMPUTE: Changes = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
SELECTIVE = NO_RECOMPUTE | {"recompute_granularity": "selective"}
# switches that go with each; the sums' default follows the precision
PRECISIONS = {
    "fp32": {"fp16": False, "bf16": False},
    "fp16": {"fp16": True, "bf16": False},
    "bf16": {"fp16": False, "bf16": True},
}
# what ranks share out costs no arithmetic: state no traffic either, weights a second gathering
SHARE_STATE: Changes = {"use_distributed_optimizer": True, "use_torch_fsdp2": False, "use_megatron_fsdp": False}
SHARE_WEIGHTS: Changes = {"use_distributed_optimizer": False, "use_torch_fsdp2": True, "use_megatron_fsdp": False}
SUMS_AS_USUAL = {"accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": False}


@dataclass(frozen=True)
class ChangedPlan:
    """A changed plan. `add` goes behind the command line, where the last one of a name counts; `drop` must leave it."""

    plan: Plan
    add: tuple[str, ...]  # ("--micro-batch-size 8", "--bf16")
    drop: tuple[str, ...]  # ("--fp16",)

    @property
    def words(self) -> str:
        """The change in words: '--bf16 instead of --fp16', 'without --fp16', '' for no change."""
        added = " ".join(self.add)
        dropped = " ".join(self.drop)
        if added and dropped:
            return f"{added} instead of {dropped}"
        if added or not dropped:
            return added
        is_fp32_now = "--fp16" in self.drop or "--bf16" in self.drop
        now = " (fp32)" if is_fp32_now else ""
        return f"without {dropped}{now}"


@dataclass(frozen=True)
class Variant(ChangedPlan):
    """A changed plan with what it needs."""

    memory: MemoryPrediction
    time: TimePrediction | None  # None without a GPU to predict for

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one GPU's tensors, in bytes."""
        return self.memory.peak.num_bytes


def change_plan(plan: Plan, changes: Changes) -> ChangedPlan | None:
    """The plan with these fields of Args changed and the same global batch; None if the trainer refuses such flags."""
    training = plan.args.training
    has_default_batch = training.global_batch_size is None and training.step_batch_size_schedule is None
    if has_default_batch and changes.get("micro_batch_size"):
        changes = {"global_batch_size": plan.batch.final, **changes}
    before = {name: FLAGS[name].get(plan.args) for name in changes}
    changes = {name: value for name, value in changes.items() if before[name] != value}
    args = replace_fields(plan.args, changes)
    if any(find_numbers_outside(args, [FLAGS[name] for name in changes])):
        return None
    for rule in RULES:
        if any(rule(args, plan.world)):
            return None
    if plan.fp8 is not None and list_fp8_mistakes(plan.fp8, args):
        return None
    add = []
    drop = []
    for name, value in changes.items():
        flag = FLAGS[name]
        if not _is_left_out(flag, value):
            shown = f"{value:g}" if isinstance(value, float) else value
            add.append(flag.spelling if flag.is_switch else f"{flag.spelling} {shown}")
        elif not _is_left_out(flag, before[name]):
            drop.append(flag.spelling)
    changed = replace(resolve(args, plan.world, plan.vocab_size), fp8=plan.fp8)
    return ChangedPlan(changed, tuple(add), tuple(drop))


def _is_left_out(flag: Flag, value: object) -> bool:
    """Whether leaving the flag out gives this value: that takes back switches, and what is None when left out."""
    return value == flag.default and (flag.is_switch or value is None)


def build_variant(plan: Plan, processor: Processor | None = None, **changes: Any) -> Variant | None:
    """Change a plan as change_plan does, and predict its memory, and its time on a GPU."""
    changed = change_plan(plan, changes)
    if changed is None:
        return None
    memory = predict_memory(changed.plan, processor)
    time = predict_time(changed.plan, processor) if processor else None
    return Variant(changed.plan, changed.add, changed.drop, memory, time)


def predict_peak(plan: Plan, /, **changes: Any) -> int:
    """Peak bytes of a rank with these fields of Args changed.

    Raises:
        ValueError: They do not go with the others.
    """
    variant = build_variant(plan, **changes)
    if variant is None:
        raise ValueError(f"{changes} do not go with the plan's other settings")
    return variant.peak_bytes


def find_heaviest_stage(plan: Plan, processor: Processor | None = None) -> Plan:
    """The plan of a rank of the stage that holds the most memory."""
    return max(plan_stages(plan), key=lambda one: measure_peak(one, processor))


def full_recompute(layers: int, method: str) -> Changes:
    """The flags of full recomputation, as fields of Args.

    Args:
        layers: How many from the first on, of block.
        method: block, or uniform, which takes all layers.
    """
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def find_fewest_recomputed(layers: int, measure_peak: Callable[[int], int], budget: int) -> int:
    """The fewest recomputed layers with which a rank's peak is within the budget.

    Each recomputed layer keeps less, and all layers are alike, so that the peak is nearly linear in their number: a
    straight line between a number that is too small and one that is enough meets the budget where the answer is, or
    close to it. What it misses is found by trying the number below, and by halving.

    Args:
        layers: A number that is enough; 0 is too small.
        measure_peak: Peak memory in bytes with so many recomputed layers.
        budget: Bytes.
    """
    too_small = 0
    enough = layers
    highest_bytes = measure_peak(too_small)
    lowest_bytes = measure_peak(enough)
    tries = 0
    while enough - too_small > 1:
        tries += 1
        if tries % HALVED_EVERY == 0:
            number = (too_small + enough) // 2
        else:
            each = (highest_bytes - lowest_bytes) / (enough - too_small)
            number = too_small + math.ceil((highest_bytes - budget) / each)
            number = min(max(number, too_small + 1), enough - 1)
        peak = measure_peak(number)
        if peak <= budget:
            enough = number
            lowest_bytes = peak
        else:
            too_small = number
            highest_bytes = peak
    return enough


def what_if(plan: Plan, processor: Processor | None = None) -> list[Variant]:
    """Variants of the plan that differ in one thing and have another memory or time; none that the trainer refuses."""
    memory = predict_memory(plan, processor)
    time = predict_time(plan, processor) if processor else None
    found = [build_variant(plan, processor, **changes) for changes in _list_changes(plan)]
    return [one for one in found if one and one.words and (one.memory, one.time) != (memory, time)]


def _list_changes(plan: Plan) -> Iterator[Changes]:
    """List variants of a plan, each with one change."""
    yield from (NO_RECOMPUTE, SELECTIVE, full_recompute(1, "uniform"))
    micro_batch = plan.args.training.micro_batch_size
    if micro_batch > 1:
        yield {"micro_batch_size": micro_batch // 2}
    yield {"micro_batch_size": micro_batch * 2}
    for name, switches in PRECISIONS.items():
        if name != plan.precision:
            yield switches | SUMS_AS_USUAL
    if plan.precision == "fp16":
        yield {"accumulate_allreduce_grads_in_fp32": not plan.fp32_gradients}
    if plan.precision == "bf16":
        yield SUMS_AS_USUAL | {"grad_reduce_in_bf16": plan.fp32_gradients}
    yield {"optimizer": "sgd" if plan.args.optimizer.optimizer == "adam" else "adam"}
    yield {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    yield from (SHARE_STATE, SHARE_WEIGHTS)
    if plan.args.model.attention_backend in ("unfused", "local"):
        yield {"attention_backend": "auto"}


# --- which flags make a run fit into a GPU


@dataclass(frozen=True)
class Fit:
    """The flags with which a plan fits into a GPU, or what needs least if none do."""

    processor: Processor
    budget_bytes: int  # the GPU's memory without the margin
    margin: float
    given: Variant  # the plan as it is
    found: Variant | None  # fastest in arithmetic, then with the largest micro-batch; None if nothing fits
    least: Variant | None = None  # where nothing fits: what needs least with this model and precision
    remedy: Variant | None = None  # where nothing fits: the smallest other change that does; None if there is none

    @property
    def fits(self) -> bool:
        """Whether the plan fits as it is."""
        return self.given.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class _Target:
    """A plan, and the memory of a GPU that it is to fit into."""

    plan: Plan
    processor: Processor
    budget_bytes: int

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return self.plan.shape.num_layers

    @property
    def micro_batches(self) -> list[int]:
        """Sizes that divide each rank's share of the global batch, which stays; the largest first."""
        share = self.plan.batch.final // self.plan.layout.data
        return [size for size in range(share, 0, -1) if share % size == 0]

    def change_to_fit(self, micro_batch: int, changes: Changes) -> Variant | None:
        """The plan with these changes; None if the trainer refuses them or it does not fit."""
        one = build_variant(self.plan, self.processor, micro_batch_size=micro_batch, **changes)
        return one if one is not None and one.peak_bytes <= self.budget_bytes else None

    def is_accepted(self, changes: Changes) -> bool:
        """Whether the trainer takes the plan with these changes."""
        return change_plan(self.plan, changes) is not None


def fit(plan: Plan, processor: Processor, margin: float = MARGIN) -> Fit:
    """The cheapest recomputation that fits with some micro-batch, and the largest micro-batch that fits with it.

    The global batch stays, so a micro-batch must divide each rank's share of it. Where nothing fits, a change of
    training on top of what needs least; none of the model, which would be another one.

    Args:
        plan: Of the rank that holds most.
        processor: The GPU.
        margin: Share of its memory that stays free.
    """
    budget = int((processor.memory_gib or 0) * GIB * (1 - margin))
    target = _Target(plan, processor, budget)
    given = Variant(plan, (), (), predict_memory(plan, processor), predict_time(plan, processor))
    shared = _choose_sharing(target)
    mode = _choose_recomputation(target, shared)
    if mode is not None:
        fitting = (target.change_to_fit(size, mode) for size in target.micro_batches)
        return Fit(processor, budget, margin, given, next(filter(None, fitting), None))
    smallest = target.micro_batches[-1]
    modes = (NO_RECOMPUTE, SELECTIVE, full_recompute(1, "uniform"))
    variants = (build_variant(plan, processor, micro_batch_size=smallest, **mode, **shared) for mode in modes)
    least = min(filter(None, variants), key=lambda one: one.peak_bytes)
    return Fit(processor, budget, margin, given, None, least, _find_smaller_training(target, least, shared))


def _choose_sharing(target: _Target) -> Changes:
    """List what ranks share out before anything is computed twice.

    Nothing where it fits or cannot be, state where that is enough, else weights; a pipeline's weights cannot be shared
    out.
    """
    plan = target.plan
    if plan.sharding is not None or plan.layout.replicas == 1:
        return {}
    smallest = target.micro_batches[-1]
    if target.change_to_fit(smallest, NO_RECOMPUTE):
        return {}
    if target.change_to_fit(smallest, NO_RECOMPUTE | SHARE_STATE):
        return SHARE_STATE
    for shared in (SHARE_WEIGHTS, SHARE_STATE):
        if target.is_accepted(NO_RECOMPUTE | shared):
            return shared
    return {}


def _choose_recomputation(target: _Target, shared: Changes) -> Changes | None:
    """The least recomputation with which the smallest micro-batch fits, with what is shared; None if none does."""
    smallest = target.micro_batches[-1]
    # from the least arithmetic to the most
    modes: list[Changes] = [NO_RECOMPUTE, SELECTIVE, full_recompute(1, "uniform")]
    if target.layers > 1:
        modes.insert(2, full_recompute(target.layers - 1, "block"))
    for mode in modes:
        if target.change_to_fit(smallest, mode | shared):
            break
    else:
        return None
    if mode["recompute_method"] != "block":
        return mode | shared

    def measure(number: int) -> int:
        """Peak in bytes with so many recomputed layers."""
        some = full_recompute(number, "block") if number else NO_RECOMPUTE
        changed = change_plan(target.plan, {"micro_batch_size": smallest} | some | shared)
        assert changed is not None  # as with layers - 1 recomputed layers
        return measure_peak(changed.plan, target.processor)

    number = find_fewest_recomputed(target.layers - 1, measure, target.budget_bytes)
    return full_recompute(number, "block") | shared


def _find_smaller_training(target: _Target, least: Variant, shared: Changes) -> Variant | None:
    """The smallest change of precision or of the sequence's length with which what needs least fits."""
    base = {name: getattr(least.plan.args.model, name) for name in NO_RECOMPUTE} | shared
    smallest = target.micro_batches[-1]
    tried = (target.change_to_fit(smallest, base | changes) for changes in _list_smaller_trainings(target))
    return next(filter(None, tried), None)


def _list_smaller_trainings(target: _Target) -> Iterator[Changes]:
    """Changes of precision, then shorter and shorter sequences."""
    plan = target.plan
    has_bf16 = target.processor.bf16
    if plan.precision == "fp32":
        yield PRECISIONS["bf16" if has_bf16 else "fp16"] | SUMS_AS_USUAL
    if plan.precision == "fp32" and has_bf16:
        yield PRECISIONS["bf16"] | SUMS_AS_USUAL | {"grad_reduce_in_bf16": True}
    elif plan.fp32_gradients:
        yield SUMS_AS_USUAL | {"grad_reduce_in_bf16": plan.precision == "bf16"}
    length = plan.shape.seq_length // 2
    while length >= SHORTEST:
        yield {"seq_length": length}
        length //= 2
