"""Replicas of the model that agree on their gradients, wrapped around a model that does not know."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from megatron_lite.config.layout import COPIES
from megatron_lite.config.plan import Plan
from megatron_lite.marks import GRADIENT_BUFFER, mark_memory
from megatron_lite.parallel.backend import Backend
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.mesh import find_group
from megatron_lite.parallel.replica import Replica
from megatron_lite.units import MIB

BUCKET_MIB = 25  # torch's default
ALIGN = 32  # elements: a gradient that starts on 128 bytes is read in whole vectors
BUNDLES = 8  # of gradients that a GPU adds at once: few launches, and little memory for gradients that wait


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters that are trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


class DataParallel(Replica):
    """The model as one rank calls it, and the gradients that all ranks share afterwards."""

    def __init__(self, plan: Plan, model: nn.Module, groups: Groups, backend: Backend):
        super().__init__(plan, model, groups.mesh, groups.pipeline)
        averaging = find_group(groups.mesh, COPIES)  # None: all ranks
        on_gpu = plan.device == "cuda"  # a launch takes longer than adding a bias; a CPU adds what is in its cache
        self.fp32 = None
        if plan.fp32_gradients:
            bundles = BUNDLES if on_gpu else None
            self.fp32 = Fp32Gradients(self.parameters, bundles)
        # fp32 gradients waiting beside their sums would be memory that no other moment of the step takes
        self._adds_at_once = on_gpu and self.fp32 is None and self.parameters[0].dtype != torch.float32
        self.replicas = list(self.chunks)
        # where backward is split, gradients are complete after the last one of weights,
        # which is no part of any backward
        self._averages_at_end = plan.stage.splits_backward and plan.layout.replicas > 1
        self._averaging, self._ranks = averaging, plan.layout.replicas
        self._alone = self._ranks == 1 or self._averages_at_end
        # a chunk of a stage may only hand hidden states on, and has nothing to average then
        self._averaged = [not self._alone and has_parameters(chunk) for chunk in self.chunks]
        if not self._alone:
            elements = plan.args.parallel.ddp_bucket_size
            bucket_mib = BUCKET_MIB if elements is None else elements * self.parameters[0].element_size() / MIB
            for number, chunk in enumerate(self.chunks):
                if not self._averaged[number]:
                    continue
                self.replicas[number] = backend.average_gradients(chunk, bucket_mib, averaging)
                if self.fp32 is not None:
                    self.replicas[number].register_comm_hook(self.fp32, self._reduce_bucket)

    def __call__(self, *inputs) -> Tensor:
        """The model's forward. Which backward reduces gradients is told when it begins."""
        replica = self.replicas[self.pipeline.chunk]
        with replica.no_sync() if self._averaged[self.pipeline.chunk] else contextlib.nullcontext():
            return replica(*inputs)

    @contextlib.contextmanager
    def backward(self, last: bool):
        """Around the backward of one micro-batch: only the last one's talks to other ranks."""
        alone = self._alone
        if (
            last and self._averaged[self.pipeline.chunk]
        ):  # what forward does otherwise; torch's own pipelines do the same
            self.replicas[self.pipeline.chunk].reducer.prepare_for_backward([])
        if self.fp32 is not None:
            self.fp32.reducing = last and not alone
        sums = []
        if self._adds_at_once and (alone or not last):  # autograd would add each gradient by a kernel of its own
            sums = [(p, p.grad) for p in self.parameters if p.grad is not None]
            for parameter, _ in sums:
                parameter.grad = None
        yield
        added = [(total, p.grad) for p, total in sums if p.grad is not None]
        if added:
            torch._foreach_add_(*map(list, zip(*added)))
        for parameter, total in sums:
            parameter.grad = total
        if self.fp32 is not None:
            self.fp32.add_waiting()

    @torch.no_grad()
    def _reduce_bucket(self, sums: "Fp32Gradients", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DistributedDataParallel's communication hook:
        the mean over ranks of the fp32 sums of a bucket's gradients."""
        flat = sums.take_bucket(bucket).div_(self._ranks)
        work = dist.all_reduce(flat, group=self._averaging, async_op=True)
        return work.get_future().then(lambda _: bucket.buffer())

    def gradients(self) -> list[Tensor]:
        """One per parameter, averaged over ranks, after the last micro-batch's backward."""
        gradients = self.fp32.gradients() if self.fp32 is not None else [p.grad for p in self.parameters]
        if self._averages_at_end:
            self._average(gradients)
        return self._add_partial(gradients)

    @torch.no_grad()
    def _average(self, gradients: list[Tensor]):
        """Over ranks, a bucket at a time."""
        bucket: list[Tensor] = []
        for gradient in gradients:
            bucket.append(gradient)
            if sum(one.nbytes for one in bucket) >= BUCKET_MIB * MIB or gradient is gradients[-1]:
                flat = torch.cat([one.reshape(-1) for one in bucket]).div_(self._ranks)
                dist.all_reduce(flat, group=self._averaging)
                parts = flat.split([one.numel() for one in bucket])
                torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket)])
                bucket = []

    def clear(self):
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.fp32 is not None:
            self.fp32.clear()


