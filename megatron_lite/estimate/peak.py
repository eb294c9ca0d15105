"""When in a step memory is highest, and what fills it then."""

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.cublas import CUBLAS_WORKSPACE
from megatron_lite.estimate.micro_batch import MicroBatch
from megatron_lite.estimate.prediction import MemoryPrediction
from megatron_lite.estimate.states import lasting, workspaces
from megatron_lite.estimate.update import update_moments


def predict_memory(plan: Plan, workspace_bytes: int = CUBLAS_WORKSPACE) -> MemoryPrediction:
    """What tensors of one rank hold at the moments of a step at which that can be most.

    As torch's allocator counts them on the plan's device, but for its steps of 512 bytes; without what lies outside of it
    (the CUDA context, NCCL), without fragmentation, and for layers that are not compiled.
    workspace_bytes: of each of cuBLAS' workspaces; cublas.CUBLAS_WORKSPACE_SINCE_HOPPER on newer GPUs.
    """
    always = lasting(plan) + workspaces(plan, workspace_bytes)
    return MemoryPrediction((*MicroBatch(plan, always).moments(), *update_moments(plan, always)))
