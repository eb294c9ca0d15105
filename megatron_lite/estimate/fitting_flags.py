"""What a change of flags does to memory and time, and the flags with which a run fits into a GPU."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.what_if import Variant, variant_of
from megatron_lite.units import GIB

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
