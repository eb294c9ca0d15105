"""The memory that cuBLAS works in, which torch takes from its allocator at the first matrix product and keeps."""

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.hardware import Processor

# ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize: ":4096:2:16:8", on Hopper and Blackwell ":4096:8"
# (docs.nvidia.com/cuda/cublas, CUBLAS_WORKSPACE_CONFIG). One for each thread that multiplies: forward's and backward's.
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
CUBLAS_WORKSPACE_SINCE_HOPPER = 8 * 4096 * 1024
THREADS_WITH_CUBLAS = 2


def workspace_bytes(plan: Plan, processor: Processor | None) -> int:
    """Of one workspace. Where the GPU is not known, an older one's; --deterministic-mode asks for Hopper's on all."""
    newer = processor is not None and processor.since_hopper
    return CUBLAS_WORKSPACE_SINCE_HOPPER if newer or plan.args.training.deterministic_mode else CUBLAS_WORKSPACE
