"""The fp32 weights that the optimizer updates, and their way back into the model."""

import torch
from torch import Tensor, nn

from megatron_lite.marks import MASTER_WEIGHTS, mark_memory


class MasterWeights:
    """fp32 copies of 16-bit parameters; an fp32 model's parameters stand for themselves."""

    @mark_memory(MASTER_WEIGHTS)
    def __init__(self, parameters: list[nn.Parameter]):
        self.model = parameters
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters]
        self._pairs = [(p, m) for p, m in zip(parameters, self.masters) if p is not m]

    @torch.no_grad()
    def attach(self, gradients: list[Tensor]):
        """Make `gradients`, in the order of the parameters, the masters' gradients, in fp32."""
        if gradients[0].dtype != torch.float32:  # all at once: a launch takes longer than a GPU needs for a bias
            short, gradients = gradients, [torch.empty_like(g, dtype=torch.float32) for g in gradients]
            torch._foreach_copy_(gradients, short)
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient

    def detach(self):
        """Let go of the gradients, so that fp32 copies of them do not live through the next forward."""
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def write_back(self):
        """Round the masters into the model."""
        if self._pairs:
            model, masters = map(list, zip(*self._pairs))
            torch._foreach_copy_(model, masters)

    @torch.no_grad()
    def reload(self):
        """Take the masters from the model, after weights were loaded without an optimizer."""
        for parameter, master in self._pairs:
            master.copy_(parameter)
