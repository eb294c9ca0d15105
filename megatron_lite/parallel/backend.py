"""The ground that a replica is built on: a device and the ranks beside it, or stand-ins for both."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # mypy does not find it as dist.GradBucket
from torch.futures import Future

from megatron_lite.config.plan import Plan
from megatron_lite.model.attention import Attend
from megatron_lite.model.experts import RouteReader
from megatron_lite.model.gpt import GPT
from megatron_lite.model.kernels import Kernels
from megatron_lite.parallel.tensor_parallel import TensorGroup

HookState = TypeVar("HookState")


class Reducer(Protocol):
    """Averages a bucket of gradients over ranks when all of it has been computed."""

    def prepare_for_backward(self, outputs: list[Tensor], /) -> None:
        """Average the gradients of the next backward.

        Args:
            outputs: Tensors from which the parameters that have a part in the losses are found; empty for all.
        """


class AveragedModel(Protocol):
    """A model whose backward averages gradients over ranks:
    the part of DistributedDataParallel that DataParallel uses."""

    @property
    def reducer(self) -> Reducer:
        """The object that averages the gradients."""

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Call the model's forward."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep forward inside the block from telling the reducer that a backward follows."""

    def register_comm_hook(self, state: HookState, hook: Callable[[HookState, GradBucket], Future[Tensor]], /) -> None:
        """Average each bucket by `hook(state, bucket)`, which runs within backward when the gradients of the bucket
        have been computed, and returns a future of the averaged bucket."""


class Backend(Protocol):
    """All that differs between a replica that trains and one that is walked without data.

    RealBackend (train/real_backend.py) computes. FakeBackend (planner/walk/fake_backend.py) has tensors without data,
    and ranks that answer at once. Both build the same model: what is in neither of them exists once.
    """

    device: torch.device  # of the parameters

    def choose_attention(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Attend:
        """Choose the attention kernel. Runs before the model is built.

        Args:
            plan: The rank's plan.
            kernels: The kernels of the plan's device, of choose_kernels.
            tensor: The ranks that split each layer; None if this rank computes whole layers.
        """

    def choose_losses(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Callable[..., Tensor]:
        """Choose the function that computes the model's losses, as GPT takes it. Runs before the model is built.

        The arguments are those of choose_attention.
        """

    def fill_parameters(self, model: GPT, plan: Plan) -> None:
        """Give parameters that lie on the meta device memory and first values.

        Runs before anything is put on the model.
        """

    def choose_route_reader(self, plan: Plan) -> RouteReader:
        """Choose what reads the routes of tokens to experts. Runs after the model is built, before it is filled."""

    def compile_layers(self, model: GPT, plan: Plan) -> None:
        """Compile each layer where the plan says so. Runs after all but recomputation is put on the model."""

    def average_gradients(self, model: nn.Module, bucket_mib: float, group: dist.ProcessGroup | None) -> AveragedModel:
        """Wrap a model so that its backward averages gradients over ranks. Runs once for each chunk of a stage's
        layers.

        Args:
            model: The model, or the chunk of it.
            bucket_mib: Gradients that are averaged at a time, in MiB.
            group: The ranks; None for all of them.
        """
