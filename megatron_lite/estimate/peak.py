"""When in a step memory is highest, and what fills it then."""

from collections import Counter

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.cublas import workspace_bytes
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.liveness import Sized
from megatron_lite.estimate.micro_batch import MicroBatch
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.peak_point import moment
from megatron_lite.estimate.prediction import MemoryPrediction, Moment
from megatron_lite.estimate.sizes import FP32
from megatron_lite.estimate.states import lasting, of_parameters, optimizer_copies, whole_gradients, workspaces
from megatron_lite.phases import Phase

# --- the moments between backward and the next step at which memory can be highest


def update_moments(plan: Plan, always: Counter[Sized]) -> list[Moment]:
    """In the order of the step. `always`: what lives anyway."""
    states = always + whole_gradients(plan)
    ready = states + optimizer_copies(plan)
    decayed = _decayed_copies(plan)
    return [
        moment(Phase.CLIP_GRAD, "gradient norm", ready),
        moment(Phase.OPTIMIZER_STEP, "update of the weights", ready + decayed),
    ]


def _decayed_copies(plan: Plan) -> Counter[Sized]:
    """SGD's weight decay that changes is added to gradients by hand: weights times decay (optim/optimizer.py)."""
    if plan.args.optimizer.optimizer != "sgd" or plan.learning_rate.weight_decay_style == "constant":
        return Counter()
    return Counter({of_parameters("workspace", "decayed weights", FP32): parameter_count(plan.shape)})


# --- when in a step memory is highest, and what fills it then


def predict_memory(plan: Plan, processor: Processor | None = None) -> MemoryPrediction:
    """What tensors of one rank hold at the moments of a step at which that can be most.

    As torch's allocator counts them on the plan's device, but for its steps of 512 bytes; without what lies outside of it
    (the CUDA context, NCCL), without fragmentation, and for layers that are not compiled.
    processor: the GPU, whose cuBLAS takes more on newer ones; None: an older one.
    """
    always = lasting(plan) + workspaces(plan, workspace_bytes(plan, processor))
    return MemoryPrediction((*MicroBatch(plan, always).moments(), *update_moments(plan, always)))