def call_when_computed(loss: Tensor, action: Callable[[], None]):
    """Call `action` within loss.backward(), on autograd's thread, when this rank has its gradients and waits for
    others'.

    DistributedDataParallel waits for the reduction in a callback of the engine, queued when its last bucket is full.
    The engine runs callbacks in the order of queueing, and this one is queued when backward begins.
    """
    loss.register_hook(lambda gradient: Variable._execution_engine.queue_callback(action))


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

    def __init__(self, parameters: list[nn.Parameter], bundles: int | None = None):
        """bundles: how many additions a micro-batch's gradients take, about; one per gradient if None."""
        self.parameters = parameters
        self._bundle = sum(p.numel() for p in parameters) // bundles if bundles else 0
        self._waiting: list[nn.Parameter] = []  # whose gradients are still to be added
        self.reducing = False  # the running backward is the one whose buckets are reduced
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._places: dict[nn.Parameter, tuple[Tensor, int]] = {}  # the tensor that holds a sum, and where that starts
        self._all = self._lay_out(parameters, _zeros(parameters))
        self._came: list[nn.Parameter] | None = []  # of the first reduced backward, in their order; None: laid out so
        self._begun: set[nn.Parameter] = set()  # those whose sum belongs to the running step
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def gradients(self) -> list[Tensor]:
        """In the order of the parameters."""
        self._zero_unused(self.parameters)
        return [self._sums[p] for p in self.parameters]

    def clear(self):
        """Forget all sums. They are not zeroed: the next step's first gradients are written over them."""
        self._begun.clear()
        if self._came:
            self._lay_out(list(dict.fromkeys((*self._came, *self.parameters))), self._all)
            self._came = None

    @torch.no_grad()
    @mark_memory(GRADIENT_BUFFER)
    def _add(self, parameter: nn.Parameter):
        if self.reducing:  # take_bucket adds this one, when its whole bucket is there
            if self._came is not None:
                self._came.append(parameter)
            return
        self._waiting.append(parameter)
        if sum(p.numel() for p in self._waiting) >= self._bundle:
            self.add_waiting()

    @torch.no_grad()
    def add_waiting(self):
        """Add the gradients that wait for more to come."""
        if self._waiting:
            self._take(self._waiting, [p.grad for p in self._waiting])
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []

    def _take(self, parameters: list[nn.Parameter], gradients: list[Tensor]):
        """Of a micro-batch: written for the first one of a step, added for the others."""
        sums = [self._sums[p] for p in parameters]
        if self._begun.isdisjoint(parameters):
            torch._foreach_copy_(sums, gradients)
        else:
            self._zero_unused(parameters)
            torch._foreach_add_(sums, gradients)
        self._begun.update(parameters)

    def _zero_unused(self, parameters: list[nn.Parameter]):
        """Those that had no part in this step's losses so far hold an earlier step's sums."""
        for parameter in parameters:
            if parameter not in self._begun:
                self._sums[parameter].zero_()

    @torch.no_grad()
    @mark_memory(GRADIENT_BUFFER)
    def take_bucket(self, bucket: dist.GradBucket) -> Tensor:
        """Add a communication bucket's gradients. Returns the tensor of their sums."""
        parameters = bucket.parameters()
        self._take(parameters, bucket.gradients())
        return self._side_by_side(parameters)

    def _side_by_side(self, parameters: list[nn.Parameter]) -> Tensor:
        """The tensor whose parts are these parameters' sums."""
        places = [self._places[p] for p in parameters]
        flat, length = places[0][0], sum(map(_length, parameters))
        first = min(start for _, start in places)
        end = max(start + _length(p) for p, (_, start) in zip(parameters, places))
        if end - first == length and all(other is flat for other, _ in places):
            return flat[first:end]
        # rank 0's order decides for all, and this rank's was another: a tensor of their own
        old = [self._sums[p] for p in parameters]
        flat = self._lay_out(parameters, _zeros(parameters))
        torch._foreach_copy_([self._sums[p] for p in parameters], old)
        return flat

    def _lay_out(self, parameters: list[nn.Parameter], flat: Tensor) -> Tensor:
        """Give each parameter a part of `flat`, in this order, whatever lies there. Returns `flat`."""
        start = 0
        for parameter in parameters:
            self._places[parameter] = flat, start
            self._sums[parameter] = flat[start : start + parameter.numel()].view_as(parameter)
            start += _length(parameter)
        return flat


def _zeros(parameters: list[nn.Parameter]) -> Tensor:
    return torch.zeros(sum(map(_length, parameters)), dtype=torch.float32, device=parameters[0].device)


def _length(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // ALIGN) * ALIGN


def replicate(plan: Plan, model: nn.Module, groups: Groups, backend: Backend) -> Replica:
    """The model as the plan's ranks train it together: a DataParallel or, where ranks share it out,
    a ShardedDataParallel."""
    if plan.sharding is None:
        return DataParallel(plan, model, groups, backend)
    from megatron_lite.parallel.sharded_data_parallel import ShardedDataParallel  # fully_shard takes a second to import

    return ShardedDataParallel(plan, model, groups.mesh, groups.pipeline)
