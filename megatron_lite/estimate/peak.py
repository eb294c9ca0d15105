"""When in a step memory is highest, and what fills it then."""

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.cublas import workspace_bytes
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.micro_batch import MicroBatch
from megatron_lite.estimate.prediction import MemoryPrediction
from megatron_lite.estimate.states import lasting, workspaces
from megatron_lite.estimate.update import update_moments


def predict_memory(plan: Plan, processor: Processor | None = None) -> MemoryPrediction:
    """What tensors of one rank hold at the moments of a step at which that can be most.

    As torch's allocator counts them on the plan's device, but for its steps of 512 bytes; without what lies outside of it
    (the CUDA context, NCCL), without fragmentation, and for layers that are not compiled.
    processor: the GPU, whose cuBLAS takes more on newer ones; None: an older one.
    """
    always = lasting(plan) + workspaces(plan, workspace_bytes(plan, processor))
    return MemoryPrediction((*MicroBatch(plan, always).moments(), *update_moments(plan, always)))
