"""Category names of Kineto files of all years and devices -> Kind."""

import re

from megatron_lite.analysis.trace.columns import Kind

# names: kineto libkineto/src/ActivityType.cpp, and those of its first releases (2021), which were capitalised
KIND_OF_CATEGORY = {
    "cpu_op": Kind.OP, "Operator": Kind.OP, "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME, "cuda_driver": Kind.RUNTIME, "Runtime": Kind.RUNTIME, "runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME, "hip_driver": Kind.RUNTIME, "xpu_runtime": Kind.RUNTIME, "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME, "glow_runtime": Kind.RUNTIME, "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "kernel": Kind.KERNEL, "Kernel": Kind.KERNEL, "concurrent_kernel": Kind.KERNEL, "hpu_op": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY, "Memcpy": Kind.MEMCPY, "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET, "Memset": Kind.MEMSET, "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "python_function": Kind.PYTHON, "PythonFunction": Kind.PYTHON, "Python": Kind.PYTHON,
    "cuda_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
}  # fmt: skip
# Waiting that some devices record as work of a stream: MTIA's event_wait, Ascend's EVENT_WAIT and NOTIFY_WAIT.
DEVICE_WAIT = re.compile(r"(event|notify|stream)_?wait|wait_?event", re.IGNORECASE)
KIND_OF_PROCESS = {
    "CPU functions": Kind.OP,
    "CUDA functions": Kind.KERNEL,
}  # before Kineto (2020) there were no categories
OPERATORS_OF_2021 = "Operator"  # this category holds annotations too
_NAMED_BY_CODE = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad)#|(nccl|gloo|mpi|ucc):|DistributedDataParallel\.|## "
)


def is_annotation_of_2021(name: str) -> bool:
    """Was this entry of the category "Operator" a range that code named?"""
    return bool(_NAMED_BY_CODE.match(name))
