"""Memory that gradients of several parameters share."""

import torch
from torch import Tensor, nn

from megatron_lite.marks import GRADIENT_BUFFER, mark_memory


@mark_memory(GRADIENT_BUFFER)
class Bucket:
    """Some parameters' gradients side by side; answers what communication hooks ask a dist.GradBucket."""

    def __init__(self, parameters: list[nn.Parameter]):
        first = parameters[0]
        self._parameters, self.missing = parameters, len(parameters)
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        parts = self._flat.split([p.numel() for p in parameters])
        self._views = [part.view_as(p) for p, part in zip(parameters, parts)]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        return self._views

    def buffer(self) -> Tensor:
        return self._flat
