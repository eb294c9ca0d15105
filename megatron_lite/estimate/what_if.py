"""The same run with other flags: what it would need, how fast it could be, and the flags with which it fits into a GPU."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_lite.config.args import Args
from megatron_lite.config.check import RULES_WITHOUT_FILES
from megatron_lite.config.flags import Flag, build, list_flags
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.rules.run import data_rules
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.memory import predict_memory
from megatron_lite.estimate.prediction import MemoryPrediction, TimePrediction
from megatron_lite.estimate.step_time import predict_time
from megatron_lite.units import GIB

RULES = [rule for rule in RULES_WITHOUT_FILES if rule is not data_rules]  # a plan may be made without its data
FLAGS = {flag.field: flag for flag in list_flags(Args)}


@dataclass(frozen=True)
class Variant:
    """A changed plan. `add` goes behind the command line, where the last one of a name counts; `drop` must leave it."""

    plan: Plan
    add: tuple[str, ...]  # ("--micro-batch-size 8", "--bf16")
    drop: tuple[str, ...]  # ("--fp16",)
    memory: MemoryPrediction
    time: TimePrediction | None  # None without a GPU to predict for

    @property
    def peak_bytes(self) -> int:
        """Of one GPU's tensors."""
        return self.memory.peak.num_bytes

    @property
    def words(self) -> str:
        """'--bf16 instead of --fp16', 'without --fp16', '' for no change."""
        added, dropped = " ".join(self.add), " ".join(self.drop)
        if added and dropped:
            return f"{added} instead of {dropped}"
        if added or not dropped:
            return added
        return f"without {dropped}" + (" (fp32)" if {"--fp16", "--bf16"} & set(self.drop) else "")


def variant_of(plan: Plan, processor: Processor | None = None, **changes) -> Variant | None:
    """`plan` with the fields of Args in `changes`; the global batch stays. None where the trainer would refuse that."""
    if plan.args.training.global_batch_size is None and changes.get("micro_batch_size"):
        changes = {"global_batch_size": plan.batch.final, **changes}
    before = _values(plan.args)
    changes = {name: value for name, value in changes.items() if before[name] != value}
    args = build(Args, before | changes)
    if any(mistake for rule in RULES for mistake in rule(args, plan.world)):
        return None
    changed = resolve(args, plan.world, plan.vocab_size)
    add, drop = _spelled(before, changes)
    return Variant(
        changed, add, drop, predict_memory(changed, processor), predict_time(changed, processor) if processor else None
    )


