"""A CPU's own tanh GELU against torch's, which is exact in fp64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.config import cpu_kernel_rules as rules
from megatron_lite.cpu_kernels import gelu
from megatron_lite.cpu_kernels.gelu import gelu_in_blocks
from megatron_lite.parallel.layers import gelu_as_sigmoid

BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def torchs(x):
    return F.gelu(x, approximate="tanh")


def values(dtype):
    """All that bf16 can hold between -60 and 60, more than a block of it; and some in between."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.abs() < 60]
    return torch.cat([every, torch.randn(3 * gelu.GELU_BLOCK, generator=torch.Generator().manual_seed(1)) * 2]).to(
        dtype
    )


def with_slope(function, x):
    x = x.clone().requires_grad_()
    result = function(x)
    return result.detach(), torch.autograd.grad(result.sum(), x)[0]


@pytest.mark.parametrize("dtype", list(BITS))
def test_values_and_slopes_are_right_to_the_last_bits(dtype):
    x = values(dtype)
    wide = x.double()
    room = 2.0**-22 + (2.0**-22 + 2.0 ** -BITS[dtype]) * torchs(wide).abs()  # fp32 inside, then rounded
    result, slope = with_slope(gelu_in_blocks, x)
    exact, exact_slope = with_slope(torchs, wide)
    assert ((result - exact).abs() <= room).all()
    assert ((slope - exact_slope).abs() <= 2.0**-18 + 2.0 ** -BITS[dtype] * exact_slope.abs()).all()


def test_the_limits():
    x = torch.tensor([-1e10, -1e4, -60.0, -0.0, 0.0, 60.0, 2.0**14], dtype=torch.bfloat16)
    result, slope = with_slope(gelu_in_blocks, x)
    assert result.tolist() == [0, 0, 0, 0, 0, 60, 2.0**14] and slope.tolist() == [0, 0, 0, 0.5, 0.5, 1, 1]
    assert gelu_in_blocks(x * float("nan")).isnan().all()
    transposed = torch.randn(5, 7).bfloat16().t()
    assert torch.allclose(gelu_in_blocks(transposed), torchs(transposed), rtol=2.0**-7)
    assert gelu_in_blocks(transposed[:0]).shape == (0, 5)


@pytest.mark.parametrize(
    ("processor", "fast"),
    [
        ("vendor_id : GenuineIntel\nflags\t: fpu avx2 avx512f\n", True),
        ("vendor_id : AuthenticAMD\nflags\t: fpu avx2 avx512f\n", False),
        ("vendor_id : GenuineIntel\nflags\t: fpu avx2\n", False),
        ("model name: A", True),
    ],
)
def test_in_fp32_it_is_torchs_where_that_is_fast(tmp_path, pretend, processor, fast):
    (tmp_path / "cpuinfo").write_text(processor)
    pretend(tmp_path / "cpuinfo")
    assert rules.gelu_works_in_blocks(4) is not fast
    assert rules.gelu_works_in_blocks(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neither_blocks_nor_threads_show(monkeypatch, dtype):
    x = torch.randn(3, 1001, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = with_slope(gelu_in_blocks, x)
    monkeypatch.setattr(gelu, "GELU_BLOCK", 64)
    assert all(torch.equal(one, other) for one, other in zip(whole, with_slope(gelu_in_blocks, x)))


def test_its_argument_stays_and_hooks_see_it():
    """A full backward hook hands out views that may not be written to."""
    layer = torch.nn.Linear(8, 8).bfloat16()
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    x = layer(torch.randn(4, 8).bfloat16())
    before = x.detach().clone()
    (gelu_in_blocks(x).sum() + x.square().sum()).backward()
    assert torch.equal(x, before) and layer.weight.grad.abs().sum() > 0


def test_it_keeps_one_tensor_that_is_not_its_argument():
    kept = []
    x = torch.randn(4, 64, requires_grad=True).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        gelu_in_blocks(x)
    assert [one.shape for one in kept] == [x.shape] and kept[0].data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", list(BITS))
def test_the_formula_for_compilers_is_the_same_function(dtype):
    x = values(dtype)
    for mine, theirs in zip(with_slope(gelu_as_sigmoid, x), with_slope(torchs, x.double())):
        assert torch.allclose(mine.double(), theirs, rtol=2.0 ** -(BITS[dtype] - 4), atol=1e-5)


@pytest.mark.slow
def test_compiled_it_is_the_same():
    x = values(torch.bfloat16)
    for mine, theirs in zip(with_slope(torch.compile(gelu_as_sigmoid), x), with_slope(gelu_in_blocks, x)):
        assert torch.allclose(mine.float(), theirs.float(), rtol=2.0**-7, atol=1e-6)
