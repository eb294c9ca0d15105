"""Gradients of a 16-bit model, added up over micro-batches and over ranks in fp32.

torch accumulates into a parameter's own precision. Here each micro-batch's 16-bit gradient is added to an fp32 one;
in the last micro-batch DistributedDataParallel's buckets carry the fp32 sums instead of its own.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGN = 32  # elements: a gradient that starts on 128 bytes is read in whole vectors


class Fp32Gradients:
    """Holds one fp32 gradient per parameter, side by side within each communication bucket."""

    def __init__(self, parameters: list[nn.Parameter], ranks: int):
        self.parameters, self.ranks = parameters, ranks
        self.reducing = False  # the running backward is the one whose buckets are reduced
        self._sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters}
        self._flat: dict[tuple[int, ...], Tensor] = {}
        self._begun: set[nn.Parameter] = set()  # those whose sum belongs to the running step
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def gradients(self) -> list[Tensor]:
        """In the order of the parameters."""
        self._zero_others(self.parameters)
        return [self._sums[p] for p in self.parameters]

    def clear(self):
        """Forget all sums. They are not zeroed: the next step's first gradients are written over them."""
        self._begun.clear()

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter):
        if self.reducing:
            return  # reduce_bucket adds this one, when its whole bucket is there
        self._take([parameter], [parameter.grad])
        parameter.grad = None

    def _take(self, parameters: list[nn.Parameter], gradients: list[Tensor]):
        """Of a micro-batch: written for the first one of a step, added for the others."""
        sums = [self._sums[p] for p in parameters]
        if self._begun.isdisjoint(parameters):
            torch._foreach_copy_(sums, gradients)
        else:
            self._zero_others(parameters)
            torch._foreach_add_(sums, gradients)
        self._begun.update(parameters)

    def _zero_others(self, parameters: list[nn.Parameter]):
        """Those that had no part in this step's losses so far hold an earlier step's sums."""
        for parameter in parameters:
            if parameter not in self._begun:
                self._sums[parameter].zero_()

    @torch.no_grad()
    def reduce_bucket(self, _state, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DistributedDataParallel's communication hook: mean over ranks of the bucket's fp32 sums."""
        flat = self._side_by_side(bucket.parameters())
        self._take(bucket.parameters(), bucket.gradients())
        flat.div_(self.ranks)
        work = dist.all_reduce(flat, async_op=True)
        return work.get_future().then(lambda _: bucket.buffer())

    def _side_by_side(self, parameters: list[nn.Parameter]) -> Tensor:
        """The flat tensor whose parts are these parameters' sums; laid out anew when buckets changed."""
        key = tuple(id(p) for p in parameters)
        if key not in self._flat:
            mine = set(key)
            self._flat = {k: flat for k, flat in self._flat.items() if mine.isdisjoint(k)}
            self._flat[key] = self._lay_out(parameters)
        return self._flat[key]

    def _lay_out(self, parameters: list[nn.Parameter]) -> Tensor:
        sizes = [-(-p.numel() // ALIGN) * ALIGN for p in parameters]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        for parameter, part in zip(parameters, flat.split(sizes)):
            place = part[: parameter.numel()].view_as(parameter)
            place.copy_(self._sums[parameter])
            self._sums[parameter] = place
        return flat
