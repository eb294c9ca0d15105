"""Replicas that shard fp32 weights, gradients and moments, by torch's fully_shard around a model that does not
know.

With --use-distributed-optimizer (ZeRO-1) a layer's weights are gathered in forward and stay until backward; with
--use-torch-fsdp2 (ZeRO-3) they are freed after forward and gathered again. Either way a rank updates its own rows
of each parameter, in fp32, and what is gathered is rounded to the run's precision.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_lite.config.layout import is_of_experts
from megatron_lite.config.plan import Plan
from megatron_lite.marks import MASTER_WEIGHTS, mark_memory
from megatron_lite.mesh_axes import REPLICATE, SHARD
from megatron_lite.model.custom_model import CustomModel
from megatron_lite.model.experts import list_mixtures
from megatron_lite.model.gpt import DTYPES, GPT, initialize
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.replica import Replica, ShardedRows


class ShardedDataParallel(Replica):
    """A replica whose `parameters` are this rank's rows of each of the model's, in fp32."""

    def __init__(self, plan: Plan, model: nn.Module, groups: Groups):
        """
        Args:
            plan: The rank's.
            model: A GPT without memory, on the meta device, or another with its weights.
            groups: The ranks that share the model.
        """
        super().__init__(plan, model, groups)
        assert plan.sharding is not None
        self._gathers_twice = plan.sharding.gathers_twice
        # rotary tables are rounded by the model; all other inputs have the layers' precision
        dtype = DTYPES[plan.precision]
        reduce_in = torch.float32 if plan.fp32_gradients else dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_in, cast_forward_inputs=False)
        self._sharded_chunks = [_shard(chunk, groups, policy, self._gathers_twice) for chunk in self.chunks]
        # torch averages over the ranks that share out experts, and all of the layout's replicas are to be averaged over
        self._of_experts = [place for place, name in enumerate(self.names) if is_of_experts(name)]
        self._expert_factor = plan.layout.expert_replicas / plan.layout.replicas
        self._sharded = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        self.parameters = [nn.Parameter(_take_rows(p)) for p in self._sharded]
        for name, parameter in zip(self.names, self._sharded, strict=True):
            sharding = plan.expert_sharding if is_of_experts(name) else plan.sharding
            assert sharding is not None
            self.shares[name] = ShardedRows(parameter, sharding)
        if isinstance(model, CustomModel):
            return
        on_cpu = plan.args.parallel.use_cpu_initialization
        own = {n: p.detach() for n, p in zip(self.names, self.parameters, strict=True)}
        initialize(own, plan.shape, self.parts, dtype, device="cpu" if on_cpu else None)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Call the forward of the running action's chunk, with the inputs of GPT's. Returns losses_BT."""
        losses_BT: Tensor = self.chunks[self.pipeline.chunk](*inputs)
        return losses_BT

    @contextlib.contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Runs around the backward of one micro-batch.

        ZeRO-1 adds up whole gradients, and reduces those of the last one; ZeRO-3 keeps none whole.

        Args:
            last: Whether it is the step's last micro-batch of this chunk.
        """
        if not self._gathers_twice:
            chunk = self._sharded_chunks[self.pipeline.chunk]
            chunk.set_requires_gradient_sync(last)
            chunk.set_reshard_after_backward(last)
            # else the forwards that a pipeline has done ahead are forgotten
            chunk.set_is_last_backward(last)
        yield

    def gradients(self) -> Sequence[Tensor | None]:
        """The gradients of this rank's rows of each parameter, averaged over ranks, after the last micro-batch's
        backward."""
        gradients = [_take_rows(p.grad) for p in self._sharded]
        if self._of_experts and self._expert_factor != 1:
            torch._foreach_mul_([gradients[place] for place in self._of_experts], self._expert_factor)
        return self._add_partial(gradients)

    def clear(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self._sharded:
            parameter.grad = None


def _take_rows(sharded: Tensor | None) -> Tensor:
    """Take this rank's rows of a tensor that fully_shard has sharded."""
    assert isinstance(sharded, DTensor)
    return sharded.to_local()


@mark_memory(MASTER_WEIGHTS)
def _shard(model: nn.Module, groups: Groups, policy: MixedPrecisionPolicy, gathers_twice: bool) -> FSDPModule:
    """Shard a model. Each layer of a GPT is gathered by itself, and the rest together: the loss uses a tied embedding,
    too, and a layer's experts from other ranks than the rest of it.

    Args:
        model: A GPT on the meta device, which gets uninitialized memory, or another model with its weights.
        groups: The ranks that share the model.
        policy: The precision in which layers compute and gradients are reduced.
        gathers_twice: Whether weights are gathered for forward and again for backward.

    Returns:
        The model, which fully_shard has given methods.
    """
    # nobody changes losses in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = groups.mesh
    assert mesh is not None, "sharding takes several ranks, which make a mesh"
    if groups.experts is not None:
        of_experts = groups.experts.mesh
        for _, mixture in list_mixtures(model):
            fully_shard(mixture.experts, mesh=of_experts, mp_policy=policy, reshard_after_forward=gathers_twice)
    names = mesh.mesh_dim_names or ()
    among = mesh[REPLICATE, SHARD] if REPLICATE in names else mesh[SHARD]
    if isinstance(model, GPT):
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=among, mp_policy=policy, reshard_after_forward=gathers_twice)
    sharded = fully_shard(model, mesh=among, mp_policy=policy, reshard_after_forward=False)
    if isinstance(model, GPT):
        model.to_empty(device=mesh.device_type)
    return sharded
