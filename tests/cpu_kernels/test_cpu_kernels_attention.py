"""Attention as a CPU computes it, against the explicit kernel in fp64."""

from dataclasses import replace

import pytest
import torch
from support.model_variants import PLAIN

from megatron_lite.config.cpu_kernel_rules import count_scores, explicit_is_faster
from megatron_lite.cpu_kernels.attention import attend_causally, suit_attention
from megatron_lite.model.attention import EXPLICIT, Attend, Scope, explicit_attention


def heads(number, seed, length=12, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, number, length, width, generator=generator).to(dtype)


def test_the_explicit_kernel_is_preferred_for_short_sequences_on_a_cpu():
    short, long = replace(PLAIN, seq_length=512), replace(PLAIN, seq_length=513)
    assert explicit_is_faster(short, "bf16", False) and explicit_is_faster(short, "fp32", False)
    scaled, dropped = replace(short, query_key_layer_scaling=True), replace(short, attention_dropout=0.1)
    for case in ((long, "fp32"), (short, "fp16"), (scaled, "fp32"), (dropped, "fp32")):
        assert not explicit_is_faster(*case, False)
    assert not explicit_is_faster(short, "bf16", masked=True)


@pytest.mark.parametrize("length", [1, 100, 128, 129, 300, 384])
@pytest.mark.parametrize("groups", [4, 2])
def test_skipping_future_scores_changes_nothing_but_the_last_digits(length, groups):
    """Against fp64, as exactly as the whole square; the result lies as the projection wants it."""
    blocks = [range(start, min(start + 128, length)) for start in range(0, length, 128)]
    assert count_scores(length) == sum(len(block) * block.stop for block in blocks)
    arguments = [heads(2, n, length, 16, torch.float32).requires_grad_() for n in (4, groups, groups)]
    gradient = heads(2, 4, length, 16, torch.float32)
    exact_arguments = [x.detach().double().requires_grad_() for x in arguments]
    out = attend_causally(*arguments, Scope(), 0.0, 1)
    exact = explicit_attention(*exact_arguments, Scope(), 0.0, 1, fp32_softmax=False, scale_by_layer=False)
    assert out.transpose(1, 2).is_contiguous() and (out - exact).abs().max() < 1e-5
    found = torch.autograd.grad(out, arguments, gradient)
    for mine, expected in zip(found, torch.autograd.grad(exact, exact_arguments, gradient.double()), strict=True):
        assert mine.dtype == torch.float32 and (mine - expected).abs().max() < 1e-5


def attend_plainly(q, k, v, *_):
    """An attention kernel that tells in which precision it is called."""
    assert q.dtype == k.dtype == v.dtype == attend_plainly.dtype
    return q + k + v


@pytest.mark.parametrize(
    ("name", "options", "dtype", "recomputes"),
    [
        (EXPLICIT, {}, torch.bfloat16, False),
        (EXPLICIT, {"widens": True, "drops": True}, torch.float32, True),
        ("sdpa flash", {"widens": True}, torch.float32, True),
        ("sdpa math", {"widens": True, "drops": True}, torch.bfloat16, False),  # torch's own converts
        ("sdpa flash", {"skips_future": True}, torch.bfloat16, False),
    ],
)
def test_16_bit_numbers_are_attended_to_in_fp32_where_the_processor_needs_it(name, options, dtype, recomputes):
    usual = {"skips_future": False, "widens": False, "drops": False}
    attend = suit_attention(Attend(attend_plainly, name), **(usual | options))
    attend_plainly.dtype = dtype
    assert (attend.name, attend.recomputes) == (name, recomputes)
    q = heads(4, 1, dtype=torch.bfloat16).requires_grad_()
    assert attend.function(q, q, q, Scope(), 0.0, 1).dtype == torch.bfloat16


def test_the_explicit_kernel_needs_no_mask_where_future_scores_are_skipped():
    attend = suit_attention(Attend(attend_plainly, EXPLICIT), skips_future=True, widens=False, drops=False)
    assert attend.function is attend_causally
