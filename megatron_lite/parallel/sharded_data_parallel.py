"""Replicas that share out fp32 weights, gradients and moments, by torch's fully_shard around a model that does not know.

With --use-distributed-optimizer (ZeRO-1) a layer's weights are gathered in forward and stay until backward; with
--use-torch-fsdp2 (ZeRO-3) they are given back after forward and gathered again. Either way a rank updates its own rows of
each parameter, in fp32, and what is gathered is rounded to the run's precision.
"""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_lite.config.layout import ROWS, Rows
from megatron_lite.config.plan import Plan
from megatron_lite.marks import MASTER_WEIGHTS, mark_memory
from megatron_lite.model.gpt import DTYPES, initialize_parameter


class ShardedDataParallel:
    """Called as DataParallel is. `parameters` are this rank's rows of each of the model's, in fp32."""

    def __init__(self, plan: Plan, model: nn.Module, mesh: DeviceMesh):
        """model: without memory, on the meta device. mesh: of `make_mesh`."""
        self.model, self._gathers_twice = model, plan.sharding.gathers_twice
        ranks = plan.sharding.ranks
        # ranks that hold the same rows are as far apart as ranks that share out the model are many
        self.is_first_copy, index = plan.world.rank < ranks, plan.world.rank % ranks
        self._group = mesh[ROWS].get_group()
        _shard(plan, model, mesh)
        self.names, self._sharded = map(list, zip(*model.named_parameters()))
        self.parameters = [nn.Parameter(p.to_local()) for p in self._sharded]
        self.rows = {n: plan.sharding.find_rows(tuple(p.shape), index) for n, p in zip(self.names, self._sharded)}
        self._initialize(plan)

    @torch.no_grad()
    def _initialize(self, plan: Plan):
        """As one rank's: each parameter is drawn whole, rounded, and cut."""
        device = "cpu" if plan.args.parallel.use_cpu_initialization else self.parameters[0].device
        for parameter, (name, rows) in zip(self.parameters, self.rows.items(), strict=True):
            whole = torch.empty(rows.whole, dtype=torch.float32, device=device)
            initialize_parameter(name, whole, plan.shape)
            parameter.copy_(whole[rows.start : rows.end].to(DTYPES[plan.precision]))

    def __call__(self, *inputs) -> Tensor:
        """The model's forward."""
        return self.model(*inputs)

    @contextlib.contextmanager
    def micro_batch(self, last: bool):
        """Around forward and backward of one micro-batch.

        ZeRO-1 adds up whole gradients, and reduces those of the last one; ZeRO-3 keeps none whole.
        """
        if not self._gathers_twice:
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
        yield

    def gradients(self) -> list[Tensor]:
        """This rank's rows, one per parameter, averaged over ranks, after the last micro-batch's backward."""
        return [p.grad.to_local() for p in self._sharded]

    def clear(self):
        """Forget all gradients."""
        for parameter in self._sharded:
            parameter.grad = None

    def gather_rows(self, tensor: Tensor, rows: Rows) -> Tensor:
        """All rows of a parameter or its state, of which `tensor` holds this rank's. Collective."""
        each = -(-rows.whole[0] // dist.get_world_size(self._group))
        own = tensor.new_zeros(each, *rows.whole[1:])
        own[: tensor.shape[0]] = tensor
        everyones = own.new_empty(each * dist.get_world_size(self._group), *rows.whole[1:])
        dist.all_gather_into_tensor(everyones, own, group=self._group)
        return everyones[: rows.whole[0]]

    @torch.no_grad()
    def sum_over_ranks(self, number: Tensor) -> Tensor:
        """Of what each rank counted over its rows of parameters or gradients."""
        total = number.clone()
        dist.all_reduce(total, group=self._group)
        return total


@mark_memory(MASTER_WEIGHTS)
def _shard(plan: Plan, model: nn.Module, mesh: DeviceMesh):
    """Each layer is gathered by itself, and the rest together: the loss uses a tied embedding, too."""
    dtype = DTYPES[plan.precision]
    reduce_in = torch.float32 if plan.fp32_gradients else dtype
    # rotary tables are rounded by the model; all other inputs have the layers' precision
    # nobody changes losses in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_in, cast_forward_inputs=False)
    for part in (*model.decoder.layers, model):
        stays = part is model or not plan.sharding.gathers_twice
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays)
    model.to_empty(device=mesh.device_type)
