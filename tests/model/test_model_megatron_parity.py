"""The model computes what Megatron-Core computes: same weights in, same logits, losses, gradients and trainings out."""

import pytest
import torch
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.megatron_core import Ours, Theirs, as_theirs, batches, load_ours, plan_for, reference
from support.model_variants import VARIANTS, build, tokens
from support.multi_token_variants import MULTI_TOKEN_VARIANTS

from megatron_lite.model.experts import list_mixtures

STEPS = 10
# megatron-core's torch norms refuse layernorm_1p.
COMPARED = [name for name in VARIANTS if name != "layernorm_1p"]
MIXTURES = {f"experts, {name}": shape for name, shape in EXPERT_VARIANTS.items()}
LATENT = {f"latent attention, {name}": shape for name, shape in LATENT_VARIANTS.items()}
FURTHER = {f"further tokens, {name}": shape for name, shape in MULTI_TOKEN_VARIANTS.items()}
SHAPES = {name: VARIANTS[name] for name in COMPARED} | MIXTURES | LATENT | FURTHER


def largest_difference(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("name", SHAPES)
def test_equals_megatron_core(name, megatron_on_cpu):
    shape = SHAPES[name]
    ours, theirs = build(shape), reference(shape)
    theirs_by_name = load_ours(theirs, ours)
    inputs, labels = tokens(shape, seed=1), tokens(shape, seed=2)
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    our_losses, their_losses = ours(inputs, labels), theirs(inputs, positions, blocked, labels=labels)
    our_losses.mean().backward()
    their_losses.mean().backward()
    our_gradients = as_theirs({key: p.grad for key, p in ours.named_parameters()}, theirs_by_name)
    assert our_gradients.keys() == theirs_by_name.keys()
    gradients = max(largest_difference(our_gradients[key], p.grad) for key, p in theirs_by_name.items())
    losses = largest_difference(our_losses, their_losses)
    logits = 0.0
    # with further tokens it asks for labels
    if not shape.mtp_num_layers:
        with torch.no_grad():
            their_logits = theirs(inputs, positions, blocked)
            logits = largest_difference(ours(inputs), their_logits) / their_logits.abs().max().item()
    print(f"largest differences, {name}: logits {logits:.1e} losses {losses:.1e} gradients {gradients:.1e}")
    # losses are about 5, of which fp32 knows 5e-7: another processor may round ten times otherwise
    assert logits < 2e-6 and losses < 5e-6 and gradients < 2e-6


# Its softmax is so sharp that differences of rounding, 5e-9 of the second gradient norm, grow tenfold every two steps at
# the usual learning rate: its losses are compared there, and its norms at a smaller one.
SHARP = "latent attention, sharpened without yarn"


EVERY_OTHER = [*(MIXTURES | LATENT | FURTHER)][::2]
TRAINED = [
    pytest.param(name, "1e-2", marks=() if name in EVERY_OTHER else pytest.mark.slow)
    for name in MIXTURES | LATENT | FURTHER
]


@pytest.mark.parametrize(("name", "rate"), [*TRAINED, (SHARP, "3e-3")])
def test_ten_steps_are_megatron_cores(name, rate, optimizers_on_cpu):
    shape = SHAPES[name]
    plan = plan_for("fp32", "--lr", rate)
    ours = Ours(plan, shape)
    names = dict(reference(shape).named_parameters())
    theirs = Theirs(plan, shape, as_theirs(dict(ours.model.named_parameters()), names))
    for batch in batches(shape, STEPS):
        for _, mixture in list_mixtures(ours.model):
            mixture.router.state.begin_step()
        assert ours.train(batch) == pytest.approx(theirs.train(batch), rel=1e-5)
        if name != SHARP or rate != "1e-2":
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        for module in theirs.model.modules():
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()


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
