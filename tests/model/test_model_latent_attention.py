"""Latent attention computes what Megatron-Core's does: the same outputs, losses, gradients and trainings."""

from dataclasses import replace

import pytest
import torch
from support.latent_variants import LATENT_VARIANTS
from support.megatron_core import Ours, Theirs, as_theirs, batches, plan_for, reference
from support.model_variants import build, tokens

from megatron_lite.model.experts import list_mixtures

STEPS = 10


def load(theirs, ours):
    """Our weights into theirs, all of them. Returns their parameters by name."""
    named = dict(theirs.named_parameters())
    weights = as_theirs(dict(ours.named_parameters()), named)
    assert weights.keys() == named.keys()
    theirs.load_state_dict({name: tensor.detach() for name, tensor in weights.items()}, strict=False)
    return named


@pytest.mark.parametrize("name", LATENT_VARIANTS)
def test_equals_megatron_core(name, megatron_on_cpu):
    shape = LATENT_VARIANTS[name]
    ours, theirs = build(shape), reference(shape)
    theirs_by_name = load(theirs, ours)
    inputs, labels = tokens(shape, seed=1), tokens(shape, seed=2)
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    their_logits = theirs(inputs, positions, blocked)
    assert (ours(inputs) - their_logits).abs().max() < 2e-6 * their_logits.abs().max()
    our_losses, their_losses = ours(inputs, labels), theirs(inputs, positions, blocked, labels=labels)
    our_losses.mean().backward()
    their_losses.mean().backward()
    gradients = as_theirs({key: p.grad for key, p in ours.named_parameters()}, theirs_by_name)
    assert (our_losses - their_losses).abs().max() < 2e-6
    for key, parameter in theirs_by_name.items():
        assert (gradients[key] - parameter.grad).abs().max() < 2e-6, key


@pytest.mark.parametrize("name", LATENT_VARIANTS)
def test_ten_steps_are_megatron_cores(name, optimizers_on_cpu):
    shape = LATENT_VARIANTS[name]
    plan = plan_for("fp32")
    ours = Ours(plan, shape)
    theirs = Theirs(
        plan, shape, as_theirs(dict(ours.model.named_parameters()), dict(reference(shape).named_parameters()))
    )
    for batch in batches(shape, STEPS):
        for _, mixture in list_mixtures(ours.model):
            mixture.router.state.begin_step()
        assert ours.train(batch) == pytest.approx(theirs.train(batch), rel=1e-5)


@pytest.mark.parametrize("backend", ["auto", "local"])
def test_every_kernel_computes_the_same(backend):
    shape = LATENT_VARIANTS["wide values"]
    inputs = tokens(shape)
    torch.testing.assert_close(build(shape, backend=backend)(inputs), build(shape)(inputs))


def test_what_rotates_decides_whether_order_matters():
    """Without rotation by positions, two earlier tokens may change places."""
    shape = replace(LATENT_VARIANTS["queries of a latent vector"], rotary_base=1e30, num_layers=1)
    inputs = tokens(shape)[:, :3]
    swapped = inputs[:, [1, 0, 2]]
    model = build(shape)
    assert (model(inputs)[:, 2] - model(swapped)[:, 2]).abs().max() > 1e-3
