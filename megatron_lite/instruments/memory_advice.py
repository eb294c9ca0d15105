"""What would help a run that does not fit: only flags that change its memory here."""

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.memory_summary import ACTIVATIONS, EVALUATION, GRADIENTS, INPUT, OPTIMIZER, WEIGHTS

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LAST_RESORT = ("fewer --num-layers, a smaller --hidden-size or a shorter --seq-length: weights and optimizer state are whole "
               "on every rank, so that more ranks do not help")
MOVING, STANDING = (ACTIVATIONS, EVALUATION, INPUT), (WEIGHTS, OPTIMIZER)


def advice(plan: Plan, held: dict[str, int], asked: int, unused: int) -> list[str]:
    """Best first, never empty.

    held: bytes by category. asked: bytes that did not fit. unused: reserved by the allocator but held by no tensor.
    """
    found = []
    if plan.device == "cuda" and unused >= max(asked, 1):
        found.append(f"{EXPANDABLE} in the environment: what is reserved but unused would have sufficed")
    moving, standing = (sum(held.get(name, 0) for name in names) for names in (MOVING, STANDING))
    shrink = _smaller_activations(plan)
    state = _smaller_state(plan)
    found += shrink + state if moving + held.get(GRADIENTS, 0) >= standing else state + shrink
    return found or [LAST_RESORT]


def _smaller_activations(plan: Plan) -> list[str]:
    m, size = plan.args.model, plan.args.training.micro_batch_size
    found = []
    if size > 1:
        smaller = max(number for number in range(1, size) if size % number == 0)
        found.append(f"--micro-batch-size {smaller} instead of {size}, with the same --global-batch-size")
    if m.recompute_granularity != "full":
        found.append(FULL_RECOMPUTE)
    elif m.recompute_method == "block" and (m.recompute_num_layers or 1) < plan.shape.num_layers:
        found.append(f"--recompute-num-layers {plan.shape.num_layers} instead of {m.recompute_num_layers or 1}")
    if plan.precision == "fp32":
        found.append("--bf16")
    return found


def _smaller_state(plan: Plan) -> list[str]:
    if not plan.fp32_gradients:
        return []
    if plan.precision == "bf16":
        return ["--grad-reduce-in-bf16: gradients without fp32 sums"]
    return ["no --accumulate-allreduce-grads-in-fp32: gradients without fp32 sums"]
