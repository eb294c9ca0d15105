"""The operations of a model that a device may compute in several ways, to the same numbers.

GPT is written with torch's own operations. A device that has faster ones to the same numbers (cpu_kernels/) puts them
on from outside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.loss_rows import MAX_LOGITS
from megatron_lite.model.attention import Attend
from megatron_lite.model.experts import ComputeExperts, compute_all_experts
from megatron_lite.model.products import Products

Activation = Callable[[Tensor], Tensor]


def _keep_attention(attend: Attend) -> Attend:
    """The kernel as it is."""
    return attend


@dataclass(frozen=True)
class Kernels:
    """Functions that a model computes with; the defaults are torch's own."""

    products: Products = field(default_factory=Products)
    # of the MLP, in place of the model's own
    activations: Mapping[Activation, Activation] = field(default_factory=dict)
    # (hidden_MH, weight_VH) -> logits_MV, by which no gradient is computed
    multiply_logits: Callable[[Tensor, Tensor], Tensor] = F.linear
    # exp in place
    exponentiate: Callable[[Tensor], Tensor] = Tensor.exp_
    # that the loss holds in fp32 at a time
    max_logits: int = MAX_LOGITS
    # why --attention-backend auto takes the explicit kernel; "": it takes torch's
    why_explicit: str = ""
    # the chosen attention kernel, as this device computes it best
    suit_attention: Callable[[Attend], Attend] = _keep_attention
    # what the experts of a layer give
    compute_experts: ComputeExperts = compute_all_experts
