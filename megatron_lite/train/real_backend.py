"""Builds replicas that train: on a device, with random numbers, compiled, among other ranks."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.config.layout import is_of_experts
from megatron_lite.config.plan import Plan
from megatron_lite.cpu_kernels.products import describe_products
from megatron_lite.model.attention import Attend
from megatron_lite.model.experts import RouteReader
from megatron_lite.model.gpt import DTYPES, GPT, initialize
from megatron_lite.model.kernels import Kernels
from megatron_lite.parallel.backend import AveragedModel
from megatron_lite.parallel.layers import compile_layers, count_compilations
from megatron_lite.parallel.replica import find_parts
from megatron_lite.parallel.tensor_parallel import TensorGroup, drop_own_heads
from megatron_lite.train.choose_kernels import choose_losses, choose_plan_attention, make_race

logger = logging.getLogger(__name__)


class RealBackend:
    """The Backend of runs."""

    def __init__(self, device: torch.device):
        self.device = device

    def choose_attention(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Attend:
        """Choose the attention kernel, on a GPU the fastest; log which, and by what linear layers multiply.

        The arguments are those of Backend.choose_attention.
        """
        race = make_race(self.device, plan.args.training.deterministic_mode, plan.world.is_first)
        attend = choose_plan_attention(plan, self.device, kernels, race)
        timed = f" ({attend.timed})" if attend.timed else ""
        logger.info("\n    not ".join((f"  attention: {attend.name}{timed}", *attend.why_not)))
        if products := describe_products(DTYPES[plan.precision], plan.device):
            logger.info(f"  linear layers: {products}")
        if tensor is not None and not tensor.shares_tokens:
            attend = drop_own_heads(attend, tensor.rank)
        return attend

    def choose_losses(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Callable[..., Tensor]:
        """Choose the function of the losses, compiled where the plan says so.

        The arguments are those of Backend.choose_losses.
        """
        return choose_losses(plan, kernels, tensor)

    def fill_parameters(self, model: GPT, plan: Plan) -> None:
        """Draw the parameters in fp32 and round them to the plan's precision."""
        on_cpu = plan.args.parallel.use_cpu_initialization
        parts = find_parts(model, plan)
        dtype = DTYPES[plan.precision]
        model.to_empty(device=torch.device("cpu") if on_cpu else self.device)
        initialize(dict(model.named_parameters()), plan.shape, parts, dtype)
        model.to(device=self.device, dtype=dtype)

    def choose_route_reader(self, plan: Plan) -> RouteReader:
        """Choose the reader of data."""
        return RouteReader()

    def compile_layers(self, model: GPT, plan: Plan) -> None:
        """Compile each layer's forward at its first call, where the plan says so."""
        if not plan.compilation.layers:
            return
        graphs = count_compilations(plan)
        compile_layers(model.list_layers(), plan.args.training.torch_compile_backend, graphs)

    def average_gradients(self, model: nn.Module, bucket_mib: float, group: dist.ProcessGroup | None) -> AveragedModel:
        """Wrap the model in torch's DistributedDataParallel, which leaves experts alone.

        The arguments are those of Backend.average_gradients.
        """
        experts = [name for name, _ in model.named_parameters() if is_of_experts(name)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        return DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mib,
            process_group=group,
        )
