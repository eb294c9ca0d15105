"""The model computes what Megatron-Core computes: same state dict in, same logits, losses and gradients out."""

import pytest
import torch
from support.megatron_core import reference
from support.model_variants import VARIANTS, build, tokens

# megatron-core's torch norms refuse layernorm_1p.
COMPARED = [name for name in VARIANTS if name != "layernorm_1p"]


def largest_difference(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("name", COMPARED)
def test_equals_megatron_core(name, megatron_on_cpu):
    shape = VARIANTS[name]
    ours, theirs = build(shape), reference(shape)
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert [key for key in missing.missing_keys if not key.endswith("_extra_state")] == []

    inputs, labels = tokens(shape, seed=1), tokens(shape, seed=2)
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    logits = largest_difference(ours(inputs), theirs(inputs, positions, blocked))
    our_losses, their_losses = ours(inputs, labels), theirs(inputs, positions, blocked, labels=labels)
    our_losses.mean().backward()
    their_losses.mean().backward()

    theirs_by_name = dict(theirs.named_parameters())
    assert theirs_by_name.keys() == dict(ours.named_parameters()).keys()
    gradients = max(largest_difference(p.grad, theirs_by_name[key].grad) for key, p in ours.named_parameters())
    losses = largest_difference(our_losses, their_losses)
    print(f"largest differences, {name}: logits {logits:.1e} losses {losses:.1e} gradients {gradients:.1e}")
    assert logits < 1e-5 and losses < 1e-5 and gradients < 2e-6


@pytest.mark.parametrize("name", COMPARED)
def test_every_compared_gradient_says_something(name):
    """A gradient of zero would equal anything's zero. The keys' norm bias is the one that softmax cancels."""
    ours, inputs = build(VARIANTS[name]), tokens(VARIANTS[name])
    ours(inputs, tokens(VARIANTS[name], seed=2)).mean().backward()
    silent = [key for key, p in ours.named_parameters() if p.grad.abs().max() < 1e-5]
    assert [key for key in silent if not key.endswith("k_layernorm.bias")] == []


def test_the_comparison_would_notice_another_activation(megatron_on_cpu):
    shape, other = VARIANTS["gelu_tanh"], VARIANTS["gelu_erf"]
    ours, theirs = build(shape), reference(other)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    inputs = tokens(shape)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    assert largest_difference(ours(inputs), theirs(inputs, positions, blocked)) > 1e-4
