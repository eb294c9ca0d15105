"""The precisions of weights."""

import torch
from torch import Tensor

from megatron_lite.errors import UserError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`. UserError if it holds finite numbers that fp16 does not reach."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise UserError(f"--dtype fp16: {name} holds {tensor.abs().max():.3g}, beyond fp16's 65504; use bf16 or fp32.")
    return result