def _values(args: Args) -> dict[str, object]:
    groups = [getattr(args, group.name) for group in dataclasses.fields(args)]
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def _spelled(before: dict[str, object], changes: dict[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags to add, flags to drop)."""
    add = [_text(FLAGS[name], value) for name, value in changes.items() if not _is_default(FLAGS[name], value)]
    drop = [
        FLAGS[name].spelling
        for name, value in changes.items()
        if _is_default(FLAGS[name], value) and not _is_default(FLAGS[name], before[name])
    ]
    return tuple(add), tuple(drop)


def _is_default(flag: Flag, value) -> bool:
    """Only switches and what is None when left out can be taken back by leaving the flag out."""
    return value == flag.default and (flag.is_switch or value is None)


def _text(flag: Flag, value) -> str:
    if flag.is_switch:
        return flag.spelling
    return f"{flag.spelling} {f'{value:g}' if isinstance(value, float) else value}"


# --- which flags make a run fit into a GPU

MARGIN = 0.08  # of a GPU's memory: CUDA's context, libraries' buffers, NCCL, what the caching allocator cannot reuse
SHORTEST = 128  # sequence that anybody would want
NO_RECOMPUTE = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
SELECTIVE = NO_RECOMPUTE | {"recompute_granularity": "selective"}
PRECISIONS = {  # switches that go with each; the sums' default follows the precision
    "fp32": {"fp16": False, "bf16": False}, "fp16": {"fp16": True, "bf16": False}, "bf16": {"fp16": False, "bf16": True},
}  # fmt: skip
SUMS_AS_USUAL = {"accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": False}


@dataclass(frozen=True)
class Fit:
    """What fits, or by how much it does not."""

    processor: Processor
    budget_bytes: int  # the GPU's memory without the margin
    margin: float
    given: Variant  # the plan as it is
    found: Variant | None  # fastest in arithmetic, then with the largest micro-batch; None if nothing fits
    least: Variant | None = None  # where nothing fits: what needs least with this model and precision
    way_out: Variant | None = None  # where nothing fits: the smallest other change that does; None if there is none

    @property
    def fits(self) -> bool:
        """The plan as it is."""
        return self.given.peak_bytes <= self.budget_bytes


def what_if(plan: Plan, processor: Processor | None = None) -> list[Variant]:
    """Changes of one thing each, without those that change nothing or that the trainer refuses."""
    now = variant_of(plan, processor)
    found = [variant_of(plan, processor, **changes) for changes in _single_changes(plan)]
    return [one for one in found if one and one.words and (one.memory, one.time) != (now.memory, now.time)]


def fit(plan: Plan, processor: Processor, margin: float = MARGIN) -> Fit:
    """The cheapest recomputation that fits with some micro-batch, and the largest micro-batch that fits with it.

    The global batch stays, so a micro-batch must divide each rank's share of it.
    """
    budget = int(processor.memory_gib * GIB * (1 - margin))
    sizes = _micro_batches(plan)

    def tried(micro_batch: int, recompute: dict) -> Variant | None:
        return variant_of(plan, processor, micro_batch_size=micro_batch, **recompute)

    mode = next((mode for mode in _recompute_modes(plan) if _fits(tried(sizes[-1], mode), budget)), None)
    if mode and mode.get("recompute_method") == "block":
        mode = _fewest_layers(plan, lambda mode: _fits(tried(sizes[-1], mode), budget))
    found = next((one for size in sizes if _fits(one := tried(size, mode), budget)), None) if mode is not None else None
    result = Fit(processor, budget, margin, given=variant_of(plan, processor), found=found)
    if found:
        return result
    whole = (NO_RECOMPUTE, SELECTIVE, full_recompute(1, "uniform"))
    least = min(filter(None, (tried(sizes[-1], mode) for mode in whole)), key=lambda one: one.peak_bytes)
    return replace(result, least=least, way_out=_way_out(plan, least.plan, processor, budget))


def _fits(one: Variant | None, budget: int) -> bool:
    return one is not None and one.peak_bytes <= budget


def _fewest_layers(plan: Plan, fits: Callable[[dict], bool]) -> dict:
    """Each more recomputed layer keeps less: halving finds the fewest that are enough."""
    numbers = range(1, plan.shape.num_layers)
    least = bisect_left(numbers, True, key=lambda number: fits(full_recompute(number, "block")))
    return full_recompute(numbers[least], "block")


def _single_changes(plan: Plan) -> Iterator[dict]:
    m, t = plan.args.model, plan.args.training
    yield NO_RECOMPUTE
    yield SELECTIVE
    yield full_recompute(1, "uniform")
    if t.micro_batch_size > 1:
        yield {"micro_batch_size": t.micro_batch_size // 2}
    yield {"micro_batch_size": t.micro_batch_size * 2}
    yield from (PRECISIONS[name] | SUMS_AS_USUAL for name in PRECISIONS if name != plan.precision)
    if plan.precision == "fp16":
        yield {"accumulate_allreduce_grads_in_fp32": not plan.fp32_gradients}
    if plan.precision == "bf16":
        yield SUMS_AS_USUAL | {"grad_reduce_in_bf16": plan.fp32_gradients}
    yield {"optimizer": "sgd" if plan.args.optimizer.optimizer == "adam" else "adam"}
    if m.hidden_dropout or m.attention_dropout:
        yield {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if m.attention_backend in ("unfused", "local"):
        yield {"attention_backend": "auto"}


def full_recompute(layers: int, method: str) -> dict:
    """Fields of Args; block: the first `layers` layers; uniform: all of them, however long the chunks."""
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def _recompute_modes(plan: Plan) -> Iterator[dict]:
    """From the least arithmetic to the most."""
    yield NO_RECOMPUTE
    yield SELECTIVE
    if plan.shape.num_layers > 1:
        yield full_recompute(plan.shape.num_layers - 1, "block")
    yield full_recompute(1, "uniform")


def _micro_batches(plan: Plan) -> list[int]:
    """Divisors of a rank's share of the global batch, largest first."""
    share = plan.batch.final // plan.world.size
    return [size for size in range(share, 0, -1) if share % size == 0]


def _way_out(plan: Plan, least: Plan, processor: Processor, budget: int) -> Variant | None:
    """A change of training on top of what needs least; none of the model, which would be another one."""
    base = {
        "micro_batch_size": least.args.training.micro_batch_size,
        **{name: getattr(least.args.model, name) for name in NO_RECOMPUTE},
    }

    def tried(changes: dict) -> Variant | None:
        return variant_of(plan, processor, **base | changes)

    return next((one for changes in _larger_changes(plan, processor) if _fits(one := tried(changes), budget)), None)


def _larger_changes(plan: Plan, processor: Processor) -> Iterator[dict]:
    narrow = "bf16" if processor.bf16 else "fp16"
    if plan.precision == "fp32":
        yield PRECISIONS[narrow] | SUMS_AS_USUAL
    if plan.precision == "fp32" and processor.bf16:
        yield PRECISIONS["bf16"] | SUMS_AS_USUAL | {"grad_reduce_in_bf16": True}
    elif plan.fp32_gradients:
        yield SUMS_AS_USUAL | {"grad_reduce_in_bf16": plan.precision == "bf16"}
    length = plan.shape.seq_length // 2
    while length >= SHORTEST:
        yield {"seq_length": length}
        length //= 2
