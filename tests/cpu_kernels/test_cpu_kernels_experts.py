"""Experts one after the other on a CPU: the numbers of all at once, and less memory."""

from dataclasses import replace

import pytest
import torch
from support.expert_variants import EXPERT_VARIANTS, PLAIN_EXPERTS, mix
from support.model_variants import build
from torch.profiler import ProfilerActivity, profile

from megatron_lite.cpu_kernels.experts import compute_one_by_one
from megatron_lite.cpu_kernels.install import choose_cpu_kernels, install_kernels
from megatron_lite.model.experts import compute_all_experts, list_mixtures

HIDDEN = 64
SHAPES = {
    "gated": {},
    "gelu": {"activation": "gelu_erf"},
    "squared relu": {"activation": "squared_relu"},
    "shares on input": {"experts": replace(PLAIN_EXPERTS, topk=1, pre_softmax=True, probs_on_input=True)},
}
# assignments of four experts, one of which has none
COUNTS = [5, 0, 9, 2]


def make_experts(changes: dict, dtype: torch.dtype):
    sizes = {"experts": PLAIN_EXPERTS, "num_layers": 2, "hidden_size": HIDDEN, "kv_channels": HIDDEN // 4}
    shape = mix(**sizes | changes)
    [(_, mixture), *_] = list_mixtures(build(shape).to(dtype))
    return mixture.experts


def differentiate(experts, compute, dtype, share_dtype):
    """What experts give for tokens of a fixed seed, and all gradients."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, HIDDEN, generator=generator).to(dtype).requires_grad_()
    shares = torch.rand(sum(COUNTS), generator=generator).to(share_dtype).requires_grad_()
    places = torch.cat([torch.randperm(8, generator=generator).repeat(2)[:count].sort().values for count in COUNTS])
    weight = torch.randn(8, HIDDEN, generator=generator).to(dtype)
    out = compute(experts, x, places, shares, COUNTS)
    inputs = (x, shares, experts.linear_fc1.weight, experts.linear_fc2.weight)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("share_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_one_by_one_is_all_at_once(name, dtype, share_dtype):
    experts = make_experts(SHAPES[name], dtype)
    found, expected = (
        differentiate(experts, compute, dtype, share_dtype or dtype)
        for compute in (compute_one_by_one, compute_all_experts)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_a_model_on_a_cpu_computes_one_by_one():
    shape = EXPERT_VARIANTS["deepseek"]
    model = build(shape)
    install_kernels(model, choose_cpu_kernels(shape, "fp32"))
    assert {mixture.experts.compute for _, mixture in list_mixtures(model)} == {compute_one_by_one}


def measure_peak(experts, compute) -> int:
    """Bytes that tensors take at once in a forward and backward of 512 assignments of each expert."""
    counts = [512] * 4
    x = torch.randn(1024, HIDDEN, requires_grad=True)
    places = torch.arange(1024).repeat(2)
    shares = torch.rand(sum(counts), requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute(experts, x, places, shares, counts).sum().backward()
    held = highest = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def test_memory_is_less_than_of_all_at_once():
    """By what the second matrices' inputs and the activation function's parts take beside what first matrices give."""
    experts = make_experts({}, torch.float32)
    one, whole = (measure_peak(experts, compute) for compute in (compute_one_by_one, compute_all_experts))
    assert one < 0.75 * whole


def test_a_second_backward_is_refused():
    experts = make_experts({}, torch.float32)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    places = torch.arange(8).repeat(2)
    out = compute_one_by_one(experts, x, places, torch.rand(16, requires_grad=True), [4] * 4).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward|freed|saved"):
        out.backward()
