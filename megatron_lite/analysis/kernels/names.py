"""Takes the name of a kernel apart: architecture, formats, tiles, layout; functor, lists; algorithm, protocol ..."""

import dataclasses
import re

from megatron_lite.analysis.kernels.attention_names import attention_name
from megatron_lite.analysis.kernels.blas_names import blas_name, helper_name
from megatron_lite.analysis.kernels.communication_names import communication_name
from megatron_lite.analysis.kernels.compiled_names import compiled_name
from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName
from megatron_lite.analysis.kernels.library_names import amd_name, nvjet_name, tensile_name, xmma_name
from megatron_lite.analysis.kernels.name_words import template_format
from megatron_lite.analysis.kernels.readable import demangled
from megatron_lite.analysis.kernels.roles import LONGEST, role_of_kernel
from megatron_lite.analysis.kernels.torch_names import torch_name

_READERS = (
    compiled_name,
    communication_name,
    attention_name,
    amd_name,
    nvjet_name,
    xmma_name,
    tensile_name,
    helper_name,
    torch_name,
    blas_name,
)
MATRIX_ROLES = (Role.GEMM, Role.ATTENTION, Role.CONVOLUTION)
_ON_TENSOR_CORES = re.compile(r"tensorop|mma_sync|wgmma|tfloat32_t|warpspecialized", re.IGNORECASE)
_SINCE_AMPERE = re.compile(r"sm(8|9|10|12)\d", re.IGNORECASE)
_HELPERS = re.compile(r"offsets|nchw|nhwc|scalepacked|im2col|reduc", re.IGNORECASE)
_FAMILIES = (
    (r"cudnn", "cuDNN"),
    (r"cutlass", "CUTLASS"),
    (r"at::|softmax_warp_|cunn_", "PyTorch"),
    (r"(^|:)cub::", "CUB"),
    (r"fbgemm|split_embedding|_codegen_", "FBGEMM"),
)


def taken_apart(name: str) -> KernelName:
    """What the name says. Any string is taken; what no scheme fits has no parts."""
    text, role = demangled(name[:LONGEST]), role_of_kernel(name)
    for read in _READERS:
        found = read(text)
        if found:
            # One table decides on roles; a reader's own word is for what the table does not know.
            return dataclasses.replace(found, name=name, role=found.role if role is Role.OTHER else role)
    family = next((family for pattern, family in _FAMILIES if re.search(pattern, text)), "")
    return KernelName(
        name, family, role, _tensor_cores(text, role), template_format(text) if role in MATRIX_ROLES else ""
    )


def _tensor_cores(text: str, role: Role) -> TensorCores:
    if role not in MATRIX_ROLES:
        return TensorCores.NOT_APPLICABLE
    if _ON_TENSOR_CORES.search(text) or ("gemm" in text.lower() and _SINCE_AMPERE.search(text)):
        return TensorCores.YES
    return TensorCores.NOT_APPLICABLE if _HELPERS.search(text) else TensorCores.UNKNOWN
