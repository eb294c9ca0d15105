"""The exponential that a CPU's loss takes."""

import pytest
import torch

from megatron_lite.cpu_kernels import loss


@pytest.mark.parametrize("lacks_avx512", [True, False])
def test_both_ways_of_exponentiating_are_right_to_the_last_bits(monkeypatch, lacks_avx512):
    monkeypatch.setattr(loss, "mkl_lacks_avx512", lambda: lacks_avx512)
    x = torch.cat([-torch.linspace(0, 100, 20_001), torch.tensor([-0.0, -1e4, -float("inf")])])
    found, exact = loss.exponentiate(x.clone()), x.double().exp()
    # exp2 of x * log2(e), which is rounded
    assert ((found.double() - exact).abs() <= (1e-7 * x.abs().nan_to_num(posinf=0) + 3e-7) * exact + 2**-126).all()
    assert loss.exponentiate(torch.tensor([float("nan")])).isnan().all()
