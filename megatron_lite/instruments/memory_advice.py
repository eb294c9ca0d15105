"""What would help a run that does not fit: only flags that change its memory here."""

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.variant import variant_of
from megatron_lite.instruments.memory_summary import ACTIVATIONS, EVALUATION, GRADIENTS, INPUT, OPTIMIZER, WEIGHTS
from megatron_lite.units import size

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LAST_RESORT = (
    "fewer --num-layers, a smaller --hidden-size or a shorter --seq-length: weights and optimizer state are whole "
    "on every rank, so that more ranks do not help"
)
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
    m, now, layers = plan.args.model, plan.args.training.micro_batch_size, plan.shape.num_layers
    found = []
    if now > 1:
        smaller = max(number for number in range(1, now) if now % number == 0)
        words = f"--micro-batch-size {smaller} instead of {now}, with the same --global-batch-size"
        found.append(_told(plan, words, micro_batch_size=smaller))
    if m.recompute_granularity != "full":
        found.append(
            _told(
                plan, FULL_RECOMPUTE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
            )
        )
    elif m.recompute_method == "block" and (m.recompute_num_layers or 1) < layers:
        words = f"--recompute-num-layers {layers} instead of {m.recompute_num_layers or 1}"
        found.append(_told(plan, words, recompute_num_layers=layers))
    if plan.precision == "fp32":
        found.append(_told(plan, "--bf16", bf16=True))
    return found


def _smaller_state(plan: Plan) -> list[str]:
    if not plan.fp32_gradients:
        return []
    if plan.precision == "bf16":
        return [
            _told(
                plan,
                "--grad-reduce-in-bf16: gradients without fp32 sums",
                grad_reduce_in_bf16=True,
                accumulate_allreduce_grads_in_fp32=False,
            )
        ]
    return [
        _told(
            plan,
            "no --accumulate-allreduce-grads-in-fp32: gradients without fp32 sums",
            accumulate_allreduce_grads_in_fp32=False,
        )
    ]


def _told(plan: Plan, words: str, **changes) -> str:
    """With the peak that the formulas give for the changed flags. Nothing may fail here: an error is being explained."""
    try:
        variant = variant_of(plan, **changes)
    except Exception:  # noqa: BLE001 - see above
        variant = None
    return words + (f" (predicted peak {size(variant.peak_bytes)})" if variant else "")
