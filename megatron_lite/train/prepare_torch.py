"""Sets torch up for a plan, once per process, before anything is built."""

import os

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.parallel.layers import keep_compiled
from megatron_lite.parallel.process_group import find_device
from megatron_lite.process_state import keep_freed_memory


def prepare_torch(plan: Plan) -> bool:
    """Set torch up for a plan.

    Returns:
        Whether the C library keeps freed memory; False on GPUs, which have an allocator of their own.
    """
    if plan.device == "cuda":
        # before anything asks for "the" GPU, which would be the first one
        torch.cuda.set_device(find_device(plan.device, plan.world))
    if plan.compilation.layers:
        keep_compiled(os.environ)
    if plan.args.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return plan.device == "cpu" and keep_freed_memory()
