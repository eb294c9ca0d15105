"""The loss' logits and exponentials as a CPU computes them fastest (docs/decisions/027).

Letters: M tokens, H hidden, V vocabulary.
"""

import math

import torch
from torch import Tensor

from megatron_lite.config.cpu_kernel_rules import VOCAB_BLOCK, mkl_lacks_avx512
from megatron_lite.cpu_kernels.products import is_widened, multiply

LOG2_E = math.log2(math.e)
BYTES_OF_16_BITS = 2


def multiply_logits(hidden_MH: Tensor, weight_VH: Tensor) -> Tensor:
    """Compute logits_MV.

    In 16 bits a block of the vocabulary at a time takes oneDNN half as long as all at once (docs/benchmarks.md).
    """
    if is_widened(hidden_MH.dtype) or hidden_MH.element_size() != BYTES_OF_16_BITS:
        return multiply(hidden_MH, weight_VH)
    logits_MV = hidden_MH.new_empty(len(hidden_MH), len(weight_VH))
    for block_MV, block_VH in zip(logits_MV.split(VOCAB_BLOCK, 1), weight_VH.split(VOCAB_BLOCK)):
        torch.mm(hidden_MH, block_VH.t(), out=block_MV)
    return logits_MV


def exponentiate(x: Tensor) -> Tensor:
    """Raise e to each number, in place.

    exp is MKL's, and exp2 torch's own, which takes a third of its time where MKL lacks AVX-512.
    """
    if mkl_lacks_avx512():
        return x.mul_(LOG2_E).exp2_()
    return x.exp_()
