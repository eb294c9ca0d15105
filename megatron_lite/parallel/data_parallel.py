"""Replicas of the model that agree on their gradients, wrapped around a model that does not know."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # mypy does not find it as dist.GradBucket
from torch.autograd import Variable
from torch.futures import Future

from megatron_lite.config.layout import is_of_experts
from megatron_lite.config.plan import Plan
from megatron_lite.marks import GRADIENT_BUFFER, mark_memory
from megatron_lite.mesh_axes import REPLICATE
from megatron_lite.parallel.backend import AveragedModel, Backend
from megatron_lite.parallel.expert_parallel import ExpertGradients
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.mesh import find_group
from megatron_lite.parallel.replica import Replica
from megatron_lite.units import MIB

BUCKET_MIB = 25  # torch's default
GRADIENT_ALIGNMENT = 32  # elements: a gradient that starts on 128 bytes is read in whole vectors
BUNDLES = 8  # of gradients that a GPU adds at once: few launches, and little memory for gradients that wait


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters that are trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


class DataParallel(Replica):
    """The model as one rank calls it, and the gradients that all ranks share afterwards."""

    def __init__(self, plan: Plan, model: nn.Module, groups: Groups, backend: Backend):
        """
        Args:
            plan: This rank's plan.
            model: The rank's part of the model, with its weights.
            groups: The ranks that share the model.
            backend: Wraps the model in what averages gradients.
        """
        super().__init__(plan, model, groups)
        # a launch takes longer than adding a bias; a CPU adds what is in its cache
        on_gpu = plan.device == "cuda"
        # gradients of experts are averaged over other ranks than those that the buckets are for
        self._experts = ExpertGradients(plan, groups.experts, self.names)
        named = zip(self.names, self.parameters)
        bucketed = [parameter for name, parameter in named if not is_of_experts(name)]
        self.fp32: Fp32Gradients | None = None
        if plan.fp32_gradients:
            bundles = BUNDLES if on_gpu else None
            self.fp32 = Fp32Gradients(self.parameters, bundles, bucketed)
        # fp32 gradients waiting beside their sums would be memory that no other moment of the step takes
        self._adds_at_once = on_gpu and self.fp32 is None and self.parameters[0].dtype != torch.float32
        # where backward is split, gradients are complete after the last one of weights,
        # which is no part of any backward
        self._averages_at_end = plan.stage.splits_backward and plan.layout.replicas > 1
        # the ranks that average; None: all of them
        self._averaging = find_group(groups.mesh, REPLICATE)
        self._ranks = plan.layout.replicas
        self._alone = self._ranks == 1 or self._averages_at_end
        self._averaged = self._wrap_chunks(plan, backend)

    def _wrap_chunks(self, plan: Plan, backend: Backend) -> list[AveragedModel | None]:
        """Wrap the chunks so that their backward averages gradients over ranks; None for one that has none to
        average, since this rank is alone or the chunk only hands hidden states on."""
        elements = plan.args.parallel.ddp_bucket_size
        bucket_mib: float = BUCKET_MIB
        if elements is not None:
            bucket_mib = elements * self.parameters[0].element_size() / MIB
        wrapped: list[AveragedModel | None] = []
        for chunk in self.chunks:
            if self._alone or not has_parameters(chunk):
                wrapped.append(None)
                continue
            averaged = backend.average_gradients(chunk, bucket_mib, self._averaging)
            if self.fp32 is not None:
                averaged.register_comm_hook(self.fp32, self._reduce_bucket)
            wrapped.append(averaged)
        return wrapped

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """The model's forward. Which backward reduces gradients is told when it begins."""
        chunk = self.pipeline.chunk
        averaged = self._averaged[chunk]
        if averaged is None:
            losses_BT: Tensor = self.chunks[chunk](*inputs)
            return losses_BT
        with averaged.no_sync():
            return averaged(*inputs)

    @contextlib.contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Runs around the backward of one micro-batch. Only the last one's talks to other ranks.

        Args:
            last: Whether it is the step's last micro-batch of this chunk.
        """
        averaged = self._averaged[self.pipeline.chunk]
        if last and averaged is not None:
            # what forward does otherwise; torch's own pipelines do the same
            averaged.reducer.prepare_for_backward([])
        if self.fp32 is not None:
            self.fp32.reducing = last and not self._alone
        sums: list[tuple[nn.Parameter, Tensor]] = []
        if self._adds_at_once and (self._alone or not last):
            # autograd would add each gradient by a kernel of its own
            for parameter in self.parameters:
                if parameter.grad is not None:
                    sums.append((parameter, parameter.grad))
                    parameter.grad = None
        yield
        totals = []
        added = []
        for parameter, total in sums:
            if parameter.grad is not None:
                totals.append(total)
                added.append(parameter.grad)
        if added:
            torch._foreach_add_(totals, added)
        for parameter, total in sums:
            parameter.grad = total
        if self.fp32 is not None:
            self.fp32.add_waiting()

    @torch.no_grad()
    def _reduce_bucket(self, sums: "Fp32Gradients", bucket: GradBucket) -> Future[Tensor]:
        """DistributedDataParallel's communication hook: the mean over ranks of the fp32 sums of a bucket's gradients.

        Runs within backward, on autograd's thread, when the last gradient of the bucket has been computed.
        """
        flat = sums.take_bucket(bucket)
        flat.div_(self._ranks)
        work = dist.all_reduce(flat, group=self._averaging, async_op=True)
        averaged: Future[Tensor] = work.get_future().then(lambda _: bucket.buffer())
        return averaged

    def gradients(self) -> Sequence[Tensor | None]:
        """The gradient of each parameter, averaged over ranks, after the last micro-batch's backward.

        Returns:
            A tensor per parameter, in their order; None for a parameter that the losses do not use.
        """
        gradients: Sequence[Tensor | None]
        if self.fp32 is not None:
            gradients = self.fp32.gradients()
        else:
            gradients = [parameter.grad for parameter in self.parameters]
        if self._averages_at_end:
            self._average([gradient for gradient in gradients if gradient is not None])
        self._experts.average(gradients)
        return self._add_partial(gradients)

    @torch.no_grad()
    def _average(self, gradients: list[Tensor]) -> None:
        """Average gradients over ranks, in place, a bucket at a time."""
        bucket: list[Tensor] = []
        for gradient in gradients:
            bucket.append(gradient)
            is_full = sum(one.nbytes for one in bucket) >= BUCKET_MIB * MIB
            if is_full or gradient is gradients[-1]:
                self._average_bucket(bucket)
                bucket = []

    def _average_bucket(self, bucket: list[Tensor]) -> None:
        """Average the gradients of a bucket by one reduction, in place."""
        flat = torch.cat([one.reshape(-1) for one in bucket])
        flat.div_(self._ranks)
        dist.all_reduce(flat, group=self._averaging)
        parts = flat.split([one.numel() for one in bucket])
        averaged = []
        for part, one in zip(parts, bucket):
            averaged.append(part.view_as(one))
        torch._foreach_copy_(bucket, averaged)

    def clear(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.fp32 is not None:
            self.fp32.clear()


def call_when_computed(loss: Tensor, action: Callable[[], None]) -> None:
    """Call `action` within loss.backward(), on autograd's thread, when this rank has its gradients and waits for
    others'.

    DistributedDataParallel waits for the reduction in a callback of the engine, queued when its last bucket is full.
    The engine runs callbacks in the order of queueing, and this one is queued when backward begins.
    """
    engine = Variable._execution_engine
    loss.register_hook(lambda gradient: engine.queue_callback(action))


@mark_memory(GRADIENT_BUFFER)
class Fp32Gradients:
    """Gradients of a 16-bit model, added up over micro-batches and over ranks in fp32; one per parameter.

    torch accumulates into a parameter's own precision. Here each micro-batch's 16-bit gradient is added to an fp32 one;
    in the last micro-batch DistributedDataParallel's buckets carry the fp32 sums instead of its own. They lie side by
    side, so that those of a communication bucket are one tensor.

    DistributedDataParallel has one bucket of all parameters at first, and from the second step on buckets filled in the
    order in which the first step's gradients came. Sums are laid out in that order between the two steps, when they
    hold nothing.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        bundles: int | None = None,
        bucketed: list[nn.Parameter] | None = None,
    ):
        """
        Args:
            parameters: The model's that are trained.
            bundles: How many additions a micro-batch's gradients take, about; None: one per gradient.
            bucketed: Parameters whose gradients buckets carry; None: all.
        """
        self.parameters = parameters
        self._bucketed: set[Tensor] = set(parameters if bucketed is None else bucketed)
        # elements that wait before their gradients are added
        self._bundle = 0
        if bundles:
            self._bundle = sum(p.numel() for p in parameters) // bundles
        # parameters whose gradients are still to be added
        self._waiting: list[Tensor] = []
        # whether the running backward is the one whose buckets are reduced
        self.reducing = False
        # by parameter, here and below
        self._sums: dict[Tensor, Tensor] = {}
        # the tensor that holds a sum, and the element of it at which the sum starts
        self._places: dict[Tensor, tuple[Tensor, int]] = {}
        self._all = self._lay_out(parameters, _zeros(parameters))
        # in the order in which gradients of the first reduced backward came; None once sums lie in that order
        self._came: list[Tensor] | None = []
        # those whose sum belongs to the running step
        self._begun: set[Tensor] = set()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def gradients(self) -> list[Tensor]:
        """The sum of each parameter's gradients, in the order of the parameters."""
        self._zero_unused(self.parameters)
        return [self._sums[p] for p in self.parameters]

    def clear(self) -> None:
        """Forget all sums. They are not zeroed: the next step's first gradients are written over them."""
        self._begun.clear()
        if self._came:
            in_order = dict.fromkeys((*self._came, *self.parameters))
            self._lay_out(list(in_order), self._all)
            self._came = None

    @torch.no_grad()
    @mark_memory(GRADIENT_BUFFER)
    def _add(self, parameter: Tensor) -> None:
        """Runs within backward, when the gradient of this parameter has been computed."""
        if self.reducing and parameter in self._bucketed:
            # take_bucket adds this one, when its whole bucket is there
            if self._came is not None:
                self._came.append(parameter)
            return
        self._waiting.append(parameter)
        waiting_elements = sum(p.numel() for p in self._waiting)
        if waiting_elements >= self._bundle:
            self.add_waiting()

    @torch.no_grad()
    def add_waiting(self) -> None:
        """Add the gradients that wait for more to come."""
        gradients = []
        for parameter in self._waiting:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        if gradients:
            self._take(self._waiting, gradients)
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []

    def _take(self, parameters: Sequence[Tensor], gradients: list[Tensor]) -> None:
        """Take gradients of a micro-batch: write those of a step's first one, add those of the others."""
        sums = [self._sums[p] for p in parameters]
        if self._begun.isdisjoint(parameters):
            torch._foreach_copy_(sums, gradients)
        else:
            self._zero_unused(parameters)
            torch._foreach_add_(sums, gradients)
        self._begun.update(parameters)

    def _zero_unused(self, parameters: Sequence[Tensor]) -> None:
        """Zero the sums of parameters that had no part in this step's losses so far: they are an earlier step's."""
        for parameter in parameters:
            if parameter not in self._begun:
                self._sums[parameter].zero_()

    @torch.no_grad()
    @mark_memory(GRADIENT_BUFFER)
    def take_bucket(self, bucket: GradBucket) -> Tensor:
        """Add a communication bucket's gradients. Returns the tensor of their sums, flat."""
        parameters = bucket.parameters()
        self._take(parameters, bucket.gradients())
        return self._side_by_side(parameters)

    def _side_by_side(self, parameters: Sequence[Tensor]) -> Tensor:
        """The tensor whose parts are these parameters' sums."""
        places = [self._places[p] for p in parameters]
        flat = places[0][0]
        length = sum(map(_length, parameters))
        first = min(start for _, start in places)
        end = max(start + _length(p) for p, (_, start) in zip(parameters, places))
        is_gapless = end - first == length
        if is_gapless and all(other is flat for other, _ in places):
            return flat[first:end]
        # rank 0's order decides for all, and this rank's was another: a tensor of their own
        old = [self._sums[p] for p in parameters]
        flat = self._lay_out(parameters, _zeros(parameters))
        torch._foreach_copy_([self._sums[p] for p in parameters], old)
        return flat

    def _lay_out(self, parameters: Sequence[Tensor], flat: Tensor) -> Tensor:
        """Give each parameter a part of `flat`, in this order, whatever lies there. Returns `flat`."""
        start = 0
        for parameter in parameters:
            self._places[parameter] = (flat, start)
            own = flat[start : start + parameter.numel()]
            self._sums[parameter] = own.view_as(parameter)
            start += _length(parameter)
        return flat


def _zeros(parameters: Sequence[Tensor]) -> Tensor:
    length = sum(map(_length, parameters))
    return torch.zeros(length, dtype=torch.float32, device=parameters[0].device)


def _length(parameter: Tensor) -> int:
    """Elements that a parameter's sum takes, rounded up to whole vectors."""
    return -(-parameter.numel() // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT


def replicate(plan: Plan, model: nn.Module, groups: Groups, backend: Backend) -> Replica:
    """Wrap a model as the plan's ranks train it together.

    Args:
        plan: This rank's plan.
        model: The rank's part of the model.
        groups: The ranks that share the model.
        backend: Wraps the model in what averages gradients.

    Returns:
        A ShardedDataParallel where ranks shard the model, else a DataParallel.
    """
    if plan.sharding is None:
        return DataParallel(plan, model, groups, backend)
    # fully_shard takes a second to import
    from megatron_lite.parallel.sharded_data_parallel import ShardedDataParallel

    return ShardedDataParallel(plan, model, groups)
