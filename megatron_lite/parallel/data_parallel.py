"""Replicas of the model that agree on their gradients, wrapped around a model that does not know."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.config.plan import Plan
from megatron_lite.parallel.fp32_gradients import Fp32Gradients
from megatron_lite.units import MIB

BUCKET_MIB = 25  # torch's default


class DataParallel:
    """The model as one rank calls it, and the gradients that all ranks share afterwards."""

    def __init__(self, plan: Plan, model: nn.Module):
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.fp32 = Fp32Gradients(self.parameters, plan.world.size) if plan.fp32_gradients else None
        self.replica = model
        if plan.world.size > 1:
            elements = plan.args.parallel.ddp_bucket_size
            bucket_mib = BUCKET_MIB if elements is None else elements * self.parameters[0].element_size() / MIB
            self.replica = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
            if self.fp32 is not None:
                self.replica.register_comm_hook(None, self.fp32.reduce_bucket)

    def __call__(self, *inputs) -> Tensor:
        """The model's forward."""
        return self.replica(*inputs)

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        """Around forward and backward of one micro-batch: only the last one's backward talks to other ranks."""
        if self.fp32 is not None:
            self.fp32.reducing = last and self.replica is not self.model
        if last or self.replica is self.model:
            yield
        else:
            with self.replica.no_sync():
                yield

    def gradients(self) -> list[Tensor]:
        """One per parameter, averaged over ranks, after the last micro-batch's backward."""
        if self.fp32 is not None:
            return self.fp32.gradients()
        return [p.grad for p in self.parameters]

    def clear(self):
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.fp32 is not None:
            self.fp32.clear()


@torch.no_grad()
def parameters_norm(parameters: list[nn.Parameter]) -> Tensor:
    """L2 norm of all parameters, a scalar on the device."""
    norms = [torch.linalg.vector_norm(p, dtype=torch.float32) for p in parameters]
    return torch.linalg.vector_norm(torch.stack(norms))


def call_when_computed(loss: Tensor, action: Callable[[], None]):
    """Call `action` within loss.backward(), on autograd's thread, when this rank has its gradients and waits for others'.

    DistributedDataParallel waits for the reduction in a callback of the engine, queued when its last bucket is full. The
    engine runs callbacks in the order of queueing, and this one is queued when backward begins.
    """
    loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(action))
