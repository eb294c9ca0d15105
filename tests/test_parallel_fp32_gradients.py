"""16-bit gradients added up in fp32."""

import torch
from torch import nn

from megatron_lite.parallel.fp32_gradients import Fp32Gradients


def run(used_by_micro_batch, steps=1):
    """Sums after the last step; each parameter's gradient in micro-batch k of step s is s + 2**-k."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2)]
    sums = Fp32Gradients(parameters, ranks=1)
    for step in range(1, steps + 1):
        for number, used in enumerate(used_by_micro_batch):
            if any(used):
                sum((p * (step + 2.0**-number)).sum() for p, counts in zip(parameters, used) if counts).backward()
        found = [gradient.clone() for gradient in sums.gradients()]
        sums.clear()
    return [gradient[0].item() for gradient in found]


def test_sums_over_micro_batches_begin_anew_in_every_step():
    assert run([(1, 1), (1, 1), (1, 1)], steps=3) == [9 + 1.75] * 2


def test_what_a_step_does_not_use_is_zero():
    assert run([(1, 0)], steps=2) == [3.0, 0.0]
    assert run([(1, 0), (1, 1)], steps=2) == [5.5, 2.5]


def test_a_sum_keeps_what_16_bits_would_lose():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = Fp32Gradients([parameter], ranks=1)
    for _ in range(300):
        (parameter * 1.0).sum().backward()
    assert sums.gradients()[0].item() == 300
