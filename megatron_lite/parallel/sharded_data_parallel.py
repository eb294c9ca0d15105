"""Replicas that share out fp32 weights, gradients and moments, by torch's fully_shard around a model that does not
know.

With --use-distributed-optimizer (ZeRO-1) a layer's weights are gathered in forward and stay until backward; with
--use-torch-fsdp2 (ZeRO-3) they are given back after forward and gathered again. Either way a rank updates its own rows
of each parameter, in fp32, and what is gathered is rounded to the run's precision.
"""

import contextlib
import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_lite.config.layout import COPIES, ROWS
from megatron_lite.config.plan import Plan
from megatron_lite.marks import MASTER_WEIGHTS, mark_memory
from megatron_lite.model.custom_model import CustomModel
from megatron_lite.model.gpt import DTYPES, initialize
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.parallel.replica import Replica


class ShardedDataParallel(Replica):
    """Called as DataParallel is. `parameters` are this rank's rows of each of the model's, in fp32."""

    def __init__(self, plan: Plan, model: nn.Module, mesh: DeviceMesh, pipeline: Pipeline | None = None):
        """model: a GPT without memory, on the meta device, or another with its weights. mesh: of `make_mesh`."""
        super().__init__(plan, model, mesh, pipeline)
        self._gathers_twice = plan.sharding.gathers_twice
        # rotary tables are rounded by the model; all other inputs have the layers' precision
        dtype = DTYPES[plan.precision]
        reduce_in = torch.float32 if plan.fp32_gradients else dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_in, cast_forward_inputs=False)
        for chunk in self.chunks:
            _shard(chunk, mesh, policy, self._gathers_twice)
        self._sharded = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        self.parameters = [nn.Parameter(p.to_local()) for p in self._sharded]
        if isinstance(model, CustomModel):
            return
        on_cpu = plan.args.parallel.use_cpu_initialization
        own = {n: p.detach() for n, p in zip(self.names, self.parameters, strict=True)}
        initialize(own, plan.shape, self.parts, dtype, device="cpu" if on_cpu else None)

    def __call__(self, *inputs) -> Tensor:
        """The model's forward."""
        return self.chunks[self.pipeline.chunk](*inputs)

    @contextlib.contextmanager
    def backward(self, last: bool):
        """Around the backward of one micro-batch.

        ZeRO-1 adds up whole gradients, and reduces those of the last one; ZeRO-3 keeps none whole.
        """
        if not self._gathers_twice:
            chunk = self.chunks[self.pipeline.chunk]
            chunk.set_requires_gradient_sync(last)
            chunk.set_reshard_after_backward(last)
            chunk.set_is_last_backward(last)  # else the forwards that a pipeline has done ahead are forgotten
        yield

    def gradients(self) -> list[Tensor]:
        """This rank's rows, one per parameter, averaged over ranks, after the last micro-batch's backward."""
        return self._add_partial([p.grad.to_local() for p in self._sharded])

    def clear(self):
        """Forget all gradients."""
        for parameter in self._sharded:
            parameter.grad = None


@mark_memory(MASTER_WEIGHTS)
def _shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, gathers_twice: bool):
    """Each layer of a GPT is gathered by itself, and the rest together: the loss uses a tied embedding, too."""
    # nobody changes losses in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    among = mesh[COPIES, ROWS] if COPIES in mesh.mesh_dim_names else mesh[ROWS]
    has_weights = isinstance(model, CustomModel)
    for part in (model,) if has_weights else (*model.decoder.layers, model):
        stays = part is model or not gathers_twice
        fully_shard(part, mesh=among, mp_policy=policy, reshard_after_forward=not stays)
    if not has_weights:
        model.to_empty(device=mesh.device_type)
