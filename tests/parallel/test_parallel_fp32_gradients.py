"""16-bit gradients added up in fp32."""

import pytest
import torch
from torch import nn

from megatron_lite.parallel.data_parallel import Fp32Gradients


def run(used_by_micro_batch, steps=1):
    """Sums after the last step; each parameter's gradient in micro-batch k of step s is s + 2**-k."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    sums = Fp32Gradients(parameters)
    for step in range(1, steps + 1):
        for number, used in enumerate(used_by_micro_batch):
            if any(used):
                sum((p * (step + 2.0**-number)).sum() for p, counts in zip(parameters, used) if counts).backward()
        found = [gradient.clone() for gradient in sums.gradients()]
        sums.clear()
    return [gradient[0].item() for gradient in found]


def test_sums_over_micro_batches_begin_anew_in_every_step_and_what_it_does_not_use_is_zero():
    assert run([(1, 1), (1, 1), (1, 1)], steps=3) == [9 + 1.75] * 2
    assert run([(1, 0)], steps=2) == [3.0, 0.0]
    assert run([(1, 0), (1, 1)], steps=2) == [5.5, 2.5]


def test_a_sum_keeps_what_16_bits_would_lose():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = Fp32Gradients([parameter])
    for _ in range(300):
        (parameter * 1.0).sum().backward()
    assert sums.gradients()[0].item() == 300


class Bucket:
    """What communication hooks ask a dist.GradBucket."""

    def __init__(self, parameters):
        self._parameters = parameters

    def parameters(self):
        return self._parameters

    def gradients(self):
        return [p.grad for p in self._parameters]


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1]], ids=["as gradients came", "as another rank's came"])
def test_buckets_are_parts_of_one_tensor(order):
    """In the first step one bucket of all; then two, in the order of the gradients, or in any other."""
    parameters = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (3, 40, 5)]
    sums, taken = Fp32Gradients(parameters), []
    buckets = [parameters], [[parameters[order[0]], parameters[order[1]]], [parameters[order[2]]]]
    for step in (1, 2, 3):
        for last in (False, True):
            sums.reducing = last
            sum((p * step).sum() for p in parameters).backward()
        for bucket in buckets[step > 1]:
            taken.append(sums.take_bucket(Bucket(bucket)))
        assert [gradient.tolist() for gradient in sums.gradients()] == [[2 * step] * p.numel() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        sums.clear()
    assert [len(tensor) for tensor in taken[1:3]] == [
        sum(32 * (1 + (p.numel() > 32)) for p in bucket) for bucket in buckets[1]
    ]
    one_tensor = len({tensor.untyped_storage().data_ptr() for tensor in taken}) == 1
    assert one_tensor == (order == [2, 1, 0])
