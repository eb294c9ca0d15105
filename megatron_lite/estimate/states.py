"""What lives from step to step or comes with gradients and the optimizer: weights, gradients, masters, moments, workspaces.

Letters: N parameters.
"""

from collections import Counter

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.cublas import THREADS_WITH_CUBLAS
from megatron_lite.estimate.liveness import Sized
from megatron_lite.estimate.memory import element_bytes, state_bytes
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.sizes import FP32

INT64 = 8


def of_parameters(category: str, name: str, num_bytes: int) -> Sized:
    """Of one parameter."""
    return Sized(category, name, num_bytes, "parameters", is_element=True)


def gradient_weight(plan: Plan) -> Sized:
    """Of one parameter, as backward computes it."""
    return of_parameters("gradients", "gradients", element_bytes(plan.precision))


def is_reduced(plan: Plan) -> bool:
    """Whether DistributedDataParallel's buckets exist."""
    return plan.world.size > 1


def accumulates(plan: Plan) -> bool:
    """Whether a step has several micro-batches."""
    return plan.micro_batches(plan.train_samples) > 1


def gradients_stay(plan: Plan) -> bool:
    """Whether backward's gradients are new memory that lives until the optimizer is through. Else they are added to fp32
    sums, to the earlier micro-batches' gradients or copied into a bucket, and freed one by one."""
    return not (plan.fp32_gradients or accumulates(plan) or is_reduced(plan))


def lasting(plan: Plan) -> Counter[Sized]:
    """From step to step."""
    number, optimizer = parameter_count(plan.shape), plan.args.optimizer
    found = state_bytes(number, plan.precision, plan.fp32_gradients, optimizer.optimizer, optimizer.sgd_momentum > 0)
    per = {category: num_bytes // number for category, num_bytes in found.items() if num_bytes}
    names = {"parameters": "weights", "master weights": "fp32 masters", "moments": f"moments of {optimizer.optimizer}"}
    kept = Counter(
        {of_parameters(category, name, per[category]): number for category, name in names.items() if category in per}
    )
    if plan.fp32_gradients:
        kept[of_parameters("gradients", "fp32 sums of gradients", FP32)] = number
    if is_reduced(plan):
        kept[of_parameters("gradients", "DistributedDataParallel's buckets", element_bytes(plan.precision))] = number
    return kept + _tokens(plan)


def earlier_gradients(plan: Plan) -> Counter[Sized]:
    """What the micro-batches before the last have added up, where fp32 sums do not hold it. Not in a bucket: without a
    reduction torch gives gradients memory of their own."""
    if plan.fp32_gradients or not accumulates(plan):
        return Counter()
    return Counter({gradient_weight(plan): parameter_count(plan.shape)})


def whole_gradients(plan: Plan) -> Counter[Sized]:
    """What the optimizer finds beside what lasts: nothing new if they lie in fp32 sums or buckets."""
    if plan.fp32_gradients or is_reduced(plan):
        return Counter()
    return Counter({gradient_weight(plan): parameter_count(plan.shape)})


def optimizer_copies(plan: Plan) -> Counter[Sized]:
    """fp32 copies of 16-bit gradients, which live through the update (optim/weights.py)."""
    if plan.fp32_gradients or plan.precision == "fp32":
        return Counter()
    return Counter({of_parameters("gradients", "fp32 copies of gradients", FP32): parameter_count(plan.shape)})


def workspaces(plan: Plan, workspace_bytes: int) -> Counter[Sized]:
    """cuBLAS', one for each thread, from the first step on."""
    if plan.device == "cpu":
        return Counter()
    return Counter(
        {Sized("workspace", "cuBLAS workspaces", workspace_bytes, f"{workspace_bytes:,} bytes"): THREADS_WITH_CUBLAS}
    )


def _tokens(plan: Plan) -> Counter[Sized]:
    data, tokens = plan.args.data, plan.args.training.micro_batch_size * plan.shape.seq_length
    number = 2 + data.reset_position_ids + data.reset_attention_mask
    one = Sized("other", "tokens, labels and their positions", INT64 * tokens, f"{INT64} bytes x {tokens:,} tokens")
    return Counter({one: number})
