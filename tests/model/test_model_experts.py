"""A mixture of experts computes what Megatron-Core's does: the same outputs, losses, gradients and trainings."""

from dataclasses import replace

import pytest
import torch
from support.expert_variants import DEEPSEEK, EXPERT_VARIANTS, PLAIN_EXPERTS, mix
from support.megatron_core import Ours, Theirs, as_theirs, batches, plan_for, reference
from support.model_variants import build, tokens

from megatron_lite.model.experts import Routes, count_assignments, drop_beyond_capacity, list_mixtures, sort_by_expert

CPU = torch.device("cpu")
STEPS = 10


def copy_biases(ours, theirs):
    """Biases that balance experts, random ones, on both."""
    for name, mixture in list_mixtures(ours):
        state = mixture.router.state
        state.prepare(CPU)
        if state.bias_E is not None:
            state.bias_E.copy_(0.3 * torch.randn(len(state.bias_E)))
            theirs.get_submodule(f"{name}.router").expert_bias.copy_(state.bias_E)


def load(theirs, ours):
    """Our weights into theirs, all of them."""
    names = dict(theirs.named_parameters())
    missing = theirs.load_state_dict(
        {name: tensor.detach() for name, tensor in as_theirs(dict(ours.named_parameters()), names).items()},
        strict=False,
    )
    assert not missing.unexpected_keys
    assert not [key for key in missing.missing_keys if not key.endswith(("_extra_state", "expert_bias"))]


@pytest.mark.parametrize("name", EXPERT_VARIANTS)
def test_equals_megatron_core(name, megatron_on_cpu):
    shape = EXPERT_VARIANTS[name]
    ours, theirs = build(shape), reference(shape)
    load(theirs, ours)
    copy_biases(ours, theirs)
    inputs, labels = tokens(shape, seed=1), tokens(shape, seed=2)
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    our_losses, their_losses = ours(inputs, labels), theirs(inputs, positions, blocked, labels=labels)
    our_losses.mean().backward()
    their_losses.mean().backward()
    theirs_by_name = dict(theirs.named_parameters())
    gradients = as_theirs({key: p.grad for key, p in ours.named_parameters()}, theirs_by_name)
    assert gradients.keys() == theirs_by_name.keys()
    assert (our_losses - their_losses).abs().max() < 5e-6
    for key, parameter in theirs_by_name.items():
        assert (gradients[key] - parameter.grad).abs().max() < 2e-6, key


@pytest.mark.parametrize("name", EXPERT_VARIANTS)
def test_ten_steps_are_megatron_cores(name, optimizers_on_cpu):
    shape = EXPERT_VARIANTS[name]
    plan = plan_for("fp32")
    ours = Ours(plan, shape)
    theirs = Theirs(
        plan, shape, as_theirs(dict(ours.model.named_parameters()), dict(reference(shape).named_parameters()))
    )
    for batch in batches(shape, STEPS):
        for _, mixture in list_mixtures(ours.model):
            mixture.router.state.begin_step()
        loss = ours.train(batch)
        assert loss == pytest.approx(theirs.train(batch), rel=1e-5)
        for module in theirs.model.modules():
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()


def test_the_losses_that_balance_experts_are_noted_once_for_each_backward():
    shape = EXPERT_VARIANTS["two losses"]
    model = build(shape)
    inputs = tokens(shape)
    states = [mixture.router.state for _, mixture in list_mixtures(model)]
    with torch.no_grad():
        model(inputs, inputs)
    assert all(state.losses == {} for state in states)
    for _ in range(2):
        model(inputs, inputs).mean().backward()
    for state in states:
        assert set(state.losses) == {"load_balancing_loss", "seq_load_balancing_loss"}
        # even shares of assignments and scores give 1, and two backwards were done
        assert 1.9 < state.losses["load_balancing_loss"] < 4
        assert state.tokens_E.sum() == 2 * inputs.numel() * shape.experts.topk
        assert state.dropped == 0


def test_biases_move_by_their_rate_towards_the_mean():
    model = build(mix(replace(DEEPSEEK, layers=(True, True))))
    _, mixture = next(iter(list_mixtures(model)))
    mixture.router.state.prepare(CPU)
    mixture.router.state.balance(torch.tensor([4.0, 0, 2, 2, 2, 2, 2, 2]), 1e-3)
    expected = torch.tensor([-1e-3, 1e-3, 0, 0, 0, 0, 0, 0])
    assert torch.equal(mixture.router.state.bias_E, expected)


@pytest.mark.parametrize(("policy", "kept"), [("position", [1, 1, 0, 0]), ("probs", [0, 1, 0, 1])])
def test_what_is_beyond_capacity_is_dropped(policy, kept):
    """Four tokens want the first of two experts, which has room for two."""
    shares = torch.tensor([[0.1], [0.4], [0.2], [0.3]])
    routes = Routes(torch.zeros(4, 1, dtype=torch.long), shares, None)
    dropped = drop_beyond_capacity(routes, 2, 1.0, policy)
    assert dropped.kept_MK.flatten().int().tolist() == kept
    assert count_assignments(dropped, 2).tolist() == [2, 0]
    assigned = sort_by_expert(dropped, 2)
    assert assigned.tokens_A.tolist() == [token for token, stays in enumerate(kept) if stays]
    assert assigned.counts_E.tolist() == [2, 0]


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    shape = mix(replace(PLAIN_EXPERTS, number=16, topk=1, pre_softmax=True))
    model = build(shape)
    inputs = tokens(shape)[:1, :4]
    model(inputs, inputs).mean().backward()
    _, mixture = next(iter(list_mixtures(model)))
    gradients = mixture.experts.linear_fc1.weight.grad.unflatten(0, (16, -1))
    silent = [number for number, gradient in enumerate(gradients) if not gradient.any()]
    counts = mixture.router.state.tokens_E
    assert silent == [number for number, count in enumerate(counts.tolist()) if count == 0] != []
